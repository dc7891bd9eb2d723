"""The scripts of training loops, each run on the fake GPU: python -m tests.dry_run.loops."""

import json
import sys

import bertscope
from bertscope.dry_run.child import installed
from bertscope.dry_run.recording import Recording
from bertscope.dry_run.script import ScriptRun
from tests.conftest import EVERY_CASE

RUN = {"device": "cuda", "batch": 4, "seq": 32, "checkpointing": "none", "loop": "freed", "calibration": False}
SETTINGS = {
    "fp32": {},
    "plain": {"loop": "plain"},
    "lightning": {"loop": "lightning"},
    "lightning with accumulation": {"loop": "lightning", "accumulate": 2},
    "plain under autocast": {"loop": "plain", "precision": "autocast-bf16", "accumulate": 2},
    "autocast-fp16": {"precision": "autocast-fp16", "grad_scaler": True},
    "autocast-bf16": {"precision": "autocast-bf16"},
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": "full"},
    "reentrant": {"checkpointing": "full", "reentrant": True},
    "checkpointing under autocast": {"checkpointing": "full", "precision": "autocast-bf16"},
    "accumulation": {"accumulate": 2},
    "clipping": {"clip_grad_norm": True},
    "eager": {"attention": "eager"},
    "eager under autocast": {"attention": "eager", "precision": "autocast-fp16", "grad_scaler": True},
    "sgd and evaluation": {"loop": "plain", "optimizer": "sgd", "momentum": 0.9, "eval_batch": 9},
    "padding": {"padding": 0.25, "ema": True, "dropout": False},
    "frozen": {"freeze": ("embeddings", "encoder.layer.0"), "precision": "bf16"},
    "mnrl": {"loss": "mnrl", "hard_negatives": 1, "architecture": "BertModel"},
    "mnrl under autocast": {"loss": "mnrl", "precision": "autocast-bf16", "architecture": "BertModel"},
    "cached mnrl and evaluation": {
        "loss": "cached-mnrl:2", "padding": 0.25, "accumulate": 2, "eval_batch": 6, "architecture": "BertModel",
    },
    "reranker": {"loss": "reranker", "architecture": "BertForSequenceClassification"},
    "evaluation with logits": {"loop": "plain", "eval_batch": 9, "eval_samples": 30, "checkpointing": "full"},
    "trainer and evaluation": {
        "loop": "trainer", "eval_batch": 9, "eval_samples": 30, "precision": "autocast-bf16", "accumulate": 3,
        "clip_grad_norm": True, "padding": 0.25,
    },
    "chunked loss": {"loss_chunks": 4, "precision": "autocast-bf16", "eval_batch": 9},
    "offloaded activations": {"offload_activations": True, "loop": "plain"},
    "offloaded activations of checkpointing": {
        "offload_activations": True, "checkpointing": "full", "precision": "autocast-bf16", "accumulate": 2,
    },
    "offloaded optimizer": {"offload_optimizer": True, "clip_grad_norm": True, "accumulate": 2, "precision": "bf16"},
    "step in backward": {"step_in_backward": True, "loss_chunks": 8, "ema": True},
    "distil": {"loss": "distil:bert-mini", "architecture": "BertModel"},
}  # fmt: skip
TWICE = {  # settings that others have too
    "fp32", "plain", "autocast-bf16", "autocast-fp16", "bf16", "checkpointing", "accumulation", "clipping", "eager",
    "mnrl", "plain under autocast", "lightning with accumulation", "checkpointing under autocast",
}  # fmt: skip
if not EVERY_CASE:
    SETTINGS = {name: settings for name, settings in SETTINGS.items() if name not in TWICE}


def source(settings):
    """The model of these settings, without them, and the other ones."""
    others = RUN | settings
    kernel, architecture = others.pop("attention", "sdpa"), others.pop("architecture", "BertForMaskedLM")
    return bertscope.load("bert-tiny", architecture=architecture, attention=kernel), others


def main() -> None:
    found = {}
    for name, settings in SETTINGS.items():
        model, others = source(settings)
        script = compile(bertscope.training_script(model, **others), name, "exec")
        with installed(ScriptRun(script=name, steps=100)) as here:
            exec(script, {})
            here.recorder.close()
            last = [phase for phase in Recording(here.recorder.log, rows=here.rows).phases() if phase.step == 3]
        found[name] = {
            phase.phase: (phase.peak_bytes, phase.cost.peak.operator, phase.cost.peak.path) for phase in last
        }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
