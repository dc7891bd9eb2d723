"""The losses that encoders train with, by the words of `--loss`; tracing/losses.py runs them."""

from __future__ import annotations

from bertscope.errors import SelectionError, suggestion
from bertscope.frozen import dataclass
from bertscope.units import decimal


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss: the texts of an example, the settings that change them, and what follows its name after a colon."""

    texts: int = 1
    takes: tuple[str, ...] = ()
    argument: str = ""  # its form, empty for none
    default: str = ""  # of the argument, which is a number if it has one
    in_one_process: bool = False  # the step of several ranks is not modelled


MODEL = "model"
# `mini_batch_size` of CachedMultipleNegativesRankingLoss is 32 by default.
LOSSES = {
    MODEL: Loss(),
    "mnrl": Loss(texts=2, takes=("pairs", "hard_negatives")),
    "cached-mnrl": Loss(texts=2, takes=("pairs", "hard_negatives"), argument="SIZE", default="32", in_one_process=True),
    "cosent": Loss(texts=2),
    "triplet": Loss(texts=3),
    "reranker": Loss(takes=("hard_negatives",)),
    "distil": Loss(takes=("pairs",), argument="TEACHER", in_one_process=True),
}
FORMS = tuple(":".join(filter(None, (name, row.default or row.argument))) for name, row in LOSSES.items())


def loss_parts(text: str) -> tuple[str, str]:
    """Return the name and the argument of a loss; raises SelectionError for another text.

    >>> loss_parts("cached-mnrl:16"), loss_parts("cached-mnrl"), loss_parts("cosent")
    (('cached-mnrl', '16'), ('cached-mnrl', '32'), ('cosent', ''))
    """
    name, _, argument = text.partition(":")
    row = LOSSES.get(name)
    if row is None:
        raise SelectionError(f"there is no loss {name[:60]!r}; {suggestion(name[:60], LOSSES)}")
    argument = argument or row.default
    is_number = 0 < (decimal(argument, 10) or 0) < 2**31
    if bool(argument) != bool(row.argument) or (row.default and not is_number):
        form = ":".join(filter(None, (name, row.argument)))
        more = ", the sequences of a mini-batch" if row.default else ""
        raise SelectionError(f"the form is {form}{more}; got {text[:60]!r}")
    return name, argument


def mini_batch(text: str) -> int:
    """Return the sequences of a mini-batch of a loss; 0 for one without mini-batches."""
    name, argument = loss_parts(text)
    return int(argument) if LOSSES[name].default else 0


def loss_text(text: str) -> str:
    """Return the only form of a loss: `cached-mnrl` is `cached-mnrl:32`; a text in this form is returned itself."""
    form = ":".join(filter(None, loss_parts(text)))
    return text if text == form else form


def takes(setting: str, loss: str) -> bool:
    """Return True if a setting has an effect on a loss."""
    return setting in LOSSES[loss_parts(loss)[0]].takes


def losses_with(setting: str) -> str:
    """Return the losses on which a setting has an effect."""
    return ", ".join(name for name, row in LOSSES.items() if setting in row.takes)
