"""Inputs that a user describes, in dictionaries and variadic too, and the default sizes of those that are derived."""

import functools
import inspect
import json
import re

import pytest
import torch

import bertscope
from bertscope.errors import SelectionError
from bertscope.settings.rows import rows
from bertscope.settings.run_config import QUESTIONS
from bertscope.tracing.inputs import described_inputs

IN_A_DICTIONARY = (
    "from torch import nn\n"
    "class Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.linear = nn.Linear(8, 10)\n"
    "    def forward(self, batch):\n        return self.linear(batch['image'])\n"
    "class Variadic(Net):\n"
    "    def forward(self, *args):\n        return self.linear(args[0])\n"
)


@pytest.fixture
def own_code(tmp_path):
    """Return the path of a file with modules whose forward takes a dictionary, or any tensors."""
    (tmp_path / "own.py").write_text(IN_A_DICTIONARY)
    return tmp_path / "own.py"


@pytest.mark.parametrize("command", [
    ("flops",), ("estimate", "--gpu", "t4"), ("estimate", "--precision", "autocast-bf16"), ("fit", "--budget", "1MiB"),
    ("profile", "--steps", "1"), ("tree", "--shapes"),
], ids=" ".join)  # fmt: skip
def test_an_input_in_a_dictionary_is_given_by_its_key(cli, own_code, command):
    done = cli(command[0], f"{own_code}:Net", *command[1:], "--input", "batch.image=Bx8:float32", "--format", "json")
    assert done.code == 0, done.err
    if command[0] == "flops":
        assert done.json["rows"][0]["forward"]["matmul_flops"] == 2 * 8 * 10  # one row of 8 features, 10 outputs


def test_the_tensors_of_a_dictionary_are_nested_by_their_names():
    found = described_inputs(["batch.image=Bx3:float32", "batch.text.ids=BxS:int64", "mask=BxS:bool"], 2, 5)
    assert list(found) == ["batch", "mask"]
    assert (*found["batch"]["image"].shape, *found["batch"]["text"]["ids"].shape) == (2, 3, 2, 5)
    for twice in (["batch=B:float32", "batch.image=B:float32"], ["batch.image=B:float32", "batch=B:float32"]):
        with pytest.raises(SelectionError, match="takes a name once"):
            described_inputs(twice, 1, 1)


def test_variadic_arguments_are_not_proposed_as_an_input(cli, own_code):
    asked = cli("flops", f"{own_code}:Variadic").err
    assert "forward takes *args" in asked
    assert "--input args=" not in asked
    (proposed,) = re.findall(r"such as (x=\S+)", asked)
    assert cli("flops", f"{own_code}:Variadic", "--input", proposed).code == 0
    assert "in a dictionary batch.KEY=SHAPE:DTYPE" in cli("flops", f"{own_code}:Net").err


def test_fit_scales_given_inputs_along_their_batch():
    net = torch.nn.Linear(1000, 10, bias=False)
    whole = {"checkpointing": "none", "precision": "stored", "margin": 0, "exact": True}
    given = bertscope.fit(net, "64MiB", inputs=torch.ones(4, 1000), **whole)
    of_size = bertscope.fit(net, "64MiB", input_size=(1, 1000), **whole)
    assert given.rows == of_size.rows
    row = given.rows[0]
    # An input row has 1,000 floats and an output row 10; the parameters, their state and gradients have 160 kB.
    assert row.batch == pytest.approx((64 * 2**20 - 160_000) / 4 / 1_010, rel=0.02)
    with pytest.raises(SelectionError, match="no tensor whose first size is the batch"):
        bertscope.fit(net, "64MiB", inputs={"scale": 3})


def test_a_module_with_inputs_has_an_answer_for_a_gpu():
    net, size = torch.nn.Linear(100, 10), (4, 100)
    on_cuda = bertscope.estimate(net, input_size=size, device="cuda")["none"]
    for_gpu = bertscope.estimate(net, input_size=size, gpu="t4")["none"]
    assert (for_gpu.answer, on_cuda.answer) == ("yes", "")
    assert for_gpu.memory.peak.parts.inputs == on_cuda.memory.peak.parts.inputs
    assert for_gpu.memory.peak.peak_bytes == on_cuda.memory.peak.peak_bytes
    of_loss = bertscope.estimate(net, input_size=size, gpu="t4", loss=lambda output: output.mean())["none"]
    assert of_loss.answer == "yes"
    with pytest.raises(SelectionError, match="the loss depends on nothing that is trained"):
        bertscope.estimate(net, input_size=size, gpu="t4", loss=lambda module, inputs: None)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_a_default_length_is_at_most_that_of_the_model_and_a_given_one_is_an_error():
    short = {"model_type": "bert", "max_position_embeddings": 40, **SMALL}
    assert bertscope.estimate(short).run.seq == 40
    assert bertscope.estimate({**short, "max_position_embeddings": 200}).run.seq == 128
    assert [row.seq for row in bertscope.fit(short, "1GiB", precision="fp32", checkpointing="none").rows] == [40]
    assert bertscope.flops(short)[""] == bertscope.flops(short, seq=40)[""]
    assert bertscope.tree(short, shapes=True)["embeddings"].outputs[0].shape == (1, 40, 16)
    with pytest.raises(SelectionError, match=r"seq 128 does not fit the model: at least 1 and at most .*40"):
        bertscope.estimate(short, seq=128)


def test_a_default_length_leaves_out_the_positions_that_padding_takes():
    pytest.importorskip("transformers")
    short = {"model_type": "roberta", "vocab_size": 99, "max_position_embeddings": 42, "pad_token_id": 1, **SMALL}
    assert bertscope.estimate(short).run.seq == 40  # positions begin after that of the padding: 2 to 41


@pytest.mark.parametrize("name", ["estimate", "profile", "plan", "fit", "fits", "flops"])
def test_the_keywords_of_a_function_have_the_defaults_of_its_command(name):
    keywords, own = inspect.signature(getattr(bertscope, name)).parameters, QUESTIONS[name].defaults
    for key, row in rows(*QUESTIONS[name].records).items():
        if key in QUESTIONS[name].unused:
            assert key not in keywords
        elif key not in ("batch", "budget") or name not in ("fit", "fits", "plan"):  # which search them
            assert keywords[key].default == own.get(key, row.default)
    assert name != "estimate" or keywords["batch"].default == 8


def test_fit_shows_no_length_where_the_inputs_fix_it():
    sizes = {"budget": "1GiB", "precision": "stored", "checkpointing": "none", "batch": 2}
    report = bertscope.fit(torch.nn.Linear(4, 4), input_size=(1, 4), **sizes)
    assert report.length_given
    assert "seq" not in str(report)
    assert "seq" in str(bertscope.fit({"model_type": "bert", **SMALL}, seq=8, **sizes | {"precision": "fp32"}))


@pytest.mark.parametrize("function", [bertscope.explain, functools.partial(bertscope.diagram, kind="forward")])
def test_a_forward_pass_without_a_length_shows_none(function):
    config = bertscope.BertConfig(**SMALL)
    assert (function(torch.nn.Linear(4, 4), inputs=torch.ones(2, 4)).seq, function(config).seq) == (None, 128)
    assert "seq" not in str(function(torch.nn.Linear(4, 4), input_size=(2, 4))).partition("flowchart")[0]


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


def test_a_report_has_the_sizes_of_the_inputs_and_of_the_optimizer_that_it_is_about(cli, tmp_path):
    """No default of a setting that they replace, neither printed nor stored."""
    model, ids = Words(), torch.zeros(6, 9, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=0.01)
    run = bertscope.from_json(bertscope.estimate(model, ids, optimizer=optimizer).to_json()).run
    assert (run.batch, run.seq, run.momentum, run.weight_decay) == (6, 9, 0.9, 0.01)
    assert bertscope.profile(model, ids, steps=1).run.batch == 6
    (tmp_path / "words.py").write_text(
        f"import torch\n{inspect.getsource(Words)}\nclass Image(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x * self.w.sum()\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(2))\n"
    )
    cases = ("Words", "ids=6x9:int64", "batch 6, seq 9"), ("Image", "x=6x3x8x8:float32", "batch 6")
    for name, size, said in (*cases, ("Words", "ids=BxS:int64", "batch 1, seq 128")):
        for command in ("flops", "estimate"):
            done = cli(command, f"{tmp_path}/words.py:{name}", "--input", size)
            assert f"{name}, {said}" in done.out.replace("batch 8", "batch 1"), done.out + done.err
            assert ("seq" in done.out.splitlines()[1]) == ("seq" in said)


def test_inputs_as_the_second_argument_and_an_option_of_the_model_as_a_keyword_get_what_to_type():
    module, inputs = torch.nn.Linear(3, 4), torch.ones(2, 3)
    for function, name in ((bertscope.explain, "path"), (bertscope.diagram, "kind")):
        with pytest.raises(SelectionError, match=f"{name} takes str.*inputs="):
            function(module, inputs)
    with pytest.raises(SelectionError, match=r"bertscope\.load"):
        bertscope.estimate("bert-tiny", lora="r=8")
    with pytest.raises(SelectionError, match="forward_inputs"):
        bertscope.diagram(module, "forward", inputs=inputs, forward_inputs={"seq": 9})


@pytest.mark.parametrize(
    "wrap", [lambda ids: ids, lambda ids: [ids], lambda ids: {"ids": ids}], ids=["", "list", "dict"]
)
def test_summary_takes_inputs_by_position_as_other_functions(wrap):
    ids = torch.zeros(6, 9, dtype=torch.int64)
    assert bertscope.summary(Words(), wrap(ids)) == bertscope.summary(Words(), input_data=wrap(ids))


@pytest.mark.parametrize(("name", "keyword"), [
    ("fit", "seq"), ("fits", "seq"), ("plan", "seq"), ("plan", "batch"), ("report", "seq"), ("estimate", "batch"),
    ("flops", "seq"), ("count", "batch"), ("tree", "seq"), ("explain", "seq"),
])  # fmt: skip
def test_a_keyword_for_what_the_inputs_determine_is_refused(name, keyword):
    budget = {"budget": "1GiB"} if name in ("fit", "fits", "plan") else {}
    with pytest.raises(SelectionError, match=keyword):
        getattr(bertscope, name)(torch.nn.Linear(4, 4), input_size=(1, 4), **budget, **{keyword: 9})


def test_a_configuration_of_images_has_no_sequence_length_in_any_answer(cli, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    (tmp_path / "vit.json").write_text(json.dumps({"model_type": "vit", "image_size": 32, "patch_size": 16, **sizes}))
    budget = ("--budget", "64MiB", "--batch", "2")
    for command in (("estimate",), ("fit", *budget), ("plan", *budget), ("flops",), ("explain",), ("tree", "--shapes")):
        answer = cli(command[0], tmp_path / "vit.json", *command[1:], *["-v"] * (command[0] != "explain"))
        assert answer.code == 0
        assert not re.search(r"\bseq\b|tokens|sequence length", answer.out), command
        if command[0] != "tree":
            refused = cli(command[0], tmp_path / "vit.json", *command[1:], "--seq", "64")
            assert (refused.code, refused.out) == (2, ""), command
            assert "no size of an input is S" in refused.err


def test_a_size_that_no_described_input_has_is_refused_in_python_and_in_every_kind_of_file(cli, own_code, tmp_path):
    model, described = f"{own_code}:Net", "batch.image=Bx8:float32"
    with pytest.raises(SelectionError, match="seq has no effect: no size of an input is S"):
        bertscope.estimate(model, seq=9, input=[described])
    expected, grid, plan = (tmp_path / name for name in ("net.bertscope.yaml", "grid.yaml", "plan.json"))
    grid.write_text(f'model: {model}\ninput: ["{described}"]\nbatch: [1, 2]\nseq: [8, 9]\n')
    expected.write_text(
        f"model: {model}\nexpected:\n  flops:\n"
        f'    one: {{mode: inference, batch: 1, input: ["{described}"], matmul_flops: 160}}\n'
        f'    two: {{mode: inference, batch: 1, seq: 9, input: ["{described}"], matmul_flops: 160}}\n'
    )
    planned = bertscope.plan(model, "1GiB", batch=2, input=[described])
    plan.write_text(planned.to_json())
    assert cli("estimate", model, "--plan", plan).code == 0
    plan.write_text(planned.to_json().replace('"seq": 1,', '"seq": 9,'))
    for words, said in (
        (("sweep", grid, "--allow-code", "-o", tmp_path / "rows.jsonl"), "grid.yaml:4: seq has no effect"),
        (("check", expected, "--allow-code"), "net.bertscope.yaml:5: flops.two: seq has no effect"),
        (("estimate", model, "--plan", plan), "the seq of the plan are not those of its input"),
    ):
        done = cli(*words)
        assert done.code == 2, done
        assert said in done.err
        assert "flops.one" not in done.err
