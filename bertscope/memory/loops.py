"""The training loops as scripts to copy, change and run: a dry run of one has the peak that its estimate says."""

from __future__ import annotations

import ast
from inspect import getsource
from textwrap import indent
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.memory import step
from bertscope.memory.step import TORCH_DTYPES, below, meta_inputs, run_model
from bertscope.model.lora import base_model_of
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import INFERENCE, PLAIN, STORED, TRAINING, RunConfig
from bertscope.settings.training import MODEL, OPTIMIZERS
from bertscope.sources.bert import BertSource, preset_paths
from bertscope.sources.model_source import ModelSource
from bertscope.tracing.fake_tensors import valid_tokens
from bertscope.units import FP32

_CONSTANTS = ("INFERENCE", "MODEL", "PLAIN", "TORCH_DTYPES", "TRAINER", "TRAINING")  # that `training_loop` names
_STEPS = 3  # the first makes the optimizer's state, the second leaves what the third finds
_LOSSES = ("label", "positions")  # in the names of inputs with which a class computes its loss


def loop_script(source: ModelSource, run: RunConfig) -> str:
    """Return the loop of a run of a BERT as a script; raises SelectionError for a run that has no such script."""
    option = name_of("show_script")
    others = {"loss": run.loss != MODEL, "world_size": run.parallelism.world_size > 1, "compile": run.compile,
              "sdpa_kernel": run.sdpa_kernel != "auto", "freeze": bool(run.freeze)}  # fmt: skip
    for name in filter(others.get, others):
        raise SelectionError(f"{option} shows a loop without {name_of(name)}; leave one of them out")
    model, batch = _model(source.require(option), run)
    has_loss = any(part in name for name in batch for part in _LOSSES)
    parts = ["import torch", "", "import bertscope", "", *model, *_optimizer(run)]
    parts += ["", "torch.set_grad_enabled(False)"] if run.mode == INFERENCE else []
    return "\n".join([*parts, "", f"for step in range({_STEPS}):", indent(_loop(run, has_loss), "    "), ""])


def _loop(run: RunConfig, has_loss: bool) -> str:
    """Return the text of a step of `training_loop` with these settings."""
    forward = ["output = model(**batch)"]
    if run.mode == TRAINING:
        forward += ["loss = output.loss" if has_loss else "loss = output[0].sum()"]
    forward += ["del output"] * (run.loop != PLAIN)
    if run.mode == TRAINING and run.accumulate > 1:
        forward += [f"loss = loss / {run.accumulate}"]
    has_optimizer = run.mode == TRAINING and run.optimizer in OPTIMIZERS
    settled = _Settled(
        {"run": run, "device": run.device, **{name: getattr(step, name) for name in _CONSTANTS}},
        {
            "loss = criterion(batch)": "\n".join(forward),
            "optimizer is not None": str(has_optimizer),
            **({"micro_batch == 0": "True"} if run.accumulate == 1 else {}),
            "clip_gradients(model)": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
            "optimizer is None": str(not has_optimizer),
            "loss = loss.detach() if run.loop == TRAINER and isinstance(loss, torch.Tensor) else None": "",
        },
    )
    function: Any = ast.parse(getsource(step.training_loop)).body[0]
    return "\n".join(map(ast.unparse, settled.visit(function.body[1]).body))  # of `while True`, after the docstring


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
            case ast.Expr(value=ast.Yield()):
                return []
            case ast.For(iter=ast.Call(args=[ast.Constant(value=1)]), body=body):
                return body
        return node


def _model(source: BertSource, run: RunConfig) -> tuple[list[str], list[str]]:
    """Return the lines that make the model and its batch, and the names of its inputs."""
    model, device = run_model(source, run), f"device={run.device!r}"
    given = source.name if source.name in preset_paths() or source.path is None else str(source.path)
    options = {"architecture": source.architecture, "attention": source.config.attn_implementation,
               "add_pooling_layer": source.add_pooling_layer if source.architecture == "BertModel" else None,
               "lora": None if source.lora is None else str(source.lora)}  # fmt: skip
    words = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    lines = [f"source = bertscope.load({given!r}{words}).for_run()"]
    if not run.dropout:
        lines += ["source = source.without_dropout()"]
    lines += ['model = source.build(device="cpu")']
    if run.checkpointing != NONE:
        lines += [f"source.checkpoint(model, {run.checkpointing!r}, reentrant={run.reentrant})"]
    if not run.padding:
        base = "model.base_model.model" if source.lora else "model"
        lines += [f"{base}.base_model.hides_positions = False  # the mask has only ones"]
    dtype = "" if run.dtype in (STORED, FP32.name) else f".to({TORCH_DTYPES[run.dtype]})"
    lines += [f"model = model{dtype}.to({run.device!r}).train({run.mode != INFERENCE})", "batch = {"]
    inputs = meta_inputs(model, run)
    for name, like in inputs.items():
        shape, high = tuple(like.shape), below(base_model_of(model), run, name)
        high = source.config.vocab_size if name == "input_ids" else high
        made = f"torch.randint({high}, {shape}, {device})"
        lines += [f"    {name!r}: {f'torch.ones({shape}, dtype=torch.long, {device})' if 'mask' in name else made},"]
    lines += ["}"]
    if run.padding:
        lines += [f'batch["attention_mask"][:, {valid_tokens(run.seq, run.padding)} :] = 0']
    if run.waiting_batches:
        copies = "[{name: value.clone() for name, value in batch.items()}"
        lines += [f"waiting = {copies} for _ in range({run.waiting_batches})]  # of the data loader"]
    return lines, list(inputs)


def _optimizer(run: RunConfig) -> list[str]:
    row = OPTIMIZERS.get(run.optimizer)
    if row is None or run.mode != TRAINING:
        return []
    place = "torch.optim" if row.in_torch else "bertscope.memory.optimizers"
    lines = [] if row.in_torch else [f"import {place}"]
    arguments = "".join(f", {name}={value!r}" for name, value in {"lr": 1e-4, **run.optimizer_arguments}.items())
    lines += [f"optimizer = {place}.{row.class_name}(model.parameters(){arguments})"]
    if run.grad_scaler:
        lines += [f"scaler = torch.amp.GradScaler({run.device!r})"]
    if run.ema:
        lines += ["named = [*model.named_parameters(), *model.named_buffers()]",
                  "average = {name: value.detach().clone() for name, value in named}"]  # fmt: skip
    return lines
