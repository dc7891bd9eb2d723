"""The catalogue of texts: every text has its Chinese one, and every text that is shown is in it."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import re
import shlex
from string import Formatter

import pytest

import bertscope
from bertscope.analyses.memory import summary
from bertscope.errors import Text, either
from bertscope.progress import detailed
from bertscope.render.console import Target, wrapped
from bertscope.settings.rows import RULES, rows
from bertscope.settings.run_config import MEASURED, SETTINGS
from bertscope.texts import CHINESE as ZH
from bertscope.texts import TEXTS, english, explain, in_language, phrase, phrases, say, texts, why
from tests.conftest import ROOT

CHINESE = re.compile(r"[\u4e00-\u9fff]")
RENDER = ROOT / "bertscope" / "render"
# Texts that are names or patterns in both languages.
SAME = {
    "named",
    "largest_of",
    "autocast",
    "amsgrad",
    "setting_grad_scaler",
    "setting_amsgrad",
    "flops_per_second",
    "gpu",
    "operator",
    "of",
}


def test_no_key_is_used_twice():
    assert len(english.TEXTS) + len(explain.TEXTS) + len(why.TEXTS) == len(TEXTS)


def test_every_text_has_a_chinese_one_with_the_same_values():
    assert [*texts(ZH)].sort() == [*TEXTS].sort()
    for key, in_english in TEXTS.items():
        chinese = texts(ZH)[key]
        fields = [{name for _, name, _, _ in Formatter().parse(text) if name} for text in (in_english, chinese)]
        assert fields[0] == fields[1], key
        assert not CHINESE.search(in_english), key
        assert CHINESE.search(chinese) or key in SAME or not re.search("[a-z]{2}", re.sub("{.*?}", "", in_english)), key


def test_every_saved_tensor_has_its_words_in_chinese():
    assert {words for *_, words in summary._WHAT} <= set(phrases())


def test_the_stages_of_profile_are_in_the_language():
    with in_language("zh"):
        for name in ("forward", "backward", "optimizer"):
            for step in ("first steps", "measured step"):
                assert f"（{name}）" in phrase(detailed("full", f"in the {name} phase of the {step}"))
        stage = Text("timing step {number} of {steps}", number=2, steps=3)
        assert phrase(detailed(stage, "full")) == "正在计时，第 2 步，共 3 步：full"


def constants(node: ast.AST) -> set[str]:
    return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def calls_with_templates() -> list[ast.Call]:
    """The calls that make a Text or an error from a template and values."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "bertscope").rglob("*.py")]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    names = {id(call): getattr(call.func, "id", getattr(call.func, "attr", "")) for call in found}
    return [call for call in found if re.fullmatch(r"Text|\w+Error|error", names[id(call)])
            and any("{" in text for text in constants(call.args[0]))]  # fmt: skip


def fields_of(template: str) -> list[tuple[str, str, str | None]]:
    return sorted((name, form or "", how) for _, name, form, how in Formatter().parse(template) if name)


def test_every_phrase_is_a_text_of_the_code_and_has_a_chinese_one_with_the_same_values():
    code = {text for path in (ROOT / "bertscope").rglob("*.py") for text in constants(ast.parse(path.read_text()))}
    code |= {os.strerror(errno.ENOENT), os.strerror(errno.EACCES), "argument", "option"}  # of the system and of Click
    code |= {
        f"in the {name} phase of the {step}"
        for name in ("forward", "backward", "optimizer")
        for step in ("first steps", "measured step")
    }
    code |= {rule.text for rule in RULES}
    for words, chinese in phrases().items():
        assert words in code, words
        if "{" in words:
            assert {*fields_of(words)} == {*fields_of(chinese)}, words
        assert CHINESE.search(chinese) or re.search("[\uff0c-\uff1b\u3001]", chinese) or words in SAME, words


def test_every_template_has_the_values_that_it_names():
    calls = calls_with_templates()
    assert len(calls) > 100
    for call in calls:
        given = {keyword.arg for keyword in call.keywords}
        if None in given:
            continue
        for template in constants(call.args[0]):
            named = {name for name, *_ in fields_of(template)}
            if named and given - {"field", "where"}:
                assert named - given <= set(SETTINGS) | set(rows(*MEASURED)) | {"batch_total"}, template


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("estimate bert-tinny", "没有名为 'bert-tinny' 的预设或文件；是否想写 'bert-tiny' 或 'bert-mini'？"),
        ("fit bert-tiny --budget 16", "--budget 16 没有单位；是 16GiB 吗？"),
        ("fit bert-tiny --gpu t44", "--gpu：没有名为 't44' 的 GPU；是否想写 't4'？或用 --budget"),
        ("estimate bert-tiny --seq 600", "seq 至少为 1，至多为 max_position_embeddings 512；给出的是 600"),
        ("count ''", "模型的名称为空；请给出预设"),
        ("diff bert-tiny", "缺少参数 'B'；见 bertscope diff --help"),
        ("estimate bert-tiny --bacth 3", "没有选项 --bacth（是否想写 --batch？）；见 bertscope estimate --help"),
        (
            "estimate bert-tiny --mode train",
            "--mode 可用：inference, forward, training 之一；给出的是 'train'；是否想写 ",
        ),
        ("estimate bert-tiny --batch x", "--batch 可用：从 1 到小于 2**31 的整数；给出的是 'x'"),
        ("estimat bert-tiny", "没有命令 'estimat'；是否想写 'estimate'？见 bertscope --help"),
        ("count bertformaskedlm", "没有名为 'bertformaskedlm' 的预设或文件；BertForMaskedLM 是类名"),
        ("fit bert-tiny --gpu t4 --checkpointing=all", "--checkpointing：未知的梯度检查点策略 'all'；可用："),
        ("flops bert-tiny -o a.pdf", "a.pdf：此命令不写 .pdf；可写 --format table"),
        ("report bert-tiny -o /nowhere/page.html", "无法写入 /nowhere/page.html："),
    ],
)
def test_a_common_error_is_in_the_language(cli, given, expected):
    result = cli(*shlex.split(given), "--lang", "zh")
    assert result.code == 2
    assert result.err.startswith(f"error: {expected}")
    assert words_of(result.err) == []


@pytest.mark.parametrize(
    ("english", "expected"),
    [
        (detailed(Text("{name}, fit", name="bert-tiny"), "none"), "bert-tiny，能否放下：none"),
        (Text("did you mean {words}?", words=either("'a'", "'b'")), "是否想写 'a' 或 'b'？"),
        (Text("use {name} {words}", name="{mode}", words="x").spelled({"mode": "--mode"}), "用 --mode x"),
        ("nothing in the catalogue", "nothing in the catalogue"),
        (Text("nothing with {value:,}", value=1000), "nothing with 1,000"),
    ],
)  # fmt: skip
def test_a_phrase_keeps_its_values(english, expected):
    assert phrase(english) == english
    assert pickle.loads(pickle.dumps(english)) == english
    with in_language("zh"):
        assert phrase(english) == phrase(pickle.loads(pickle.dumps(english))) == expected


# Other words for the terms of the Chinese texts: 梯度检查点, 批大小, 参数量, 激活值, 估算, 一步, 任务头, 矩阵乘法,
# 优化器更新, 按层累加; 检查点文件 is a file, 激活函数 a function.
OTHER_TERMS = re.compile(
    "(?<!梯度)检查点(?!文件)|批次大小|批量|参数数量|激活(?![值函])|估计|单步|输出头|头部|矩阵乘积|优化器步|逐层求和|显存/内存"
)


def test_a_term_has_one_chinese_word():
    read = [*texts(ZH).values(), *phrases().values(), (ROOT / "README.zh.md").read_text()]
    assert len(read) > 700
    assert [(found[0], text) for text in read for found in OTHER_TERMS.finditer(text)] == []


def asked() -> tuple[set[str], set[str]]:
    """Return the keys that the code asks for, and the beginnings of those that it puts together."""
    keys, beginnings = set(), set()
    for path in (*RENDER.rglob("*.py"), *(ROOT / "bertscope" / "commands").glob("*.py"), ROOT / "bertscope" / "cli.py",
                 *(ROOT / "bertscope" / "api").glob("*.py"), ROOT / "bertscope/analyses/memory/plan.py"):  # fmt: skip
        for call in ast.walk(ast.parse(path.read_text())):
            name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            if name == "Note":
                keys.add(next(keyword.value.value for keyword in call.keywords if keyword.arg == "key"))
            if name == "word":
                beginnings.add(f"{call.args[0].value}_")
            elif name == "say":
                for node in ast.walk(call.args[0]):
                    if isinstance(node, ast.JoinedStr):
                        beginnings.add(node.values[0].value)
                    elif isinstance(node, ast.Constant) and node.value[-1] != "_":
                        keys.add(node.value)
    for path in RENDER.rglob("*.html"):
        for key in re.findall(r"say\(\"(\w+)\"", path.read_text()):
            (beginnings if key[-1] == "_" else keys).add(key)
    return keys, beginnings


def test_every_text_that_the_code_asks_for_is_there_and_every_text_is_asked_for():
    keys, beginnings = asked()
    words = {"searched", "auto", "cuda", "none"}  # of conditions
    assert keys - words <= set(TEXTS)
    assert len(beginnings) > 5
    places = {"operator_of", "operator_of_own_code", "operator", "of", "of_own_code"}  # of a peak
    together = {key for key in TEXTS if key.startswith(tuple(beginnings))}
    columns = {"batch", "sequence"}  # run_text asks for them by the fields of a run
    assert set(TEXTS) - keys - together - places - columns == set()


def words_of(text: str) -> list[str]:
    """Return three English words in a row, outside of paths, sources, commands and names of options."""
    kept = [line for line in text.splitlines() if "'bertscope" not in line]
    return re.findall(r"(?<![\w./-])[A-Za-z]{2,} [a-z]{2,} [a-z]{2,}\b(?![./])", "\n".join(kept))


@pytest.mark.parametrize("command", [
    "estimate bert-tiny --checkpointing none,full -v",
    "estimate bert-tiny --device cuda --lora r=8 --accumulate 2 --clip-grad-norm --ema -v",
    "estimate bert-tiny bert-mini",
    "explain bert-tiny",
    "count bert-tiny --by group",
    "doctor",
    "count bert-tiny bert-mini",
    "tree bert-tiny --depth 1 --shapes",
    "flops bert-tiny --depth 1",
    "flops bert-tiny --convention macs",
    "fit bert-tiny --budget 2GiB --precision fp32 --checkpointing none --optimizer sgd -v",
    "fit bert-tiny --gpu t4 --seq 64 --batch 4 --precision autocast-bf16 --checkpointing none --optimizer sgd -v",
    "fit bert-tiny --gpu t4,a10 --batch 32 --checkpointing none --precision fp32 --optimizer sgd -v",
])  # fmt: skip
def test_the_output_in_chinese_has_no_english_sentence(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "400")
    result = cli(*command.split(), "--lang", "zh")
    assert result.code == 0, result.err
    assert len(CHINESE.findall(result.out)) > 50
    assert words_of(result.out) == []


def test_an_english_sentence_is_found_and_the_next_run_is_in_english(cli):
    assert words_of("the peak falls by 3 MiB")
    assert words_of(cli("estimate", "bert-tiny").out)


def test_notes_in_json_and_rows_in_markdown_are_in_the_language(cli):
    words = ("estimate", "bert-tiny", "--lang", "zh", "--format")
    data = cli(*words, "json").json
    assert all(CHINESE.search(note) for note in data["notes"])
    assert data["variants"][0]["checkpointing"] == "none"
    assert "| 为反向保存的张量 |" in cli(*words, "markdown").out
    assert cli(*words, "csv").out == cli("estimate", "bert-tiny", "--format", "csv").out
    flow = "[batch, seq, hidden_size] and [batch, seq, hidden_size] -> [batch, seq, hidden_size]"
    assert flow in cli("explain", "bert-tiny", "--lang", "zh", "--format", "csv").out


def test_a_report_of_explain_prints_in_its_language_in_python():
    text = bertscope.explain("bert-tiny", "pooler").shown("printed", language="zh")
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


def test_a_language_lasts_as_long_as_its_block():
    with in_language("zh"):
        assert say("peak") == "峰值"
    assert say("peak") == "peak"
