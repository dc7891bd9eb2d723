"""BERT as torch modules, from small to large: attention, encoder, bert and heads.

Attribute names equal the published checkpoints' keys, so `load_state_dict` needs no mapping.
"""

from bertscope import torch_access  # first: torch is imported there, with its errors in one line
from bertscope.config import HEADS, BertConfig, unknown_architecture
from bertscope.model import heads
from bertscope.model.attention import BertAttention, BertSdpaSelfAttention, BertSelfAttention, BertSelfOutput
from bertscope.model.bert import BertModel, BertPreTrainedModel
from bertscope.model.encoder import BertEmbeddings, BertEncoder, BertIntermediate, BertLayer, BertOutput, BertPooler
from bertscope.model.lora import PeftModel

CLASSES: dict[str, type[BertPreTrainedModel]] = {name: getattr(heads, name) for name in HEADS}

__all__ = [
    "CLASSES",
    "BertAttention",
    "BertEmbeddings",
    "BertEncoder",
    "BertIntermediate",
    "BertLayer",
    "BertModel",
    "BertOutput",
    "BertPooler",
    "BertPreTrainedModel",
    "BertSdpaSelfAttention",
    "BertSelfAttention",
    "BertSelfOutput",
    "PeftModel",
    "build",
]


def build(
    config: BertConfig,
    architecture: str = "BertModel",
    *,
    add_pooling_layer: bool = True,
    device: str | torch_access.torch.device = "meta",
) -> BertPreTrainedModel:
    """Build the model of `architecture` on `device`; on meta this needs no memory for weights.

    `add_pooling_layer` applies only to BertModel. Raises ConfigError for an unknown architecture.

    >>> model = bertscope.build(bertscope.BertConfig(num_hidden_layers=1), "BertForMaskedLM")
    >>> model.bert.embeddings.word_embeddings.weight.device
    device(type='meta')
    """
    if architecture not in CLASSES:
        raise unknown_architecture(architecture)
    with torch_access.on_device(device):
        if architecture == "BertModel":
            return BertModel(config, add_pooling_layer=add_pooling_layer)
        return CLASSES[architecture](config)
