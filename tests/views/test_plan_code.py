"""The code of a plan: gradients are those without it, less is saved, and each form parses."""

import ast
import importlib
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bertscope
from bertscope.errors import SelectionError, SourceError
from bertscope.memory.layer_operators import layer_costs
from bertscope.model.save_policy import save_operators
from bertscope.reports.base import Subject
from bertscope.reports.plan import PlanList, PlanOperator, PlanReport, PlanRow
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.settings.run_config import PLAN_FORMS, RunConfig
from bertscope.sources.find import source_of
from bertscope.sources.model_source import GivenModule
from bertscope.views.plan import emitted
from tests.conftest import kinds

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
LINEAR = ("addmm.0", "addmm.1", "addmm.2", "addmm.3", "addmm.5")
ATTENTION = "scaled_dot_product_attention.0"
MODULES = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
           "intermediate.dense", "output.dense")  # fmt: skip


def operator(text: str, calls: int = 6) -> PlanOperator:
    name, _, number = text.rpartition(".")
    kernel = "_scaled_dot_product_efficient_attention" if text == ATTENTION else name
    module = MODULES[int(number)] if name == "addmm" else ""
    return PlanOperator(name=name, number=int(number), torch_name=kernel, module=module, output_bytes=8, flops=8,
                        recomputed=True, calls=calls)  # fmt: skip


def layers(path: str, count: int, *kept: str, recomputed: Any = None, calls: int = 6, **rest: Any) -> PlanList:
    numbers = tuple(range(count) if recomputed is None else recomputed)
    return PlanList(path=path, layers=count, recomputed=numbers,
                    saved=tuple(operator(name, calls) for name in kept), **rest)  # fmt: skip


def plan(*lists: PlanList, name: str = "bert-tiny", precision: str = "fp32", **changes: Any) -> PlanReport:
    peak = PhasePeak(phase="forward", peak_bytes=2**30, path="", operator="", parts=Parts(inputs=2**30))
    cost = StepCost(peak=peak, limit_bytes=2**34, shortfall=ByteRange())
    row = PlanRow(checkpointing="save:none", batch=2, accumulate=3, cost=cost, recompute_share=0,
                  recompute_moved_bytes=0, lists=lists, changes=changes)  # fmt: skip
    subject = Subject(name=name, architecture="bert", dtype="fp32", attention="sdpa", torch_version="2.13.0",
                      bertscope_version="0.1.0")  # fmt: skip
    run = RunConfig(batch=2, seq=6, precision=precision)
    return PlanReport(subject=subject, run=run, budget_bytes=2**34, rows=(row,), layers_flops=0)


def test_a_step_of_micro_batches_without_recomputation_is_a_loop_only():
    model, names = nn.Linear(2, 1), dict[str, Any]()
    exec(emitted(plan(), "torch"), names)
    assert "PLAN" not in names
    loss = SimpleNamespace(loss=model(torch.ones(2)).sum())
    before = model.weight.clone()
    names["train_step"](lambda: loss, [{}], torch.optim.SGD(model.parameters(), lr=1))
    torch.testing.assert_close(before - model.weight, torch.ones(1, 2))
    assert all("save_operators" not in emitted(plan(), form) for form in ("trainer", "lightning"))


class WithLoss(nn.Linear):
    """A model whose output has a loss, the sum of the layer's output for ones."""

    def forward(self):
        return SimpleNamespace(loss=super().forward(torch.ones(2)).sum())


def test_the_emitted_step_scales_the_loss_clips_and_keeps_gradients_as_the_run_does():
    model, names, report = WithLoss(2, 1), dict[str, Any](), plan()
    run = replace(report.run, grad_scaler=True, clip_grad_norm=True, keep_gradients=True)
    exec(emitted(replace(report, run=run), "torch"), names)
    before = model.weight.clone()
    names["train_step"](model, [{}], torch.optim.SGD(model.parameters(), lr=1), torch.amp.GradScaler("cpu"))
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 3**-0.5))  # of three gradients of 1
    assert torch.equal(model.weight.grad, torch.zeros(1, 2))


def installed(report: PlanReport, model: nn.Module, form: str = "torch") -> nn.Module:
    """Return the model after the emitted code has run on it."""
    names: dict[str, Any] = {}
    exec(emitted(report, form), names)
    names["save_operators"](model, names["PLAN"])
    return model


class Storages(TorchDispatchMode):
    """The storages that operators return; `alive_bytes` are those of which something still has a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self.seen[reference.cdata] = reference, tensor.untyped_storage().nbytes()
        return out

    @property
    def alive_bytes(self) -> int:
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def step(model: nn.Module, precision: str = "fp32") -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that forward leaves for backward, and the gradients, of a step with fixed dropout masks."""
    torch.manual_seed(3)
    model.zero_grad()
    with Storages() as storages, torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        loss = model(IDS, labels=IDS)[0] if hasattr(model, "config") else model(torch.ones(2, 6, 8))
    saved = storages.alive_bytes
    loss.backward()
    return saved, [tensor.grad.clone() for tensor in model.parameters() if tensor.grad is not None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + nn.functional.dropout(self.down(nn.functional.gelu(self.up(given))), 0.1, self.training)


class Stack(nn.Module):
    """An own module with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            given = block(given)
        return given.square().sum()


def own_bert(attention: str) -> nn.Module:
    config = replace(bertscope.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=4, num_attention_heads=2,
                     intermediate_size=32), attn_implementation=attention)  # fmt: skip
    return bertscope.BertForMaskedLM(config)


def bert(attention: str, layers: int = 4, **settings: Any) -> nn.Module:
    import transformers

    config = transformers.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=layers, num_attention_heads=2,
                                     intermediate_size=32, attn_implementation=attention, **settings)  # fmt: skip
    return transformers.BertForMaskedLM(config)


def gpt2(attention: str) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(vocab_size=40, n_embd=8, n_layer=4, n_head=2, n_positions=16,
                                     attn_implementation=attention)  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def t5(attention: str) -> nn.Module:
    import transformers

    config = transformers.T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=32, num_layers=3, num_heads=2,
                                   decoder_start_token_id=0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def adapted(attention: str) -> nn.Module:
    """Return BERT in the wrapper of peft: a plan has the paths of the model, not of the wrapper."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(bert(attention), config)


ENCODER = layers("bert.encoder.layer", 4, *LINEAR, ATTENTION)
MODELS = {
    "own BERT": (own_bert, (ENCODER,)),
    "BERT": (bert, (ENCODER,)),
    "BERT in peft's wrapper": (adapted, (ENCODER,)),
    "GPT-2": (gpt2, (layers("transformer.h", 4, "addmm.0", "addmm.3", ATTENTION, recomputed=(0, 1, 3)),)),
    "T5": (t5, (layers("encoder.block", 3, "mm.0", "mm.3"), layers("decoder.block", 3, "mm.1", "bmm.1", "mm.6"))),
    "a ModuleList": (lambda attention: Stack(), (layers("blocks", 4, "addmm.1", recomputed=(1, 2, 3)),)),
}


@kinds("name, attention, precision", MODELS, ("eager", "sdpa"), ("fp32", "bf16"))
def test_gradients_are_those_without_the_code_bit_for_bit_and_less_is_saved(name, attention, precision):
    build, lists = MODELS[name]
    torch.manual_seed(1)
    model = build(attention).train()
    saved, gradients = step(model, precision)
    weights = model.state_dict()
    least, again = 0, []
    for kept in (False, True):
        other = build(attention).train()
        other.load_state_dict(weights)
        installed(plan(*(item if kept else replace(item, saved=()) for item in lists)), other)
        size, again = step(other, precision)
        assert all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))
        assert least < size < saved
        least = size
    assert len(again) > 10


def test_attention_is_kept_whichever_kernel_torch_chooses():
    """Without dropout the CPU has a fused kernel, of which 2 x 2 heads x 6 x 4 outputs and a sum for each row stay."""
    sizes, gradients = [], []
    for kept in ((), (ATTENTION,)):
        torch.manual_seed(1)
        model = bert("sdpa", attention_probs_dropout_prob=0.0).train()
        size, found = step(installed(plan(layers("bert.encoder.layer", 4, *kept)), model))
        sizes.append(size)
        gradients.append(found)
    assert sizes[1] - sizes[0] == 4 * (2 * 2 * 6 * 4 + 2 * 2 * 6) * 4
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_repeated_layer_does_not_fill_a_cache_of_keys():
    model = installed(plan(*MODELS["T5"][1]), t5("eager"))
    assert not any(module.config.use_cache for module in (model, model.encoder, model.decoder))


def test_the_repetition_keeps_the_same_calls():
    """torch 2.6 asks the policy again in backward; 2.13 remembers."""
    names: dict[str, Any] = {}
    exec(emitted(plan(ENCODER), "torch"), names)
    names["create_selective_checkpoint_contexts"] = lambda policy: policy
    policy = names["save_contexts"]({"addmm.0", "addmm.2"})
    answers = [
        [policy(SimpleNamespace(is_recompute=again), torch.ops.aten.addmm.default).name for _ in range(3)]
        for again in (False, True)
    ]
    assert answers == [["MUST_SAVE", "PREFER_RECOMPUTE", "MUST_SAVE"]] * 2


@pytest.mark.skipif(hasattr(torch.ops.bitsandbytes, "gemm_4bit"), reason="bitsandbytes has the operator already")
def test_a_4_bit_product_with_a_bias_is_saved_as_addmm():
    """bitsandbytes gives the bias by name, and torch's dispatcher passes it on by position."""
    library, runs = torch.library.Library("bitsandbytes", "FRAGMENT"), []
    library.define("gemm_4bit(Tensor x, Tensor b, int[] s, Tensor a, int n, str kind, Tensor? bias=None) -> Tensor")
    library.impl("gemm_4bit", lambda x, *_: runs.append(1) or x.clone(), "CompositeExplicitAutograd")
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    layer.forward = lambda x: layer.weight[0] * torch.ops.bitsandbytes.gemm_4bit(x, x, [4], x, 64, "nf4", bias=x)
    save_operators(nn.Sequential(layer), {"0": {"addmm.0"}})
    layer(x).sum().backward()
    assert len(runs) == 1


def test_an_example_by_hand():
    """One block of 8 x 32 on 12 tokens: up leaves 12 x 32 and GELU as much; kept up is 12 x 32 x 4 = 1536 bytes."""
    sizes = []
    for kept in ((), ("addmm.0",)):
        model = installed(plan(layers("blocks", 4, *kept, recomputed=(2,))), Stack().train())
        sizes.append(step(model)[0])
    assert sizes[1] - sizes[0] == 1536


@pytest.mark.parametrize("form", ["torch", "trainer", "lightning"])
@pytest.mark.parametrize(
    "name",
    [
        "x coding=raw_unicode_escape \\u000aimport os",
        'a "quoted" \\ name',
        'three """ quotes',
        "two\nlines",
        "模型 {braces}",
    ],
)
def test_the_text_of_a_name_is_no_code(form, name):
    text = emitted(plan(layers("layer{0}.x", 2, *LINEAR), name=name), form)
    assert text.isascii()
    assert text.startswith("# -*- coding: utf-8 -*-\n")
    tree = ast.parse(text.encode())
    assert isinstance(tree.body[0], ast.ImportFrom)
    assert len(tree.body) == len(ast.parse(emitted(plan(layers("layer", 2, *LINEAR)), form)).body)


def test_the_name_of_an_operator_in_a_file_is_no_code_and_a_change_is_one_of_the_known():
    row = layers("layers", 2, "mm.0", calls=1)
    row = replace(row, saved=tuple(replace(item, name='x"}; open("x"); {"\ny') for item in row.saved))
    report = plan(row, lora="r=8,alpha=open(1)")
    tree = ast.parse(emitted(report, "trainer"))
    assert not any(isinstance(node, ast.Name) and node.id == "open" for node in ast.walk(tree))
    for change in ({"precision": "autocast-x); open('x'); (y"}, {"quantize": "open"}, {"optimizer": "open"}):
        changed = replace(report, rows=(replace(report.rows[0], changes=change),))
        with pytest.raises(SelectionError, match="open"):
            emitted(changed, "trainer")


def test_layers_are_at_their_paths():
    names: dict[str, Any] = {}
    lists = (layers("a{b}.c", 6, "mm.0", recomputed=(0, 1, 2, 5)), layers("d", 1, layer_paths=("d.first",)))
    exec(emitted(plan(*lists), "torch"), names)
    assert names["PLAN"] == {**{f"a{{b}}.c.{number}": {"mm.0"} for number in (0, 1, 2, 5)}, "d.first": set()}


def test_a_trainer_takes_a_step_with_the_emitted_arguments(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    report = plan(layers("bert.encoder.layer", 4, *LINEAR, recomputed=(0, 1)))
    text = emitted(report, "trainer").replace("arguments = TrainingArguments(",
                                              "arguments = TrainingArguments(max_steps=1, use_cpu=True,")  # fmt: skip
    (tmp_path / "emitted_plan.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "emitted_plan", raising=False)
    module = importlib.import_module("emitted_plan")  # a checkpoint of the Trainer has the arguments, by import
    model = bert("sdpa")
    module.save_operators(model, module.PLAN)
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    made = []
    create = module.create_selective_checkpoint_contexts
    monkeypatch.setattr(module, "create_selective_checkpoint_contexts", lambda policy: made.append(1) or create(policy))
    trainer = transformers.Trainer(model=model, args=module.arguments, train_dataset=rows * 3)
    trainer.train()
    assert len(made) == 3 * 2  # of each micro-batch and recomputed layer


@pytest.mark.parametrize("form", ["torch", "trainer", "lightning"])
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
def test_the_code_loads_and_adapts_the_model_as_the_plan_says(form, precision):
    text = emitted(
        plan(quantize="nf4", lora="r=4,alpha=16,dropout=0.05", optimizer="adamw-8bit", precision=precision), form
    )
    config = "load_in_4bit=True bnb_4bit_quant_type='nf4' bnb_4bit_use_double_quant=False bnb_4bit_compute_dtype=torch."
    calls = {call.func.id: " ".join(map(ast.unparse, call.keywords)) for call in ast.walk(ast.parse(text))
             if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}  # fmt: skip
    is_half = precision != "fp32"
    assert calls["BitsAndBytesConfig"] == config + ("bfloat16" if is_half else "float32")
    assert calls["LoraConfig"] == "r=4 lora_alpha=16 lora_dropout=0.05"
    assert ("prepare_model_for_kbit_training" in calls) == is_half
    assert form != "trainer" or "optim='adamw_bnb_8bit'" in calls["TrainingArguments"]


def test_a_callback_of_lightning_recomputes_the_model_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    names: dict[str, Any] = {}
    exec(emitted(plan(layers("blocks", 4, "addmm.1", recomputed=(1, 2))), "lightning"), names)
    model = Stack()
    callback = names["SaveOperators"]("model")
    for stage in ("validate", "fit", "fit"):
        callback.setup(None, nn.ModuleDict({"model": model}), stage)
        assert isinstance(model.blocks[1].forward, partial) == (stage == "fit")
    assert not isinstance(model.blocks[1].forward.args[0], partial)
    assert not isinstance(model.blocks[0].forward, partial)


def test_a_form_has_the_precision_of_autocast():
    report = plan(ENCODER, precision="autocast-bf16")
    assert "    bf16=True,\n" in emitted(report, "trainer")
    chunked = replace(report, rows=(replace(report.rows[0], changes={"loss_chunks": 4}),))
    assert "        with torch.autocast('cpu', torch.bfloat16):\n" in emitted(chunked, "torch")
    assert "16=True" not in emitted(plan(ENCODER), "trainer")


CONFIG = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 40, "hidden_size": 8,
          "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}  # fmt: skip
LORA = "r=2,target=query+value"
OPTIONS = (
    {"attention": "eager", "freeze": ["embeddings"], "optimizer": "sgd", "accumulate": 3, "clip_grad_norm": True},
    {"lora": LORA, "freeze": ["embeddings"], "precision": "autocast-bf16", "loop": "trainer", "ema": True},
)  # fmt: skip


@cache
def found(number: int) -> PlanReport:
    """Return the plan of a small BERT with an option, at a limit that needs a part of the recomputation."""
    given = dict(OPTIONS[number])
    model = {"attention": given.pop("attention", None), "lora": given.pop("lora", None)}
    source = source_of(CONFIG).with_options(**model)
    run = {"batch": 64, "seq": 16, **given}
    none, full = (variant.estimated for variant in
                  bertscope.estimate(source, checkpointing="none,full", **run).variants)  # fmt: skip
    peaks = [memory.cost.gpu_bytes for memory in (none, full)]
    return bertscope.plan(source, budget=sum(peaks) // 2, margin=0, **run)


@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=[" ".join(map(str, own)) for own in OPTIONS])
def test_the_emitted_code_runs_for_every_option(number, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    report = found(number)
    assert report.fits
    orders = ("before", "after") if "lora" in OPTIONS[number] else ("",)
    for form, order in product(("torch", "trainer", "lightning"), orders):
        names: dict[str, Any] = {}
        exec(emitted(report, form).replace("TrainingArguments(\n", "TrainingArguments(use_cpu=True,\n"), names)
        model = bert(OPTIONS[number].get("attention", "sdpa"), layers=CONFIG["num_hidden_layers"])
        if order == "after":
            model = lora(model)
        layers = getattr(model, "get_base_model", lambda model=model: model)().bert.encoder.layer
        if "PLAN" in names:
            names["save_operators"](model, names["PLAN"])
            assert any(isinstance(layer.forward, partial) for layer in layers)
        else:
            model.gradient_checkpointing_enable(names["arguments"].gradient_checkpointing_kwargs)
        model = lora(model) if order == "before" else model
        gradients = step(model.train())[1]
        assert len(gradients) == sum(parameter.requires_grad for parameter in model.parameters()) >= 8


def lora(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query", "value"]))


def test_a_plan_of_peft_around_any_model_runs_before_and_after_it_is_put_around():
    for build, target in ((gpt2, ["c_attn"]), (t5, ["q", "v"]), (bert, ["query", "value"])):
        import peft

        config = peft.LoraConfig(r=2, target_modules=target)
        wrapped = GivenModule(name="own", module=peft.get_peft_model(build("eager"), config))
        (costs, *_) = layer_costs(wrapped, RunConfig(batch=2, seq=6))
        path = costs.layer_paths[0]
        assert path.startswith("base_model.model.")
        save_operators(build("eager"), {path: set()})
        save_operators(peft.get_peft_model(build("eager"), config), {path: set()})


SOME = plan(layers("model.layers", 12, *LINEAR))


@pytest.mark.parametrize("form", PLAN_FORMS)
def test_a_plan_that_recomputes_nothing_has_each_form(form):
    text = emitted(plan(layers("encoder.layer", 4, recomputed=())), form)
    assert text.endswith(("\n", "}"))


def test_a_report_whose_plans_do_not_fit_has_no_code_and_one_without_plans_is_none():
    cost = replace(SOME.rows[0].cost, shortfall=ByteRange(low_bytes=1, high_bytes=1))
    with pytest.raises(SelectionError, match="no plan fits"):
        emitted(replace(SOME, rows=(replace(SOME.rows[0], cost=cost),)), "torch")
    text = emitted(SOME, "json").replace('"limit_bytes": 17179869184', '"limit_bytes": 1')
    with pytest.raises(SourceError, match="contradicts itself"):
        bertscope.from_json(text)
    with pytest.raises(SelectionError, match="at least one"):
        str(replace(SOME, rows=()))
