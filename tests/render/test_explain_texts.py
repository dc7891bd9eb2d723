"""The texts of `explain`: two languages with the same keys and values, each asked for, one Chinese word for a term."""

import ast
import re
from string import Formatter

import pytest

import bertscope
from bertscope.analyses.explain.steps import SECTIONS
from bertscope.render.console import Target, wrapped
from bertscope.render.explain import LANGUAGES, texts
from tests.conftest import ROOT

VIEW = ROOT / "bertscope" / "render" / "explain.py"
ENGLISH, CHINESE = map(texts, LANGUAGES)


def test_both_languages_have_the_same_keys_and_values():
    assert [*ENGLISH] == [*CHINESE]
    for key, text in ENGLISH.items():
        fields, others = ({*Formatter().parse(words)} for words in (text, CHINESE[key]))
        assert {(name, form) for _, name, form, _ in fields if name} == {
            (name, form) for _, name, form, _ in others if name
        }, key


def test_every_text_that_the_view_asks_for_is_there_and_every_text_is_asked_for():
    calls = [node for node in ast.walk(ast.parse(VIEW.read_text())) if isinstance(node, ast.Call)]
    asked = [call.args[0] for call in calls if getattr(call.func, "id", "") == "say"]
    keys = {node.value for item in asked for node in ast.walk(item) if isinstance(node, ast.Constant)} & {*ENGLISH}
    assert {item.value for item in asked if isinstance(item, ast.Constant)} <= keys
    kinds = "step", "question", "answer", "title", "point", *SECTIONS
    others = {key for key in ENGLISH if not key.startswith(tuple(f"explain_{kind}_" for kind in kinds))}
    assert others - keys == {"explain_no_forward"}  # the key of a report's note


# Other words for the terms of the Chinese texts: 梯度检查点, 批大小, 参数量, 激活值, 估算, 一步, 任务头, 矩阵乘法,
# 优化器更新, 按层累加; 检查点文件 is a file, 激活函数 a function.
OTHER_TERMS = re.compile(
    "(?<!梯度)检查点(?!文件)|批次大小|批量|参数数量|激活(?![值函])|估计|单步|输出头|头部|矩阵乘积|优化器步|逐层求和|显存/内存"
)


def test_a_term_has_one_chinese_word():
    read = [*CHINESE.values(), (ROOT / "README.zh.md").read_text()]
    assert [(found[0], text) for text in read for found in OTHER_TERMS.finditer(text)] == []


def test_a_report_of_explain_prints_in_a_language_in_python():
    text = bertscope.explain("bert-tiny", "pooler").shown("printed", lang="zh")
    assert "参数量：hidden_size x hidden_size" in text
    assert str(bertscope.explain("bert-tiny", "pooler")).count("parameters: ") == 1


@pytest.mark.parametrize("width", [30, 41, 80])
def test_a_chinese_line_is_not_wider_than_the_terminal(width):
    text = "可以：t4 上批大小 2,178 放得下（序列长度 512，fp32，检查点 full）：峰值 13.65 GiB，预留 14.56 GiB；" * 2
    lines = wrapped(text, Target(width=width), 2).splitlines()
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    for line in lines:
        assert len(line) + len(re.findall(r"[^\x00-\xff]", line)) <= width
        assert line.lstrip()[0] not in "，；：）"
        assert line[-1] != "（"
        assert line.count("GiB") == len(re.findall(r"\d GiB", line))
