"""`import bertscope`: its names, their types and examples, and the kinds of models that its functions take."""

import ast
import doctest
import inspect
import io
import json
import re
import runpy
import shutil

import pytest
import torch

import bertscope
from bertscope.commands.table import COMMANDS
from bertscope.config import BertConfig
from bertscope.errors import BertscopeError, Reason, SelectionError, name_of, naming, shown
from bertscope.settings import generate
from bertscope.settings.rows import rows
from bertscope.settings.run_config import ESTIMATED, MEASURED, QUESTIONS
from bertscope.sources.find import source_of
from tests.conftest import ROOT, TERMINAL

PUBLIC = [name for name in bertscope.__all__ if name != "__version__"]
FUNCTIONS = (*COMMANDS, "fits", "lengths", "verify")


@pytest.fixture
def _in_the_users_folder(user_folder, tmp_path, monkeypatch):
    shutil.copytree(user_folder / "my-bert", tmp_path / "my-bert")
    for name in ("args.json", "oom.log", "train.py"):
        shutil.copy(user_folder / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)


# ---- names and types ----


def test_the_functions_of_the_command_line_exist():
    assert set(FUNCTIONS) <= set(PUBLIC)
    assert all(callable(getattr(bertscope, name)) for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(bertscope))
    assert not hasattr(bertscope, "nope")


def test_a_type_checker_sees_the_same_names_from_the_same_modules():
    stub = ast.parse((ROOT / "bertscope" / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == bertscope.public_names()
    assert (ROOT / "bertscope" / "py.typed").exists()


def test_the_keywords_of_the_functions_are_the_rows_of_settings():
    assert generate.KEYWORDS.read_text() == generate.keywords(), "run: python -m bertscope.settings.generate"
    inputs = {"input_size", "dtypes", "input_data", "training_file", "plan"}
    kinds: dict = {}
    exec(generate.keywords(), kinds)
    assert kinds["RunSettings"].__annotations__.keys() == rows(*ESTIMATED).keys() | inputs
    assert kinds["MeasurementSettings"].__annotations__.keys() == rows(*MEASURED).keys() | inputs
    for name in ("estimate", "fit", "report", "profile"):
        function, taken = getattr(bertscope, name), QUESTIONS[name].table
        assert inspect.signature(function).parameters.keys() >= taken.keys() | inputs
        assert not inspect.signature(function).parameters.keys() & set(QUESTIONS[name].unused)
        assert all(f"{key}: {taken[key].help}" in function.__doc__
                   for key in taken if name != "fit" or key not in ("batch", "budget"))  # fmt: skip


# ---- examples ----


@pytest.mark.usefixtures("_in_the_users_folder")
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_docstring_has_an_example_that_holds(name):
    text = inspect.getdoc(getattr(bertscope, name)) or ""
    examples = doctest.DocTestParser().get_doctest(text, {"bertscope": bertscope, "torch": torch}, name, None, 0)
    assert examples.examples, f"{name} has no example"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    out = io.StringIO()
    failed = doctest.DocTestRunner(optionflags=flags).run(examples, out=out.write).failed
    assert not failed, out.getvalue()


# ---- what is given ----


class Image(torch.nn.Module):
    """A module whose inputs cannot be derived."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(picture).mean((2, 3)))


@pytest.mark.parametrize("name", ["count", "tree", "flops", "estimate", "explain", "diff"])
def test_every_function_takes_a_configuration_a_dictionary_a_source_and_a_module(tiny, name):
    """A configuration gives the same report in each form; a module is shown by its class."""
    function = getattr(bertscope, name)
    options = {} if name in ("count", "tree") else {"seq": 8}
    more = (tiny,) if name == "diff" else ()
    settings = {key: value for key, value in tiny.to_dict().items() if value is not None}
    first = function(tiny, *more, **options)
    assert function(settings | {"architectures": ["BertModel"]}, *more, **options).kind == first.kind
    assert str(function(source_of(tiny), *more, **options)) == str(first)
    module = bertscope.BertModel(tiny)
    assert "BertModel" in str(function(module, *more, **options))
    assert not hasattr(module, "example_inputs")


def test_a_configuration_of_transformers_is_taken_for_a_bert_and_for_another_family():
    from transformers import BertConfig as TheirBert
    from transformers import GPT2Config

    own = bertscope.count(BertConfig(num_hidden_layers=1)).totals
    assert bertscope.count(TheirBert(num_hidden_layers=1)).totals == own
    report = bertscope.tree(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10, n_positions=4), depth=1)
    assert report["wte"].params == 10 * 8
    assert report.subject.architecture == "GPT2Model"


@pytest.mark.parametrize("given", [42, None, torch.nn.Linear, ["bert-tiny"]])
def test_anything_else_is_refused_with_the_list_of_what_is_taken(given):
    with pytest.raises(SelectionError, match=r"a model is a module of torch, a name or path .*; got "):
        bertscope.count(given)


# ---- inputs and input_size ----


def test_input_size_gives_the_same_numbers_as_inputs():
    model, picture = Image(), torch.zeros(2, 3, 16, 16)
    by_hand = 2 * 2 * 14 * 14 * 8 * 3 * 9 + 2 * 2 * 8 * 5
    reports = [
        bertscope.flops(model, picture),
        bertscope.flops(model, input_size=(2, 3, 16, 16)),
        bertscope.flops(model, inputs=[picture]),
        bertscope.flops(model, inputs={"picture": picture}),
    ]
    assert [report[""].forward.matmul_flops for report in reports] == [by_hand] * 4
    peaks = [bertscope.estimate(model, **given)["none"].memory.peak.peak_bytes
             for given in ({"inputs": picture}, {"input_size": [(2, 3, 16, 16)]}, {"inputs": [picture]})]  # fmt: skip
    assert len(set(peaks)) == 1
    assert bertscope.count(model, by="module", inputs=picture)["conv"].outputs[0].shape == (2, 8, 14, 14)


def test_dtypes_make_ids_of_an_input_size(tiny):
    report = bertscope.tree(bertscope.BertModel(tiny), input_size=(2, 7), dtypes=[torch.long])
    assert report["encoder"].outputs[0].shape == (2, 7, 8)
    assert report == bertscope.tree(bertscope.BertModel(tiny), shapes=True, batch=2, seq=7)


# ---- the page and the notebook ----


@pytest.mark.usefixtures("_in_the_users_folder")
def test_the_examples_of_the_python_page_hold(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = (ROOT / "docs" / "python.md").read_text()
    code = "\n".join(re.findall(r"```pycon\n(.*?)```", page, re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(code, {}, "python.md", None, 0)
    out = io.StringIO()
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed = doctest.DocTestRunner(optionflags=flags).run(examples, out=out.write).failed
    assert not failed, out.getvalue()
    assert all(f"`{name}(" in page for name in FUNCTIONS)


def test_the_notebook_runs_and_its_outputs_are_those_of_today(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    make_tour = runpy.run_path(str(ROOT / "docs" / "make_tour.py"))
    stored = json.loads((ROOT / "docs" / "tour.ipynb").read_text())
    # The bytes of a picture depend on the version of matplotlib.
    texts = [re.sub(r'torch [\w.+]+|(?<="image/png": )"[^"]+"', "...", make_tour["text"](notebook))
             for notebook in (stored, make_tour["executed"](stored))]  # fmt: skip
    assert texts[0] == texts[1], "run: python docs/make_tour.py"
    assert texts[0].count('"text/html"') >= 5
    assert texts[0].count('"image/png"') == 1
    assert sum(bool(cell.get("outputs")) for cell in stored["cells"]) >= 8


def test_the_next_call_repeats_the_name_that_was_given_from_the_cache_too():
    first, second = (str(bertscope.fit("bert-tiny", "64MiB", seq=8)) for _ in range(2))
    assert first == second
    assert "('bert-tiny', " in second


@pytest.mark.parametrize(
    ("name", "more"),
    [("fit", {"budget": "64MiB"}), ("report", {}), ("plan", {"budget": "64MiB"}), ("explain", {}),
     ("diagram", {"kind": "forward"}), ("diff", {"b": torch.nn.Conv2d(3, 4, 1)})],
)  # fmt: skip
def test_every_function_that_runs_a_module_takes_its_inputs(name, more):
    given = {"input_size": (2, 3, 8, 8)}
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 5))
    report = getattr(bertscope, name)(module, **given, **more)
    if name in ("explain", "diagram", "diff"):
        assert report.batch == 2
    if name == "diff":
        assert report.forward_flops_b == 2 * 2 * 64 * 3 * 4
    if name == "report":
        assert (report.models[0].batch, report.models[0].flops.rows[0].forward.matmul_flops) == (
            2, bertscope.flops(module, **given).rows[0].forward.matmul_flops
        )  # fmt: skip


def test_an_error_names_keywords_in_python_and_options_on_the_command_line(cli):
    ids = torch.nn.Embedding(9, 4)
    with pytest.raises(bertscope.BertscopeError) as raised:
        bertscope.estimate(torch.nn.Bilinear(3, 4, 5))
    assert "add input input1=SHAPE" in raised.value.message
    with naming(generate.option_form):
        assert "add --input input1=SHAPE" in shown(raised.value.message)
    with pytest.raises(bertscope.BertscopeError, match="or use mode forward"):
        bertscope.estimate(ids.requires_grad_(False), inputs=torch.tensor([1]), mode="training", precision="stored")
    assert "--attention sdpa" in cli("estimate", "bert-tiny", "--attention", "flash_attention_2").err
    inner = SelectionError(f"use {name_of('batch')} 1")
    outer = BertscopeError(f"of the base model: {inner.marked}")  # the names in it are spelled too
    assert outer.message == f"of the base model: {inner}" == "of the base model: use batch 1"
    with naming(generate.option_form):
        assert shown(outer.message) == "of the base model: use --batch 1"


def test_a_front_end_shows_no_remedy_that_names_what_it_does_not_have():
    reason = Reason(f"it is too large; lower {name_of('batch')}; use {name_of('swap')}")
    with naming({"batch": "--batch", "swap": ""}.__getitem__):
        assert shown(reason) == shown(BertscopeError(reason).message) == "it is too large; lower --batch"
        assert reason.parts() == ("it is too large", "lower --batch")
    assert reason == "it is too large; lower batch; use swap"  # JSON has all of them


@pytest.mark.parametrize(
    ("call", "options", "python", "command"),
    [
        (lambda: bertscope.explain("bilinear:build"), "explain bilinear:build", "; add input input1=",
         "; add --input input1="),
        (lambda: bertscope.plan("bert-tiny", "1MiB"), "plan bert-tiny --budget 1MiB", "may_change='lora",
         "--may-change lora"),
        (lambda: bertscope.plan("bert-tiny", "220MiB", batch=64, seq=128),
         "plan bert-tiny --budget 220MiB --batch 64 --seq 128", 'report.emitted("torch")', "--emit torch"),
    ],
)  # fmt: skip
def test_a_report_names_keywords_in_python_and_options_on_the_command_line(
    call, options, python, command, cli, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bilinear.py").write_text("import torch\n\ndef build():\n    return torch.nn.Bilinear(3, 4, 5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in TERMINAL:
        monkeypatch.delenv(name, raising=False)
    report, shown = call(), cli(*options.split())
    assert python in str(report)
    assert command in shown.out
    assert cli(*options.split(), "--format", "json").json == json.loads(report.to_json())  # with the texts of Python
