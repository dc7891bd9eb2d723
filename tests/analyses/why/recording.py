"""Snapshots of a card that does not exist: a BERT in a training loop, on the simulated allocator, in torch's format.

The stacks are those that torch records: the innermost frame first, a list for each event whose frames are shared
dicts, and no Python frame in the backward pass, which a thread of C++ runs.
"""

import pickle
from collections.abc import Sequence
from itertools import count
from typing import Any

from bertscope.memory.caching_allocator import Allocator, SegmentBlock

_PACKAGES = "/home/me/.venv/lib/python3.11/site-packages"
MODULE, BERT = f"{_PACKAGES}/torch/nn/modules/module.py", f"{_PACKAGES}/transformers/models/bert/modeling_bert.py"
TRAIN = "/home/me/project/train.py"
MIB, GIB = 2**20, 2**30

Frames = list[dict[str, Any]]
_SHARED: dict[tuple[str, int, str], dict[str, Any]] = {}


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    """The frame, one object for equal frames as in torch."""
    return _SHARED.setdefault((file, line, name), {"filename": file, "line": line, "name": name})


def own(line: int, name: str = "train", file: str = TRAIN) -> Frames:
    """A line of the user's code in a function that line 80 of the script calls."""
    return [frame(file, line, name), frame(TRAIN, 80, "<module>")]


_CALL = [frame(MODULE, 1751, "_call_impl"), frame(MODULE, 1740, "_wrapped_call_impl")]
_LINEAR = [frame(f"{_PACKAGES}/torch/nn/modules/linear.py", 125, "forward"), *_CALL]


def forward(bert_line: int, caller: Frames, *inner: dict[str, Any]) -> Frames:
    layers = [frame(BERT, bert_line, "forward"), *_CALL, frame(BERT, 1142, "forward"), *_CALL]
    return [*inner, *layers, *caller]


def load(caller: Frames) -> Frames:
    """`model.to("cuda")`."""
    applied = [frame(MODULE, 1343, "convert"), *[frame(MODULE, 915, "_apply")] * 3, frame(MODULE, 1355, "to")]
    return [*applied, *caller]


def optimizer(name: str, caller: Frames) -> Frames:
    """A function of torch's AdamW in `optimizer.step()`."""
    path = f"{_PACKAGES}/torch/optim"
    return [frame(f"{path}/adamw.py", 150, name), frame(f"{path}/optimizer.py", 487, "wrapper"), *caller]


class Recording:
    """The events of a card, whose addresses are those of the simulated allocator."""

    def __init__(self) -> None:
        self.allocator = Allocator()
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[SegmentBlock, int, Frames]] = {}
        self.numbers = count()
        self.states: dict[int, str] = {}  # of blocks that are freed and wait

    def alloc(self, size: int, frames: Sequence[dict[str, Any]]) -> int:
        before = self.allocator.reserved_bytes
        block = self.allocator.malloc(size)
        if more := self.allocator.reserved_bytes - before:
            self._event("segment_alloc", block.address, more, frames)
        self._event("alloc", block.address, size, frames)
        number = next(self.numbers)
        self.blocks[number] = block, size, list(frames)
        return number

    def free(self, *numbers: int) -> None:
        for number in numbers:
            block, size, _ = self.blocks.pop(number)
            for action in ("free_requested", "free_completed"):
                self._event(action, block.address, size, own(1, "free"))
            self.allocator.free(block)

    def oom(self, size: int, frames: Frames, device_free: int = 0) -> None:
        event = {"action": "oom", "device_free": device_free, "size": size, "stream": 0, "frames": list(frames)}
        self.events.append({**event, "time_us": len(self.events)})

    def _event(self, action: str, address: int, size: int, frames: Sequence[dict[str, Any]]) -> None:
        self.events.append({"action": action, "addr": 2**47 + address, "size": size, "stream": 0,
                            "frames": list(frames), "time_us": len(self.events)})  # fmt: skip

    def segments(self) -> list[dict[str, Any]]:
        used = {id(block): (number, size, frames) for number, (block, size, frames) in self.blocks.items()}
        free = [block for pool in self.allocator.free_blocks.values() for *_, block in pool]
        first: dict[int, SegmentBlock] = {}
        for block in [*(block for block, *_ in self.blocks.values()), *free]:
            while block.before is not None:
                block = block.before
            first[block.address] = block
        found = []
        for address, block in sorted(first.items()):
            blocks, following = [], block
            while following is not None:
                number, size, frames = used.get(id(following), (-1, 0, []))
                state = self.states.get(number, "inactive" if following.is_free else "active_allocated")
                blocks.append({"address": 2**47 + following.address, "size": following.size, "requested_size": size,
                               "state": state, "frames": frames})  # fmt: skip
                following = following.after
            found.append({"device": 0, "address": 2**47 + address, "total_size": sum(b["size"] for b in blocks),
                          "allocated_size": sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
                          "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False,
                          "frames": [], "blocks": blocks})  # fmt: skip
        return found

    def data(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` returns."""
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False,
                    "garbage_collection_threshold": 0.0, "roundup_power2_divisions": {"1": 0}}  # fmt: skip
        return {"segments": self.segments(), "device_traces": [self.events], "allocator_settings": settings}

    def pickled(self) -> bytes:
        """What `torch.cuda.memory._dump_snapshot` writes."""
        return pickle.dumps(self.data())


class Loop:
    """A BERT of `layers` layers on the card, and the parts of a loop that trains it."""

    def __init__(self, recording: Recording, *, layers: int = 4, hidden: int = 256, vocab: int = 4000,
                 caller: Frames | None = None) -> None:  # fmt: skip
        self.card, self.layers, self.hidden = recording, layers, hidden
        one = [4 * hidden * hidden, 4 * hidden] * 4 + [16 * hidden * hidden, 16 * hidden] * 2 + [4 * hidden] * 4
        self.sizes = [4 * vocab * hidden, 512 * 4 * hidden, 8 * hidden, 4 * hidden, 4 * hidden, *one * layers]
        self.parameters = [recording.alloc(size, load(caller or own(12, "main"))) for size in self.sizes]
        self.gradients: list[int] = []
        self.state: list[int] = []

    def forward(self, caller: Frames | None = None, *, batch: int = 8, seq: int = 128, grad: bool = True,
                output: int = 2 * MIB, eager: bool = False) -> tuple[list[int], int]:  # fmt: skip
        """Run a forward pass; return what is saved for backward, and the output."""
        caller = caller or own(31)
        size, saved = 4 * batch * seq * self.hidden, []
        scores = 4 * batch * 4 * seq * seq
        kernel = [frame(BERT, 130, "eager_attention_forward")] if eager else []
        hidden = self.card.alloc(size, forward(90, caller))
        saved.append(hidden)
        for _ in range(self.layers):
            of_layer = [self.card.alloc(size, forward(line, caller, *_LINEAR)) for line in (301, 302, 303, 374)]
            temporary = self.card.alloc(scores, forward(330, caller, *kernel))
            of_layer.append(self.card.alloc(scores, forward(331, caller, *kernel)))
            of_layer += [self.card.alloc(4 * size, forward(line, caller, *_LINEAR)) for line in (431, 432)]
            of_layer.append(self.card.alloc(size, forward(433, caller)))
            self.card.free(temporary)
            if grad:
                saved += of_layer
            else:
                self.card.free(*of_layer)
        result = self.card.alloc(output, forward(1560, caller, *_LINEAR))
        if not grad:
            self.card.free(*saved)
            saved = []
        return saved, result

    def loss(self, line: int = 32, name: str = "train") -> int:
        functional = frame(f"{_PACKAGES}/torch/nn/functional.py", 3479, "cross_entropy")
        return self.card.alloc(4, [functional, *own(line, name)])

    def backward(self, saved: list[int]) -> None:
        """Run a backward pass, which frees what was saved."""
        sizes = self.sizes if not self.gradients else []
        for number in reversed(saved):
            temporary = self.card.alloc(self.card.blocks[number][1], [])
            self.card.free(temporary, number)
        self.gradients += [self.card.alloc(size, []) for size in reversed(sizes)]

    def step(self, caller: Frames | None = None, *, foreach: bool = False) -> None:
        """Update the parameters; the first update creates the state."""
        caller = caller or own(34)
        if not self.state:
            frames = optimizer("_init_group", caller)
            self.state = [self.card.alloc(size, frames) for size in self.sizes for _ in range(2)]
        frames = optimizer("_multi_tensor_adamw" if foreach else "_single_tensor_adamw", caller)
        if foreach:
            self.card.free(*[self.card.alloc(size, frames) for size in self.sizes])
        else:
            for size in self.sizes:
                self.card.free(self.card.alloc(size, frames))

    def zero_grad(self) -> None:
        self.card.free(*self.gradients)
        self.gradients = []

    def train(self, steps: int, *, foreach: bool = False, keeps_loss: bool = False, **sizes: Any) -> None:
        """Run steps without a fault, or with losses that are kept."""
        for _ in range(steps):
            saved, output = self.forward(**sizes)
            loss = self.loss()
            self.backward(saved)
            self.step(foreach=foreach)
            self.zero_grad()
            self.card.free(output, *[loss] * (not keeps_loss))


def documented() -> bytes:
    """The snapshot of the documentation: the graphs of five forward passes, which a sum of losses keeps."""
    card = Recording()
    loop = Loop(card)
    loop.train(1)
    for _ in range(5):
        loop.forward()
        loop.loss()
        card.alloc(4, own(33))
    card.oom(4 * MIB, forward(431, own(31), *_LINEAR))
    return card.pickled()
