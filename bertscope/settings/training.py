"""The parts of a training loop: optimizers with their state, losses, and rules for TrainingArguments.

tracing/losses.py runs the losses. A rule takes its key's value in TrainingArguments or in an accelerate config,
and all values in the file, and returns the setting's value; None leaves the setting as it is. It
raises ValueError with the allowed values in words, and NotModelledError for a feature that the estimate does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol, runtime_checkable

from bertscope.errors import SelectionError
from bertscope.frozen import Record
from bertscope.settings.checkpointing import EVERY, FULL, NONE
from bertscope.settings.rows import near_word
from bertscope.units import decimal


class Optimizer(Record):
    """An optimizer: its class, its implementations, and its state between steps."""

    class_name: str  # in torch.optim
    in_torch: bool = True  # with a foreach implementation; else the class is in memory/optimizers.py
    fused: bool = True
    foreach_on_cuda: bool = True  # torch's default there; on a CPU it is the for-loop
    is_kernel_on_cuda: bool = False  # which allocates nothing, as a fused one
    host_state: tuple[str, ...] = ("step",)  # that stays on the CPU, but for a fused kernel
    state: tuple[str, ...] = ()  # of each parameter, with the defaults of the class; of Adafactor, for 2 dimensions
    takes: tuple[str, ...] = ()  # fields of RunConfig that are arguments of the class
    one_list_from: tuple[int, ...] = ()  # the version of torch; before it the foreach step has a second denominator
    trainer: dict[str, str] = field(default_factory=dict)  # `optim` of TrainingArguments -> implementation

    def has(self, implementation: str) -> bool:
        """Return True if the optimizer has that implementation."""
        return {"foreach": self.in_torch, "fused": self.fused}.get(implementation, True)


ADAMW = "adamw"  # the default
_ADAM_STATE, _ONE_LIST_FROM = ("step", "exp_avg", "exp_avg_sq"), (2, 1)  # pull requests pytorch/pytorch 104780, 104898
# `trainer`: get_optimizer_cls_and_kwargs in trainer.py of transformers 4.43.4. The kernels of apex and bitsandbytes
# allocate nothing, as torch's fused ones.
OPTIMIZERS = {
    "sgd": Optimizer(class_name="SGD", takes=("momentum", "weight_decay"), trainer={"sgd": "default"}),
    "adam": Optimizer(
        class_name="Adam", state=_ADAM_STATE, takes=("weight_decay",), one_list_from=_ONE_LIST_FROM,
    ),
    ADAMW: Optimizer(
        class_name="AdamW", state=_ADAM_STATE, one_list_from=_ONE_LIST_FROM,
        trainer={"adamw_torch": "default", "adamw_torch_fused": "fused", "adamw_apex_fused": "fused"},
    ),
    "adafactor": Optimizer(
        class_name="Adafactor", fused=False, foreach_on_cuda=False, state=("step", "row_var", "col_var"),
    ),
    "rmsprop": Optimizer(
        class_name="RMSprop", fused=False, state=("step", "square_avg"), takes=("momentum", "weight_decay"),
        trainer={"rmsprop": "default"},
    ),
    "adagrad": Optimizer(
        class_name="Adagrad", state=("step", "sum"), takes=("weight_decay",), trainer={"adagrad": "default"},
    ),
    "adadelta": Optimizer(
        class_name="Adadelta", fused=False, state=("step", "square_avg", "acc_delta"), takes=("weight_decay",),
    ),
    "adamax": Optimizer(
        class_name="Adamax", fused=False, state=("step", "exp_avg", "exp_inf"), takes=("weight_decay",),
    ),
    "asgd": Optimizer(
        class_name="ASGD", fused=False, host_state=(), state=("step", "eta", "mu", "ax"), takes=("weight_decay",),
    ),
    "nadam": Optimizer(
        class_name="NAdam", fused=False, host_state=("step", "mu_product"),
        state=("step", "mu_product", "exp_avg", "exp_avg_sq"), takes=("weight_decay",),
    ),
    "radam": Optimizer(class_name="RAdam", fused=False, state=_ADAM_STATE, takes=("weight_decay",)),
    "rprop": Optimizer(class_name="Rprop", fused=False, state=("step", "prev", "step_size")),
    "lamb": Optimizer(class_name="Lamb", in_torch=False, state=("exp_avg", "exp_avg_sq")),
    "lion": Optimizer(class_name="Lion", in_torch=False, state=("exp_avg",), trainer={"lion_32bit": "fused"}),
    "adamw-8bit": Optimizer(
        class_name="AdamW8bit", in_torch=False, fused=False, is_kernel_on_cuda=True, state=("state1", "state2"),
        trainer={"adamw_bnb_8bit": "default", "adamw_8bit": "default", "paged_adamw_8bit": "default"},
    ),
    "adamw-transformers": Optimizer(
        class_name="TransformersAdamW", in_torch=False, fused=False, state=("exp_avg", "exp_avg_sq"),
        trainer={"adamw_hf": "default"},
    ),
    "adafactor-transformers": Optimizer(
        class_name="TransformersAdafactor", in_torch=False, fused=False,
        state=("exp_avg_sq_row", "exp_avg_sq_col"), trainer={"adafactor": "default"},
    ),
}  # fmt: skip
# The end of a language model's class -> whether its labels are the next tokens.
_PREDICTS_NEXT = {"ForMaskedLM": False, "ForCausalLM": True, "LMHeadModel": True, "ForConditionalGeneration": False}


def predicts_next(architecture: str) -> bool | None:
    """Return whether the labels of a language model's class are the next tokens; None for any other class."""
    return next((is_next for end, is_next in _PREDICTS_NEXT.items() if architecture.endswith(end)), None)


NO_OPTIMIZER = "none"
CUSTOM = "custom"  # an optimizer of a Python program whose class has no row
LEANER = {"8bit": "adamw-8bit", "sgd": "sgd"}  # than AdamW, by the words of `plan --may-change`
QUANTIZING = ("int8", "nf4")  # words of `plan --may-change` and of `quantize`; adapters are trained (QLoRA)
# Words of `plan --may-change` -> settings that save memory, the cheapest first; 8 chunks are torchtune's default.
SAVERS: dict[str, dict[str, Any]] = {
    "loss-chunks": {"loss_chunks": 8},
    "step-in-backward": {"step_in_backward": True},
    "offload-optimizer": {"offload_optimizer": True},
    "offload-activations": {"offload_activations": True},
}
KEEPING_RESULTS = {name for settings in SAVERS.values() for name in settings}
# These settings -> those that they exclude. A step in backward frees each gradient before the next one exists.
_CPU_ONLY = ("grad_scaler", "keep_gradients", "optimizer_implementation", "compile")
_AT_ONCE = ("accumulate", "clip_grad_norm", "grad_scaler", "keep_gradients", "compile", "offload_optimizer")
EXCLUDED = {
    "loss_chunks": ("compile",),
    "offload_activations": ("compile",),
    "offload_optimizer": _CPU_ONLY,
    "step_in_backward": _AT_ONCE,
}
MAY_CHANGE = ("lora", *QUANTIZING, "freeze", *LEANER, "precision")  # and SAVERS, which keep the result
# Words of `optim` in TrainingArguments.
TRAINER_OPTIMIZERS = {word: name for name, row in OPTIMIZERS.items() for word in row.trainer}
TRAINER_IMPLEMENTATIONS = {word: form for row in OPTIMIZERS.values() for word, form in row.trainer.items()}


def takers(name: str) -> list[str]:
    """Return the optimizers that take a field of RunConfig as an argument."""
    return [key for key, row in OPTIMIZERS.items() if name in row.takes]


# Implementation of an optimizer -> arguments of its class in torch.
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


# ---- losses ----


class Loss(Record):
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
    """Return the name and the argument in a loss; raises SelectionError for another text.

    >>> loss_parts("cached-mnrl:16"), loss_parts("cached-mnrl"), loss_parts("cosent")
    (('cached-mnrl', '16'), ('cached-mnrl', '32'), ('cosent', ''))
    """
    name, _, argument = text.partition(":")
    row = LOSSES.get(name)
    if row is None:
        near = near_word(name, LOSSES)
        hint = f"did you mean {near!r}?" if near else f"known: {', '.join(LOSSES)}"
        raise SelectionError(f"there is no loss {name[:60]!r}; {hint}")
    argument = argument or row.default
    is_number = 0 < (decimal(argument, 10) or 0) < 2**31
    if bool(argument) != bool(row.argument) or (row.default and not is_number):
        form = ":".join(filter(None, (name, row.argument)))
        more = ", the sequences of a mini-batch" if row.default else ""
        raise SelectionError(f"the form is {form}{more}; got {text[:60]!r}")
    return name, argument


def mini_batch(text: str) -> int:
    """Return the sequences in a loss's mini-batch; 0 without mini-batches."""
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


# ---- rules that read a setting from a key of TrainingArguments ----


_NAMES = ("activation", "gradient")  # of checkpointing, since transformers 5.23 and before
Rule = Callable[[Any, Mapping[str, Any]], Any]


@runtime_checkable
class TrainingArguments(Protocol):
    """The arguments of a Trainer, an object of transformers."""

    def to_json_string(self) -> str:
        """Return them as JSON."""


class NotModelledError(Exception):
    """A value that changes a step's memory in a way that is not modelled; the message is its effect."""


def flag(setting: Any) -> Rule:
    """Return the rule that takes true or false: the setting's value if true."""

    def rule(value: Any, keys: Mapping[str, Any]) -> Any:
        if not isinstance(value, bool | None):
            raise ValueError("true or false")
        return setting if value else None

    return rule


def whole_number(value: Any, keys: Mapping[str, Any]) -> int | None:
    """Return an integer."""
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError("an integer")
    return value


def words(known: Mapping[Any, Any], default: str) -> Rule:
    """Return the rule that takes one of these words; `default` is what the estimate uses for another word."""

    def rule(value: Any, keys: Mapping[str, Any]) -> Any:
        if not isinstance(value, str | bool | None):
            raise ValueError("a word")
        if value not in known:
            raise NotModelledError(f"the estimate uses {default}, unless an option is given")
        return known[value]

    return rule


def clips(value: Any, keys: Mapping[str, Any]) -> bool:
    """Return True if max_grad_norm clips: 0 and null mean no clipping."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ValueError("a number")
    return value is not None and value > 0


# The keys of TrainingArguments that decide whether a run evaluates, and the batch of its evaluation.
_EVALUATES = ("eval_strategy", "evaluation_strategy", "do_eval")
_EVAL_BATCH = ("per_device_eval_batch_size", "per_gpu_eval_batch_size")
EVALUATING_KEYS = (*_EVALUATES, *_EVAL_BATCH)


def evaluation_batch(value: Any, keys: Mapping[str, Any]) -> int | None:
    """Return an evaluation's batch, 8 unless a key says it (training_args.py); None if nothing is evaluated."""
    if all(keys.get(name) in (None, False, "no") for name in _EVALUATES):
        return None
    sizes = (whole_number(keys[name], keys) for name in _EVAL_BATCH if keys.get(name) is not None)
    return next(sizes, 8)


def recomputes(value: Any, keys: Mapping[str, Any]) -> str:
    """Return the strategy for activation_checkpointing, which is gradient_checkpointing before transformers 5.23."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    every = _checkpoint_keywords(keys).get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError("with every_n_layers, a whole number of at least 1")
    return NONE if not value else FULL if every == 1 else EVERY.format(every)


def is_reentrant(value: Any, keys: Mapping[str, Any]) -> bool | None:
    """Return True for gradient_checkpointing: the Trainer in transformers 4 leaves torch's default, reentrant."""
    default = "activation_checkpointing" not in keys  # the Trainer of 5.23 writes both names (trainer.py)
    return bool(_checkpoint_keywords(keys).get("use_reentrant", default)) if value else None


def reentrant_keyword(value: Any, keys: Mapping[str, Any]) -> bool | None:
    """Return the setting for activation_checkpointing_kwargs, which only a checkpointed model reads."""
    if not isinstance(value, dict | None):
        raise ValueError("an object")
    keywords = value or {}
    if keywords.get("offload"):
        raise NotModelledError("the inputs of the recomputed layers are on the CPU")
    is_read = any(keys.get(f"{name}_checkpointing") is True for name in _NAMES) and "use_reentrant" in keywords
    return bool(keywords["use_reentrant"]) if is_read else None


def _checkpoint_keywords(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    values = (keys.get(f"{name}_checkpointing_kwargs") for name in _NAMES)
    return next((value for value in values if isinstance(value, dict)), {})
