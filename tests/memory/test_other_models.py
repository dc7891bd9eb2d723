"""Memory of models that are no BERTs: other families and the installed classes of transformers, and the user's own."""

import json
import socket
import warnings
from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.errors import BertscopeWarning, SelectionError
from bertscope.measure.profile import profile_report
from bertscope.measure.profile_job import Job
from bertscope.memory.derived_traces import same_events
from bertscope.memory.estimate import MemoryTraces
from bertscope.settings.rows import CodeName
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import find
from bertscope.sources.model_source import GivenModule
from bertscope.tracing.repeat import layer_stacks
from tests.conftest import EVERY_CASE, kinds
from tests.memory.plain_loop import peak_bytes, tokenized
from tests.memory.steps import fit_report, whole_trace

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
# Families with many layers -> the layers that run of them, and their runs of equal units.
_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 40, "num_heads": 2, "vocab_size": 99}
DEEP = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 99, "n_embd": 16, "n_layer": 6, "n_head": 2}, 3, [(1, 6)]),
    "gemma2": ("Gemma2ForCausalLM", {**WIDTHS, "vocab_size": 99, "num_hidden_layers": 13, "num_key_value_heads": 2,
                                     "head_dim": 8, "sliding_window": 4, "pad_token_id": 0}, 7, [(2, 6), (1, 1)]),
    "t5": ("T5ForConditionalGeneration", {**_T5, "num_layers": 6, "num_decoder_layers": 8}, 8,
           [(1, 1), (1, 5), (1, 1), (1, 7)]),  # the first layer of each stack has the biases of positions
}  # fmt: skip
OWN = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(500, 60), nn.Linear(60, 30)
    def forward(self, input_ids):
        return self.out(self.words(input_ids)).tanh()

class Pairs(Tagger):
    def forward(self, left, right):
        return super().forward(left) @ right

def half():
    return Tagger().to(torch.bfloat16)

class Chosen(Tagger):
    def forward(self, input_ids):
        chosen = super().forward(input_ids)
        return chosen[chosen > 0]

def compiled():
    return torch.compile(Tagger())

class Own(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(40, 50), nn.Tanh())
    def example_inputs(self, batch, seq):
        return (torch.ones(batch, seq, 40),)

def fails():
    raise ValueError("no way")

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
        return tokenized(ids, segments=family == "electra") | {"labels": ids.clone()}

    return peak_bytes(make_model, make_inputs, torch.optim.AdamW)


@pytest.mark.parametrize("family", ["roberta", "gpt2"], indirect=True)
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


@pytest.mark.parametrize(("family", "precision"), [("roberta", "autocast-bf16"), ("gpt2", "fp32")], indirect=["family"])
def test_selective_checkpointing_of_any_class_saves_the_products_and_not_what_is_between(family, precision):
    source, run_config = find(family[1]), RunConfig(batch=16, seq=32, precision=precision)
    traces = {name: MemoryTraces(source).trace(replace(run_config, checkpointing=name))
              for name in ("full", "selective", "none")}  # fmt: skip
    full, selective, none = (trace.peak_bytes for trace in traces.values())
    assert full < selective < none

    def products(trace):
        return sum(event.size_bytes > 0 and event.operator in ("mm", "addmm", "bmm") for event in trace.events)

    # Recomputation takes the saved products; every other strategy than full computes each of them once.
    assert products(traces["selective"]) == products(traces["none"]) < products(traces["full"])


def test_fit_keeps_the_dtypes_of_own_code_unless_a_precision_is_given(cli, own):
    def rows(*words):
        found = cli("fit", f"{own}:half", "--budget", "1MiB", "--seq", 16, "--format", "json", *words)
        assert found.code == 0, found.err
        return [(row["precision"], row["batch"]) for row in found.json["rows"]]

    (stored, half), (autocast, _) = rows()
    ((fp32, full),) = rows("--precision", "fp32")
    assert (stored, autocast, fp32) == ("stored", "autocast-bf16", "fp32")
    assert half > full


def test_a_run_does_not_change_a_module_that_other_runs_share(own):
    source = find(CodeName(f"{own}:ready"))
    source.build().to(torch.bfloat16).requires_grad_(False)
    assert {(param.dtype, param.requires_grad) for param in source.build().parameters()} == {(torch.float32, True)}


MEASURED = ("--batch", 3, "--seq", 16, "--steps", 1, "--threads", 1, "--format", "json")


def peaks(result):
    """The peaks that `profile` estimates and measures."""
    assert result.code == 0, result.err
    (variant,) = result.json["variants"]
    return [max(phase["peak_bytes"] for phase in variant[part]["phases"]) for part in ("estimated", "measured")]


@pytest.mark.parametrize("attribute", ["half", *EVERY_CASE * ("Own",)])
def test_profile_measures_own_code_as_it_estimates_it(cli, own, attribute):
    result = cli("profile", f"{own}:{attribute}", *MEASURED)
    estimated, measured = peaks(result)
    assert measured == pytest.approx(estimated, rel=1e-3)
    assert result.json["subject"]["dtype"] == "stored"


def test_the_remedy_for_a_step_that_reads_values_is_a_measurement(cli, own):
    refused = cli("estimate", f"{own}:Chosen")
    assert (refused.code, refused.out) == (2, "")
    assert "'bertscope profile' measures a step" in refused.err.splitlines()[-1]
    (variant,) = cli("profile", f"{own}:Chosen", *MEASURED).json["variants"]
    assert variant["estimated"] is None
    assert max(phase["peak_bytes"] for phase in variant["measured"]["phases"]) > 4 * 500 * 60


def test_inputs_that_nothing_describes_are_given_by_an_option(cli, own):
    given = ("--input", "left=BxS:int64", "--input", "right=Bx30x7:float32")
    estimated, measured = peaks(cli("profile", f"{own}:Pairs", *given, *MEASURED))
    assert measured == pytest.approx(estimated, rel=1e-3)
    found = cli("fit", f"{own}:Pairs", "--budget", f"{2 * estimated}B", "--seq", 16, "--precision", "fp32", *given,
                "--format", "json")  # fmt: skip
    assert found.code == 0, found.err
    assert found.json["rows"][0]["batch"] > 3
    refused = cli("profile", f"{own}:Pairs", *given[:2], *MEASURED)
    assert (refused.code, refused.out) == (2, "")
    assert "add --input right=SHAPE:DTYPE" in refused.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("attribute", "words"), [("ready", "a real run needs a function or class"), ("fails", "ValueError (own_")]
)
def test_own_code_that_no_child_can_build_is_one_line(cli, own, attribute, words):
    result = cli("profile", f"{own}:{attribute}", *MEASURED)
    assert (result.code, result.out) == (2, "")
    assert words in result.err.splitlines()[-1]


def test_a_source_of_another_family_goes_to_the_child_as_it_is(tmp_path):
    for source in (find(written(tmp_path, "gpt2"), attention="eager"), find(CodeName("own:Tagger"))):
        found = Job.from_json(Job(source=source, run_config=RunConfig()).to_json()).source
        assert (found, found.settings) == (source, source.settings)


def test_a_module_that_only_this_process_has_is_refused_before_a_child_starts():
    job = Job(source=GivenModule(name="given", module=torch.nn.Linear(2, 3)), run_config=RunConfig())
    with pytest.raises(SelectionError, match="another process measures only what it can build by name"):
        profile_report([job])


def test_a_real_run_of_another_family_has_no_network(tmp_path):
    with find(written(tmp_path, "gpt2")).confined(), pytest.raises(PermissionError):
        socket.create_connection(("localhost", 9))


LABELLED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
            "vocab_size": 500, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "head", "fields", "labels"),
    [
        ("DebertaV2", "ForSequenceClassification", {"num_labels": 3}, (4,)),
        *EVERY_CASE * (
            ("Electra", "ForPreTraining", {"embedding_size": 32}, (4, 16)),
            ("Bart", "ForSequenceClassification",
             {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "eos_token_id": 2}, (4,)),
        ),
    ],
)  # fmt: skip
def test_a_loss_over_the_valid_labels_is_estimated_with_all_of_them(family, head, fields, labels):
    def make():
        config = getattr(transformers, f"{family}Config")(**LABELLED, **fields)
        return getattr(transformers, f"{family}{head}")(config)

    def inputs(_):
        mask = {"attention_mask": torch.ones(4, 16, dtype=torch.long)} if family == "Electra" else {}
        ids = torch.zeros(4, 16, dtype=torch.long)
        ids[:, -1] = 2  # the end token, at which BART's classifier looks
        return {"input_ids": ids, "labels": torch.zeros(labels, dtype=torch.long)} | mask

    with pytest.warns(BertscopeWarning, match="all are taken as valid, the upper bound"):
        report = bertscope.estimate(make(), inputs(None))
    true = peak_bytes(make, inputs, lambda params: torch.optim.AdamW(params, lr=0.0))
    assert report.variants[0].estimated.peak.peak_bytes == pytest.approx(true, rel=1e-3)


class Around(torch.nn.Module):
    """A module around a model, as peft's and Lightning's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_a_loss_over_valid_labels_is_estimated_in_a_module_around_the_model_too():
    config = transformers.DebertaV2Config(**LABELLED, num_labels=3)
    model = transformers.DebertaV2ForSequenceClassification(config)
    inputs = {"input_ids": torch.zeros(4, 16, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}
    with pytest.warns(BertscopeWarning, match="all are taken as valid, the upper bound"):
        inner, outer = (bertscope.estimate(module, inputs).variants[0].estimated for module in (model, Around(model)))
    assert outer.peak.peak_bytes == inner.peak.peak_bytes > 0


def test_a_decoder_with_a_cache_of_keys_has_a_plan(cli, tmp_path):
    """A layer that runs again would add its keys to the cache again."""
    (architecture, config, *_), few = DEEP["t5"], {"num_layers": 1, "num_decoder_layers": 2}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": [architecture], **config, **few})
    )
    found = cli("plan", tmp_path, "--budget", "1KiB", "--batch", 2, "--seq", 7, "--format", "json")
    assert found.code == 1, found.err
    assert found.json["rows"][0]["cost"]["recompute_flops"] > 0


@pytest.mark.parametrize("name", [*DEEP][not EVERY_CASE :])  # one stack, as a BERT
def test_few_layers_of_each_stack_of_a_family_stand_for_all(name, tmp_path):
    architecture, config, ran, runs = DEEP[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, "architectures": [architecture], **config}))
    source, run_config = find(path), RunConfig(batch=2, seq=8, optimizer="sgd", checkpointing="full")
    if name == "t5":  # recomputation of the first layer frees in another order
        run_config = replace(run_config, checkpointing="none")
    assert [tuple(run) for stack in layer_stacks(source) for run in stack.runs] == runs
    short, whole = MemoryTraces(source).trace(run_config), whole_trace(source, run_config)
    assert (short.traced_layers, short.state) == (ran, whole.state)
    assert same_events(short, whole)


BODY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
WORDS = BODY | {"vocab_size": 500, "max_position_embeddings": 64}


def words(model):
    """Ids of words, which are labels too."""
    ids = torch.randint(1, 500, (3, 24))
    return {"input_ids": ids, "labels": ids.clone()}


def masked(model):
    """Words with a mask that hides none."""
    return words(model) | {"attention_mask": torch.ones(3, 24, dtype=torch.long)}


def pictures(model):
    """Pictures with labels."""
    return {"pixel_values": torch.rand(3, 3, 32, 32), "labels": torch.zeros(3, dtype=torch.long)}


OF_OTHERS = {
    "hidden states and attentions": ("BertForMaskedLM", "BertConfig", words, WORDS | {
        "output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}),
    "past keys and values": ("GPT2LMHeadModel", "GPT2Config", words, {
        "vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "encoder and decoder": ("BartForConditionalGeneration", "BartConfig", words, {
        "vocab_size": 500, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64}),
    "one more stack": ("T5ForConditionalGeneration", "T5Config", words, {
        "vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0}),
    "windows of a picture": ("SwinModel", "SwinConfig", lambda model: {"pixel_values": torch.rand(3, 3, 32, 32)}, {
        "image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": 4}),
    "rotary": ("LlamaForCausalLM", "LlamaConfig", masked, WORDS | {"num_key_value_heads": 2}),
    "pictures": ("ViTForImageClassification", "ViTConfig", pictures, BODY | {"image_size": 32, "patch_size": 8}),
    "no loss": ("BertModel", "BertConfig", lambda model: {"input_ids": words(model)["input_ids"]}, WORDS),
}  # fmt: skip


@kinds("name, loop", OF_OTHERS, [{"loop": "plain", "accumulate": 2}, {"loop": "trainer"}])
def test_each_loop_around_a_model_of_another_family_is_estimated(name, loop):
    """Every tensor of an output lives until the next forward has returned, or is freed before backward."""
    kind, config, inputs, fields = OF_OTHERS[name]

    def model():
        return getattr(transformers, kind)(getattr(transformers, config)(**fields))

    real = peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), **loop)
    (variant,) = bertscope.estimate(model().train(), inputs(None), **loop).variants
    assert variant.estimated.peak.peak_bytes == pytest.approx(real, rel=1e-4)
