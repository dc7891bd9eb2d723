"""`fit` of models that are no BERTs: other families of transformers, and the user's own."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.memory.fit import fit_report
from bertscope.run_config import RunConfig
from bertscope.sources.find import find
from tests.analyses.memory.plain_loop import peak_bytes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 99, "max_position_embeddings": 40}
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
# model_type -> class, and its tiny configuration
FAMILIES = {
    "roberta": ("RobertaForMaskedLM", {**SIZES, **WIDTHS}),
    "electra": ("ElectraForMaskedLM", {**SIZES, **WIDTHS, "embedding_size": 8}),
    "distilbert": ("DistilBertForMaskedLM", {**SIZES, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 40}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}),
}
OWN = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 6), nn.Linear(6, 3)
    def forward(self, input_ids):
        return self.out(self.words(input_ids))

def half():
    return Tagger().to(torch.bfloat16)

ready = Tagger()
"""


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    """The name of a family, and the path of its tiny config.json."""
    return request.param, written(tmp_path, request.param)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The name of a module of the user's own in the working directory."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return name


def written(folder, family):
    model_class, fields = FAMILIES[family]
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, "architectures": [model_class], **fields}))
    return path


def plain_peak(family, batch, seq):
    """The peak of a plain training loop over a model that transformers itself builds."""
    model_class, fields = FAMILIES[family]

    def make_model():
        config = transformers.AutoConfig.for_model(family, **fields)
        return getattr(transformers, model_class)(config)

    def make_inputs(model):
        ids = torch.randint(2, 99, (batch, seq))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    return peak_bytes(make_model, make_inputs, torch.optim.AdamW)


def test_the_batch_that_fit_finds_fits_a_plain_loop_and_one_more_does_not(family):
    name, path = family
    source, run_config = find(path), RunConfig(batch=5, seq=16)
    budget = MemoryTraces(source).trace(run_config).peak_bytes
    (row,) = fit_report(source, [run_config], [16], budget).rows
    assert row.batch == 5
    tolerance = 1 + 1e-3  # of an estimate in fp32
    assert plain_peak(name, row.batch, 16) <= budget * tolerance
    assert plain_peak(name, row.batch + 1, 16) > budget


def test_fit_tries_the_strategies_that_the_model_takes(cli, tmp_path, own):
    def fit(model, *words):
        return cli("fit", model, "--budget", "2MiB", "--seq", 16, "--precision", "fp32", "--format", "json", *words)

    strategies = [[row["checkpointing"] for row in fit(model).json["rows"]]
                  for model in (written(tmp_path, "roberta"), f"{own}:Tagger")]  # fmt: skip
    assert strategies == [["none", "full"], ["none"]]
    refused = fit(f"{own}:Tagger", "--checkpointing", "every-2")
    assert (refused.code, refused.out) == (2, "")
    assert "takes --checkpointing none" in refused.err.splitlines()[-1]


def test_fit_keeps_the_dtypes_of_own_code_unless_a_precision_is_given(cli, own):
    def rows(*words):
        found = cli("fit", f"{own}:half", "--budget", "1MiB", "--seq", 16, "--format", "json", *words)
        assert found.code == 0, found.err
        return [(row["precision"], row["batch"]) for row in found.json["rows"]]

    (stored, half), (autocast, _) = rows()
    ((fp32, full),) = rows("--precision", "fp32")
    assert (stored, autocast, fp32) == ("stored", "bf16 autocast", "fp32")
    assert half > full


def test_a_run_does_not_change_a_module_that_other_runs_share(own):
    source = find(f"{own}:ready")
    source.build().to(torch.bfloat16).requires_grad_(False)
    assert {(param.dtype, param.requires_grad) for param in source.build().parameters()} == {(torch.float32, True)}


def test_eager_attention_of_another_family_leaves_the_margin_too(tmp_path, own):
    eager = find(written(tmp_path, "roberta"), attention="eager")
    run_config = RunConfig(seq=8, device="cuda")
    reports = [fit_report(source, [run_config], [8], 2**31, batch=1) for source in (eager, find(f"{own}:Tagger"))]
    assert [report.subject.attention for report in reports] == ["eager", None]
    assert reports[0].margin > reports[1].margin == 0
    assert [report.other_head for report in reports] == ["", ""]  # a hint for BERTs only
