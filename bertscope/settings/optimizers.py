"""The optimizers with their implementations and state."""

from __future__ import annotations

from dataclasses import field

from bertscope.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: its class, its implementations, and its state between steps."""

    class_name: str  # in torch.optim
    in_torch: bool = True  # else the class is in memory/optimizers.py
    foreach: bool = True
    fused: bool = True
    foreach_on_cuda: bool = True  # torch's default there; on a CPU it is the for-loop
    state: tuple[str, ...] = ()  # of each parameter, with the defaults of the class; of Adafactor, for 2 dimensions
    takes: tuple[str, ...] = ()  # fields of RunConfig that are arguments of the class
    trainer: dict[str, str] = field(default_factory=dict)  # `optim` of TrainingArguments -> implementation

    def has(self, implementation: str) -> bool:
        """Return True if the optimizer has that implementation."""
        return {"foreach": self.foreach, "fused": self.fused}.get(implementation, True)


ADAMW = "adamw"  # the default
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
# `trainer`: get_optimizer_cls_and_kwargs in trainer.py of transformers 4.43.4. The kernels of apex and bitsandbytes
# allocate nothing, as torch's fused ones.
OPTIMIZERS = {
    "sgd": Optimizer(class_name="SGD", takes=("momentum", "weight_decay"), trainer={"sgd": "default"}),
    "adam": Optimizer(class_name="Adam", state=_ADAM_STATE, takes=("weight_decay",)),
    ADAMW: Optimizer(
        class_name="AdamW", state=_ADAM_STATE,
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
    "lamb": Optimizer(
        class_name="Lamb", in_torch=False, foreach=False, foreach_on_cuda=False, state=("exp_avg", "exp_avg_sq"),
    ),
    "lion": Optimizer(
        class_name="Lion", in_torch=False, foreach=False, foreach_on_cuda=False, state=("exp_avg",),
        trainer={"lion_32bit": "fused"},
    ),
    "adamw-8bit": Optimizer(
        class_name="AdamW8bit", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("state1", "state2"),
        trainer={"adamw_bnb_8bit": "default", "adamw_8bit": "default", "paged_adamw_8bit": "default"},
    ),
    "adamw-transformers": Optimizer(
        class_name="TransformersAdamW", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("exp_avg", "exp_avg_sq"), trainer={"adamw_hf": "default"},
    ),
    "adafactor-transformers": Optimizer(
        class_name="TransformersAdafactor", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("exp_avg_sq_row", "exp_avg_sq_col"), trainer={"adafactor": "default"},
    ),
}  # fmt: skip
NO_OPTIMIZER = "none"
LEANER = {"8bit": "adamw-8bit", "sgd": "sgd"}  # than AdamW, by the words of `plan --may-change`
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
