"""Compare real ranks on gloo with their estimates: python -m benchmarks.gloo_rank (docs/parallel.md).

Each rank is a process with these arguments: its number, the number of ranks, a file that they share, and the jobs as
JSON. It is a plain training loop, which uses the model and nothing of the analyses, and reads the bytes that malloc has
given out, phase by phase. malloc maps each block of 4 KiB and more by itself if no free part of the heap holds
it (MALLOC_MMAP_THRESHOLD_, set before the process starts), and the free parts are filled before each step: its count of
mapped bytes then equals the bytes of the tensors. It is read after each operator of the last step, which both ranks
have then run, and once the gloo threads of both sleep: a buffer lives until the other rank has answered, and on a busy
machine that is late.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from bertscope import load
from bertscope import model as models
from bertscope.config import BertConfig
from bertscope.memory.estimate import source_trace
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig

_STEPS = 3  # the first two allocate what FSDP and the optimizer keep
_NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # of mallinfo2 in malloc.h


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES.split()]


libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p


TENSOR_PARALLEL = {
    "attention.self.query": ColwiseParallel(),
    "attention.self.key": ColwiseParallel(),
    "attention.self.value": ColwiseParallel(),
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}


class Ranks:
    """This rank and the other one, which tell each other how far they have come."""

    def __init__(self, rank: int, path: str) -> None:
        pipes = []
        for number in (rank, 1 - rank):
            with suppress(FileExistsError):
                os.mkfifo(f"{path}.{number}")
            pipes.append(os.open(f"{path}.{number}", os.O_RDWR))
        self.own, self.other = pipes
        os.write(self.other, b"%8d" % os.getpid())
        self.pids = os.getpid(), int(os.read(self.own, 8))

    def meet(self) -> None:
        """Wait until the other rank has come as far: both run the same operators."""
        os.write(self.other, b"x")
        os.read(self.own, 1)

    def are_calm(self) -> bool:
        """Return whether every thread sleeps but those that run the operators.

        Paths are bytes: pathlib interns names, and Python's table of them, which malloc maps, would grow.
        """
        for pid in self.pids:
            for task in os.listdir(b"/proc/%d/task" % pid):
                with open(b"/proc/%d/task/%s/stat" % (pid, task), "rb", 0) as file:
                    state = file.read(400).rpartition(b") ")[2][:1]
                if int(task) != pid and state != b"S":
                    return False
        return True


ranks: Ranks


def mapped_bytes() -> int:
    return libc.mallinfo2().hblkhd


def fill_heap() -> None:
    """Allocate blocks until the heap grows, so that no free part of it can hold a block of 4 KiB."""
    size = libc.mallinfo2().arena
    while libc.mallinfo2().arena == size:
        libc.malloc(4000)


def settled_bytes() -> int:
    """Return the count when both ranks have come as far and are calm, three times in a row."""
    ranks.meet()
    return calm_bytes()


def calm_bytes() -> int:
    calm = 0
    while calm < 3:
        calm = calm + 1 if ranks.are_calm() else 0
        time.sleep(0.0005)
    return mapped_bytes()


class Highest(TorchDispatchMode):
    """A mode that keeps the highest number of mapped bytes after any operator, if it is measuring."""

    def __init__(self, *, is_measuring: bool):
        super().__init__()
        self.is_measuring = is_measuring
        self.peak_bytes = settled_bytes()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        result = operator(*args, **(kwargs or {}))
        if self.is_measuring:
            ranks.meet()
            if mapped_bytes() > self.peak_bytes:
                self.peak_bytes = max(self.peak_bytes, calm_bytes())
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


def steps_of(strategy, sizes, checkpointing, accumulate, fields):
    """The mapped bytes of the last step above those before it, phase by phase.

    With several micro-batches those before the last do not count.
    """
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    model = models.CLASSES["BertForMaskedLM"](BertConfig(**fields)).train()
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False}, strategy=checkpointing)
    layers = model.bert.encoder.layer
    if strategy == "ddp":
        model = DistributedDataParallel(model)
    elif strategy == "tp":
        for layer in layers:
            parallelize_module(layer, mesh, TENSOR_PARALLEL)
    else:
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=strategy != "fsdp-no-reshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    ids = torch.randint(0, fields["vocab_size"], (4, 61))
    for number in range(_STEPS):
        gc.collect()
        fill_heap()
        before = settled_bytes()
        run_unreduced(model, ids, accumulate - 1)
        with Highest(is_measuring=number == _STEPS - 1) as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with Highest(is_measuring=number == _STEPS - 1) as backward:
            loss.backward()
            del loss
        with Highest(is_measuring=number == _STEPS - 1) as update:
            optimizer.step()
            optimizer.zero_grad()
        phases = {"forward": forward, "backward": backward, "optimizer": update}
    return {name: mode.peak_bytes - before for name, mode in phases.items()}


def gradient_error(world_size, fields):
    """The largest difference between a gradient with tensor parallelism and without, by its largest element.

    The gradient of the bias of key is 0 but for rounding, since softmax ignores what is added to all scores.
    """
    fields = fields | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    mesh, gradients = init_device_mesh("cpu", (world_size,)), []
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
    global ranks
    torch.set_num_threads(1)
    ranks = Ranks(int(rank), shared)
    gc.freeze()  # what is imported, out of the collection before each step
    dist.init_process_group("gloo", init_method=f"file://{shared}", rank=int(rank), world_size=int(world_size))
    *given, fields = json.loads(jobs)
    found = [*(steps_of(*job, fields) for job in given), gradient_error(int(world_size), fields)]
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort the interpreter's end


# Wide enough that what malloc adds to a block, at most a page of 4 KiB and a header, is far below 0.5 %.
FIELDS = {"vocab_size": 5000, "hidden_size": 264, "num_attention_heads": 4, "intermediate_size": 1056,
          "num_hidden_layers": 2, "max_position_embeddings": 64}  # fmt: skip
JOBS = (("fsdp", "none", 1), ("fsdp-no-reshard", "none", 1), ("tp", "none", 1), ("ddp", "full", 2))


def measured(jobs=JOBS):
    """Return what each of two ranks printed: the bytes of each job, and the error of the gradients."""
    jobs = json.dumps([*((strategy, (2,), *more) for strategy, *more in jobs), FIELDS])
    malloc = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_TOP_PAD_": "0", "MALLOC_ARENA_MAX": "1"}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "benchmarks.gloo_rank", str(rank), "2", f"{folder}/store", jobs],
                text=True, stdout=subprocess.PIPE, env=os.environ | malloc,
            )
            for rank in range(2)
        ]  # fmt: skip
        return [json.loads(process.communicate()[0]) for process in started]


def compare():
    """Print the estimate of each phase and its error for each rank."""
    *jobs, errors = zip(*measured(), strict=True)
    source = load("bert-tiny", architecture="BertForMaskedLM")
    source = replace(source, config=replace(source.config, **FIELDS))
    for (strategy, checkpointing, accumulate), found in zip(JOBS, jobs, strict=True):
        ranks = Parallelism(strategy=strategy, world_size=2, sync_each_batch=accumulate == 1)
        run = RunConfig(batch=4, seq=61, checkpointing=checkpointing, accumulate=accumulate, parallelism=ranks)
        trace = source_trace(source, run)
        before = sum(size for block, size in trace.state if block.part != "gradients")  # of earlier micro-batches
        for moment in trace.peaks():
            estimated = moment.live_bytes - before
            differences = " ".join(f"{estimated / one[moment.phase] - 1:+.2%}" for one in found)
            print(f"{strategy:16} {checkpointing:6} {moment.phase:10} {estimated:12,} B  {differences}")
    print(f"gradients with tensor parallelism differ by {max(errors):.1e} of the largest")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else compare()
