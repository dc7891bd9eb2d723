"""A plain training loop and its peak memory by torch's profiler: the witness of estimates.

It imports nothing of bertscope's analyses. The profiler starts before the model is built; the third step is measured.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

STEPS = 3
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def tokenized(ids: torch.Tensor, *, segments: bool = True) -> dict[str, torch.Tensor]:
    """Return what the tokenizer of BERT returns for these ids; other tokenizers return no segments."""
    more = {"token_type_ids": torch.zeros_like(ids)} if segments else {}
    return {"input_ids": ids, **more, "attention_mask": torch.ones_like(ids)}


def peak_bytes(
    make_model: Callable[[], torch.nn.Module],
    make_inputs: Callable[[torch.nn.Module], dict[str, torch.Tensor]],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    keep_gradients: bool = False,
    ema: bool = False,
    clip_grad_norm: bool = False,
    loop: str = "plain",
    grad_scaler: bool = False,
    make_held_out: Callable[[torch.nn.Module], dict[str, torch.Tensor]] | None = None,
    held_out_batches: int = 2,
    keeps_logits: bool = False,
    criterion: Callable[[Any], torch.Tensor] = lambda output: (
        output.loss if getattr(output, "loss", None) is not None else output[0].sum()
    ),
) -> int:
    """Return the highest sum of the allocator's events during the last of three steps on the CPU.

    The loop is plain, as tutorials write it, trainer, which deletes the output before backward, freed, which deletes
    the loss too, or lightning, which zeroes the gradients between forward and backward and whose autocast casts each
    weight anew. With held-out inputs an evaluation follows each step.
    """

    def autocasting() -> Any:
        kept = loop != "lightning"
        return torch.autocast("cpu", dtype=autocast, cache_enabled=kept) if autocast else nullcontext()

    def evaluate(model: torch.nn.Module) -> None:
        logits: list[torch.Tensor] = []
        labels = None
        model.eval()
        with torch.no_grad():
            following = make_held_out(model) if loop == "trainer" else None  # as its data loader has
            for number in range(held_out_batches):
                held_out, following = following or make_held_out(model), None
                if loop == "trainer" and number + 1 < held_out_batches:
                    following = make_held_out(model)
                with autocasting():
                    output = model(**held_out)
                if keeps_logits and loop == "trainer":
                    part = output.logits
                    logits = [torch.cat([*logits, part]) if logits else part]
                    labels = held_out["labels"] if labels is None else torch.cat([labels, held_out["labels"]])
                elif keeps_logits:
                    logits.append(output.logits)
                if loop != "plain":
                    output = None
            if keeps_logits and loop != "trainer":
                torch.cat(logits)
        model.train()

    gc.collect()  # else cycles of earlier models are freed inside the window
    gc.freeze()  # the next collection has less to scan
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = make_model().train()
        inputs = make_inputs(model)
        optimizer = make_optimizer(param for param in model.parameters() if param.requires_grad)
        scaler = torch.amp.GradScaler("cpu") if grad_scaler else None
        average = copy.deepcopy(model).requires_grad_(False) if ema else None
        waiting = [make_inputs(model) for _ in range(accumulate)] if loop == "trainer" else []  # as its data loader has
        for number in range(STEPS):
            with record_function(f"plain step {number}"):
                for micro_batch in range(accumulate):
                    with autocasting():
                        output = model(**inputs)
                        loss = criterion(output)
                    if accumulate > 1:
                        loss = loss / accumulate
                    if loop != "plain":
                        del output
                    if loop == "lightning" and micro_batch == 0:
                        optimizer.zero_grad()
                    (scaler.scale(loss) if scaler else loss).backward()
                    loss = loss.detach() if loop == "trainer" else loss
                    if loop == "freed":
                        del loss
                if clip_grad_norm:
                    if scaler:
                        scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if scaler:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                if loop != "lightning":
                    optimizer.zero_grad(set_to_none=not keep_gradients)
                for mean, param in zip(average.parameters(), model.parameters(), strict=True) if average else ():
                    mean.lerp_(param.detach(), 0.001)
                if make_held_out:
                    evaluate(model)
    del waiting
    is_half = any(param.element_size() == 2 for param in model.parameters()) or autocast is not None
    return highest(profiler, f"plain step {STEPS - 1}", is_half=is_half)


def highest(profiler: profile, mark: str, *, is_half: bool = False) -> int:
    """Return the highest sum of the allocator's events on the CPU during the last range with that name."""
    is_half = is_half and torch.cpu._is_amx_tile_supported()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    last = [event for event in events if event.name() == mark][-1]
    live = peak = inside = 0
    memory = []
    for event in events:
        if event.name() in _PRODUCTS:
            inside = max(inside, event.end_ns())
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU and event.start_ns() <= last.end_ns():
            memory.append((event.start_ns(), event.nbytes(), event.start_ns() <= inside))
    following = [*memory[1:], (0, 0, False)]
    for (start, size, _), (_, next_size, in_product) in zip(memory, following, strict=True):
        live += size
        # With AMX oneDNN lays 16-bit matrices out anew for its own use, which no estimate has.
        is_scratch = is_half and in_product and next_size == -size
        if start >= last.start_ns() and not is_scratch:
            peak = max(peak, live)
    return peak
