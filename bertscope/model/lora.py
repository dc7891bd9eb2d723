"""LoRA: small trained matrices next to the frozen Linear layers of a BERT, under the names that peft gives them.

`base_model.model.bert.encoder.layer.0.attention.self.query.lora_A.default.weight`. Each forward has peft's operators in
peft's order, so that outputs and memory are the same. Source: Hu et al. 2021, arXiv:2106.09685; peft 0.12.0.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from bertscope.config import ALL_LINEAR, BertConfig, Lora
from bertscope.errors import ConfigError
from bertscope.model.bert import BertPreTrainedModel

ADAPTER = "default"  # peft's name for the first adapter
WRAPPED = "base_model.model."  # in front of the paths of the BERT


class LoraLinear(nn.Module):
    """A frozen Linear layer and its adapter: W x + b + scaling * B A dropout(x), with A (r, in) and B (out, r)."""

    def __init__(self, base_layer: nn.Linear, lora: Lora) -> None:
        super().__init__()
        weight = base_layer.weight
        like: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.scaling = lora.scaling
        self.base_layer = base_layer
        self.lora_dropout = nn.ModuleDict({ADAPTER: nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()})
        down, up = nn.Linear(base_layer.in_features, lora.r, **like), nn.Linear(lora.r, base_layer.out_features, **like)
        nn.init.zeros_(up.weight)  # so that training starts from the output of the frozen layer
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER: down}), nn.ModuleDict({ADAPTER: up})

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out) in the frozen layer's dtype; the adapter computes in the dtype of A and B."""
        result: Tensor = self.base_layer(x)
        dtype = result.dtype
        down: Any = self.lora_A[ADAPTER]
        up, dropout = self.lora_B[ADAPTER], self.lora_dropout[ADAPTER]
        x = x.to(down.weight.dtype)
        result = result + up(down(dropout(x))) * self.scaling
        return result.to(dtype)


class ModulesToSaveWrapper(nn.Module):
    """A frozen module that does not run any more, and its trained copy, which does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({ADAPTER: copy.deepcopy(module)})

    @property
    def weight(self) -> Any:
        """Return the trained copy's weight."""
        return self.modules_to_save[ADAPTER].weight

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the trained copy."""
        return self.modules_to_save[ADAPTER](*inputs, **named)


class LoraModel(nn.Module):
    """The inner one of peft's two wrappers around a model."""

    def __init__(self, model: BertPreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        return self.model(*inputs, **named)


class PeftModel(nn.Module):
    """A BERT of which only adapters, saved modules and, by `lora.bias`, biases are trained.

    Raises ConfigError for a name in `target` or `save` that matches no module, or none that can be adapted or saved.
    """

    def __init__(self, model: BertPreTrainedModel, lora: Lora) -> None:
        super().__init__()
        self.lora = lora = lora.of_bert()
        _inject(model, lora)
        self.base_model = LoraModel(model)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in path or (lora.bias == "all" and "bias" in path))
        for module in model.modules():
            if isinstance(module, LoraLinear) and lora.bias == "lora_only" and module.base_layer.bias is not None:
                module.base_layer.bias.requires_grad_(True)
            elif isinstance(module, ModulesToSaveWrapper):
                module.original_module.requires_grad_(False)
                module.modules_to_save.requires_grad_(True)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model."""
        return self.base_model(*inputs, **named)

    def get_base_model(self) -> BertPreTrainedModel:
        """Return the BERT with its adapters, without the two wrappers."""
        return self.base_model.model

    @property
    def config(self) -> BertConfig:
        """Return the BERT's configuration."""
        return self.get_base_model().config

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors that peft's `save_pretrained` writes, by their names in the file."""
        state = self.state_dict(keep_vars=True)
        has_biases = self.lora.bias == "all"
        adapter = {name: value for name, value in state.items() if "lora_" in name or (has_biases and "bias" in name)}
        saved = f".modules_to_save.{ADAPTER}."
        copies = {name.replace(saved, f".{ADAPTER}."): value for name, value in state.items() if saved in name}
        return {name.replace(f".{ADAPTER}", ""): value for name, value in (adapter | copies).items()}


def _inject(model: BertPreTrainedModel, lora: Lora) -> None:
    paths = {module: path for path, module in model.named_modules()}
    linear = {path.rpartition(".")[2] for module, path in paths.items() if isinstance(module, nn.Linear)}
    targets = set(lora.target or ())
    targets = targets - {ALL_LINEAR} | (linear if ALL_LINEAR in targets else set())
    ends = {end for path in paths.values() for end in _ends(path)}
    owner, choose = type(model).__name__, f"choose from {', '.join(sorted(linear))} and {ALL_LINEAR}"
    for name in sorted(targets - ends):
        raise ConfigError(f"{owner} has no module {name!r} to adapt; {choose}", field="target")
    for name in lora.save:
        if not any(path.endswith(name) for path in paths.values()):
            known = ", ".join(path for path, _ in model.named_children())
            raise ConfigError(f"{owner} has no module {name!r} to save; choose from {known}", field="save")

    def replace_in(parent: nn.Module) -> None:
        for name, module in list(parent.named_children()):
            path = paths[module]
            if path.endswith(lora.save):
                if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                    raise ConfigError(f"{path} is a list of modules; name those inside it", field="save")
                setattr(parent, name, ModulesToSaveWrapper(module))
            elif not targets.isdisjoint(_ends(path)):
                if not isinstance(module, nn.Linear):
                    kind = type(module).__name__
                    raise ConfigError(
                        f"{path} is of class {kind}, and adapters need a linear layer; {choose}", field="target"
                    )
                setattr(parent, name, LoraLinear(module, lora))
            else:
                replace_in(module)

    replace_in(model)


def _ends(path: str) -> Iterator[str]:
    """Yield the ends of a path, part by part: `a.b.c`, `b.c`, `c`."""
    parts = path.split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def base_model_of(module: nn.Module) -> Any:
    """Return the model inside the wrappers of this module or of peft's, else the module itself."""
    inner = getattr(module, "get_base_model", None)
    return inner() if callable(inner) else module


def name_without_adapter(path: str) -> str:
    """Return a parameter's path in the model before adapters were added."""
    name = path.removeprefix(WRAPPED)
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def keep_adapters_in_fp32(module: nn.Module) -> None:
    """Convert the adapters of a model of 16 bits back to fp32, as `get_peft_model` does; also those that peft made."""
    for inner in module.modules():
        for path, param in inner.named_parameters() if hasattr(inner, "base_layer") else ():
            if not path.startswith("base_layer."):
                # The conversion of peft 0.12 to 0.21 forgets that AdaLoRA's rank is constant.
                if path.startswith("ranknum") and param.itemsize < 4:
                    param.requires_grad_(True)
                param.data = param.data.float()
