"""The stack of an allocation: the phase of the step in which it ran, its line of the user's code and its module.

A stack is a list of frames, the innermost first, as torch records it: `{"filename": ..., "line": ..., "name": ...}`.
In the backward pass on CUDA it has no Python frame, since autograd runs in a thread of C++.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from bertscope.frozen import dataclass
from bertscope.reports.layer_ranges import without_numbers
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.reports.why import TENSORS

LOAD, USER, NONE = "load", "user", ""  # phases of a stack outside the step: building a model, other code, no frame
EVALUATION, ATTENTION_SCORES, LOGITS, COPIED, KEY_VALUES, FOREACH, BUCKETS, RECOMPUTED = (
    "evaluation", "attention", "logits", "copy", "cache", "foreach", "buckets", "recomputed"
)  # fmt: skip
_MOST_FRAMES = 200  # that are read of a stack; a step of the Trainer has about 60
_MOST_TEXT, _MOST_PATH = 100, 500  # characters of a name, and of the path of a file

# A frame as `filename:name` -> the phase and the part of its allocations. The innermost frame with a rule decides.
_RULES = tuple((re.compile(pattern), phase, part) for pattern, phase, part in (
    (r"cache_utils\.py:(\w+\.)?(update|lazy_init\w*)$", FORWARD, "activations"),
    (r"[/\\]optim\w*[/\\].*:(\w+\.)?(_init_group|init_state\w*|load_state_dict|_process_value\w*|get_state_buffer)$",
     OPTIMIZER, "optimizer_state"),
    (r"[/\\]optim\w*[/\\](?!lr_sched).*:|clip_grad\.py:|grad_scaler\.py:|[/\\]bitsandbytes[/\\]optim", OPTIMIZER, ""),
    (r"torch[/\\]_tensor\.py:(\w+\.)?backward$|autograd[/\\](graph|__init__)\.py:|autograd::\w*:*\w*Engine|"
     r"AccumulateGrad", BACKWARD, ""),
    (r"nn[/\\]parallel[/\\]distributed\.py:(\w+\.)?(__init__|_ddp_init_helper)$", LOAD, "communication"),
    (r"distributed[/\\](fsdp|_composable)[/\\]", FORWARD, "gathered_parameters"),
    (r"module\.py:(\w+\.)?(_apply|convert|to|to_empty|cuda|half|_load_from_state_dict)$|:(\w+\.)?reset_parameters$|"
     r"[/\\]torch[/\\]nn[/\\](init|parameter)\.py:|nn[/\\]modules[/\\]\w+\.py:(\w+\.)?__init__$|__deepcopy__$|"
     r"[/\\]safetensors[/\\]|modeling_utils\.py:|core_model_loading\.py:|[/\\]torch[/\\]serialization\.py:|"
     r"set_module_tensor_to_device$|bitsandbytes[/\\]nn[/\\]\w+\.py:(\w+\.)?(to|cuda|_quantize)$", LOAD, "parameters"),
    (r":(\w+\.)?\w*forward\w*$|module\.py:(\w+\.)?_(wrapped_)?call_impl$|torch[/\\]nn[/\\]functional\.py:",
     FORWARD, ""),
))  # fmt: skip
# What a stack shows too: a pattern of any of its frames.
_MARKS = tuple((mark, re.compile(pattern)) for mark, pattern in (
    (EVALUATION, r":(\w+\.)?\w*(eval|valid|predict|infer|generate|test)\w*$"),
    (ATTENTION_SCORES, r"[/\\]\w*:(\w+\.)?\w*attention\w*forward$|:(\w*[Aa]ttention\w*\.)(forward|_attn)$|"
                       r":(\w+\.)?(_attn|eager_attention\w*|scaled_dot_product_attention_math)$"),
    (LOGITS, r":(\w+\.)?(cross_entropy|\w*loss\w*|log_softmax|\w*lm_head\w*)$"),
    (COPIED, r":(\w+\.)?(__)?deepcopy(__)?$"),
    (KEY_VALUES, r"cache_utils\.py:"),
    (FOREACH, r":_multi_tensor_\w+$|:_?foreach\w*$"),
    (BUCKETS, r"nn[/\\]parallel[/\\]distributed\.py:"),
    (RECOMPUTED, r"checkpoint\.py:(\w+\.)?(unpack_hook|recompute_fn|backward)|autograd[/\\]graph\.py:_engine_run"),
))  # fmt: skip
_NATIVE = r"^<|\.(c|cc|cpp|cu|cuh|h|hpp|o|so)\b|^\?\?$|^$"  # C++, and frames of code that a program has made
_LIBRARY = re.compile(rf"(site|dist)-packages|lib[/\\]python[0-9]|{_NATIVE}")
_TORCH = re.compile(rf"[/\\]torch[/\\]|[/\\]lib[/\\]python[0-9][.0-9]*[/\\]\w+\.py$|{_NATIVE}")
_CALL = re.compile(r"module\.py:(\w+\.)?_(wrapped_)?call_impl$|:(\w+\.)*forward$")
_OWN = re.compile(r"(\w+), (\w[\w ]*)$")  # the third frame of a snapshot of `estimate` or `profile`: part, phase


@dataclass(frozen=True)
class StackKind:
    """The phase, the part, the lines and the module of an allocation, from its frames."""

    phase: str
    part: str = ""  # if the frames decide it
    lines: tuple[str, ...] = ()  # of the user's code, the innermost first
    module: str = ""  # the innermost function of a module that is none of torch's, outside of that line
    caller: str = ""  # the innermost line of the user's code outside the outermost module
    loop: str = ""  # the function outside the outermost module: that of one loop over batches
    marks: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """Return the innermost line of the user's code."""
        return self.lines[0] if self.lines else ""


NO_STACK = StackKind(NONE)


class _Frame(NamedTuple):
    text: str  # `train.py:31 (main)`
    key: str  # `/home/me/train.py:main`
    rule: tuple[str, str] | None  # the phase and the part
    marks: frozenset[str]
    is_own: bool  # code of the user
    is_other: bool  # code outside torch
    is_call: bool  # of a module
    is_forward: bool


@lru_cache(maxsize=2**16)
def _frame(file: str, line: int, name: str) -> _Frame:
    """Return what a frame tells; a few hundred frames occur in all stacks of a run."""
    key = f"{file}:{name}"
    place = re.split(r"[/\\]", file)[-1][-_MOST_TEXT:] + (f":{line}" if line else "")
    return _Frame(
        f"{place} ({name.rpartition('::')[2] or name})", key,
        next(((phase, part) for pattern, phase, part in _RULES if pattern.search(key)), None),
        frozenset() if re.search(_NATIVE, file) else frozenset(mark for mark, own in _MARKS if own.search(key)),
        is_own=not _LIBRARY.search(file), is_other=not _TORCH.search(file), is_call=bool(_CALL.search(key)),
        is_forward=name.rpartition(".")[2].endswith("forward"),
    )  # fmt: skip


def stack_kind(frames: Any) -> StackKind:
    """Return what a stack tells; NO_STACK for one without frames or of another structure."""
    if not isinstance(frames, list) or not frames:
        return NO_STACK
    dicts = [frame for frame in frames[:_MOST_FRAMES] if isinstance(frame, dict)]
    if len(dicts) == 3 and not any(frame.get("filename") for frame in dicts):
        return _own_kind(dicts)
    found = [_frame(*_plain(frame)) for frame in dicts]
    marks = frozenset(chain.from_iterable(frame.marks for frame in found))
    phase, part = next((frame.rule for frame in found if frame.rule), (USER, TENSORS))
    if any(frame.key.endswith("linear.py:forward") for frame in found):
        marks -= {ATTENTION_SCORES}  # a projection
    if phase == FORWARD and RECOMPUTED in marks:
        phase, part = BACKWARD, "activations"
    outside = found[max((number for number, frame in enumerate(found) if frame.is_call), default=-1) + 1 :]
    own = [frame for frame in found if frame.is_own] or [frame for frame in found if frame.is_other]
    modules = [frame for frame in found if frame.is_forward]
    return StackKind(
        phase, part,
        lines=tuple(frame.text for frame in own),
        module=next((frame.text for frame in modules if frame.is_other and frame not in own[:1]),
                    modules[0].text if modules else ""),
        caller=next((frame.text for frame in outside if frame.is_own), own[0].text if own else ""),
        loop=next((frame.key for frame in outside if frame.is_other), ""), marks=marks,
    )  # fmt: skip


def _plain(frame: dict[str, Any]) -> tuple[str, int, str]:
    """Return the file, the line and the name of a frame; a value of another type is left out."""
    file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
    number = line if isinstance(line, int) and 0 < line < 2**31 else 0
    return (file[-_MOST_PATH:] if isinstance(file, str) else "", number,
            name[-_MOST_TEXT:] if isinstance(name, str) else "")  # fmt: skip


def _own_kind(frames: Sequence[dict[str, Any]]) -> StackKind:
    """Return the kind of a stack that this program wrote: operator, module, and part with phase."""
    operator, path, last = (str(frame.get("name", ""))[:_MOST_TEXT] for frame in frames)
    match = _OWN.match(last)
    if match is None:
        return NO_STACK
    phase = match[2] if match[2] in (FORWARD, BACKWARD, OPTIMIZER) else BACKWARD if match[2] == "recompute" else LOAD
    marks = frozenset({FOREACH} if operator.startswith("_foreach") else ())
    path = without_numbers(path)  # equal layers are one row
    return StackKind(phase, match[1], lines=(operator,), module=path, caller=operator, loop="a step", marks=marks)
