"""The training loops as scripts to copy, change and run: a dry run of one has the peak that its estimate says."""

from __future__ import annotations

from textwrap import indent

from bertscope.errors import SelectionError, name_of
from bertscope.memory.step import TORCH_DTYPES, below, meta_inputs, run_model
from bertscope.model.lora import base_model_of
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import INFERENCE, PLAIN, STORED, TRAINER, TRAINING, RunConfig
from bertscope.settings.training import MODEL, OPTIMIZERS
from bertscope.sources.bert import BertSource, preset_paths
from bertscope.sources.model_source import ModelSource
from bertscope.tracing.fake_tensors import valid_tokens
from bertscope.units import FP32

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
    parts = ["import torch", "", "import bertscope", "", *model, *_optimizer(run), ""]
    if run.mode == TRAINING:
        parts += _training(run, "output.loss" if has_loss else "output[0].sum()")
    else:
        parts += [f"for step in range({_STEPS}):", *_indented([f"with torch.set_grad_enabled({run.mode != INFERENCE}):",
                  *_indented(_in_autocast(run, ["output = model(**batch)"]))])]  # fmt: skip
        parts += ["    del output"] if run.loop != PLAIN else []
    return "\n".join([*parts, ""])


def _indented(lines: list[str]) -> list[str]:
    return indent("\n".join(lines), "    ").splitlines()


def _in_autocast(run: RunConfig, lines: list[str]) -> list[str]:
    if run.autocast is None:
        return lines
    return [f"with torch.autocast({run.device!r}, dtype={TORCH_DTYPES[run.autocast]}):", *_indented(lines)]


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


def _training(run: RunConfig, loss: str) -> list[str]:
    """Return the lines of the loop, each setting where it has its effect."""
    forward = ["output = model(**batch)", f"loss = {loss}"]
    if run.loop != PLAIN:
        forward += ["del output"]
    if run.accumulate > 1:
        forward += [f"loss = loss / {run.accumulate}"]
    scaled = "scaler.scale(loss)" if run.grad_scaler else "loss"
    after = {TRAINER: ["loss = loss.detach()"], PLAIN: []}.get(run.loop, ["del loss"])
    has_optimizer = run.optimizer in OPTIMIZERS
    zeroes = f"{'optimizer' if has_optimizer else 'model'}.zero_grad(set_to_none={not run.keep_gradients})"
    between = ["if micro_batch == 0:", f"    {zeroes}"] if run.accumulate > 1 else [zeroes]
    between = between if run.zeroes_between else []
    lines = [*_in_autocast(run, forward), *between, f"{scaled}.backward()", *after]
    if run.accumulate > 1:
        lines = [f"for micro_batch in range({run.accumulate}):", *_indented(lines)]
    if run.clip_grad_norm and has_optimizer:
        lines += ["scaler.unscale_(optimizer)"] if run.grad_scaler else []
        lines += ["torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
    if has_optimizer:
        lines += ["scaler.step(optimizer)", "scaler.update()"] if run.grad_scaler else ["optimizer.step()"]
    if not run.zeroes_between:
        lines += [zeroes]
    if run.ema and has_optimizer:
        lines += ["for name, parameter in model.named_parameters():",
                  "    average[name].lerp_(parameter.detach(), 0.001)"]  # fmt: skip
    return [f"for step in range({_STEPS}):", *_indented(lines)]
