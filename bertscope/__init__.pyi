"""The public names. Written by docs/make_cli.py; do not edit."""

from bertscope.analyses.check import check as check
from bertscope.analyses.doctor import doctor as doctor
from bertscope.analyses.verify import verify as verify
from bertscope.api.counts import count as count
from bertscope.api.counts import summary as summary
from bertscope.api.counts import tree as tree
from bertscope.api.explain import diagram as diagram
from bertscope.api.explain import explain as explain
from bertscope.api.explain import flops as flops
from bertscope.api.memory import estimate as estimate
from bertscope.api.memory import fit as fit
from bertscope.api.memory import fits as fits
from bertscope.api.memory import lengths as lengths
from bertscope.api.memory import plan as plan
from bertscope.api.memory import profile as profile
from bertscope.api.memory import training_script as training_script
from bertscope.api.page import diff as diff
from bertscope.api.page import report as report
from bertscope.api.run import run as run
from bertscope.api.tools import presets as presets
from bertscope.api.tools import sweep as sweep
from bertscope.api.why import why as why
from bertscope.checkpoints.reading import read_checkpoint as read_checkpoint
from bertscope.commands.agents import mcp as mcp
from bertscope.config import BertConfig as BertConfig
from bertscope.config import Lora as Lora
from bertscope.errors import BertscopeError as BertscopeError
from bertscope.model import build as build
from bertscope.model.bert import BertModel as BertModel
from bertscope.model.heads import BertForMaskedLM as BertForMaskedLM
from bertscope.model.heads import BertForMultipleChoice as BertForMultipleChoice
from bertscope.model.heads import BertForNextSentencePrediction as BertForNextSentencePrediction
from bertscope.model.heads import BertForPreTraining as BertForPreTraining
from bertscope.model.heads import BertForQuestionAnswering as BertForQuestionAnswering
from bertscope.model.heads import BertForSequenceClassification as BertForSequenceClassification
from bertscope.model.heads import BertForTokenClassification as BertForTokenClassification
from bertscope.model.heads import BertLMHeadModel as BertLMHeadModel
from bertscope.progress import listening as listening
from bertscope.reports.base import to_json as to_json
from bertscope.reports.json import from_json as from_json
from bertscope.reports.json import schema as schema
from bertscope.sources.find import load as load
from bertscope.sources.training_files import read_training_file as read_training_file

__version__: str
