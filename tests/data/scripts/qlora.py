"""python qlora.py SETTINGS: a real QLoRA loop with bitsandbytes and peft on the CPU; prints its peak in bytes.

`qlora.py SETTINGS cuda` is the same loop for a dry run. With `code` among the settings a plan's code is installed.

The model is built as in tests/memory/test_quantized.py; SETTINGS are keywords of `estimate`, as JSON.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import bitsandbytes as bnb
import peft
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from tests.real_run import peaks

ADAPTER = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
settings, (device,) = json.loads(sys.argv[1]), sys.argv[2:] or ["cpu"]
kind, _, is_double = settings["quantize"].partition("-")
precision, strategy = settings["precision"], settings.get("checkpointing", "none")
autocast = precision.startswith("autocast")
is_prepared = autocast and kind != "int8"
dtype = torch.bfloat16 if precision == "bf16" or is_prepared else torch.float32
torch.set_num_threads(1)
torch.set_default_dtype(dtype)
model = LlamaForCausalLM(LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=1000))  # fmt: skip
torch.set_default_dtype(torch.float32)
in_4bit = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": bool(is_double),
           "bnb_4bit_compute_dtype": dtype}  # fmt: skip
weights = dict(model.named_parameters())
how = BitsAndBytesConfig(**{"load_in_8bit": True} if kind == "int8" else in_4bit)
replace_with_bnb_linear(model, get_keys_to_not_convert(model), how)
for path, layer in model.named_modules():
    if isinstance(layer, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
        options = {name: value for name, value in vars(layer.weight).items() if name != "SCB"}
        weight = type(layer.weight)(weights[f"{path}.weight"].detach(), requires_grad=False, **options)
        layer.weight = weight.to(device)
del weights
model.to(device)
setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
if is_prepared:
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = peft.get_peft_model(model, peft.LoraConfig(**ADAPTER, use_dora="dora" in settings)).train()
if strategy == "full":
    model.gradient_checkpointing_enable({"use_reentrant": settings.get("reentrant", False)})
    model.enable_input_require_grads()
if "code" in settings:
    planned = {}
    exec(settings["code"], planned)
    planned["save_operators"](model, planned["PLAN"])
ids = torch.randint(0, 1000, (4, 64)).to(device)
batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
with torch.no_grad():
    model(**batch)  # an 8-bit layer moves its weight in its first forward pass


def tensors():
    for layer in model.modules():
        yield from (tensor for tensor in (*layer._parameters.values(), *layer._buffers.values()) if tensor is not None)
        state = getattr(layer._parameters.get("weight"), "quant_state", None)
        nested = getattr(state, "state2", None)
        named = ((state, "absmax code offset"), (nested, "absmax code"), (vars(layer).get("state"), "CB SCB"))
        values = (getattr(owner, name, None) for owner, names in named for name in names.split())
        yield from (value for value in values if isinstance(value, torch.Tensor))


storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors()}
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])


def run():
    while True:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            output = model(**batch)
        output.loss.backward()
        optimizer.step()


if device == "cpu":
    found = peaks(run, 3)
    state = sum(storages.values()) + sum(value.nbytes for value in batch.values())
    print("REAL", state + found["steps"][2][0])
else:
    run()
