"""One step of a model, phase by phase, which `estimate` runs on fake tensors and `profile` on real ones."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import methodcaller
from typing import Any

from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import SelectionError, name_of
from bertscope.memory import optimizers
from bertscope.memory.trace import Block
from bertscope.model.bert import BertPreTrainedModel
from bertscope.model.lora import base_model_of, keep_adapters_in_fp32
from bertscope.model.savers import HostOptimizer, StepInBackward
from bertscope.reports.memory import BACKWARD, EVALUATING, FORWARD, OPTIMIZER
from bertscope.settings.checkpointing import NONE
from bertscope.settings.rows import CodeObject
from bertscope.settings.run_config import (
    CPU,
    CUDA,
    FLASH_KERNELS,
    INFERENCE,
    PLAIN,
    STORED,
    TRAINER,
    TRAINING,
    RunConfig,
)
from bertscope.settings.training import CUSTOM, MODEL, NO_OPTIMIZER, OPTIMIZERS
from bertscope.sources.find import teachers
from bertscope.sources.model_source import ModelSource, as_source_error, built_for_counting
from bertscope.torch_access import compile_module, is_plain_fake, nn, storage_key, torch, tree_map
from bertscope.torch_access.distributed import held_tensors, is_wrapper, set_gradient_sync, unreduced_gradients
from bertscope.tracing.fake_tensors import attribute_tensors, state_tensors, trainable, valid_tokens
from bertscope.tracing.inputs import inputs_for, loss_of, with_values
from bertscope.tracing.log import tensors
from bertscope.tracing.losses import add_teacher, batch_of_texts
from bertscope.tracing.module_tree import freeze
from bertscope.units import PRECISIONS

_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, row.torch_name) for name, row in PRECISIONS.items()}
STEP_END = "step end"
Phase = Callable[[str], AbstractContextManager[Any]]
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def call_with_keywords(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the tensor that backward starts from by default: the output's loss, or the sum of its first tensor."""
    return loss_of(model(**inputs))[0]


def training_loop(
    run: RunConfig,
    model: nn.Module,
    batch: dict[str, Any],
    criterion: Callable[[dict[str, Any]], Any],
    optimizer: Any,
    scaler: torch.amp.GradScaler,
    average: dict[str, torch.Tensor],
    sync_gradients: Callable[[bool], None],
    evaluate: Callable[[], None],
    device: str,
) -> Iterator[str]:
    """Train as people write it; each `yield` says which phase begins, and its variables live on between the steps.

    This is the code that `estimate` and `profile` run, and that `--show-script` prints with the run's settings.
    """
    while True:
        for micro_batch in range(run.accumulate):
            yield FORWARD
            if not run.parallelism.sync_each_batch:
                sync_gradients(micro_batch + 1 == run.accumulate)
            if run.autocast is not None and run.loss == MODEL:
                with torch.autocast(device, dtype=TORCH_DTYPES[run.autocast], cache_enabled=run.keeps_casts):
                    loss = criterion(batch)
            else:
                loss = criterion(batch)
            if run.zeroes_between and micro_batch == 0:
                model.zero_grad(set_to_none=not run.keep_gradients)
            if run.mode == TRAINING:
                yield BACKWARD
                if run.grad_scaler:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
                if run.loop == TRAINER:
                    loss = loss.detach()
                elif run.loop != PLAIN:
                    del loss
        if optimizer is not None and not run.step_in_backward:
            yield OPTIMIZER
            if run.clip_grad_norm:
                if run.grad_scaler:
                    scaler.unscale_(optimizer)
                if run.offload_optimizer:
                    torch.nn.utils.clip_grad_norm_(optimizer.copies, 1.0)
                else:
                    clip_gradients(model)
            if run.grad_scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if not run.zeroes_between:
                optimizer.zero_grad(set_to_none=not run.keep_gradients)
        if optimizer is not None and run.ema:
            for name, parameter in model.named_parameters():
                if name in average:
                    average[name].lerp_(parameter.detach(), 0.001)
        if run.eval_batch:
            yield EVALUATING
            evaluate()
        yield STEP_END
        if run.mode != TRAINING and run.loop != PLAIN:  # a graph without a backward pass lives until here
            loss = loss.detach() if run.loop == TRAINER and isinstance(loss, torch.Tensor) else None
        if optimizer is None and run.mode == TRAINING and not (run.keep_gradients or run.zeroes_between):
            model.zero_grad()


def evaluation(
    run: RunConfig, model: nn.Module, held_out_batch: Callable[[], Any], predict: Callable[[Any], Any], device: str
) -> None:
    """Evaluate as people write it, with the logits that metrics need: Trainer joins them after each batch."""
    if run.eval_samples:
        for_metrics: list[Any] = []
    model.eval()
    with torch.no_grad():
        for _ in range(run.eval_batches):
            held_out = held_out_batch()
            if run.autocast is not None and run.loss == MODEL:
                with torch.autocast(device, dtype=TORCH_DTYPES[run.autocast], cache_enabled=run.keeps_casts):
                    output = predict(held_out)
            else:
                output = predict(held_out)
            if run.eval_samples:
                logits = logits_of(model, output)
            if run.loop != PLAIN:
                del output
            if run.eval_samples and run.loop != TRAINER:
                for_metrics.append(logits)
            elif run.eval_samples:
                if run.autocast is not None:  # accelerate converts outputs
                    logits = [part.float() for part in logits]
                logits += [value for name, value in held_out.items() if "label" in name]
                for number, part in enumerate(logits):
                    if number < len(for_metrics):
                        for_metrics[number] = torch.cat((for_metrics[number], part))
                    else:
                        for_metrics.append(part)
        if run.eval_samples and run.loop != TRAINER:
            for_metrics = [torch.cat(parts) for parts in zip(*for_metrics)]  # noqa: B905
    model.train()


def logits_of(model: nn.Module, output: Any) -> list[torch.Tensor]:
    """Return what metrics need of an output: all but its loss and the caches of a decoder."""
    ignored = ("loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ()))
    values = [value for name, value in output.items() if name not in ignored] if isinstance(output, Mapping) else output
    return [value for value in tensors(values) if value.dim()]


def clip_gradients(model: nn.Module) -> None:
    """Clip the gradients by the norm of all; torch does not stack norms of DTensors on different meshes."""
    groups = defaultdict(list)
    for param in model.parameters():
        if param.grad is not None:
            groups[getattr(param.grad, "device_mesh", None)].append(param)
    if len(groups) <= 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    norms: list[Any] = [
        torch.nn.utils.get_total_norm([param.grad for param in group if param.grad is not None])
        for group in groups.values()
    ]
    total = torch.stack([norm.full_tensor() if is_wrapper(type(norm)) else norm for norm in norms]).norm()
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)


@dataclass
class ModelStep:
    """A model on its device with inputs, optimizer and loop; `run` takes one step, each phase inside `phase(name)`."""

    model: nn.Module
    inputs: dict[str, Any]
    run_config: RunConfig
    device: str = "cpu"  # of the model; tensors of an estimate are fake tensors on the CPU
    loss: Loss = call_with_keywords
    buckets: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of DDP, by parameter
    outputs: dict[int, Any] = field(default_factory=dict)  # of the model, by the number of its call in a micro-batch
    wrapper: nn.Module | None = None  # DDP around the model
    waiting: tuple[dict[str, Any], ...] = ()  # the inputs of the next micro-batches
    held_out: Callable[[], Any] = dict  # makes the inputs of an evaluation
    called: nn.Module = field(init=False)  # the model, compiled if the run is
    phase: str = field(init=False)  # the one that begins next

    def __post_init__(self) -> None:
        run_config = self.run_config
        self.called = compile_module(self.model) if run_config.compile else self.model
        if run_config.autocast is not None and run_config.loss != MODEL:  # a loss of several forward passes
            autocast_each_forward(self.called, self.device, TORCH_DTYPES[run_config.autocast])
        self.optimizer = make_optimizer(self.model.parameters(), run_config)
        self.scaler = torch.amp.GradScaler(self.device, enabled=run_config.grad_scaler)
        dtypes = {param.dtype for param in self.model.parameters() if param.requires_grad}
        if run_config.grad_scaler and torch.float16 in dtypes:  # such as a module in fp16
            raise SelectionError(
                f"GradScaler takes no fp16 gradients; leave {name_of('grad_scaler')} out, or use fp32 parameters"
            )
        # The exponential moving average of the weights is a copy of the model.
        averaged = (*self.model.named_parameters(), *self.model.named_buffers()) if run_config.ema else ()
        # A module may replace an attribute in a step, unlike a table that it begins with.
        self.tables = {storage_key(tensor) for part in self.model.modules() for tensor in attribute_tensors(part)}
        self.average = {path: value.detach().clone() for path, value in averaged if not path.startswith("teacher.")}
        self.start(run_config)

    def start(self, run_config: RunConfig) -> None:
        """Begin the loop of `run_config`."""
        self.loop = self._loop(run_config)
        self.phase = next(self.loop)

    def _loop(self, run_config: RunConfig) -> Iterator[str]:
        return training_loop(run_config, self.model, self.inputs, self.criterion, self.optimizer, self.scaler,
                             self.average, self.sync_gradients, self.evaluate, self.device)  # fmt: skip

    def run(self, phase: Phase = nullcontext) -> None:
        """Run one step to its end, or what is left of it."""
        self.advance(phase, STEP_END)

    def advance(self, phase: Phase = nullcontext, *stops: str) -> None:
        """Run one phase, and those after it until one of `stops` begins; STEP_END is the end of the step."""
        kernel = _BACKENDS.get(self.run_config.sdpa_kernel) if self.device == CUDA else None
        backend = getattr(torch.nn.attention.SDPBackend, kernel) if kernel else None
        while True:
            on_gpu = torch.nn.attention.sdpa_kernel(backend) if backend else nullcontext()
            with on_gpu, torch.set_grad_enabled(not self.run_config.is_eval), phase(self.phase):
                following = next(self.loop)
            self.phase = next(self.loop) if following == STEP_END else following
            if following in stops:
                return

    def run_first_steps(self, phase: Phase = nullcontext) -> None:
        """Run two steps of the loop, so that the next one is in the steady state."""
        for _ in range(2 if self.optimizer is not None else 0):
            self.run(phase)

    def offloading(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass whose saved tensors are in the host's memory until backward."""
        return torch.autograd.graph.save_on_cpu(pin_memory=True)

    def criterion(self, batch: dict[str, Any]) -> Any:
        """Return a micro-batch's loss; on the way the model's outputs are assigned to variables of the loop."""
        with ExitStack() as stack:
            if not isinstance(self.model, torch.jit.ScriptModule):  # takes no hooks
                numbers = count()
                hook = self.called.register_forward_hook(
                    lambda module, args, output: self.assign("output", output, next(numbers))
                )
                stack.enter_context(hook)
            if self.run_config.offload_activations:
                stack.enter_context(self.offloading())
            loss = self.loss(self.called, batch)
        is_tensor = isinstance(loss, torch.Tensor)
        if self.run_config.mode == TRAINING and not (is_tensor and loss.requires_grad):
            if not all(param.is_floating_point() for param in self.model.parameters()):
                raise SelectionError(f"a quantized model is frozen: train adapters, such as {name_of('lora')} r=8")
            raise SelectionError("the loss depends on nothing that is trained; freeze less, or use mode forward")
        loss = loss / self.run_config.accumulate if self.run_config.accumulate > 1 and is_tensor else loss
        self.assign("loss", loss)
        return loss

    def assign(self, name: str, value: Any, number: int = 0) -> None:
        """Assign an output to its variable, if the loop has one; the loss is a variable of `training_loop`."""
        if name == "output" and self.run_config.loop == PLAIN:
            self.outputs[number] = value

    def evaluate(self) -> None:
        """Evaluate on held-out inputs; the Trainer of transformers 5 has switched a decoder's cache off."""
        config: Any = getattr(self.model, "config", None)
        package = sys.modules.get("transformers")
        is_new = package is not None and int(package.__version__.partition(".")[0]) >= 5
        if self.run_config.loop == TRAINER and is_new and type(config).__module__.startswith("transformers."):
            config.use_cache = False
        evaluation(self.run_config, self.called, self.held_out, self.predict, self.device)

    def predict(self, batch: dict[str, Any]) -> Any:
        """Return the model's output for a held-out batch, or its loss if that is not the model's own."""
        has_output = self.run_config.loss == MODEL and not self.run_config.loss_chunks
        return self.called(**batch) if has_output else self.loss(self.called, batch)

    def sync_gradients(self, is_synced: bool) -> None:
        """Have the ranks average the gradients of the next backward pass, or add them up first."""
        set_gradient_sync(self.wrapper or self.model, is_synced)

    def run_backward(self) -> None:
        """Run forward and backward once, and begin the loop again."""
        self.start(self.run_config.changed(accumulate=1))
        self.advance(nullcontext, OPTIMIZER, STEP_END)
        self.start(self.run_config)

    def state(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield the blocks that are allocated between steps, each storage once, with a tensor of it."""
        seen: set[int] = set()
        for part, path, whole in self._state_tensors():
            for tensor in held_tensors(whole):
                key = storage_key(tensor)
                if key not in seen and tensor.untyped_storage().nbytes():
                    seen.add(key)
                    yield Block(part, path, "", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), tensor

    def _state_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        paths = {tensor: path for path, tensor in (*self.model.named_parameters(), *self.model.named_buffers())}
        for tensor in moved_tensors(self.model):
            yield "parameters" if isinstance(tensor, nn.Parameter) else "buffers", paths.get(tensor, ""), tensor
        for path, part in self.model.named_modules():
            tables = (table for table in attribute_tensors(part) if storage_key(table) in self.tables)
            yield from (("buffers", path, table) for table in tables)
        for path, mean in self.average.items():
            yield "parameters", path, mean
        for batch in (self.inputs, *self.waiting):
            for name, value in batch.items():
                for tensor in tensors(value):
                    yield "inputs", name, tensor
        for path, bucket in self.buckets.items():
            yield "communication", path, bucket
        optimizer: Any = getattr(self.optimizer, "optim", self.optimizer)  # of this rank, with ZeRO
        if isinstance(optimizer, HostOptimizer):
            paths |= {copy: paths[param] for param, copy in zip(optimizer.params, optimizer.copies, strict=True)}
            for copy in optimizer.copies:
                yield "optimizer_state", f"{paths[copy]}.copy", copy
                if copy.grad is not None:
                    yield "optimizer_state", f"{paths[copy]}.gradient", copy.grad
            optimizer = optimizer.optimizer
        of_model = {id(tensor) for param in paths for tensor in (param, param.grad)}  # its groups refer to these
        optimizers = optimizer.optimizers.values() if isinstance(optimizer, StepInBackward) else [optimizer]
        for param, name, tensor in (row for one in optimizers if one is not None for row in state_tensors(one)):
            if id(tensor) not in of_model:
                yield "optimizer_state", f"{paths.get(param, '')}.{name}", tensor
        for path, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                yield "gradients", path, parameter.grad
        for path, gradient in unreduced_gradients(self.model):
            yield "gradients", path, gradient


def moved_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers in the order in which `Module.to` moves them, children first (`Module._apply`)."""
    for child in module.children():
        yield from moved_tensors(child)
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def autocast_each_forward(model: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Run each forward pass in a block of autocast and convert its outputs to fp32, as accelerate does."""
    inside: list[torch.autocast] = []

    def begin(*_: Any) -> None:
        inside.append(torch.autocast(device, dtype=dtype))
        inside[-1].__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        inside.pop().__exit__(None, None, None)
        return _in_fp32(output)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def _in_fp32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, Mapping):
        return type(output)(**{name: _in_fp32(value) for name, value in output.items()})
    return type(output)(map(_in_fp32, output)) if type(output) in (tuple, list) else output


def waiting_inputs(inputs: dict[str, Any], run_config: RunConfig) -> tuple[dict[str, Any], ...]:
    """Return the inputs of the micro-batches that the run's loop has in memory before their turn."""
    return tuple(deepcopy(inputs) for _ in range(run_config.waiting_batches))


def run_model(
    source: ModelSource, run_config: RunConfig, device: str = "meta", build: Callable[..., Any] | None = None
) -> nn.Module:
    """Return the model of `source` as `run_config` runs it; `build` builds it, by default as the source does.

    Raises SelectionError or ConfigError if the model cannot run so.
    """
    source = source if run_config.dropout else source.require(name_of("dropout=False")).without_dropout()
    source = source.for_run()
    build = build or methodcaller("build", device=device)
    model: nn.Module = build(source)
    source.checkpoint(model, run_config.checkpointing, reentrant=run_config.reentrant)
    freeze(model, run_config.freeze)
    add_teacher(model, teachers(run_config.loss), build)
    if isinstance(base := base_model_of(model), BertPreTrainedModel):
        base.base_model.hides_positions = run_config.padding > 0 or run_config.compile  # a graph reads no values
    if run_config.dtype != STORED:
        keep_adapters_in_fp32(model.to(TORCH_DTYPES[run_config.dtype]))
    computes_in = TORCH_DTYPES.get(run_config.compute_precision)
    source.quantize(model, run_config.quantize, computes_in, on_cuda=run_config.device == CUDA)
    return model.train(not run_config.is_eval)


def counted_model(source: ModelSource, run_config: RunConfig) -> nn.Module:
    """Return the model of `run_model` without recomputation, of equal layers two that count for all and do not run."""
    most = MAX_BUILT_LAYERS if run_config.freeze else 2  # a pattern may name a layer
    build = partial(built_for_counting, most=most)
    return run_model(source, run_config.changed(checkpointing=NONE), build=build)


def meta_inputs(model: nn.Module, run_config: RunConfig) -> Any:
    """Return example inputs on meta as a tokenizer returns them, with labels if the model computes its loss.

    The built-in model takes a mask if there is padding, or if it has the memory of transformers.
    """
    kernel = getattr(getattr(base_model_of(model), "config", None), "_attn_implementation", None)
    if run_config.device == "cpu" and kernel in FLASH_KERNELS:
        raise SelectionError(
            f"{kernel} runs on a GPU only: estimate it for one with {name_of('gpu')}, or take "
            f"{name_of('attention')} sdpa on a CPU"
        )
    labels = run_config.mode != INFERENCE and run_config.loss == MODEL
    inputs = inputs_for(model, run_config.batch, run_config.seq, labels=labels, described=run_config.input)
    if "example_inputs" in vars(model):  # inputs of a Python call, which are complete
        return batch_of_texts(run_config, inputs)
    ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
    if run_config.padding and ids is None:
        raise SelectionError(f"{type(model).__name__} takes no input_ids; leave {name_of('padding')} out")
    base = base_model_of(model)
    is_own = isinstance(base, BertPreTrainedModel)
    has_mask = run_config.padding > 0 or (is_own and base.base_model.uses_transformers_masks)
    if ids is not None:
        added = {"token_type_ids": is_own, "attention_mask": has_mask}
        inputs = {name: torch.empty_like(ids) for name, is_added in added.items() if is_added} | inputs
    floats = (param.dtype for param in model.parameters() if param.is_floating_point())
    dtype = TORCH_DTYPES.get(run_config.dtype) or next(floats, torch.float32)
    if isinstance(inputs, dict) and dtype != torch.float32:
        inputs = tree_map(lambda value: value.to(dtype) if torch.is_floating_point(value) else value, inputs)
    return batch_of_texts(run_config, inputs)


def make_optimizer(params: Iterable[nn.Parameter], run_config: RunConfig) -> Any:
    """Return the trainable parameters' optimizer; None if there are none, or no optimizer step.

    The host of fake tensors is meta: they are on the CPU for a GPU.
    """
    params = list(params)
    trained = trainable(params)
    if run_config.optimizer == NO_OPTIMIZER or run_config.mode != TRAINING or not trained:
        return None
    if isinstance(run_config.optimizer, CodeObject):
        return _given_optimizer(run_config.optimizer, params, run_config)
    row = OPTIMIZERS.get(run_config.optimizer)
    if row is None:
        raise SelectionError(
            f"{name_of('optimizer')} {CUSTOM} is an optimizer object or class, which only a Python call can give: "
            "bertscope.estimate(model, inputs, optimizer=optimizer)"
        )
    optimizer: Any = getattr(torch.optim if row.in_torch else optimizers, row.class_name)
    # A learning rate of 0 keeps the weights; memory and FLOPs are the same.
    arguments = {"lr": 0.0, **run_config.optimizer_arguments}
    if run_config.step_in_backward:
        return StepInBackward(trained, partial(optimizer, **arguments))
    if run_config.offload_optimizer:
        host = "meta" if is_plain_fake(next(held_tensors(trained[0]))) else CPU
        return HostOptimizer(trained, partial(optimizer, **arguments), host)
    if run_config.parallelism.row.divides_optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(trained, optimizer, **arguments)
    # Operators over all parameters of a group take no DTensors together with other tensors.
    groups = ([param for param in trained if is_wrapper(type(param)) == is_wrapped] for is_wrapped in (False, True))
    return optimizer([{"params": group} for group in groups if group], **arguments)


def _given_optimizer(custom: CodeObject, params: list[nn.Parameter], run_config: RunConfig) -> Any:
    """Return the optimizer of the caller's program for a copy of the model, with torch's choice of implementation."""
    if run_config.parallelism.world_size > 1:
        raise SelectionError(f"the optimizer {custom.label} is estimated in one process; leave the ranks out")
    for name in ("step_in_backward", "offload_optimizer"):
        if getattr(run_config, name):
            raise SelectionError(f"{name_of(name)} makes the optimizers itself; give {name_of('optimizer')} as a word")
    with as_source_error(f"the optimizer {custom.label}"):
        optimizer = custom.value(params)
    step = optimizer.step

    def guarded(*args: Any, **kwargs: Any) -> Any:
        """Run the step; an error in it is about the optimizer and not about the model."""
        with as_source_error(f"{custom.label}.step on fake tensors, which have no values"):
            return step(*args, **kwargs)

    optimizer.step = guarded
    chosen = run_config.optimizer_arguments
    for group in (group for group in optimizer.param_groups if not group.get("fused")):
        group |= {name: value for name, value in chosen.items() if group.get(name, 0) is None}
    return optimizer


def real_inputs(model: nn.Module, run_config: RunConfig, device: str) -> Any:
    """Return the inputs of `meta_inputs` with the values of `with_values`, and a mask that hides the padding."""
    likes = meta_inputs(model, run_config)
    inputs = with_values(model, likes, device=device)
    pairs = (tensors(batch.get("attention_mask")) for batch in (likes, inputs)) if isinstance(likes, Mapping) else ()
    for mask, real in zip(*pairs, strict=True):
        if mask.is_meta:
            real[..., valid_tokens(run_config.seq, run_config.padding) :] = 0
    return inputs
