"""A rank of a real job on gloo: a plain training loop, and the bytes that malloc has given out, phase by phase.

Its arguments: the number of the rank, the number of ranks, a file that they share, and the jobs as JSON. It uses the
model and nothing of the analyses. All blocks of 4 KiB and more are mapped one by one (MALLOC_MMAP_THRESHOLD_, set
before the process starts: else a large block may be one that is free in the heap). malloc's count of mapped bytes then
equals the bytes of the tensors. It is read after each operator, once the gloo threads sleep: they free their send
buffers after the operator has returned, and later on a busy machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from bertscope import model as models
from bertscope.config import BertConfig

_STEPS = 3  # the first two allocate what FSDP and the optimizer keep
_NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of mallinfo2 in malloc.h


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info


TENSOR_PARALLEL = {
    "attention.self.query": ColwiseParallel(),
    "attention.self.key": ColwiseParallel(),
    "attention.self.value": ColwiseParallel(),
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}


def mapped_bytes() -> int:
    return libc.mallinfo2().hblkhd


def settled_bytes() -> int:
    """Return the count when every other thread sleeps, three times in a row."""
    own, calm = threading.get_native_id(), 0
    while calm < 3:
        states = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(") ")[2][0]
                  for task in os.listdir("/proc/self/task") if int(task) != own]  # fmt: skip
        calm = calm + 1 if set(states) <= {"S"} else 0
        time.sleep(0.0005)
    return mapped_bytes()


class Highest(TorchDispatchMode):
    """A mode that keeps the highest number of mapped bytes after any operator."""

    def __init__(self):
        super().__init__()
        self.peak_bytes = settled_bytes()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        if mapped_bytes() > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, settled_bytes())
        return result


def run_unreduced(model, ids, number):
    """Run so many micro-batches whose gradients each rank keeps to itself."""
    is_ddp = isinstance(model, DistributedDataParallel)
    for _ in range(number):
        if not is_ddp:
            model.set_requires_gradient_sync(False)
        with model.no_sync() if is_ddp else nullcontext():
            model(input_ids=ids, labels=ids).loss.backward()
        if not is_ddp:
            model.set_requires_gradient_sync(True)


def steps_of(strategy, mesh, checkpointing, accumulate, fields):
    """The mapped bytes of the last step above those before it, phase by phase.

    With several micro-batches those before the last do not count.
    """
    ranks = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    model = models.CLASSES["BertForMaskedLM"](BertConfig(**fields)).train()
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False}, strategy=checkpointing)
    layers = model.bert.encoder.layer
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "tp":
        for layer in layers:
            parallelize_module(layer, ranks, TENSOR_PARALLEL)
    else:
        for module in (*layers, model):
            fully_shard(module, mesh=ranks, reshard_after_forward=strategy != "fsdp-no-reshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    ids = torch.randint(0, fields["vocab_size"], (4, 61))
    for _ in range(_STEPS):
        gc.collect()
        before = settled_bytes()
        run_unreduced(model, ids, accumulate - 1)
        with Highest() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with Highest() as backward:
            loss.backward()
            del loss
        with Highest() as update:
            optimizer.step()
            optimizer.zero_grad()
        phases = {"forward": forward, "backward": backward, "optimizer": update}
    return {name: mode.peak_bytes - before for name, mode in phases.items()}


def gradient_error(ranks, fields):
    """The largest difference between a gradient with tensor parallelism and without, by its largest element.

    The gradient of the bias of key is 0 but for rounding, since softmax ignores what is added to all scores.
    """
    fields = fields | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    mesh, gradients = init_device_mesh("cpu", (ranks,)), []
    for is_divided in (False, True):
        torch.manual_seed(0)
        model = models.CLASSES["BertForMaskedLM"](BertConfig(**fields)).train()
        for layer in model.bert.encoder.layer if is_divided else ():
            parallelize_module(layer, mesh, TENSOR_PARALLEL)
        ids = torch.arange(2 * 16).view(2, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        found = {path: param.grad for path, param in model.named_parameters()}
        gradients.append({path: grad.full_tensor() if is_divided and hasattr(grad, "full_tensor") else grad
                          for path, grad in found.items()})  # fmt: skip
    whole, divided = gradients
    paths = [path for path in whole if not path.endswith("key.bias")]
    return max(((divided[path] - whole[path]).abs().max() / whole[path].abs().max()).item() for path in paths)


def main(rank, world_size, shared, jobs):
    torch.set_num_threads(1)
    gc.freeze()  # what is imported, out of the collection before each step
    dist.init_process_group("gloo", init_method=f"file://{shared}", rank=int(rank), world_size=int(world_size))
    *given, fields = json.loads(jobs)
    found = [*(steps_of(*job, fields) for job in given), gradient_error(int(world_size), fields)]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort the interpreter's end


if __name__ == "__main__":
    main(*sys.argv[1:])
