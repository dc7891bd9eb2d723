"""LoRA on a BERT: settings, names, what is trained, and that no command treats it apart."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bertscope
from bertscope.analyses.dataflow import ForwardInputs
from bertscope.config import LORA_BIASES, Lora
from bertscope.measure.profile_job import Job
from bertscope.memory.derived_traces import same_events
from bertscope.memory.estimate import MemoryTraces
from bertscope.memory.step import run_model
from bertscope.settings.run_config import RunConfig
from bertscope.tracing.flops import FlopsRun
from tests.memory.steps import small, whole_trace


def adapted(text: str = "r=8", architecture: str = "BertForSequenceClassification", **fields):
    """A small source with adapters."""
    return small(architecture, **fields).with_options(lora=text)


names = st.lists(st.sampled_from(["query", "key", "output.dense", "layer.0.attention.self.value"]), min_size=1).map(
    tuple
)
numbers = st.floats(0, 1000) | st.integers(0, 1000)
loras = st.builds(
    Lora, r=st.integers(1, 999), alpha=numbers, dropout=st.floats(0, 1), target=names,
    bias=st.sampled_from(LORA_BIASES), rslora=st.booleans(), save=st.just(()) | names,
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(lora=loras)
def test_the_text_of_settings_gives_the_same_settings(lora):
    assert Lora.parse(str(lora)) == lora


def test_the_defaults_of_settings_are_those_of_peft():
    assert Lora() == Lora(r=8, alpha=8, dropout=0, target=None, bias="none", rslora=False, save=())
    assert Lora(r=16, alpha=8).scaling == 0.5
    assert Lora(r=16, alpha=8, rslora=True).scaling == 2


def test_the_trained_parameters_of_an_example_can_be_counted_by_hand(cli):
    """Source: peft 0.12.0 prints `trainable params: 296,450 || all params: 109,780,228 || trainable%: 0.2700`."""
    of_adapters = 12 * 2 * 8 * (768 + 768)  # layers x targets x r x (in + out)
    of_classifier = 768 * 2 + 2
    assert of_adapters + of_classifier == 296_450
    result = cli("count", "bert-base-uncased", "-a", "BertForSequenceClassification", "--lora", "r=8,save=classifier")
    assert result.out.startswith("109,780,228 parameters\n")
    assert "trainable               296,450 (0.2700 %), frozen 109,483,778\n" in result.out
    assert 109_780_228 == 109_483_778 + 296_450  # the frozen ones are those of the model without adapters


def test_adapters_stay_in_fp32_in_a_model_of_16_bits():
    model = run_model(adapted("r=2,save=classifier"), RunConfig(precision="bf16"))
    found = {str(parameter.dtype) for path, parameter in model.named_parameters() if "lora_" in path}
    others = {str(parameter.dtype) for path, parameter in model.named_parameters() if "lora_" not in path}
    assert (found, others) == ({"torch.float32"}, {"torch.bfloat16"})


def test_no_dropout_concerns_adapters_too():
    model = run_model(adapted("r=2,dropout=0.5"), RunConfig(dropout=False))
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


@pytest.mark.parametrize(("mode", "strategy"), [("inference", "none"), ("training", "full")])
def test_the_memory_of_a_deep_model_is_that_of_all_its_layers(mode, strategy):
    source = adapted("r=2,dropout=0.1,target=query+output.dense,bias=all", num_hidden_layers=6)
    run_config = RunConfig(batch=2, seq=8, checkpointing=strategy, mode=mode)
    traces = MemoryTraces(source)
    assert same_events(traces.trace(run_config), whole_trace(source, run_config))
    assert list(traces.verified.values()) == [True]  # so three units ran, and not every layer


def test_adapters_in_one_layer_make_all_layers_run():
    source = adapted("r=2,target=layer.3.attention.self.query", num_hidden_layers=6)
    assert not source.has_equal_layers
    assert not Lora(target=("3.output.dense",)).has_equal_layers
    traces = MemoryTraces(source)
    found = traces.trace(RunConfig(batch=1, seq=4))
    assert traces.verified == {}
    state = {block.path for block, _ in found.state if block.part == "optimizer_state"}
    assert {path.split(".")[5] for path in state} == {"3"}


def test_the_flops_of_a_deep_model_are_those_of_all_its_layers():
    source = adapted("r=2,target=query+value", num_hidden_layers=8)
    for mode in ("inference", "training"):
        run = FlopsRun(source=source, run=RunConfig(mode=mode))
        assert run.at(2, 8).rows[0].total == run.of_all_layers(2, 8).rows[0].total
    plain = FlopsRun(source=small("BertForSequenceClassification", num_hidden_layers=8))
    more = FlopsRun(source=source).at(2, 8).rows[0].forward.matmul_flops - plain.at(2, 8).rows[0].forward.matmul_flops
    assert more == 8 * 2 * (2 * 8) * 2 * 2 * (16 + 16)  # layers x targets x tokens x 2 FLOPs x r x (in + out)


def test_a_job_for_the_child_of_profile_keeps_the_adapters():
    source = replace(adapted("r=2,rslora=true,save=classifier"), config_lines={})
    assert Job.from_json(Job(source=source, run_config=RunConfig()).to_json()).source.lora == source.lora


def test_diff_shows_what_adapters_add(cli, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "base_model_name_or_path": "bert-tiny", "r": 4, "task_type": "FEATURE_EXTRACTION"}
        )
    )
    report = cli("diff", "bert-tiny", str(tmp_path), "--format", "json").json
    assert {row["path"] for row in report["rows"]} == {
        f"encoder.layer.0-1.attention.self.{layer}.lora_{part}.default.weight"
        for layer in ("query", "value") for part in "AB"
    }  # fmt: skip
    assert {"field": "lora", "a": None, "b": "r=4,alpha=8,target=query+value"} in report["fields"]
    of_adapters = 2 * 2 * 4 * (128 + 128)
    assert report["totals_b"]["distinct_params"] - report["totals_a"]["distinct_params"] == of_adapters


def test_a_forward_diagram_has_the_adapters():
    model = adapted("r=2,target=query", "BertModel").build()
    path, given = "encoder.layer.0.attention.self.query", ForwardInputs(seq=8)
    report = bertscope.diagram(model, "forward", path, forward_inputs=given)
    same = bertscope.diagram(model, "forward", f"base_model.model.{path}", forward_inputs=given)
    assert report == same
    assert "lora_B" in " ".join(node.path for node in report.nodes)


def test_explain_has_a_step_for_each_matrix_of_the_adapters(cli):
    report = bertscope.explain(adapted("r=2,target=query", "BertModel"), "encoder.layer.0.attention.self.query", seq=8)
    assert [(step.name.rpartition("query.")[2], step.params.value) for step in report.steps] == [
        ("base_layer", 16 * 16 + 16), ("lora_A.default", 16 * 2), ("lora_B.default", 2 * 16),
    ]  # fmt: skip
    assert all(item.agrees for item in report.sums)
    assert "leave --naming out" in cli("explain", "bert-tiny", "--lora", "r=2", "--naming", "tf").err


def test_adapters_of_another_family_name_the_extra_that_they_need(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("bertscope.sources.model_source.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = cli("count", str(tmp_path), "--lora", "r=8")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "bertscope[peft]" in result.err


def test_an_expectation_file_may_have_adapters(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.bertscope.yaml"
    path.write_text(f"model: bert-tiny\nlora: r=4\nexpected: {{distinct_params: {4_385_920 + 2 * 2 * 4 * 256}}}\n")
    assert cli("check", str(path)).code == 0
