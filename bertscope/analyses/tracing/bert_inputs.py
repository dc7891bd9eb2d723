"""Inputs for one of our models, on meta: what a run of that class takes at a batch and a sequence length."""

from __future__ import annotations

from typing import Any

from bertscope.errors import SelectionError
from bertscope.model import BertPreTrainedModel
from bertscope.torch_access import torch

CHOICES = 2  # BertForMultipleChoice: continuations of one question
MAX_SIZE = 2**31


Inputs = dict[str, torch.Tensor]


def example_inputs(model: BertPreTrainedModel, batch: int, seq: int, *, labels: bool = False) -> Inputs:
    """Ids, encoder states for a decoder with cross-attention, and labels if asked; all on meta.

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
    return inputs | (_labels(name, config.problem_type, config.num_labels, batch, seq) if labels else {})


def _labels(name: str, problem_type: str | None, num_labels: int, batch: int, seq: int) -> Inputs:
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


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def loss_of(output: Any) -> tuple[torch.Tensor, str]:
    """The scalar that a training step goes back from, and its name: the loss, or the sum of the first output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, "the loss"
    from bertscope.analyses.tracing.operator_costs import tensors

    floating = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise SelectionError("the module gives no floating-point tensor to go back from; use mode 'inference'")
    return floating[0].sum(), "the sum of the first output (what else comes out is unused)"
