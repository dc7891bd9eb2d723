"""The names of weights of llama.cpp, TensorFlow and Flax, translated to those of transformers' BERT in torch.

Sources: the names of the architecture BERT in `constants.py` of the package gguf 0.19 and the conversion of
llama.cpp; `convert_bert_original_tf_checkpoint_to_pytorch` and `modeling_flax_pytorch_utils` of transformers 4.43.
"""

import re
from dataclasses import replace

from bertscope.reports.checkpoint import StoredTensor

_GGUF = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "cls": "pooler.dense", "cls.output": "classifier",
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
# The parameters of a head have their own names in TensorFlow.
_HEADS = {
    "cls.predictions.output_bias": "cls.predictions.bias", "output_weights": "classifier.weight",
    "cls.seq_relationship.output_weights": "cls.seq_relationship.weight", "output_bias": "classifier.bias",
    "cls.seq_relationship.output_bias": "cls.seq_relationship.bias",
}  # fmt: skip
_ENDS = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


def in_torch(tensor: StoredTensor, form: str) -> tuple[str, StoredTensor]:
    """Return the name of a tensor in torch, and the tensor with its shape there; a kernel is a transposed weight."""
    if form == "gguf":
        module, _, end = tensor.name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        inner = _GGUF.get(layer[2] if layer else module)
        if inner is None:
            return tensor.name, tensor
        return f"encoder.layer.{layer[1]}.{inner}.{end}" if layer else f"{inner}.{end}", tensor
    if form not in ("tensorflow", "flax"):
        return tensor.name, tensor
    name = re.sub(r"\blayer_(\d+)\b", r"layer.\1", tensor.name.replace("/", ".")).removeprefix("params.")
    module, _, end = name.rpartition(".")
    if end == "kernel":
        tensor = replace(tensor, shape=tensor.shape[::-1])
    if end in _ENDS:
        return f"{module}.{_ENDS[end]}", tensor
    return _HEADS.get(name, f"{name}.weight" if end.endswith("_embeddings") else name), tensor
