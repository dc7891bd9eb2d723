"""Every family of transformers by the same code: the counts and FLOPs of a tiny model, compared with torch's own.

These tests also pass with transformers 5, where a family that it does not have any more is skipped.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertscope.analyses.flops import FlopsRun, flops_model
from bertscope.analyses.memory.steps import estimate_memory
from bertscope.analyses.params import count
from bertscope.errors import BertscopeError
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import find
from tests.analyses.memory.plain_loop import peak_bytes, tokenized
from tests.conftest import data

transformers = pytest.importorskip("transformers", reason="it is in the extra 'test'")

BATCH, SEQ = 2, 8
TABLE = data("families.yaml")
SIZES, FAMILIES = TABLE["settings"]["sizes"], TABLE["families"]


def reference(model_type: str, name: str, settings: dict) -> torch.nn.Module:
    """Return the model that transformers builds on the CPU, with eager kernels."""
    config = transformers.CONFIG_MAPPING[model_type].from_dict(settings, attn_implementation="eager")
    model = getattr(transformers, name)(config).eval()
    if getattr(config, "pad_token_id", 0) is None:  # classifiers of GPT-2 need one for a batch of 2
        model.config.pad_token_id = 0
    if hasattr(model, "set_experts_implementation"):  # of transformers 5; torch does not count the default kernel
        model.set_experts_implementation("eager")
    return model


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("model_type", "name", "settings", "inputs"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_family_has_the_parameters_and_flops_that_torch_counts(tmp_path, model_type, name, settings, inputs):
    if model_type not in transformers.CONFIG_MAPPING or not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name == "XLNetLMHeadModel" and transformers.__version__ < "5":  # its tokenizer returns segments before version 5
        inputs = inputs | {"token_type_ids": ((BATCH, SEQ), 4)}  # relative to them it computes scores
    settings = json.loads(json.dumps(settings))
    given = settings | {"model_type": model_type, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    model = reference(model_type, name, settings)
    expected = sum(param.numel() for param in model.parameters())
    source = find(tmp_path)
    assert count(source.build()).totals.distinct_params == expected
    real = {key: torch.randint(3, top, shape) if top else torch.rand(shape) for key, (shape, top) in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        model(**real)
    found = flops_model(FlopsRun(source=source), [BATCH], [SEQ]).rows[0].forward
    assert found.matmul_flops == counter.get_total_flops() > 0


def test_the_memory_of_longformer_which_divides_sizes_as_tensors_is_that_of_a_plain_loop(tmp_path):
    settings = SIZES | {"hidden_size": 64, "intermediate_size": 96, "attention_window": 4, "vocab_size": 500}
    given = settings | {"model_type": "longformer", "architectures": ["LongformerForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = estimate_memory(find(tmp_path), RunConfig(batch=BATCH, seq=SEQ))

    def inputs(model):
        ids = torch.randint(3, 90, (BATCH, SEQ))
        return tokenized(ids) | {"labels": ids.clone()}

    def build():
        config = transformers.CONFIG_MAPPING["longformer"].from_dict(settings)
        return transformers.LongformerForMaskedLM(config)

    assert found.peak.peak_bytes == pytest.approx(peak_bytes(build, inputs, torch.optim.AdamW), rel=1e-3)


def test_a_class_of_another_family_is_refused_with_those_that_fit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "roberta"}))
    with pytest.raises(BertscopeError, match="did you mean 'RobertaForMaskedLM'"):
        find(tmp_path, architecture="RobertaForMaskedLMs").build()
    with pytest.raises(BertscopeError, match="unknown architecture 'ViTModel' for a roberta"):
        find(tmp_path, architecture="ViTModel").build()


def test_count_names_the_version_of_transformers_whose_classes_decide_the_number(cli, tmp_path):
    import transformers

    settings = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    version = f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    assert version in cli("count", str(tmp_path)).out
    assert "transformers" not in cli("count", "bert-tiny").out
