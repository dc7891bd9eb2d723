"""The training loops as scripts to copy, change and run: a dry run of one has the peak that its estimate says."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from inspect import getsource
from textwrap import indent
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.memory import step
from bertscope.memory.step import TORCH_DTYPES, meta_inputs, run_model
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import CUDA, PLAIN, STORED, TRAINING, RunConfig
from bertscope.settings.training import MODEL, OPTIMIZERS, loss_parts
from bertscope.sources.bert import BertSource, preset_paths
from bertscope.sources.find import teachers
from bertscope.sources.model_source import ModelSource
from bertscope.tracing.fake_tensors import valid_tokens
from bertscope.tracing.losses import loss_function
from bertscope.units import FP32

_CONSTANTS = ("INFERENCE", "MODEL", "PLAIN", "TORCH_DTYPES", "TRAINER", "TRAINING")  # that `training_loop` names
_STEPS = 3  # the first makes the optimizer's state, the second leaves what the third finds
# What a script may call -> its import.
_IMPORTS = {
    "deepcopy(": "from copy import deepcopy",
    "autocast_each_forward(": "from bertscope.memory.step import autocast_each_forward",
    "partial(": "from functools import partial",
    "savers.": "from bertscope.model import savers",
    "losses.": "from bertscope.tracing import losses",
    "bertscope.memory.optimizers.": "import bertscope.memory.optimizers",
    "logits_of(": "from bertscope.memory.step import logits_of",
    "freeze(": "from bertscope.tracing.module_tree import freeze",
}
_LOSSES = ("label", "positions")  # in the names of inputs with which a class computes its loss


def loop_script(source: ModelSource, run: RunConfig) -> str:
    """Return the loop of a run of a BERT as a script; raises SelectionError for a run that has no such script."""
    option = name_of("show_script")
    refused = {"world_size": run.parallelism.world_size > 1, "compile": run.compile}
    refused["sdpa_kernel"] = run.sdpa_kernel != "auto"
    for name in filter(refused.get, refused):
        raise SelectionError(f"{option} shows a loop without {name_of(name)}; leave one of them out")
    if run.loss != MODEL and run.loop == PLAIN:  # the outputs of its forward passes are variables of no plain code
        raise SelectionError(f"{option} shows a loss in a loop that frees outputs, such as {name_of('loop')} trainer")
    bert = source.require(option)
    model = run_model(bert, run)
    if run.mode == TRAINING and not any(param.requires_grad for param in model.parameters()):
        raise SelectionError(f"nothing is trained in this loop; train adapters, such as {name_of('lora')} r=8")
    has_loss = any(part in name for name in meta_inputs(model, run) for part in _LOSSES)
    parts = [*_model(bert, run), *_batch(bert, model, run), *_optimizer(run)]
    if run.eval_batch:
        held_out = "\n".join([*_batch(bert, model, run.evaluation), "return batch"])
        forward = {"predict(held_out)": _forward(run, "held_out")}
        parts += ["", "", "def held_out_batch():", indent(held_out, "    ")]
        parts += ["", "", "def evaluate():", indent(_settled(run, step.evaluation, forward), "    "), ""]
    parts += ["", "torch.set_grad_enabled(False)"] if run.is_eval else []
    parts += ["", f"for step in range({_STEPS}):", indent(_loop(run, has_loss), "    "), ""]
    text = "\n".join(parts)
    imports = [line for name, line in _IMPORTS.items() if name in text]
    return "\n".join(["import torch", "", "import bertscope", *imports, "", text])


def _loop(run: RunConfig, has_loss: bool) -> str:
    forward = [f"loss = {_forward(run, 'batch')}"]
    if run.loss == MODEL and not run.loss_chunks:
        forward = [f"output = {_forward(run, 'batch')}"]
        if run.mode == TRAINING:
            forward += ["loss = output.loss" if has_loss else "loss = output[0].sum()"]
        forward += ["del output"] * (run.loop != PLAIN)
    if run.offload_activations:
        forward = ["with torch.autograd.graph.save_on_cpu(pin_memory=True):", *(f"    {line}" for line in forward)]
    if run.mode == TRAINING and run.accumulate > 1:
        forward += [f"loss = loss / {run.accumulate}"]
    has_optimizer = run.mode == TRAINING and run.optimizer in OPTIMIZERS
    texts = {
        "loss = criterion(batch)": "\n".join(forward),
        "optimizer is not None": str(has_optimizer),
        **({"micro_batch == 0": "True"} if run.accumulate == 1 else {}),
        "clip_gradients(model)": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "optimizer is None": str(not has_optimizer),
        "loss = loss.detach() if run.loop == TRAINER and isinstance(loss, torch.Tensor) else None": "",
    }
    return _settled(run, step.training_loop, texts)


def _forward(run: RunConfig, batch: str) -> str:
    """Return the call that gives the output of a batch, or its loss if that is not the model's own."""
    if not isinstance(criterion := loss_function(run), partial):
        return f"model(**{batch})"
    options = "".join(f", {name}={value!r}" for name, value in criterion.keywords.items())
    return f"losses.{criterion.func.__name__}(model, {batch}{options})"


def _settled(run: RunConfig, function: Callable[..., Any], texts: dict[str, str]) -> str:
    """Return the body of a function, or of its `while True`, with these settings and texts."""
    body: Any = ast.parse(getsource(function)).body[0].body[1:]  # type: ignore[attr-defined]  # after the docstring
    body = body[0].body if isinstance(body[0], ast.While) else body
    names = {"run": run, "device": run.device, **{name: getattr(step, name) for name in _CONSTANTS}}
    text = "\n".join(map(ast.unparse, _Settled(names, texts).visit(ast.Module(body, [])).body))
    return text.replace(", cache_enabled=True", "")  # the default


class _Settled(ast.NodeTransformer):
    """A reader of code that puts values for `names`, drops the branches that they rule out, and replaces `texts`."""

    def __init__(self, names: dict[str, Any], texts: dict[str, str]) -> None:
        self.names, self.texts = names, texts

    def visit(self, node: ast.AST) -> Any:
        """Return the node or, for a statement, the list of those that are left of it."""
        if isinstance(node, (ast.expr, ast.stmt)) and (text := self.texts.get(ast.unparse(node))) is not None:
            statements: list[Any] = ast.parse(text).body
            return statements[0].value if isinstance(node, ast.expr) else statements
        if isinstance(node, ast.If) and isinstance(test := self.visit(node.test), ast.Constant):
            return self.generic_visit(ast.Module(node.body if test.value else node.orelse, [])).body  # type: ignore[attr-defined]
        match self.generic_visit(node):
            case ast.Name(id=name) if name in self.names:
                return ast.Constant(self.names[name])
            case ast.Attribute(value=ast.Constant(value=owner), attr=name):
                return ast.Constant(getattr(owner, name))
            case ast.Subscript(value=ast.Constant(value=table), slice=ast.Constant(value=key)):
                return ast.Constant(table[key])  # type: ignore[index]
            case ast.UnaryOp(op=ast.Not(), operand=ast.Constant(value=value)):
                return ast.Constant(not value)
            case ast.Compare(left=ast.Constant(value=one), ops=[how], comparators=[ast.Constant(value=other)]):
                return ast.Constant((one == other) == isinstance(how, (ast.Eq, ast.Is)))
            case ast.BoolOp(op=how, values=[ast.Constant(value=value) as first, *others]):
                if bool(value) != isinstance(how, ast.And):
                    return first
                return others[0] if len(others) == 1 else self.visit(ast.BoolOp(how, others))
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                return ast.Assign([target], value, lineno=0)
            case ast.Expr(value=ast.Yield()):
                return []
            case ast.For(iter=ast.Call(args=[ast.Constant(value=1)]), body=body):
                return body
        return node


def _model(source: BertSource, run: RunConfig) -> list[str]:
    name_or_path = source.name if source.name in preset_paths() or source.path is None else str(source.path)
    options = {"architecture": source.architecture, "attention": source.config.attn_implementation,
               "add_pooling_layer": source.add_pooling_layer if source.architecture == "BertModel" else None,
               "lora": None if source.lora is None else str(source.lora)}  # fmt: skip
    arguments = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    lines = [f"source = bertscope.load({name_or_path!r}{arguments}).for_run()"]
    if not run.dropout:
        lines += ["source = source.without_dropout()"]
    lines += ['model = source.build(device="cpu")']
    if run.checkpointing != NONE:
        lines += [f"source.checkpoint(model, {run.checkpointing!r}, reentrant={run.reentrant})"]
    if run.freeze:
        lines += [f"freeze(model, {run.freeze!r})"]
    for teacher in teachers(run.loss):
        arguments = "" if teacher.bert_config is None else ", architecture='BertModel'"
        loaded = f"bertscope.load({loss_parts(run.loss)[1]!r}{arguments})"
        lines += [f'model.teacher = losses.Teacher({loaded}.for_run().build(device="cpu"), model)']
    if not run.padding:
        base = "model.base_model.model" if source.lora else "model"
        lines += [f"{base}.base_model.hides_positions = False  # the mask has only ones"]
    dtype = "" if run.dtype in (STORED, FP32.name) else f".to({TORCH_DTYPES[run.dtype]})"
    lines += [f"model = model{dtype}.to({run.device!r}).train({not run.is_eval})"]
    if run.quantize != STORED:
        arguments = f"{run.quantize!r}, {TORCH_DTYPES.get(run.compute_precision)}, on_cuda={run.device == CUDA}"
        lines += [f"source.quantize(model, {arguments})"]
    if run.autocast is not None and run.loss != MODEL:  # a loss of several forward passes
        lines += [f"autocast_each_forward(model, {run.device!r}, {TORCH_DTYPES[run.autocast]})"]
    return lines


def _batch(source: BertSource, model: Any, run: RunConfig) -> list[str]:
    inputs, device = meta_inputs(model, run), f"device={run.device!r}"

    def values(name: str, like: Any) -> str:
        """Return the expression that makes an input; it makes a list if there are several texts."""
        if isinstance(like, list):
            return f"[{values(name, like[0])} for text in range({len(like)})]"
        shape = tuple(like.shape)
        if like.is_floating_point():
            return f"torch.rand({shape}, {device})"
        if name == "input_ids":
            return f"torch.randint({source.config.vocab_size}, {shape}, {device})"
        return f"torch.{'ones' if 'mask' in name else 'zeros'}({shape}, dtype=torch.long, {device})"

    lines = ["batch = {", *(f"    {name!r}: {values(name, like)}," for name, like in inputs.items()), "}"]
    if run.padding:
        hidden = f"[:, {valid_tokens(run.seq, run.padding)} :] = 0"
        of_texts = ['for mask in batch["attention_mask"]:', f"    mask{hidden}"]
        lines += of_texts if run.loss != MODEL else [f'batch["attention_mask"]{hidden}']
    if run.waiting_batches:
        lines += [f"waiting = [deepcopy(batch) for _ in range({run.waiting_batches})]  # of the data loader"]
    return lines


def _optimizer(run: RunConfig) -> list[str]:
    row = OPTIMIZERS.get(run.optimizer)
    if row is None or run.mode != TRAINING:
        return []
    module = "torch.optim" if row.in_torch else "bertscope.memory.optimizers"
    arguments = "".join(f", {name}={value!r}" for name, value in {"lr": 1e-4, **run.optimizer_arguments}.items())
    lines = [f"optimizer = {module}.{row.class_name}(model.parameters(){arguments})"]
    if saver := "StepInBackward" * run.step_in_backward or "HostOptimizer" * run.offload_optimizer:
        make = f"partial({module}.{row.class_name}{arguments})"
        lines = [f"optimizer = savers.{saver}(model.parameters(), {make})"]
    if run.grad_scaler:
        lines += [f"scaler = torch.amp.GradScaler({run.device!r})"]
    if run.ema:
        lines += ["named = [*model.named_parameters(), *model.named_buffers()]"]
        student = ' if not name.startswith("teacher.")' if teachers(run.loss) else ""
        lines += [f"average = {{name: value.detach().clone() for name, value in named{student}}}"]
    return lines
