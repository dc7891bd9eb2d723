"""Inputs that the class and the configuration of a model describe: ids, masks, pixels, audio, labels; all on meta."""

import math
from collections.abc import Callable, Collection
from typing import Any

from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.model.lora import base_model_of
from bertscope.settings.rows import MAX_SIZE
from bertscope.torch_access import nn, torch

# Suffixes of classes whose labels are ids of words, and of those with a label for each token.
WORD_LABELS = ("ForMaskedLM", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration")
_TOKEN_LABELS = (*WORD_LABELS, "ForTokenClassification")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")
_PARTS = ("vision_config", "text_config", "encoder")  # configurations inside that of CLIP, of an encoder and a decoder
IMAGE_SIZE = 224  # of a configuration without one, as in crop_size of ResNet's preprocessor_config.json
_AS_IDS = ("attention_mask", "token_type_ids", "position_ids")  # inputs of the shape of input_ids
_TWO_SIZES = ((1, 1), (3, 2))  # batch and sequence; the sizes of an input in both say which of its sizes are which
CHOICES = 2  # BertForMultipleChoice: continuations of one question
Inputs = dict[str, torch.Tensor]


def derived_inputs(module: nn.Module, names: Collection[str], batch: int, seq: int) -> Inputs:
    """Return the inputs of these names that the class and the configuration describe."""
    config = getattr(module, "config", None)
    shape = (batch, CHOICES, seq) if type(module).__name__.endswith("ForMultipleChoice") else (batch, seq)
    inputs: Inputs = {}
    for name in names:
        if name == "input_ids" or (name == "attention_mask" and "input_ids" in names):
            inputs[name] = _ids(*shape)
        elif name == "decoder_input_ids" and getattr(config, "is_encoder_decoder", False):
            inputs[name] = _ids(batch, seq)
        elif name in _DERIVED and config is not None:
            size = _DERIVED[name](config, seq)
            if size:
                inputs[name] = torch.empty(batch, *size, device="meta")
    return inputs


def setting(config: Any, *names: str) -> Any:
    """Return the first of these settings that the configuration has, or that of its vision tower or encoder."""
    places = (config, *(getattr(config, part, None) for part in _PARTS))
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if value is not None), None)


def _pixels(config: Any, seq: int) -> tuple[int, ...]:
    """Return (channels, height, width) of images; of videos with their frames first."""
    size, frames = setting(config, "image_size", "input_size"), setting(config, "num_frames")
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size or IMAGE_SIZE,) * 2
    return (*((frames,) if frames else ()), setting(config, "num_channels") or 3, *sides)


def _samples(config: Any, seq: int) -> tuple[int, ...]:
    """Return the samples of a waveform of which the convolutions make `seq` frames, or the sizes of a spectrogram."""
    kernels, strides = setting(config, "conv_kernel"), setting(config, "conv_stride")
    if kernels and strides:
        samples = seq
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return (samples,)
    channels, ratios = setting(config, "audio_channels"), setting(config, "upsampling_ratios")
    if channels and ratios:  # EnCodec
        return channels, seq * math.prod(ratios)
    return _settings("max_length", "num_mel_bins")(config, seq)


def _features(config: Any, seq: int) -> tuple[int, ...]:
    """Return the sizes of a spectrogram: of Whisper, whose second convolution halves the length, or of `seq` frames."""
    if getattr(config, "model_type", "") == "whisper":
        return (config.num_mel_bins, 2 * config.max_source_positions)
    size = setting(config, "input_feat_per_channel", "feature_projection_input_dim")
    return (seq, size) if size else ()


def _settings(*names: str) -> Callable[[Any, int], tuple[int, ...]]:
    """Return a function that returns these settings as sizes, `seq` for an empty name; nothing if one is absent."""

    def sizes(config: Any, seq: int) -> tuple[int, ...]:
        found = tuple(setting(config, name) if name else seq for name in names)
        return found if all(isinstance(size, int) for size in found) else ()

    return sizes


# Name of an input -> its sizes after the batch by the configuration; empty: it cannot be derived.
_DERIVED: dict[str, Callable[[Any, int], tuple[int, ...]]] = {
    "pixel_values": _pixels, "input_values": _samples, "input_features": _features,
    "past_values": _settings("context_length", "num_input_channels"),  # of PatchTST
    "visual_feats": _settings("", "visual_feat_dim"), "visual_pos": _settings("", "visual_pos_dim"),  # of LXMERT
}  # fmt: skip


def check_sizes(batch: int, seq: int, most: int, limit: str) -> None:
    """Raise SelectionError for a batch, or a length above `most`, that no tensor has; `limit` is `most` in words."""
    if not 1 <= batch < MAX_SIZE:
        raise SelectionError(f"batch must be at least 1 and below 2**31; got {batch}")
    if not 1 <= seq <= most:
        raise SelectionError(f"seq must be at least 1 and at most {limit}; got {seq}")


def positions(module: nn.Module) -> int:
    """Return the length limit of a sequence, MAX_SIZE if it is not known.

    The positions of the RoBERTa family start after the padding index.
    """
    most = setting(getattr(module, "config", None), *_POSITIONS)
    if not isinstance(most, int) or most <= 0:
        return MAX_SIZE
    tables = (getattr(inner, "position_embeddings", None) for inner in module.modules())
    padding = next((table.padding_idx for table in tables if isinstance(table, nn.Embedding)), None)
    return most if padding is None else most - padding - 1


def labels_of(module: nn.Module, batch: int, seq: int) -> Inputs:
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
    check_sizes(batch, seq, most, f"max_position_embeddings {most}")
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


def known_shapes(module: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the shapes and dtypes of the inputs that the model describes, such as `BxS:int64`, by name."""
    if isinstance(module, BertPreTrainedModel):
        one, other = (example_inputs(module, *sizes, labels=True) for sizes in _TWO_SIZES)
    else:
        one, other = (derived_inputs(module, names, *sizes) | labels_of(module, *sizes) for sizes in _TWO_SIZES)
    letters = {pair: letter for letter, pair in zip("BS", zip(*_TWO_SIZES, strict=True), strict=True)}
    shapes = {name: [letters.get(pair, str(pair[0])) for pair in zip(tensor.shape, other[name].shape, strict=True)]
              for name, tensor in one.items()}  # fmt: skip
    known = {name: f"{'x'.join(shape)}:{str(one[name].dtype).removeprefix('torch.')}" for name, shape in shapes.items()}
    of_words = dict.fromkeys(_AS_IDS, known["input_ids"]) if "input_ids" in known else {}
    return of_words | known
