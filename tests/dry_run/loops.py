"""Training loops as a tutorial prints them, each run on the fake card: python -m tests.dry_run.loops."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext

import torch

import bertscope
from bertscope.dry_run.child import installed
from bertscope.dry_run.recording import Recording
from bertscope.dry_run.script import ScriptRun

SHAPE = (4, 32)  # batch and length
SETTINGS = {
    "fp32": {},
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
    "sgd": {"optimizer": "sgd", "momentum": 0.9},
}


def train(attention="sdpa", precision="fp32", checkpointing="none", reentrant=False, accumulate=1, clip_grad_norm=False,
          grad_scaler=False, optimizer="adamw", momentum=0.0, steps=3) -> None:  # fmt: skip
    """Train a BERT with a masked-LM head."""
    source = bertscope.load("bert-tiny", architecture="BertForMaskedLM", attention=attention)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = source.build(device="cpu").to(dtype).cuda().train()
    model.bert.uses_transformers_masks, model.bert.hides_positions = True, False  # as an estimate has them
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if optimizer == "adamw":
        update = torch.optim.AdamW(model.parameters())
    else:
        update = torch.optim.SGD(model.parameters(), 0.1, momentum)
    scaler = torch.amp.GradScaler("cuda", enabled=grad_scaler)
    lower = {"autocast-fp16": torch.float16, "autocast-bf16": torch.bfloat16}.get(precision)
    ids = torch.randint(0, 1000, SHAPE)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": torch.zeros_like(ids),
        "labels": ids,
    }
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast("cuda", dtype=lower) if lower else nullcontext():
                loss = model(**batch).loss
                if accumulate > 1:
                    loss = loss / accumulate
            scaler.scale(loss).backward()
            del loss
        if clip_grad_norm:
            scaler.unscale_(update)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(update)
        scaler.update()
        update.zero_grad()


def main() -> None:
    found = {}
    for name, settings in SETTINGS.items():
        with installed(ScriptRun(script=name, steps=100)) as here:
            train(**settings)
            here.recorder.close()
            last = [phase for phase in Recording(here.recorder.log, rows=here.rows).phases() if phase.step == 3]
        found[name] = {
            phase.phase: (phase.peak_bytes, phase.cost.peak.operator, phase.cost.peak.path) for phase in last
        }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
