"""What a program is told that reads a value off a tensor without values: what the run settles, and nothing else.

Models ask whether a mask hides anything, whether a sum has overflowed, and whether a random share lies below the
rate at which layers are dropped. A question with another answer must be measured: a guess would silently skip
layers.
"""

from __future__ import annotations

from typing import Any

from bertscope.torch_access import torch

_KNOWN = "_bertscope_known"  # of a tensor of truth values, the one that all of them have
_SHARE = "_bertscope_share"  # of a tensor whose elements are drawn from 0 to 1
_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


class Answers:
    """Notes of each result what is known of it beforehand; `is_masked` tells whether masks hide anything."""

    def __init__(self, *, is_masked: bool) -> None:
        self.is_masked = is_masked

    def note(self, operator: Any, args: Any, out: Any) -> None:
        """Remember what the operator's result will be."""
        name = operator._schema.name.removeprefix("aten::")
        if name in ("rand", "rand_like"):
            setattr(out, _SHARE, True)
        elif isinstance(out, torch.Tensor) and out.dtype == torch.bool and args:
            known = self._truth(name, args)
            if known is not None:
                setattr(out, _KNOWN, known)

    def _truth(self, name: str, args: Any) -> bool | None:
        before = getattr(args[0], _KNOWN, None)
        if name in ("logical_not", "bitwise_not"):
            return None if before is None else not before
        if name in ("all", "any"):
            return before if before is not None else self.is_masked == (name == "any")
        if name in ("isinf", "isnan"):
            return False  # no sum overflows
        if name in _BELOW and getattr(args[0], _SHARE, False) and isinstance(args[1], (int, float)):
            return _BELOW[name] == (args[1] >= 1) if not 0 < args[1] < 1 else None
        return before if name in ("view", "reshape", "alias", "detach", "_to_copy", "clone") else None

    def truth(self, operator: Any, asked: torch.Tensor) -> bool:
        """The value of a tensor of one truth value; raises DataDependentOutputException where nothing settles it."""
        from torch._subclasses.fake_tensor import DataDependentOutputException

        known = getattr(asked, _KNOWN, None)
        if asked.dtype != torch.bool or known is None:
            raise DataDependentOutputException(operator)
        return bool(known)
