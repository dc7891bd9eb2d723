"""A card and a calibration for tests on a machine without CUDA, and a child of `profile` that finds the card."""

import inspect
from types import SimpleNamespace

from bertscope.reports.tool import COPY, CalibrationReport, CalibrationStep, CardWork, Machine

MIB = 2**20
H200 = Machine(
    gpu="NVIDIA H200", memory_bytes=143771 * MIB, driver="580.1", torch_version="2.11.0", bertscope_version="0.1.0",
    date="2026-11-22",
)  # fmt: skip
ALLOCATED, RESERVED, CONTEXT = 64 * MIB, 100 * MIB, 500 * MIB
_ANSWERS = {
    "is_available": True, "synchronize": None, "current_device": 0, "empty_cache": None,
    "get_device_name": H200.gpu, "get_device_capability": (9, 0),
    "get_device_properties": SimpleNamespace(name=H200.gpu, total_memory=H200.memory_bytes, major=9, minor=0),
    "mem_get_info": (H200.memory_bytes - RESERVED - CONTEXT, H200.memory_bytes),
    "memory_reserved": RESERVED, "max_memory_allocated": ALLOCATED, "max_memory_reserved": RESERVED,
    "reset_peak_memory_stats": None,
}  # fmt: skip


def calls_of_cuda(replace=setattr) -> list[tuple]:
    """Replace the calls of torch.cuda, whose arguments must fit the real functions; return what is called."""
    from bertscope.torch_access import torch

    calls: list[tuple] = []

    def answer(name, value):
        signature = inspect.signature(getattr(torch.cuda, name))

        def call(*args, **kwargs):
            signature.bind(*args, **kwargs)
            calls.append((name, args))
            return value

        return call

    for name, value in _ANSWERS.items():
        replace(torch.cuda, name, answer(name, value))
    return calls


def main() -> None:
    """Be the child of `profile`, with real tensors on the CPU, and small ones for the rates."""
    from bertscope.measure import profile_worker

    real = profile_worker.real_step
    profile_worker.real_step = lambda source, run, device: real(source, run.changed(device="cpu"), "cpu")
    profile_worker._SIDE, profile_worker._COPIED_BYTES = 128, 2**20
    calls_of_cuda()
    profile_worker.main()


def main_full_in_an_error() -> None:
    """Be the same child, but without memory for a step with checkpointing."""
    from bertscope.measure import profile_worker

    real = profile_worker.estimate_job

    def estimate(job, say):
        if job.run_config.checkpointing == "full":
            raise RuntimeError("CUDA out of memory. Tried to allocate 3.00 GiB")
        return real(job, say)

    profile_worker.estimate_job = estimate
    main()


def main_without_rates() -> None:
    """Be the same child, but fail with the rates of the GPU."""
    from bertscope.measure import profile_worker

    def no_product(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    profile_worker._product_rate = no_product
    main()


def step(precision: str, checkpointing: str, batch: int, seq: int) -> CalibrationStep:
    """A step of 1 s, with 1 GFLOP a token."""
    return CalibrationStep(
        model="bert-base-uncased", batch=batch, seq=seq, mode="training", precision=precision,
        checkpointing=checkpointing, context_bytes=500 * MIB + batch * MIB, estimated_allocated_bytes=101,
        allocated_bytes=100, estimated_reserved_bytes=190, reserved_bytes=200, step_seconds=(1.0,),
        work=CardWork(matmul_flops={precision: batch * seq * 10**9}, moved_bytes=10**9, calls=100),
    )  # fmt: skip


def calibration(machine: Machine = H200) -> CalibrationReport:
    """A calibration with round numbers: products at 100 TFLOP/s in fp32 and 500 in bf16, 1 TB/s."""
    steps = [
        step("fp32", "none", 4, 512), step("fp32", "none", 32, 128), step("fp32", "none", 16, 512),
        step("fp32", "full", 16, 512), step("fp32", "selective", 16, 128), step("fp16", "none", 16, 512),
        step("bf16", "none", 16, 512), step("bf16", "full", 16, 512), step("bf16", "selective", 16, 512),
    ]  # fmt: skip
    rates = {"fp32": 100e12, "fp16": 500e12, "bf16": 500e12, COPY: 1e12}
    return CalibrationReport(machine=machine, rates=rates, steps=tuple(steps))
