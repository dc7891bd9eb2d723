"""Every keyword of every public function has an effect on its report, or is refused."""

import functools
import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import bertscope
from bertscope.analyses.dataflow import ForwardInputs
from bertscope.api import why as diagnosis
from bertscope.measure import profile as measurement
from bertscope.memory import step as steps
from bertscope.memory.simulator import Simulator
from bertscope.reports.base import Report
from bertscope.settings.rows import rows
from bertscope.settings.run_config import MEASURED, QUESTIONS, DryRun
from tests.conftest import EVERY_CASE
from tests.corpus import values_of

CONFIG = bertscope.BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                              intermediate_size=40, max_position_embeddings=32)  # fmt: skip
SINGLE = replace(CONFIG, num_hidden_layers=1)
LAYERS = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
EQUAL = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Sequential(LAYERS, torch.nn.ReLU()))
OF_SIZE = {"input_size": (2, 8)}
# Without the size of the card, for which `why` would search the batch that fits for each value.
MESSAGE = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 12.00 GiB "
           "is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.")  # fmt: skip
STEP = {"batch": 2, "seq": 8}
SCRIPT = """import sys, torch
model = torch.nn.Linear(8, 8 * len(sys.argv)).cuda()
model(torch.ones(4, 8).cuda()).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""
# Each call has the function, what it is about, and keywords with which the others have an effect.
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "count": ("count", (CONFIG,), {}),
    "count of a run": ("count", (CONFIG,), {"shapes": True}),
    "tree": ("tree", (CONFIG,), {}),
    "summary of a module": ("summary", (EQUAL,), OF_SIZE),
    "flops": ("flops", (CONFIG,), STEP),
    "flops of a module": ("flops", (EQUAL,), OF_SIZE),
    "explain": ("explain", (CONFIG,), {"seq": 8}),
    "classes": ("diagram", (CONFIG, "class"), {}),
    "dataflow": ("diagram", (CONFIG, "forward"), {}),
    "dataflow of a module": ("diagram", (EQUAL, "forward"), OF_SIZE),
    "diff": ("diff", (CONFIG, "bert-tiny"), {}),
    "estimate": ("estimate", (SINGLE,), STEP),
    "estimate of a module": ("estimate", (EQUAL,), OF_SIZE),
    "lengths": ("lengths", (SINGLE, [8, 8]), {"batch": 2}),
    "fit": ("fit", (SINGLE, "50MiB"), {"seq": 8, "precision": "fp32", "checkpointing": "none", "batch": 64}),
    "plan": ("plan", (SINGLE, "2MiB"), {"batch": 32, "seq": 8}),
    "profile": ("profile", (SINGLE,), {**STEP, "steps": 1}),
    "verify": ("verify", (CONFIG, "model.safetensors"), {}),
    "load": ("load", ("bert-tiny",), {}),
    "build": ("build", (CONFIG,), {}),
    "presets": ("presets", (), {}),
    "check": ("check", ("bert-tiny",), {}),
    "sweep": ("sweep", ({"model": "bert-tiny", "batch": [1, 2], "seq": 8},), {}),
    "script of a training": ("training_script", (SINGLE,), {}),
}
# Those of `tests/products.py`: another model or mode, and functions that take the keywords of others.
MORE_CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "count of a module": ("count", (EQUAL,), OF_SIZE),
    "tree of a module": ("tree", (EQUAL,), OF_SIZE),
    "summary": ("summary", (CONFIG,), {}),
    "explain a module": ("explain", (EQUAL,), OF_SIZE),
    "tree of modules": ("diagram", (EQUAL, "tree"), {}),
    "diff of modules": ("diff", (EQUAL, LAYERS[1]), OF_SIZE),
    "fits": ("fits", (CONFIG,), {"gpu": "t4", "seq": 8, "precision": "fp32", "checkpointing": "none", "batch": 64}),
    "report": ("report", (SINGLE,), {**STEP, "fit": False, "checkpointing": "none"}),
    "why": ("why", ("oom.txt", SINGLE), {**STEP, "checkpointing": "full"}),
    "flops of training": ("flops", (CONFIG,), {**STEP, "mode": "training"}),
    "estimate of inference": ("estimate", (CONFIG,), {**STEP, "mode": "inference"}),
    "estimate on a card": ("estimate", (CONFIG,), {**STEP, "gpu": "t4"}),
    "lengths of a module": ("lengths", (EQUAL, [4, 8, 8]), {"input_size": (2, 4, 8)}),
    "profile of a module": ("profile", (EQUAL,), {**OF_SIZE, "steps": 1}),
    "run": ("run", ("train.py",), {"gpu": "t4"}),
}
# Public names that ask nothing of a model, or that another test calls with each keyword.
NO_QUESTIONS = {
    "kernel": "tests/dry_run/test_extension_kernels.py",
    "watch": "tests/measure/test_watch.py",
    "listening": "tests/settings/test_front_ends.py",
    "TrainerCallback": "takes what watch takes",
    "LightningCallback": "takes what watch takes",
    "doctor": "takes nothing",
    "mcp": "takes nothing",
    "schema": "a kind",
    "from_json": "a text",
    "to_json": "a report",
    "read_training_file": "a path",
    "read_checkpoint": "a path",
}
# Values of keywords that are no settings.
VALUES: dict[str, list[Any]] = {
    "name": ["other"], "by": ["group", "parameter"], "dtype": ["bf16"], "folded": [True, False], "sort": ["params"],
    "col_names": [["params_percent"], ["mult_adds"]],
    "shapes": [True], "batch": [3], "seq": [7], "input_size": [(3, 8)], "inputs": [torch.ones(5, 8)], "depth": [1, 2],
    "input_data": [torch.ones(5, 8)], "dtypes": [[torch.long]], "kind": ["tree"], "path": ["encoder.layer.0", "0"],
    "direction": ["RL"], "forward_inputs": [ForwardInputs(seq=4)], "seeds": [2], "around": ["BertPooler"],
    "implementation": ["other"],
    "nn_module": [True], "batch_total": [64], "may_change": ["sgd"], "compare": ["bert-tiny"], "field": ["length"],
    "tokenizer": ["bert-tiny"], "search": [True], "training_file": ["args.json"],
    "plan": ["plan.json"], "model": [CONFIG], "fit": [True], "budget": ["1GiB"], "calibration": [False],
    "allow": [["unexpected"]], "strip_prefix": ["auto"], "architecture": ["BertForMaskedLM"], "attention": ["eager"],
    "add_pooling_layer": [False], "lora": ["r=2"], "download": [True], "steps": [2],
    "config": [True], "exact": [True], "eval_batch": [512], "price": ["t4=0.35"],
    "quantize": ["nf4"],
    "presets: name": ["bert-tiny"], "build: device": ["cpu"], "models": ["bert-mini"], "output": ["rows.jsonl"],
    "allow_code": [True], "changes": [{}], "engine": ["dask"], "workers": [1], "address": ["tcp://127.0.0.1:1"],
    "args": [["--wide"]], "module": [True], "run: fit": ["wide=1..2"],
    "freeze": ["embeddings", "0"], "input": ["inputs_embeds=BxSx16:float32", "input=3x8:float32"],
}  # fmt: skip
# Keywords that change nothing of these small steps or say what is so anyhow, each with the reason.
IDLE = {
    **dict.fromkeys(("explain a module: dtypes", "diff of modules: dtypes"), "shapes on meta do not depend on them"),
    "summary of a module: dtypes": "the table has shapes only",
    "build: device": "a count does not depend on it", "sweep: output": "it is written", "sweep: workers": "speed alone",
    "allow_code": "nothing names code", "check: changes": "the caller reads it",
    "script of a training: name": "no line has it",
    **dict.fromkeys(("run: network", "run: sandbox", "run: memory_limit", "run: timeout"), "limits of the process"),
    "run: steps": "the script has one",
    "calibration": "false: there is none",
    "device": "cuda: the card implies it",
    "report: margin": "the page has no largest batch",
    "exact": "the batch is asked for, or nothing limits it",
    "expandable_segments": "a small step fills no segment", "why: torch": "the parts of this step are the same",
    "shapes": "the inputs of a module have shapes anyhow",
    "may_change": "the plan fits without a change",
    "padding": "the trace of the peak has no mask", "clip_grad_norm": "the norm is gone before the peak",
    "optimizer_implementation": "the peak is in backward", "download": "a preset is not downloaded",
}  # fmt: skip
DERIVED = () if EVERY_CASE else ("lengths", "plan")  # whose keywords of a step are those of `estimate`
UNSTEADY = ("run", "runs", "warmup_seconds", "process_high_water_bytes")
TABLE = rows(DryRun) | rows(*MEASURED)


def numbers(report: Any) -> str:
    """Return the report without the run that it repeats, and without times."""
    if isinstance(report, tuple):
        return "".join(map(numbers, report))
    if isinstance(report, str):
        return report
    if not isinstance(report, Report):  # a model
        return bertscope.count(report).to_json()

    def of(part: Any) -> Any:
        if isinstance(part, dict):
            part = {key: len(value) if key == "step_seconds" else value for key, value in part.items()}
            return {key: of(value) for key, value in part.items() if key not in UNSTEADY}
        return [of(item) for item in part] if isinstance(part, list) else part

    return json.dumps(of(json.loads(bertscope.to_json(report))))


class Larger(torch.nn.Module):
    """A model that stands for its compiled form: it allocates more."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.more = torch.ones(10_000)
        return self.module(*args, **keywords)


def without_processes(jobs: Any, **limits: Any) -> Any:
    """Return the estimates of what processes would measure, and as their machine what they are asked."""
    report = Simulator(jobs[0].source).report([job.run_config for job in jobs])
    asked = [json.loads(replace(job, run_config=jobs[0].run_config).to_json()) for job in jobs]
    return replace(report, machine=f"{asked} {limits}"), (), None


def tried(call: str, name: str, default: Any) -> list[Any]:
    own = VALUES.get(f"{call}: {name}") or VALUES.get(name) or [value for value in values_of(TABLE[name]) if not (
        isinstance(value, int | float) and value > 2**10)]  # fmt: skip
    return [value for value in own if isinstance(value, torch.Tensor) or value != default]


def kept(function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> str | None:
    """Return the numbers of a call; None if it is refused."""
    try:
        return numbers(function(*args, **keywords))
    except bertscope.BertscopeError:
        return None


@pytest.mark.parametrize("call", CALLS)
def test_each_keyword_changes_the_report_or_is_refused(call, tmp_path, monkeypatch):
    try_keywords(call, tmp_path, monkeypatch)


def try_keywords(call, tmp_path, monkeypatch) -> None:
    """Fail for a keyword that the call takes and that changes nothing in its report."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "oom.txt").write_text(MESSAGE)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "args.json").write_text('{"per_device_train_batch_size": 5, "optim": "sgd"}')
    tensors = bertscope.BertModel(CONFIG).state_dict() if call == "verify" else {}
    save_file({f"module.{key}": value for key, value in tensors.items()} | {"module.more": torch.ones(1)},
              "model.safetensors")  # fmt: skip
    monkeypatch.setattr(diagnosis, "read_why", functools.cache(diagnosis.read_why))
    monkeypatch.setattr(measurement, "profile_report", without_processes)
    monkeypatch.setattr(steps, "compile_module", Larger)  # tests/memory/test_compiled.py compiles
    name, args, base = (CALLS | MORE_CALLS)[call]
    function = getattr(bertscope, name)
    plain, idle = numbers(function(*args, **base)), []
    estimated = inspect.signature(bertscope.estimate).parameters
    for keyword, parameter in list(inspect.signature(function).parameters.items())[len(args) :]:
        is_tried = keyword in base or (name in DERIVED and keyword in estimated)
        if is_tried or parameter.kind == parameter.VAR_KEYWORD:
            continue
        found = (kept(function, args, {**base, keyword: value}) for value in tried(call, keyword, parameter.default))
        accepted = False
        for report in found:
            if report not in (None, plain):
                break
            accepted |= report is not None
        else:
            idle += [keyword] * accepted
    idle = [keyword for keyword in idle if not {keyword, f"{call}: {keyword}"} & IDLE.keys()]
    assert not idle, "accepted, and without effect"


def test_each_public_function_is_called_or_has_a_reason_not_to_be():
    functions = {name for name in bertscope.__all__ if inspect.isroutine(getattr(bertscope, name))}
    called = {name for name, _, _ in (CALLS | MORE_CALLS).values()}
    assert functions == called | NO_QUESTIONS.keys() - {"watch"}
    assert not called & NO_QUESTIONS.keys()


@pytest.mark.parametrize(
    "name", sorted({name for name, _, _ in (CALLS | MORE_CALLS).values()} | NO_QUESTIONS.keys() - {"watch"})
)
def test_an_argument_of_another_type_is_refused_in_one_line(name):
    """Not by an error of Python about the first operation that it does not have."""
    function = getattr(bertscope, name)
    for keyword, parameter in inspect.signature(function).parameters.items():
        hint = inspect.formatannotation(parameter.annotation).strip("'")
        if not re.search("^Any$|_empty|Model|Unpack|Module", hint) and parameter.kind != parameter.VAR_KEYWORD:
            with pytest.raises(bertscope.BertscopeError, match=f"^{keyword} takes "):
                function(**{keyword: object()})


@pytest.mark.parametrize("device", ["x", "", "cuda:99", "hpu", "privateuseone"])
@pytest.mark.parametrize("name", [name for name in sorted({name for name, *_ in CALLS.values()})
                                  if "device" in inspect.signature(getattr(bertscope, name)).parameters])  # fmt: skip
def test_a_device_that_does_not_exist_is_refused_in_one_line(name, device):
    _, args, keywords = next(row for row in CALLS.values() if row[0] == name)
    calls = [functools.partial(getattr(bertscope, name), *args, **keywords)]
    calls += [bertscope.load(model).build for model in ("bert-tiny", "gpt2") if name == "build"]
    for call in calls:
        with pytest.raises(bertscope.BertscopeError, match=r"^[^\n]*\bdevice\b[^\n]*$"):
            call(device=device)


@pytest.mark.parametrize("name", ["estimate", "flops"])
def test_a_keyword_that_is_none_is_one_that_is_not_given(name):
    """Else None would mean the default of a single run: batch 1, and a training step for `flops`."""
    function, nothing = getattr(bertscope, name), dict.fromkeys(QUESTIONS[name].table)
    assert numbers(function(CONFIG, **nothing)) == numbers(function(CONFIG))


@pytest.mark.parametrize("call", CALLS)
def test_a_keyword_that_no_function_has_is_refused(call):
    name, args, base = CALLS[call]
    with pytest.raises((TypeError, bertscope.BertscopeError), match="depht"):
        getattr(bertscope, name)(*args, **base, depht=1)


@pytest.mark.parametrize(("name", "wrong"), [
    ("count", {"quantize": "x"}), ("tree", {"depth": -1}), ("summary", {"depth": -1}), ("diagram", {"depth": -1})],
    ids=str)  # fmt: skip
def test_a_value_that_the_command_refuses_is_refused_in_python(name, wrong):
    with pytest.raises(bertscope.BertscopeError, match=rf"^{next(iter(wrong))} takes"):
        getattr(bertscope, name)(CONFIG, **wrong)


@pytest.mark.parametrize("limit", [{"gpu": "t4"}, {"budget": "1GiB"}])
def test_the_price_of_no_gpu_in_use_is_refused(limit):
    with pytest.raises(bertscope.BertscopeError, match=r"price (lacks t4; add it, or give|needs) gpu l4"):
        bertscope.fit(SINGLE, **limit, price="l4=0.7", sequences=9, **{**STEP, "batch": None})
