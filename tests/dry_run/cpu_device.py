"""A fake GPU with the kernels and the memory of a CPU, to compare a dry run with a real one where there is no GPU."""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bertscope.dry_run.child import Installed, installed
from bertscope.dry_run.device import FakeGpu
from bertscope.dry_run.script import ScriptRun
from bertscope.memory.kernels import attention, cpu_scratch, result_bytes
from bertscope.torch_access import always, storage_key
from bertscope.torch_access.fake_gpu import Put
from bertscope.tracing.log import Call, tensors
from tests.dry_run.cpu_layers import CELLS, recurrent


class CpuDevice(FakeGpu):
    """What kernels and libraries allocate on a CPU."""

    kind, counts_random_states = "cpu", True

    def scratch(self, operator, args):
        return cpu_scratch(operator, args)

    def true_bytes(self, operator, args, number, tensor):
        """A tensor of the host is one on a CPU's "GPU" too, where `to` makes no second one."""
        if operator is not torch.ops.aten._to_copy.default or isinstance(args[0], self.fake):
            return result_bytes(operator, args, number, tensor, on_cuda=False)
        if tensor.dtype != args[0].dtype:
            return None
        weakref.finalize(tensor.untyped_storage(), always(None), args[0].untyped_storage())
        return 0

    def elsewhere(self, operator, args, kwargs):
        """Run an operator on the host, whose memory counts on a CPU; what NumPy allocates does not."""
        out, recorder = super().elsewhere(operator, args, kwargs), self.recorder
        is_new = operator is torch.ops.aten.lift_fresh.default
        older = set() if is_new else {storage_key(tensor) for tensor in tensors((args, kwargs))}
        for tensor in tensors(out):
            if tensor.layout == torch.strided and storage_key(tensor) not in older | recorder.numbers.keys():
                with recorder.lock:
                    recorder.log.calls.append(Call(operator, at := recorder.position(), recorder.line()))
                    recorder._watch(tensor, at.path, at)
        return out


@contextmanager
def installed_cpu(name: str, steps: int) -> Iterator[Installed]:
    """Install the card for a program that ends after some steps."""
    with installed(ScriptRun(script=name, steps=steps), CpuDevice) as here, ExitStack() as stack:
        put, functional = Put(stack), nn.functional
        dropout, fused = _dropout(functional.dropout, here.device), _attention(functional)
        here.recorder.libraries |= {dropout.__code__: True, fused.__code__: True}  # no lines of the program
        put(functional, scaled_dot_product_attention=fused, dropout=dropout)
        put(torch, native_dropout=lambda given, p, train: (dropout(given, p, train), None))
        layers = nn.modules.rnn._VF
        put(layers, **{name: recurrent(getattr(layers, name), cell, here.device) for name, cell in CELLS.items()})
        yield here


def _attention(functional: Any):
    given = functional.scaled_dot_product_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    math = attention(lambda _: "math", "cuda")

    def run(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
            scale: Any = None, enable_gqa: bool = False) -> Any:  # fmt: skip
        """Compute attention as a CPU does."""
        if query.device.type != "cuda":
            return given(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if query.dim() == 4 and not dropout_p and query.shape[1] == key.shape[1]:
            is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
            mask = torch.zeros_like(attn_mask, dtype=query.dtype) if is_bool else attn_mask
            return flash(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
        return math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return run


def _dropout(given, device: FakeGpu):
    def run(given_tensor: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Drop elements as a CPU does, by a mask of the tensor's own dtype."""
        if not device.has(given_tensor) or not training or not 0 < p < 1 or inplace:
            return given(given_tensor, p, training, inplace)
        return given_tensor * torch.empty_like(given_tensor).bernoulli_(1 - p).div_(1 - p)

    return run
