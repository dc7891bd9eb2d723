"""Example inputs on meta for a model: token ids, masks and labels that fit its forward and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from bertscope.errors import SelectionError
from bertscope.model import BertPreTrainedModel
from bertscope.run_config import MAX_SIZE
from bertscope.torch_access import nn, torch

_TOKEN_LABELS = ("ForMaskedLM", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForTokenClassification")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def inputs_for(module: nn.Module, batch: int, seq: int, *, labels: bool = False) -> Any:
    """Return inputs for any module: the result of its `example_inputs(batch, seq)`, or a dictionary of keywords.

    The dictionary has `input_ids`, and the mask and decoder's ids that forward accepts. Raises SelectionError for
    sizes that the model cannot run, and for a module with neither `example_inputs` nor `input_ids`.
    """
    if isinstance(module, BertPreTrainedModel):
        return example_inputs(module, batch, seq, labels=labels)
    if callable(getattr(module, "example_inputs", None)):
        return module.example_inputs(batch, seq)  # type: ignore[operator]
    _check_sizes(module, batch, seq)
    takes = inspect.signature(module.forward).parameters
    if "input_ids" not in takes:
        raise SelectionError(
            f"{type(module).__name__}.forward takes {', '.join(takes) or 'nothing'} and no input_ids; give the module "
            "a method example_inputs(batch, seq) that returns what a run takes"
        )
    shape = (batch, 2, seq) if type(module).__name__.endswith("ForMultipleChoice") else (batch, seq)
    names = ["input_ids", "attention_mask"] + (["decoder_input_ids"] if _is_encoder_decoder(module) else [])
    inputs = {name: _ids(*shape) for name in names if name in takes}
    return inputs | (_labels(module, batch, seq) if labels and "labels" in takes else {})


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from a tensor, a sequence of tensors, or a dictionary of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _check_sizes(module: nn.Module, batch: int, seq: int) -> None:
    most = min(_positions(module), MAX_SIZE - 1)
    if not 1 <= batch < MAX_SIZE:
        raise SelectionError(f"batch must be at least 1 and below 2**31; got {batch}")
    if not 1 <= seq <= most:
        raise SelectionError(f"seq must be at least 1 and at most the model's {most:,} positions; got {seq}")


def _positions(module: nn.Module) -> int:
    """Return the length limit of a sequence; the positions of the RoBERTa family start after the padding index."""
    config = getattr(module, "config", None)
    for name in _POSITIONS:
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found - _reserved(module)
    return MAX_SIZE


def _reserved(module: nn.Module) -> int:
    for inner in module.modules():
        place = getattr(inner, "position_embeddings", None)
        if isinstance(place, nn.Embedding):
            return 0 if place.padding_idx is None else place.padding_idx + 1
    return 0


def _is_encoder_decoder(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))


def _labels(module: nn.Module, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Return the labels that the class's name implies; without labels backward starts from the output."""
    name, config = type(module).__name__, getattr(module, "config", None)
    if name.endswith(_TOKEN_LABELS):
        return {"labels": _ids(batch, seq)}
    if name.endswith("ForSequenceClassification") and getattr(config, "num_labels", 1) > 1:
        return {} if getattr(config, "problem_type", None) else {"labels": _ids(batch)}
    return {}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


CHOICES = 2  # BertForMultipleChoice: continuations of one question


Inputs = dict[str, torch.Tensor]


def example_inputs(model: BertPreTrainedModel, batch: int, seq: int, *, labels: bool = False) -> Inputs:
    """Return ids, encoder states for a decoder with cross-attention, and labels if asked for, all on meta.

    Raises SelectionError for a batch below 1 or a sequence longer than the model's positions.
    """
    config, name = model.config, type(model).__name__
    if not 1 <= batch < MAX_SIZE:
        raise SelectionError(f"batch must be at least 1 and below 2**31; got {batch}")
    if not 1 <= seq <= config.max_position_embeddings:
        most = config.max_position_embeddings
        raise SelectionError(f"seq must be at least 1 and at most max_position_embeddings {most}; got {seq}")
    shape = (batch, CHOICES, seq) if name == "BertForMultipleChoice" else (batch, seq)
    inputs = {"input_ids": _ids(*shape)}
    if config.add_cross_attention and name in ("BertModel", "BertForMaskedLM", "BertLMHeadModel"):
        inputs["encoder_hidden_states"] = torch.empty(batch, seq, config.hidden_size, device="meta")
    return inputs | (_bert_labels(name, config.problem_type, config.num_labels, batch, seq) if labels else {})


def _bert_labels(name: str, problem_type: str | None, num_labels: int, batch: int, seq: int) -> Inputs:
    if name == "BertModel":
        return {}
    if name == "BertForPreTraining":
        return {"labels": _ids(batch, seq), "next_sentence_label": _ids(batch)}
    if name == "BertForQuestionAnswering":
        return {"start_positions": _ids(batch), "end_positions": _ids(batch)}
    if name in ("BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification"):
        return {"labels": _ids(batch, seq)}
    if name == "BertForSequenceClassification":
        if problem_type == "multi_label_classification" or (problem_type == "regression" and num_labels > 1):
            return {"labels": torch.empty(batch, num_labels, device="meta")}
        if problem_type == "regression" or num_labels == 1:
            return {"labels": torch.empty(batch, device="meta")}
    return {"labels": _ids(batch)}


def loss_of(output: Any) -> tuple[torch.Tensor, str]:
    """Return the scalar that backward starts from, and its name: the loss, or the sum of the first output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, "the loss"
    from bertscope.analyses.tracing.operator_costs import tensors

    floating = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise SelectionError("the module returns no floating-point tensor for backward; use mode 'inference'")
    return floating[0].sum(), "the sum of the first output (what else comes out is unused)"
