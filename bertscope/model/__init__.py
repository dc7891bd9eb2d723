"""BERT as torch modules, from small to large: attention, encoder, bert and heads.

Attribute names equal the published checkpoints' keys, so `load_state_dict` needs no mapping.
"""

from bertscope import torch_access  # noqa: F401  first: torch is imported there, with its errors in one line
from bertscope.model.attention import BertAttention, BertSdpaSelfAttention, BertSelfAttention, BertSelfOutput
from bertscope.model.bert import BertModel, BertPreTrainedModel
from bertscope.model.encoder import BertEmbeddings, BertEncoder, BertIntermediate, BertLayer, BertOutput, BertPooler
from bertscope.model.heads import CLASSES, build
from bertscope.model.lora import PeftModel

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
