"""Example inputs on meta for a model: token ids, masks and labels that fit its forward and its configuration."""

import inspect
from collections.abc import Mapping
from typing import Any

from bertscope.analyses.tracing.operator_costs import tensors
from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.model.lora import base_model_of
from bertscope.run_config import MAX_SIZE
from bertscope.torch_access import nn, torch

_TOKEN_LABELS = ("ForMaskedLM", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForTokenClassification")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")
CHOICES = 2  # BertForMultipleChoice: continuations of one question
Inputs = dict[str, torch.Tensor]


def inputs_for(module: nn.Module, batch: int, seq: int, *, labels: bool = False) -> Any:
    """Return inputs for any module: the result of its `example_inputs(batch, seq)`, or a dictionary of keywords.

    The dictionary has `input_ids`, and the mask and decoder's ids that forward accepts. Raises SelectionError for
    sizes that the model cannot run, and for a module with neither `example_inputs` nor `input_ids`. The inputs of a
    model of peft are those of the model that it wraps.
    """
    module = base_model_of(module)
    if isinstance(module, BertPreTrainedModel):
        return example_inputs(module, batch, seq, labels=labels)
    if callable(getattr(module, "example_inputs", None)):
        return module.example_inputs(batch, seq)  # type: ignore[operator]
    most = min(positions(module), MAX_SIZE - 1)
    _check_sizes(batch, seq, most, f"the model's {most:,} positions")
    takes = inspect.signature(module.forward).parameters
    if "input_ids" not in takes:
        raise SelectionError(
            f"{type(module).__name__}.forward takes {', '.join(takes) or 'nothing'} and no input_ids; give the module "
            "a method example_inputs(batch, seq) that returns what a run takes"
        )
    shape = (batch, CHOICES, seq) if type(module).__name__.endswith("ForMultipleChoice") else (batch, seq)
    is_encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    names = ("input_ids", "attention_mask", *(("decoder_input_ids",) if is_encoder_decoder else ()))
    inputs = {name: _ids(*shape) for name in names if name in takes}
    found = _labels(module, batch, seq) if labels else {}
    return inputs | {name: value for name, value in found.items() if name in takes}


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from a tensor, a sequence of tensors, or a dictionary of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _check_sizes(batch: int, seq: int, most: int, limit: str) -> None:
    if not 1 <= batch < MAX_SIZE:
        raise SelectionError(f"batch must be at least 1 and below 2**31; got {batch}")
    if not 1 <= seq <= most:
        raise SelectionError(f"seq must be at least 1 and at most {limit}; got {seq}")


def positions(module: nn.Module) -> int:
    """Return the length limit of a sequence, MAX_SIZE if it is not known.

    The positions of the RoBERTa family start after the padding index.
    """
    given = (getattr(getattr(module, "config", None), name, None) for name in _POSITIONS)
    most = next((value for value in given if isinstance(value, int) and value > 0), None)
    if most is None:
        return MAX_SIZE
    tables = (getattr(inner, "position_embeddings", None) for inner in module.modules())
    padding = next((table.padding_idx for table in tables if isinstance(table, nn.Embedding)), None)
    return most if padding is None else most - padding - 1


def _labels(module: nn.Module, batch: int, seq: int) -> Inputs:
    """Return the labels that the class's name implies; without labels backward starts from the output."""
    name, config = type(module).__name__, getattr(module, "config", None)
    if name in ARCHITECTURES:
        return _bert_labels(name, config, batch, seq)
    if name.endswith(_TOKEN_LABELS):
        return {"labels": _ids(batch, seq)}
    has_classes = name.endswith("ForSequenceClassification") and getattr(config, "num_labels", 1) > 1
    return {"labels": _ids(batch)} if has_classes and not getattr(config, "problem_type", None) else {}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def example_inputs(model: BertPreTrainedModel | PeftModel, batch: int, seq: int, *, labels: bool = False) -> Inputs:
    """Return ids, encoder states for a decoder with cross-attention, and labels if asked for, all on meta.

    Raises SelectionError for a batch below 1 or a sequence longer than the model's positions.
    """
    config, name = model.config, type(base_model_of(model)).__name__
    most = config.max_position_embeddings
    _check_sizes(batch, seq, most, f"max_position_embeddings {most}")
    shape = (batch, CHOICES, seq) if name == "BertForMultipleChoice" else (batch, seq)
    inputs = {"input_ids": _ids(*shape)}
    if config.add_cross_attention and name in ("BertModel", "BertForMaskedLM", "BertLMHeadModel"):
        inputs["encoder_hidden_states"] = torch.empty(batch, seq, config.hidden_size, device="meta")
    return inputs | (_bert_labels(name, config, batch, seq) if labels else {})


def _bert_labels(name: str, config: Any, batch: int, seq: int) -> Inputs:
    is_regression = config.problem_type == "regression"
    if name == "BertForSequenceClassification":
        if config.problem_type == "multi_label_classification" or (is_regression and config.num_labels > 1):
            return {"labels": torch.empty(batch, config.num_labels, device="meta")}
        if is_regression or config.num_labels == 1:
            return {"labels": torch.empty(batch, device="meta")}
    if name.endswith(_TOKEN_LABELS):
        return {"labels": _ids(batch, seq)}
    others: dict[str, Inputs] = {
        "BertModel": {},
        "BertForPreTraining": {"labels": _ids(batch, seq), "next_sentence_label": _ids(batch)},
        "BertForQuestionAnswering": {"start_positions": _ids(batch), "end_positions": _ids(batch)},
    }
    return others.get(name, {"labels": _ids(batch)})


def loss_of(output: Any) -> tuple[torch.Tensor, str]:
    """Return the scalar that backward starts from, and its name: the loss, or the sum of the first output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, "the loss"
    floating = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise SelectionError("the module returns no floating-point tensor for backward; use mode 'inference'")
    return floating[0].sum(), "the sum of the first output (other outputs are unused)"
