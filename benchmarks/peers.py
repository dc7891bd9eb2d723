"""The same questions to bertscope and to other tools (peers); the numbers of docs/comparison.md.

    python -m benchmarks.peers [--question flops] [--tool torchinfo] [--here]

The first run makes a separate environment, build/peers, and installs the packages of `PINNED` in it; with --here the
script uses the present environment. Every answer comes from a separate process, since some peers patch torch
permanently. The peers get transformers' BERT with the same configuration. For a peer that is not installed the script
prints "not installed", and for one that fails the first line of its error. The largest answer takes about 3 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 300
QUESTIONS = {
    "parameters": "parameters of bert-base-cased, BertForMaskedLM: unique 108,340,804, sum over layers 130,609,732",
    "ties": "which tensors are one",
    "tensors": "every tensor by name, with its shape: BertModel has 199",
    "folded": "12 equal layers as one row",
    "flops": "forward of bert-base-uncased, BertModel, 1 x 128: eager; sdpa",
    "meta": "forward of bert-large-uncased, BertModel, 4096 x 512, on meta",
    "frozen": "forward and backward of bert-base-uncased, BertForMaskedLM, 2 x 128: all trained; embeddings frozen",
    "recomputed": "the same, every layer checkpointed: more FLOPs than without",
    "peak": "peak bytes of that step with AdamW, 8 x 128: without; with checkpointing",
    "cuda": "the same for CUDA, on a machine without it: without; with checkpointing",
    "fit": "the largest batch of 128 tokens that trains in 16 GiB",
    "measured": "measured peak bytes of a real step, 2 x 128: forward; backward; optimizer",
    "offline": "from a config.json alone, without network",
    "check": "exit code when a count is as expected; when it is not",
    "convolution": "any module: parameters and multiply-adds of Conv2d(3, 16, 3) at 1 x 3 x 32 x 32",
}
PACKAGES = {
    "bertscope": "bertscope", "torchinfo": "torchinfo", "fvcore": "fvcore", "calflops": "calflops",
    "accelerate": "accelerate", "flops-profiler": "flops_profiler", "ptflops": "ptflops", "thop": "thop",
    "torch": "torch", "transformers": "transformers",
}  # fmt: skip
# The versions in the environment of the comparison; what `report` needs is among them.
PINNED = (
    "torch==2.13.0", "transformers==4.43.4", "tokenizers==0.19.1", "numpy==2.2.6", "typer==0.28.0", "rich==15.0.0",
    "pyyaml==6.0.3", "torchinfo==1.8.0", "fvcore==0.1.5.post20221221", "calflops==0.3.2",
    "accelerate==1.15.0", "flops-profiler==0.1.2", "ptflops==0.7.5", "thop==0.1.1.post2209072238",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent
PROBES: dict[tuple[str, str], Callable[[], str]] = {}


def answers(question: str, tool: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register a function as the answer of `tool` to `question`; it returns the text for the table."""

    def register(function: Callable[[], str]) -> Callable[[], str]:
        if question not in QUESTIONS or tool not in PACKAGES or (question, tool) in PROBES:
            raise ValueError(f"unknown or repeated: {question}, {tool}")
        PROBES[question, tool] = function
        return function

    return register


def pair(*values: float | None) -> str:
    """Return numbers as text for the table."""
    return "; ".join("nothing" if value is None else f"{value:,.0f}" for value in values)


# ---------------------------------------------------------------- the same models for all peers


def bert(head: str = "BertModel", attention: str = "eager", device: str = "meta", **sizes: int) -> Any:
    """Build transformers' BERT-base with random weights; `sizes` change its configuration."""
    import torch
    import transformers

    # Without a pad token: with one, transformers reads an id to warn of missing masks; on meta it has no value.
    config = transformers.BertConfig(attn_implementation=attention, pad_token_id=None, **sizes)
    with torch.device(device):
        return getattr(transformers, head)(config)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def cased() -> Any:
    """Build bert-base-cased with its tied decoder."""
    return bert("BertForMaskedLM", vocab_size=28996)


def ids(batch: int = 1, seq: int = 128, device: str = "cpu") -> Any:
    import torch

    return torch.ones(batch, seq, dtype=torch.long, device=device)


def both_kernels(count: Callable[[Any], float]) -> str:
    """Return the result of `count` for a forward pass on a CPU, with eager and with fused attention."""
    return pair(*(count(bert(attention=attention, device="cpu").eval()) for attention in ("eager", "sdpa")))


def conv() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3)), torch.ones(1, 3, 32, 32)


# ---------------------------------------------------------------- bertscope


def bertscope(*arguments: object) -> Any:
    """Return the JSON that the command prints."""
    command = [sys.executable, "-m", "bertscope", *map(str, arguments), "--format", "json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # noqa: S603  our command


MASKED = ("bert-base-uncased", "-a", "BertForMaskedLM", "-s", 128)


@answers("parameters", "bertscope")
def _() -> str:
    totals = bertscope("count", "bert-base-cased")["totals"]
    return pair(totals["distinct_params"], totals["layer_params"])


@answers("ties", "bertscope")
def _() -> str:
    return "; ".join(f"{tie['path']} is {tie['is_path']}" for tie in bertscope("count", "bert-base-cased")["ties"])


@answers("tensors", "bertscope")
def _() -> str:
    rows = bertscope("count", "bert-base-uncased", "-a", "BertModel", "--by", "parameter")["rows"]
    return pair(sum(bool(row["shapes"]) for row in rows))


@answers("folded", "bertscope")
def _() -> str:
    rows = bertscope("count", "bert-base-uncased", "-a", "BertModel")["rows"]
    return next(f"{row['path']} ({row['copies']} x)" for row in rows if row["copies"] > 1)


@answers("flops", "bertscope")
def _() -> str:
    asked = ("flops", "bert-base-uncased", "-a", "BertModel", "-d", 0, "--attention")
    return pair(*(bertscope(*asked, kernel)["sweep"][0]["total_flops"] for kernel in ("eager", "sdpa")))


@answers("meta", "bertscope")
def _() -> str:
    asked = ("flops", "bert-large-uncased", "-a", "BertModel", "-b", 4096, "-s", 512, "-d", 0)
    return pair(bertscope(*asked)["sweep"][0]["total_flops"])


def training_flops(*more: object) -> int:
    return bertscope("flops", *MASKED, "-b", 2, "-d", 0, "--mode", "training", *more)["sweep"][0]["total_flops"]


@answers("frozen", "bertscope")
def _() -> str:
    return pair(training_flops(), training_flops("--freeze", "bert.embeddings"))


@answers("recomputed", "bertscope")
def _() -> str:
    return pair(training_flops("--checkpointing", "full") - training_flops())


def estimated(*more: object) -> str:
    report = bertscope("estimate", *MASKED, "-b", 8, "--checkpointing", "none,full", *more)
    return pair(*(peaks(variant["estimated"])[-1] for variant in report["variants"]))


def peaks(memory: Any) -> list[int]:
    """Return the peaks of the phases and of the step."""
    phases = [phase["peak_bytes"] for phase in memory["phases"]]
    return [*phases, max(phases)]


@answers("peak", "bertscope")
def _() -> str:
    return estimated()


@answers("cuda", "bertscope")
def _() -> str:
    return estimated("--device", "cuda")


@answers("fit", "bertscope")
def _() -> str:
    asked = ("fit", *MASKED, "--budget", "16GiB", "--precision", "fp32", "--checkpointing", "none")
    return pair(bertscope(*asked, "--margin", 0, "--exact")["rows"][0]["batch"])


@answers("measured", "bertscope")
def _() -> str:
    report = bertscope("profile", *MASKED, "-b", 2, "--steps", 1)
    return pair(*peaks(report["variants"][0]["measured"])[:3])


def config_folder() -> str:
    """Return a folder with only BERT-base's config.json."""
    folder = Path(tempfile.mkdtemp())
    sizes = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    more = {"intermediate_size": 3072, "model_type": "bert", "architectures": ["BertModel"]}
    (folder / "config.json").write_text(json.dumps(sizes | more))
    return str(folder)


@answers("offline", "bertscope")
def _() -> str:
    return pair(bertscope("count", config_folder())["totals"]["distinct_params"])


@answers("check", "bertscope")
def _() -> str:
    command = [sys.executable, "-m", "bertscope", "count", "bert-base-uncased", "-a", "BertModel", "--expect"]
    return pair(*(subprocess.run([*command, n], capture_output=True).returncode for n in ("109482240", "110000000")))  # noqa: S603  our command


@answers("convolution", "bertscope")
def _() -> str:
    import bertscope as package

    module, picture = conv()
    return pair(
        package.count(module).totals.distinct_params, package.flops(module, picture).rows[0].total.matmul_flops / 2
    )


# ---------------------------------------------------------------- torchinfo


@answers("parameters", "torchinfo")
def _() -> str:
    import torchinfo

    return pair(torchinfo.summary(cased(), depth=9, verbose=0).total_params)


@answers("ties", "torchinfo")
def _() -> str:
    import torchinfo

    text = str(torchinfo.summary(cased(), depth=9, verbose=0))
    return f"the words tied and shared occur {len(re.findall('tied|shared', text, re.IGNORECASE))} times"


@answers("tensors", "torchinfo")
def _() -> str:
    import torchinfo

    with contextlib.redirect_stdout(io.StringIO()) as out:
        torchinfo.summary(bert(), depth=9, verbose=2, col_names=("kernel_size", "num_params"))
    rows = re.findall(r"(\S*(?:weight|bias)) +(\[.*?\])", out.getvalue())
    return (
        f"{len(rows)} rows with verbose=2, among them "
        + ", ".join(shape for name, shape in rows if "30522" in shape)
        + " of one tensor"
    )


@answers("folded", "torchinfo")
def _() -> str:
    import torchinfo

    return f"{str(torchinfo.summary(bert(), depth=3, verbose=0)).count('BertLayer')} rows BertLayer"


@answers("flops", "torchinfo")
def _() -> str:
    import torchinfo

    return both_kernels(lambda model: torchinfo.summary(model, input_data=ids(), verbose=0).total_mult_adds)


@answers("meta", "torchinfo")
def _() -> str:
    import torchinfo

    model = bert(**LARGE)
    return pair(torchinfo.summary(model, input_data=ids(4096, 512, "meta"), device="meta", verbose=0).total_mult_adds)


@answers("frozen", "torchinfo")
def _() -> str:
    return "forward alone: no option for backward (" + ", ".join(keywords("torchinfo", "summary")) + ")"


@answers("peak", "torchinfo")
def _() -> str:
    import torchinfo

    found = torchinfo.summary(bert("BertForMaskedLM", device="cpu"), input_data=ids(8), verbose=0)
    return pair(found.total_input + found.total_output_bytes + found.total_param_bytes) + " (Estimated Total Size)"


@answers("convolution", "torchinfo")
def _() -> str:
    import torchinfo

    module, picture = conv()
    found = torchinfo.summary(module, input_data=picture, verbose=0)
    return pair(found.total_params, found.total_mult_adds)


def keywords(package: str, name: str) -> list[str]:
    """Return the names of the parameters of a public function."""
    import inspect

    return list(inspect.signature(getattr(importlib.import_module(package), name)).parameters)


# ---------------------------------------------------------------- fvcore


@answers("parameters", "fvcore")
def _() -> str:
    from fvcore.nn import parameter_count

    return pair(parameter_count(cased())[""])


@answers("tensors", "fvcore")
def _() -> str:
    from fvcore.nn import parameter_count_table

    return pair(len(re.findall(r"\| +\(\d", parameter_count_table(bert(), max_depth=9))))


@answers("ties", "fvcore")
def _() -> str:
    from fvcore.nn import parameter_count_table

    rows = [row for row in parameter_count_table(cased(), max_depth=9).splitlines() if "decoder" in row]
    return f"{len(rows)} rows name the decoder"


@answers("folded", "fvcore")
def _() -> str:
    from fvcore.nn import parameter_count_table

    return f"{len(re.findall(r'layer.[0-9]+ +[|]', parameter_count_table(bert(), max_depth=3)))} rows encoder.layer.N"


def fvcore_flops(model: Any, *inputs: Any) -> Any:
    from fvcore.nn import FlopCountAnalysis

    return FlopCountAnalysis(model, inputs).unsupported_ops_warnings(False)


@answers("flops", "fvcore")
def _() -> str:
    found = fvcore_flops(bert(attention="sdpa", device="cpu").eval(), ids())
    found.total()
    return both_kernels(lambda model: fvcore_flops(model, ids()).total()) + (
        f" MACs (names what it did not count: {', '.join(found.unsupported_ops())})"
    )


@answers("meta", "fvcore")
def _() -> str:
    return pair(fvcore_flops(bert(**LARGE), ids(4096, 512, "meta")).total())


@answers("peak", "fvcore")
def _() -> str:
    from fvcore.nn import ActivationCountAnalysis

    found = ActivationCountAnalysis(bert("BertForMaskedLM").train(), ids(8, 128, "meta"))
    return f"{pair(found.unsupported_ops_warnings(False).total())} elements (ActivationCountAnalysis)"


@answers("convolution", "fvcore")
def _() -> str:
    from fvcore.nn import parameter_count

    module, picture = conv()
    return pair(parameter_count(module)[""], fvcore_flops(module, picture).total())


# ---------------------------------------------------------------- calflops, flops-profiler, ptflops, thop


def calflops(model: Any, tokens: Any, **options: Any) -> tuple[float, float, float]:
    from calflops import calculate_flops

    options = {"print_results": False, "output_as_string": False} | options
    return calculate_flops(model=model, kwargs={"input_ids": tokens}, **options)


@answers("parameters", "calflops")
def _() -> str:
    return pair(calflops(bert("BertForMaskedLM", device="cpu", vocab_size=28996), ids())[2])


@answers("flops", "calflops")
def _() -> str:
    return both_kernels(lambda model: calflops(model, ids())[0])


@answers("meta", "calflops")
def _() -> str:
    return pair(calflops(bert(**LARGE), ids(4096, 512, "meta"))[0])


@answers("frozen", "calflops")
def _() -> str:
    def total(frozen: bool) -> float:
        model = bert("BertForMaskedLM", device="cpu")
        model.bert.embeddings.requires_grad_(not frozen)
        return calflops(model, ids(2), include_backPropagation=True, compute_bp_factor=2.0)[0]

    with contextlib.redirect_stdout(io.StringIO()) as out:
        calflops(bert("BertForMaskedLM", device="cpu"), ids(2), include_backPropagation=True, print_results=True)
    total_line = next(line for line in out.getvalue().splitlines() if "fwd+bwd FLOPs" in line)
    return pair(total(False), total(True)) + f" returned; printed {total_line.strip()}"


@answers("offline", "calflops")
def _() -> str:
    from calflops import calculate_flops_hf

    folder, said = config_folder(), []
    for empty in (None, bert()):
        try:
            found = calculate_flops_hf(folder, empty_model=empty, input_shape=(1, 128), print_results=False)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:160]
        said.append(f"empty_model={'None' if empty is None else 'BertModel'}: {found}")
    return "; ".join(said)


def flops_profiler(model: Any, tokens: Any) -> tuple[float, float, float]:
    from flops_profiler.profiler import get_model_profile

    return get_model_profile(model, kwargs={"input_ids": tokens}, print_profile=False, as_string=False, warm_up=0)


@answers("parameters", "flops-profiler")
def _() -> str:
    return pair(flops_profiler(bert("BertForMaskedLM", device="cpu", vocab_size=28996), ids())[2])


@answers("flops", "flops-profiler")
def _() -> str:
    return both_kernels(lambda model: flops_profiler(model, ids())[0])


@answers("meta", "flops-profiler")
def _() -> str:
    return pair(flops_profiler(bert(**LARGE), ids(4096, 512, "meta"))[0])


def ptflops(model: Any, tokens: Any, backend: str) -> tuple[float, float]:
    from ptflops import get_model_complexity_info

    return get_model_complexity_info(
        model, (128,), input_constructor=lambda _: {"input_ids": tokens}, as_strings=False,
        print_per_layer_stat=False, backend=backend,
    )  # fmt: skip


@answers("parameters", "ptflops")
def _() -> str:
    return pair(ptflops(bert("BertForMaskedLM", device="cpu", vocab_size=28996), ids(), "pytorch")[1])


@answers("flops", "ptflops")
def _() -> str:
    found = {backend: both_kernels(lambda model, backend=backend: ptflops(model, ids(), backend)[0])
             for backend in ("pytorch", "aten")}  # fmt: skip
    return ", ".join(f"{backend} {text}" for backend, text in found.items()) + " MACs"


@answers("meta", "ptflops")
def _() -> str:
    return pair(ptflops(bert(**LARGE), ids(4096, 512, "meta"), "aten")[0])


def thop(model: Any, tokens: Any) -> tuple[float, float]:
    from thop import profile

    return profile(model, inputs=(tokens,), verbose=False)


@answers("parameters", "thop")
def _() -> str:
    return pair(thop(bert("BertForMaskedLM", device="cpu", vocab_size=28996), ids())[1])


@answers("flops", "thop")
def _() -> str:
    return both_kernels(lambda model: thop(model, ids())[0]) + " MACs"


@answers("meta", "thop")
def _() -> str:
    return pair(thop(bert(**LARGE), ids(4096, 512, "meta"))[0])


@answers("convolution", "calflops")
def _() -> str:
    from calflops import calculate_flops

    module, picture = conv()
    found = calculate_flops(model=module, args=[picture], print_results=False, output_as_string=False)
    return pair(found[2], found[1])


@answers("convolution", "flops-profiler")
def _() -> str:
    from flops_profiler.profiler import get_model_profile

    module, picture = conv()
    found = get_model_profile(module, args=[picture], print_profile=False, as_string=False, warm_up=0)
    return pair(found[2], found[1])


@answers("convolution", "ptflops")
def _() -> str:
    from ptflops import get_model_complexity_info

    found = get_model_complexity_info(conv()[0], (3, 32, 32), as_strings=False, print_per_layer_stat=False)
    return pair(found[1], found[0])


@answers("convolution", "thop")
def _() -> str:
    module, picture = conv()
    found = thop(module, picture)
    return pair(found[1], found[0])


# ---------------------------------------------------------------- accelerate and transformers


@answers("parameters", "accelerate")
def _() -> str:
    from accelerate.utils import calculate_maximum_sizes

    return pair(calculate_maximum_sizes(cased())[0] / 4)


@answers("ties", "accelerate")
def _() -> str:
    from accelerate.utils import find_tied_parameters

    return str(find_tied_parameters(cased()))


@answers("tensors", "accelerate")
def _() -> str:
    from accelerate.utils import named_module_tensors

    return pair(len(list(named_module_tensors(bert(), include_buffers=False, recurse=True))))


def estimate_memory(model: str) -> str:
    """Return the output of `accelerate estimate-memory` for fp32."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "estimate-memory", model,
               "--library_name", "transformers", "--dtypes", "float32"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603  our command
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return " ".join(done.stdout.split())


@answers("offline", "accelerate")
def _() -> str:
    return estimate_memory(config_folder())


@answers("peak", "accelerate")
def _() -> str:
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    found = estimate_training_usage(calculate_maximum_sizes(bert("BertForMaskedLM"))[0], "float32")
    return pair(*found.values()) + f" ({', '.join(found)})"


@answers("fit", "accelerate")
def _() -> str:
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def run(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 97:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    return f"{find_executable_batch_size(run, starting_batch_size=128)()} when 97 is the largest (tried {tried})"


@answers("parameters", "transformers")
def _() -> str:
    return pair(cased().num_parameters())


@answers("ties", "transformers")
def _() -> str:
    return f"{cased()._tied_weights_keys} (_tied_weights_keys, not to what)"


@answers("offline", "transformers")
def _() -> str:
    import transformers

    config = transformers.AutoConfig.from_pretrained(config_folder())
    return pair(transformers.AutoModel.from_config(config).num_parameters())


@answers("peak", "transformers")
def _() -> str:
    return pair(bert("BertForMaskedLM").get_memory_footprint()) + " (get_memory_footprint: weights and buffers)"


@answers("frozen", "transformers")
def _() -> str:
    def total(frozen: bool) -> float:
        model = bert("BertForMaskedLM")
        model.bert.embeddings.requires_grad_(not frozen)
        return model.floating_point_ops({"input_ids": ids(2)}, exclude_embeddings=False)

    return pair(total(False), total(True)) + " (floating_point_ops: 6 x tokens x parameters)"


# ---------------------------------------------------------------- torch's own


@answers("folded", "torch")
def _() -> str:
    return re.search(r"\(0-11\): 12 x BertLayer", str(bert()))[0]


@answers("tensors", "torch")
def _() -> str:
    return pair(len([(name, tuple(tensor.shape)) for name, tensor in bert().named_parameters()]))


@answers("parameters", "torch")
def _() -> str:
    model = cased()
    both = (sum(p.numel() for _, p in model.named_parameters(remove_duplicate=once)) for once in (True, False))
    return pair(*both) + " (named_parameters, remove_duplicate True; False)"


@answers("ties", "torch")
def _() -> str:
    names: dict[int, list[str]] = {}
    for name, tensor in cased().named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
    return str([group for group in names.values() if len(group) > 1]) + " (6 lines by hand)"


def torch_flops(call: Callable[[], Any]) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def profiler_flops(call: Callable[[], Any]) -> int:
    from torch.profiler import profile

    with profile(with_flops=True) as found:
        call()
    return sum(event.flops or 0 for event in found.key_averages())


@answers("flops", "torch")
def _() -> str:
    first = both_kernels(lambda model: torch_flops(lambda: model(ids())))
    return first + "; torch.profiler " + both_kernels(lambda model: profiler_flops(lambda: model(ids())))


@answers("meta", "torch")
def _() -> str:
    model = bert(**LARGE)
    return pair(torch_flops(lambda: model(ids(4096, 512, "meta"))))


def torch_training(counting: Callable[..., int], device: str, frozen: bool = False, checkpointing: bool = False) -> int:
    model = bert("BertForMaskedLM", device=device).train()
    model.bert.embeddings.requires_grad_(not frozen)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = ids(2, device=device)
    return counting(lambda: model(tokens, labels=tokens).loss.backward())


@answers("frozen", "torch")
def _() -> str:
    first = pair(*(torch_training(torch_flops, "meta", frozen=frozen) for frozen in (False, True)))
    return (
        first
        + "; torch.profiler "
        + pair(*(torch_training(profiler_flops, "cpu", frozen=frozen) for frozen in (False, True)))
    )


@answers("recomputed", "torch")
def _() -> str:
    without, full = (torch_training(torch_flops, "meta", checkpointing=on) for on in (False, True))
    return pair(full - without)


def mem_tracker(device: str, checkpointing: bool) -> int:
    """Return the peak in bytes from torch.distributed's MemTracker over a step on fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = bert("BertForMaskedLM", device=device).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = ids(8, device=device)

        def step() -> None:
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the optimizer creates its state; MemTracker tracks only one step
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            step()
        return next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]


@answers("peak", "torch")
def _() -> str:
    return pair(mem_tracker("cpu", False), mem_tracker("cpu", True)) + " (MemTracker, FakeTensorMode)"


@answers("cuda", "torch")
def _() -> str:
    return pair(mem_tracker("cuda", False), mem_tracker("cuda", True)) + " (MemTracker, FakeTensorMode)"


@answers("measured", "torch")
def _() -> str:
    import torch
    from torch.profiler import profile

    model = bert("BertForMaskedLM", device="cpu").train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = ids(2)

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(profile_memory=True, record_shapes=True, with_stack=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        found.export_memory_timeline(str(path), device="cpu")
        _, sizes = json.loads(path.read_text())
    return pair(max(map(sum, sizes))) + " (export_memory_timeline, by kind of tensor)"


@answers("convolution", "torch")
def _() -> str:
    module, picture = conv()
    return pair(sum(p.numel() for p in module.parameters()), torch_flops(lambda: module(picture)) / 2)


# ---------------------------------------------------------------- run


def run_in_own_environment(module: str) -> None:
    """Replace this process by one that runs the module in the environment of the comparison; make that if needed."""
    folder = ROOT / "build" / "peers"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    made = folder / "installed.txt"
    if not made.exists() or made.read_text().split() != list(PINNED):
        print(f"making the environment {folder} with {', '.join(PINNED)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)  # noqa: S603  our command
        command = [python, "-m", "pip", "install", "--quiet", *PINNED, "--editable", ROOT]
        subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603  our command
        made.write_text("\n".join(PINNED))
    os.chdir(ROOT)
    os.execv(python, [str(python), "-m", module, *sys.argv[1:], "--here"])  # noqa: S606  our command


def installed(tool: str) -> bool:
    return importlib.util.find_spec(PACKAGES[tool]) is not None


def version(tool: str) -> str:
    try:
        return importlib.metadata.version(tool)
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module(PACKAGES[tool]), "__version__", "?")


def import_once() -> None:
    """Import the modules that most answers need, before the forks."""
    for package in ("torch", "transformers.models.bert.modeling_bert", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)


def ask(question: str, tool: str) -> str:
    """Return the answer from a forked process: imports are shared, and patches by a peer end with the process."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_answer, args=(question, tool, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else f"no answer in {TIMEOUT_SECONDS} s"
    except EOFError:
        return "FAILED: the process ended without an answer"
    finally:
        process.kill()
        process.join()


def _answer(question: str, tool: str, sender: Any) -> None:
    """Send the answer of the tool, or the first line of its error, from the forked process."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            said = PROBES[question, tool]()
        except BaseException as error:
            said = f"FAILED: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:240]}"
    sender.send(said)


def main() -> None:
    """Ask every selected question to every selected tool that is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", choices=QUESTIONS, action="append")
    parser.add_argument("--tool", choices=PACKAGES, action="append")
    parser.add_argument("--here", action="store_true", help="use the present environment")
    asked = parser.parse_args()
    if not asked.here:
        run_in_own_environment("benchmarks.peers")
    tools = asked.tool or list(PACKAGES)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import_once()
    here = [tool for tool in tools if installed(tool)]
    print("\n".join(f"{tool}: {version(tool) if tool in here else 'not installed'}" for tool in tools))
    for question in asked.question or QUESTIONS:
        print(f"\n{question}: {QUESTIONS[question]}")
        for tool in here:
            if (question, tool) in PROBES:
                start = time.perf_counter()
                print(f"  {tool:15} {ask(question, tool)}   [{time.perf_counter() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
