"""Adapters in a plain loop, of `--lora` and of the installed peft, whose models are counted too."""

import json

import pytest
import torch
import transformers

import bertscope
from bertscope.config import BertConfig, Lora
from bertscope.memory.estimate import MemoryTraces
from bertscope.memory.step import TORCH_DTYPES, run_model
from bertscope.model import PeftModel, build
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import OPTIMIZERS
from bertscope.sources.bert import BertSource
from bertscope.tracing.flops import FlopsRun
from tests.memory.plain_loop import peak_bytes

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20,
}  # fmt: skip
WIDE = SIZES | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 32}
LOOPS = [
    {},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reentrant": True},
    {"optimizer": "sgd"},
    {"accumulate": 2},
    {"accumulate": 2, "checkpointing": "full", "optimizer": "sgd"},
]
BATCH, SEQ = 3, 24


def measured(make, run_config: RunConfig) -> int:
    """The peak of a plain training loop."""

    def inputs(model):
        ids = torch.randint(0, 500, (BATCH, SEQ))
        return {"input_ids": ids, "labels": torch.zeros(BATCH, dtype=torch.long)}

    kind = getattr(torch.optim, OPTIMIZERS[run_config.optimizer].class_name)
    return peak_bytes(make, inputs, lambda params: kind(params, lr=0.0), accumulate=run_config.accumulate)


TEXTS = ["r=8,alpha=16,dropout=0.05", "r=4,target=all-linear,save=LayerNorm,bias=all"]


@pytest.mark.parametrize(("text", "loop"), [*((TEXTS[0], loop) for loop in LOOPS[2:5]), (TEXTS[1], LOOPS[5])], ids=str)
def test_the_estimate_of_our_model_is_the_peak_of_a_plain_loop(text, loop):
    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)
    name, config, lora = "BertForSequenceClassification", BertConfig(**WIDE), Lora.parse(text)
    source = BertSource(name="own", config=config, architecture=name, lora=lora)

    def make():
        model = PeftModel(build(config, name, device="cpu"), lora)
        source.checkpoint(model, run_config.checkpointing, reentrant=run_config.reentrant)
        return model

    assert MemoryTraces(source).trace(run_config).peak_bytes == pytest.approx(measured(make, run_config), rel=1e-3)


@pytest.mark.parametrize("loop", [LOOPS[2], LOOPS[5]], ids=str)
def test_the_estimate_of_pefts_model_is_the_peak_of_a_plain_loop(loop):
    import peft  # here, since it takes seconds: the other workers of the tests need none

    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)

    def make():
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**WIDE))
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1))
        if run_config.checkpointing != "none":
            base = model.get_base_model()
            base.gradient_checkpointing_enable({"use_reentrant": run_config.reentrant})
            base.enable_input_require_grads() if run_config.reentrant else None
        return model

    given = {"input_ids": torch.ones(BATCH, SEQ, dtype=torch.long), "labels": torch.zeros(BATCH, dtype=torch.long)}
    run = {field: getattr(run_config, field) for field in ("optimizer", "accumulate")}
    (variant,) = bertscope.estimate(make(), given, **run).variants
    found = max(phase.peak_bytes for phase in variant.estimated.phases)
    assert found == pytest.approx(measured(make, run_config), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adalora_trains_the_parameters_that_peft_leaves_trainable(precision, tmp_path):
    import peft

    config = peft.AdaLoraConfig(target_modules=["query"], total_step=10)
    base = transformers.BertModel(transformers.BertConfig(**SIZES)).to(TORCH_DTYPES[precision])
    real = peft.get_peft_model(base, config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **SIZES}))
    config.save_pretrained(tmp_path)
    ours = run_model(bertscope.load(tmp_path / "config.json", lora=str(tmp_path)), RunConfig(precision=precision))
    trained = [
        [(param.shape, param.dtype) for param in model.parameters() if param.requires_grad] for model in (real, ours)
    ]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_flops_of_pefts_model_are_those_of_ours(mode):
    import peft

    base = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1))
    theirs = bertscope.flops(model, torch.ones(1, 8, dtype=torch.long), mode=mode).rows[0]
    lora = Lora(r=4, dropout=0.1, save=("classifier",))
    source = BertSource(name="own", config=BertConfig(**SIZES), architecture="BertForSequenceClassification", lora=lora)
    ours = FlopsRun(source=source, run=RunConfig(mode=mode)).at(1, 8).rows[0]
    for phase in ("forward", "backward"):
        assert getattr(theirs, phase).matmul_flops == getattr(ours, phase).matmul_flops
