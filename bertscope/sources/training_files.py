"""Training files: `TrainingArguments` of transformers as JSON, and configurations of accelerate and of two trainers.

Each key has one of four effects on the memory of a training step: it sets settings of a run (rows name their keys), it
has none, it is not modelled, or it is unknown.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bertscope.errors import BertscopeError, SourceError
from bertscope.frozen import dataclass
from bertscope.reports.memory import TrainingFile, TrainingKey
from bertscope.settings.resolve import Layer
from bertscope.settings.run_config import AUTOCAST, SETTINGS, TRAINER
from bertscope.settings.training_arguments import NotModelledError, whole_number
from bertscope.text_files import Entry, read_mapping, readable
from bertscope.text_files import Mapping as Entries
from bertscope.units import BF16, FP16

_WANTED = (
    "give the output of TrainingArguments.to_json_string() as a .json file, or a configuration of accelerate "
    "(default_config.yaml), axolotl or LLaMA-Factory"
)
# A torch file is a zip archive, in old versions a pickle, whose first opcode is PROTO (pickletools in the standard
# library).
_ARCHIVES = (b"PK\x03\x04", b"\x80")
Fields = dict[str, Any]  # settings and their values
# Key -> the settings that it sets, each with its rule. Those of one format occur in files of the other without harm.
_USED = {
    key: {name: own.trainer[key] for name, own in SETTINGS.items() if key in own.trainer}
    for row in SETTINGS.values()
    for key in row.trainer
}


def _fields(key: str, value: Any, given: Mapping[str, Any]) -> Fields:
    """Return the settings that a key sets; raise NotModelledError or ValueError."""
    found = {name: rule(value, given) for name, rule in _USED.get(key, {}).items()}
    return {name: item for name, item in found.items() if item is not None}


def _is_off(value: Any) -> bool:
    """Return True for a value with which a feature is not used."""
    if isinstance(value, dict):  # such as dynamo_config, whose backend may be NO
        return all(_is_off(item) for item in value.values())
    return value is None or value is False or value in ("", "no", "NO") or value == []


@dataclass(frozen=True)
class _Absent:
    """A feature that is not modelled: its effect, and the values with which it is not used."""

    effect: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """Return True if the feature is not used."""
        return _is_off(value) or value in self.off


_COMPILER = "the compiler fuses operators and plans their memory"
_SHARDS = "parameters, gradients or optimizer state are divided between processes or moved to the CPU"
_REPLICAS = "each process needs in addition the buckets of its gradients"
_TPU = "a TPU"


@dataclass(frozen=True)
class _Format:
    """A format of training files: the keys that identify it, and the effect of each key."""

    name: str
    identifying: tuple[str, ...]
    absent: dict[str, _Absent]
    no_effect: frozenset[str] = field(default_factory=frozenset)
    fields: Fields = field(default_factory=dict)  # whatever the keys are
    renamed: dict[str, str] = field(default_factory=dict)  # the key of TrainingArguments that a key becomes
    settings: dict[str, Callable[[Any], Fields]] = field(default_factory=dict)  # of its own keys
    offloads: bool = False  # gradient_checkpointing may be `offload`, which needs less memory than full
    skips_null: bool = False  # a key without a value is a key that is not there

    def is_of(self, keys: Collection[str]) -> bool:
        """Return True if a file with these keys has the format."""
        return not set(keys).isdisjoint(self.identifying)


# Keys of transformers 4.43.4 (training_args.py), of earlier versions and of 5.
_TRAINING_ARGUMENTS = _Format(
    name="TrainingArguments",
    identifying=("per_device_train_batch_size", "per_gpu_train_batch_size", "output_dir"),
    fields={"loop": TRAINER},
    absent={
        "deepspeed": _Absent(_SHARDS),
        "fsdp": _Absent(_SHARDS),
        "sharded_ddp": _Absent(_SHARDS),
        "parallelism_config": _Absent(_SHARDS),
        "mp_parameters": _Absent(_SHARDS),
        "torchdynamo": _Absent(_COMPILER),
        "auto_find_batch_size": _Absent("the batch becomes smaller after an out-of-memory error"),
        "optim_target_modules": _Absent("the optimizer treats these modules differently"),
        "past_index": _Absent("the output of a step is kept for the next", off=(-1,)),
        "tpu_num_cores": _Absent(_TPU),
        "use_mps_device": _Absent("the kernels of MPS"),
        "use_ipex": _Absent("the kernels of Intel's extension for PyTorch"),
        "use_liger_kernel": _Absent("the kernels of Liger, which fuse operators"),
        "half_precision_backend": _Absent("the mixed precision of apex", off=("auto", "amp", "cuda_amp", "cpu_amp")),
        "fp16_backend": _Absent("the mixed precision of apex", off=("auto", "amp", "cuda_amp", "cpu_amp")),
        "full_determinism": _Absent("deterministic kernels may need other temporary memory"),
        "torch_empty_cache_steps": _Absent("cached blocks are freed during training"),
        "debug": _Absent("hooks for debugging may keep tensors"),
    },
    no_effect=frozenset((
        "output_dir", "overwrite_output_dir", "do_train", "do_eval", "do_predict", "eval_strategy",
        "evaluation_strategy", "prediction_loss_only", "per_device_eval_batch_size", "per_gpu_eval_batch_size",
        "eval_accumulation_steps", "eval_delay", "learning_rate", "adam_beta1", "adam_beta2",
        "adam_epsilon", "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio",
        "warmup_steps", "log_level", "log_level_replica", "log_on_each_node", "logging_dir", "logging_strategy",
        "logging_first_step", "logging_steps", "logging_nan_inf_filter", "save_strategy", "save_steps",
        "save_total_limit", "save_safetensors", "save_on_each_node", "save_only_model",
        "restore_callback_states_from_checkpoint", "seed", "data_seed", "jit_mode_eval", "fp16_opt_level",
        "bf16_full_eval", "fp16_full_eval", "tf32", "local_rank", "ddp_backend", "xpu_backend", "tpu_metrics_debug",
        "dataloader_drop_last", "eval_steps", "dataloader_num_workers", "dataloader_prefetch_factor", "run_name",
        "disable_tqdm", "remove_unused_columns", "label_names", "load_best_model_at_end", "metric_for_best_model",
        "greater_is_better", "ignore_data_skip", "fsdp_min_num_params", "fsdp_config",
        "fsdp_transformer_layer_cls_to_wrap", "accelerator_config", "optim_args", "group_by_length",
        "length_column_name", "report_to", "ddp_find_unused_parameters", "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers", "dataloader_pin_memory", "dataloader_persistent_workers", "skip_memory_metrics",
        "use_legacy_prediction_loop", "push_to_hub", "resume_from_checkpoint", "hub_model_id", "hub_strategy",
        "hub_token", "hub_private_repo", "hub_always_push", "hub_revision", "include_inputs_for_metrics",
        "include_for_metrics", "eval_do_concat_batches", "push_to_hub_model_id", "push_to_hub_organization",
        "push_to_hub_token", "ray_scope", "ddp_timeout", "torch_compile_backend", "torch_compile_mode",
        "dispatch_batches", "split_batches", "include_tokens_per_second", "include_num_input_tokens_seen",
        "batch_eval_metrics", "eval_on_start", "eval_use_gather_object", "average_tokens_across_devices",
        "label_smoothing_factor", "neftune_noise_alpha",  # below 0.005 % of the peak of 12 measured steps of BERT
        "liger_kernel_config", "enable_jit_checkpoint", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id", "use_cache", "train_sampling_strategy", "train_batch_size", "eval_batch_size",
        "dataloader_multiprocessing_context", "dataloader_in_order", "ddp_static_graph",
    )),
)  # fmt: skip
# Keys of accelerate 1.1.1 (commands/config/config_args.py).
_ACCELERATE = _Format(
    name="accelerate config",
    identifying=("distributed_type", "compute_environment", "mixed_precision"),
    absent={
        "compute_environment": _Absent("another environment", off=("LOCAL_MACHINE",)),
        "distributed_type": _Absent(_REPLICAS),
        "num_processes": _Absent(_REPLICAS, off=(1,)),
        "num_machines": _Absent(_REPLICAS, off=(1,)),
        "deepspeed_config": _Absent(_SHARDS),
        "fsdp_config": _Absent(_SHARDS),
        "megatron_lm_config": _Absent(_SHARDS),
        "parallelism_config": _Absent(_SHARDS),
        "fp8_config": _Absent("computation in 8 bits"),
        "ipex_config": _Absent("the kernels of Intel's extension for PyTorch"),
        "dynamo_config": _Absent(_COMPILER),
        "dynamo_backend": _Absent(_COMPILER),
        "downcast_bf16": _Absent(_TPU),
        "tpu_name": _Absent(_TPU),
        "tpu_use_cluster": _Absent(_TPU),
    },
    no_effect=frozenset((
        "debug", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
        "main_training_function", "enable_cpu_affinity", "mpirun_config", "tpu_zone", "tpu_use_sudo",
        "command_file", "commands", "tpu_vm", "tpu_env",
    )),
)  # fmt: skip
_LORA = _Absent("adapters: give --lora r=...,target=... for a BERT", off=("full",))
_QUANTIZED = _Absent("weights in 4 or 8 bits")
_KERNEL = _Absent("the attention kernel: give --attention", off=("auto", "eager", "sdpa", "disabled"))
_PACKED = _Absent("several sequences in a row of a batch")
_DATA = ("datasets", "dataset", "dataset_dir", "dataset_prepared_path", "val_set_size", "val_size", "test_datasets",
         "template", "chat_template", "preprocessing_num_workers", "overwrite_cache", "max_samples")  # fmt: skip


def _whole(name: str) -> Callable[[Any], Fields]:
    return lambda value: {} if value is None else {name: whole_number(value, {})}


# Keys of axolotl 0.13 (utils/schemas/config.py, core/builders/causal.py) beside those of TrainingArguments, to which it
# passes most of them; it loads the weights in the dtype in which it computes.
_AXOLOTL = replace(
    _TRAINING_ARGUMENTS, name="axolotl", identifying=("micro_batch_size", "sequence_len"),
    renamed={"micro_batch_size": "per_device_train_batch_size", "optimizer": "optim"},
    settings={"sequence_len": _whole("seq"),
              BF16.name: lambda value: {"precision": BF16.name} if value in (True, "auto", "full", "true") else {},
              FP16.name: lambda value: {"precision": f"{AUTOCAST}{FP16.name}"} if value in (True, "true") else {}},
    fields={"loop": TRAINER, "batch": 1}, offloads=True, skips_null=True,
    absent=_TRAINING_ARGUMENTS.absent | {
        "adapter": _LORA, "load_in_4bit": _QUANTIZED, "load_in_8bit": _QUANTIZED, "gptq": _QUANTIZED,
        "sample_packing": _PACKED, "flash_attention": _KERNEL, "xformers_attention": _KERNEL,
        "attn_implementation": _KERNEL, "unfrozen_parameters": _Absent("parameters that are not trained"),
        "fsdp_version": _Absent(_SHARDS), "tensor_parallel_size": _Absent(_SHARDS),
        "context_parallel_size": _Absent(_SHARDS), "rl": _Absent("the loss and the models of preferences"),
    },
    no_effect=_TRAINING_ARGUMENTS.no_effect | {
        *_DATA, "base_model", "base_model_config", "model_type", "tokenizer_type", "num_epochs", "learning_rate",
        "lr_scheduler", "pad_to_sequence_len", "special_tokens", "tokens", "evals_per_epoch", "saves_per_epoch",
        "lora_model_dir", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "tf32",
        "wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "strict",
        "auto_resume_from_checkpoints",
    },
)  # fmt: skip
# Keys of LLaMA-Factory 0.9 (hparams/*.py); it recomputes layers unless the file says otherwise (model/model_utils/
# checkpointing.py).
_LLAMA_FACTORY = replace(
    _TRAINING_ARGUMENTS, name="LLaMA-Factory", identifying=("finetuning_type", "cutoff_len"),
    settings={"cutoff_len": _whole("seq"), "pure_bf16": lambda value: {"precision": BF16.name} if value is True else {},
              "disable_gradient_checkpointing": lambda value: {"checkpointing": "none"} if value is True else {}},
    fields={"loop": TRAINER, "batch": 8, "checkpointing": "full", "reentrant": True}, skips_null=True,
    renamed={"micro_batch_size": "per_device_train_batch_size"},
    absent=_TRAINING_ARGUMENTS.absent | {
        "finetuning_type": _LORA, "quantization_bit": _QUANTIZED, "quantization_method": _QUANTIZED,
        "flash_attn": _KERNEL, "packing": _PACKED, "neat_packing": _PACKED,
        "stage": _Absent("the loss and the models of preferences", off=("pt", "sft")),
        "use_galore": _Absent("another optimizer"), "use_badam": _Absent("another optimizer"),
        "use_apollo": _Absent("another optimizer"), "use_muon": _Absent("another optimizer"),
        "freeze_trainable_layers": _Absent("parameters that are not trained"), "use_unsloth": _Absent("other kernels"),
        "enable_liger_kernel": _Absent("other kernels"),
    },
    no_effect=_TRAINING_ARGUMENTS.no_effect | {
        *_DATA, "model_name_or_path", "trust_remote_code", "lora_rank", "lora_alpha", "lora_dropout", "lora_target",
        "plot_loss", "do_sample", "double_quantization", "additional_target",
    },
)  # fmt: skip
_FORMATS = (_LLAMA_FACTORY, _AXOLOTL, _TRAINING_ARGUMENTS, _ACCELERATE)


def read_training_file(path: Path | str) -> TrainingFile:
    """Return the settings in a `TrainingArguments` JSON or in a configuration of accelerate.

    Raises SourceError for a file that is neither, with its line if it has one, and ConfigError for a value that no
    run has.

    >>> bertscope.read_training_file("args.json").fields["accumulate"]  # of TrainingArguments.to_json_string()
    4
    """
    path = Path(path)
    _refuse_archive(path)
    try:
        entries = read_mapping(path)
    except SourceError as error:  # the remedy after the semicolon names presets
        raise SourceError(f"{error.message.partition(';')[0]}; {_WANTED}", where=error.where) from None
    form = next((form for form in _FORMATS if form.is_of(entries)), None)
    if form is None:
        names = ", ".join(name for form in reversed(_FORMATS) for name in form.identifying)
        raise SourceError(f"{path} describes no training, since it has none of {names}; {_WANTED}")
    return _read(entries, form, path)


def _refuse_archive(path: Path) -> None:
    """Raise SourceError for `training_args.bin`, which only unpickling could read."""
    with readable(path):
        if not path.is_file():
            return  # the reader of text files has the message
        with path.open("rb") as file:
            if not file.read(4).startswith(_ARCHIVES):
                return
    raise SourceError(
        f"{path} is a pickle, which can run code, and bertscope loads none; "
        "save TrainingArguments.to_json_string() to a .json file and give that"
    )


def _read(entries: Entries, form: _Format, path: Path) -> TrainingFile:
    """Return the effect of each key; raise ConfigError with file and line for an impossible value."""
    given = {form.renamed.get(key, key): value for key, value in entries.plain().items()}
    fields: Fields = dict(form.fields)
    lists: dict[str, list[TrainingKey]] = {"used": [], "no_effect": [], "not_modelled": [], "unknown": []}
    for key, entry in entries.items():
        own = form.renamed.get(key, key)
        value = _finite(given[own])
        if form.offloads and key == "gradient_checkpointing" and str(value).startswith("offload"):
            value = given[own] = True
        kind, effect = "unknown", ""
        if value is None and form.skips_null:
            kind = "no_effect"
        elif key in form.settings:
            kind, effect = _apply(key, value, form.settings[key], fields, entry)
        elif own in _USED:
            kind, effect = _apply(key, value, partial(_fields, own, given=given), fields, entry)
        elif key in form.absent:
            is_off = form.absent[key].is_off(value)
            kind, effect = ("no_effect", "not used") if is_off else ("not_modelled", form.absent[key].effect)
        elif key in form.no_effect:
            kind = "no_effect"
        shown = "hidden" if key.endswith("_token") else value
        lists[kind].append(TrainingKey(key=key, value=shown, effect=effect))
    return TrainingFile(
        path=str(path), format=form.name, fields=fields, **{name: tuple(rows) for name, rows in lists.items()}
    )


def _apply(
    key: str, value: Any, read: Callable[[Any], Fields], fields: Fields, entry: Entry
) -> tuple[str, str]:  # fmt: skip
    """Add the fields that a key sets to `fields`; return the list that it belongs to, and its effect."""
    try:
        found = read(value)
    except ValueError as error:
        raise entry.error(f"{key} must be {error}; got {value!r:.40}", key) from None
    except NotModelledError as reason:
        return "not_modelled", str(reason)
    if "precision" in fields.keys() & found.keys() and fields["precision"] != found["precision"]:
        raise entry.error(f"{key} contradicts {fields['precision']}, which is set too; keep one", key)
    fields |= found
    try:
        Layer(found, is_default=True)
    except BertscopeError as error:
        raise entry.error(f"{key}: {error.message}", key) from None
    return ("used", effect_text(found)) if found else ("no_effect", "")


def effect_text(fields: Fields) -> str:
    """Return settings in words: `batch 16`, `precision autocast-fp16, grad_scaler`, `no clip_grad_norm`."""
    words = {True: "{0}", False: "no {0}"}
    return ", ".join(
        words[value].format(name) if isinstance(value, bool) else f"{name} {value}" for name, value in fields.items()
    )


def _finite(value: Any) -> Any:
    """Return the value with `nan` and `inf` as text, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
