"""A job's ranks: the strategies of settings/parallelism.py, and one process instead of all ranks.

A strategy is applied to a model as a training script does it; torch does the work. In the one process collectives
return at once, and this rank has its part of the model.
"""

import heapq
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from math import prod
from operator import itemgetter
from typing import Any
from unittest.mock import patch

from bertscope.errors import SelectionError
from bertscope.model.encoder import BertLayer
from bertscope.model.modules import layer_lists, outermost
from bertscope.reports.memory import RankGroup
from bertscope.settings.parallelism import TENSOR, Parallelism
from bertscope.sources.model_source import REPEATED, all_parameters
from bertscope.torch_access import has_kernel, nn, torch
from bertscope.torch_access.distributed import fake_store, forget_meshes, real_tensors
from bertscope.units import PRECISIONS

# torch's defaults: _DEFAULT_FIRST_BUCKET_BYTES of torch.distributed, and bucket_cap_mb of DistributedDataParallel.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20


def rank_groups(model: nn.Module, parallelism: Parallelism, layer_path: str = "") -> tuple[RankGroup, ...]:
    """Return the ranks in groups that update the same number of the model's trained parameters."""
    runs = _runs(model, parallelism, layer_path)  # how many ranks follow each other with a number of parameters
    if parallelism.row.divides_optimizer:
        sizes = [param.numel() for _, param in all_parameters(model) if param.requires_grad]
        shares = zero_shares(sizes, parallelism.world_size)
        without_share = (parallelism.world_size - len(shares), 0)
        runs = iter([*((1, sum(map(sizes.__getitem__, share))) for share in shares), without_share])
    groups: list[RankGroup] = []
    first = 0
    for count, run in groupby((run for run in runs if run[0]), key=itemgetter(1)):
        last = first + sum(ranks for ranks, _ in run) - 1
        groups.append(RankGroup(first=first, last=last, updated_params=count))
        first = last + 1
    return tuple(groups)


def _runs(model: nn.Module, parallelism: Parallelism, layer_path: str) -> Iterator[tuple[int, int]]:
    """Yield how many ranks follow each other with a share of that many parameters."""
    size = dict(zip(parallelism.row.dimensions, parallelism.sizes, strict=True))
    tensor_ranks = size.get(TENSOR, 1)
    sharding = parallelism.world_size // parallelism.replicas // tensor_ranks
    shapes = Counter(
        divided_shape(path, tuple(param.shape), layer_path, tensor_ranks)
        for path, param in all_parameters(model)
        if param.requires_grad
    )
    # FSDP2 gives each rank the same number of rows, rounded up, as long as there are any.
    places = {0, sharding}
    for rows in {shape[0] if shape else 1 for shape in shapes} - {0}:
        full = rows // -(-rows // sharding)
        places |= {min(full, sharding), min(full + 1, sharding)}
    groups = []
    for first, last in pairwise(sorted(places)):
        count = sum(number * _rows(shape, first, sharding) * prod(shape[1:]) for shape, number in shapes.items())
        groups.append((tensor_ranks * (last - first), count))
    for _ in range(parallelism.replicas):
        yield from groups


def _rows(shape: tuple[int, ...], rank: int, ranks: int) -> int:
    rows = shape[0] if shape else 1
    most = -(-rows // ranks)
    return min(most, max(rows - rank * most, 0))


def zero_shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the parameters that each rank updates, in the order of its update.

    The largest one that is left goes to the rank with the fewest numbers. Ranks behind the last one update nothing.
    """
    shares: list[list[int]] = [[] for _ in range(min(ranks, len(sizes)))]
    least = [(0, rank) for rank in range(len(shares))]
    for number in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        count, rank = least[0]
        shares[rank].append(number)
        heapq.heapreplace(least, (count + sizes[number], rank))
    return shares


def zero_ranks(model: nn.Module, parallelism: Parallelism) -> Parallelism:
    """Return a job with one rank more than there are trained parameters instead of a larger one.

    All its ranks from that one on update nothing. torch's ZeroRedundancyOptimizer visits every rank.
    """
    most = sum(param.requires_grad for param in model.parameters())
    if not parallelism.row.divides_optimizer or parallelism.world_size <= most + 1:
        return parallelism
    return replace(parallelism, world_size=most + 1, mesh="", rank=min(parallelism.rank, most))


# The projections of a layer whose outputs, and those whose inputs, are divided by the ranks: Shoeybi et al. 2019,
# arXiv:1909.08053.
_COLUMNS = ("self.query", "self.key", "self.value", "intermediate.dense")
_ROWS = ("output.dense",)


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The ranks among which parameters are sharded, and those among which layers are divided; None for neither."""

    shard: Any = None
    tensor: Any = None


def make_meshes(parallelism: Parallelism, device: str) -> Meshes:
    """Return the meshes of the job of this process. Call it outside FakeTensorMode, since ranks are values."""
    from torch.distributed.device_mesh import init_device_mesh

    names = parallelism.row.dimensions
    mesh = init_device_mesh(device, parallelism.sizes, mesh_dim_names=names)
    sharded = tuple(name for name in names if name != TENSOR)
    shard = mesh[sharded] if parallelism.row.is_sharded else None
    return Meshes(shard=shard, tensor=mesh[TENSOR] if TENSOR in names else None)


def layers_of(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the units that a strategy divides one by one: the list's layers at `path`.

    Without a path those modules that transformers does not split among devices, else the layers of lists of one class,
    else the model's children: what accelerate and users of fully_shard take.
    """
    if path:
        return list(model.get_submodule(path).children())
    undivided = set(getattr(model, "_no_split_modules", None) or ())
    modules = [*outermost(model, lambda module: type(module).__name__ in undivided).values()]
    paths = () if modules else (layer for layers in layer_lists(model).values() for layer in layers)
    units = modules or map(model.get_submodule, paths)
    return [unit for unit in dict.fromkeys(units) if any(True for _ in unit.parameters())]


def units_text(model: nn.Module, parallelism: Parallelism, path: str) -> str:
    """Return the units of FSDP, such as `32 x LlamaDecoderLayer`; empty for a strategy that does not shard."""
    counts = Counter(type(unit).__name__ for unit in layers_of(model, path)) if parallelism.row.is_sharded else {}
    if layers := path and vars(model.get_submodule(path)).get(REPEATED):
        counts = dict.fromkeys(counts, layers)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def parallelize(model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, meshes: Meshes) -> None:
    """Divide the parameters among the ranks: layer by layer, then what is left.

    The model changes: the parameters become DTensors, which hold the part of this rank. DDP leaves the parameters
    as they are. Raises SelectionError for a model that the strategy cannot divide.
    """
    if meshes.tensor is not None:
        for layer in layers or [model]:
            _divide_projections(layer, meshes.tensor)
    if meshes.shard is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    name = parallelism.param_dtype
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, PRECISIONS[name].torch_name) if name else None)
    inside = {module for layer in layers for module in layer.modules()}
    rest = (param for module in model.modules() if module not in inside for param in module.parameters(recurse=False))
    units = [set(rest), *(set(layer.parameters()) for layer in layers)]
    if sum(map(len, units)) > len(set().union(*units)):  # which fully_shard refuses from torch 2.13 on
        raise SelectionError(f"FSDP cannot divide {type(model).__name__}, whose units share a parameter; choose ddp")
    for module in (*layers, model):
        fully_shard(module, mesh=meshes.shard, reshard_after_forward=parallelism.row.reshards, mp_policy=policy)


def _divide_projections(layer: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if not isinstance(layer, BertLayer):
        raise SelectionError(
            f"tensor parallelism divides the layers of bertscope's own BERT; got {type(layer).__name__}, choose fsdp"
        )
    ranks = mesh.size()
    attention = layer.attention.self
    for name, count in (
        ("attention heads", attention.num_attention_heads),
        ("intermediate units", layer.intermediate.dense.out_features),
    ):
        if count % ranks:
            raise SelectionError(f"{count:,} {name} cannot be divided by {ranks:,} ranks; use a divisor of {count:,}")
    styles: dict[str, Any] = {}
    for path, module in layer.named_modules():
        if path.endswith((*_COLUMNS, *_ROWS)):
            if not isinstance(module, nn.Linear):
                raise SelectionError(
                    f"tensor parallelism divides linear layers; {path} is {type(module).__name__}, choose fsdp"
                )
            styles[path] = ColwiseParallel() if path.endswith(_COLUMNS) else RowwiseParallel()
    parallelize_module(layer, mesh, styles)


def divided_shape(path: str, shape: tuple[int, ...], layer_path: str, ranks: int) -> tuple[int, ...]:
    """Return the shape that each rank has of a parameter with tensor parallelism; one rank has all of it."""
    module, _, name = path.rpartition(".")
    if ranks == 1 or not path.startswith(f"{layer_path}."):
        return shape
    if module.endswith(_COLUMNS):
        return (shape[0] // ranks, *shape[1:])
    return (shape[0], shape[1] // ranks) if module.endswith(_ROWS) and name == "weight" else shape


def bucket_sizes(model: nn.Module) -> list[int]:
    """Return the bytes of each bucket into which DDP puts gradients, the first one first.

    A bucket ends when it reaches its limit; tensors of different dtypes or devices are never in one.
    """
    limits: dict[object, int] = {}
    open_bytes: dict[object, int] = {}
    sizes = []
    for param in [param for _, param in all_parameters(model) if param.requires_grad][::-1]:  # in backward's order
        kind = param.dtype, param.device
        open_bytes[kind] = open_bytes.get(kind, 0) + param.nbytes
        if open_bytes[kind] >= limits.setdefault(kind, _FIRST_BUCKET_BYTES):
            sizes.append(open_bytes.pop(kind))
            limits[kind] = _BUCKET_BYTES
    return [*sizes, *open_bytes.values()]


# ---- one process instead of all ranks ----


@contextmanager
def fake_ranks(parallelism: Parallelism) -> Iterator[Meshes]:
    """Make this process one rank of a job whose other ranks do not exist; yield its meshes.

    Enter it outside FakeTensorMode, in which the numbers of the ranks would have no values. Raises SelectionError if
    the process already belongs to a job.
    """
    dist = torch.distributed
    if not dist.is_available():
        raise SelectionError("this build of torch has no torch.distributed; install one that has")
    if not has_kernel(torch.ops.c10d.broadcast_.default, "Meta"):
        raise SelectionError(
            f"torch {torch.__version__} does not run collectives without values; estimates of several ranks are tested "
            "with torch 2.11 and newer"
        )
    if dist.is_initialized():
        raise SelectionError("this process belongs to a process group; run the estimate in another process")
    logger = logging.getLogger("torch.distributed.tensor")  # it warns that two all-reduces could be one
    level = logger.level
    logger.setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=parallelism.rank, world_size=parallelism.world_size, store=fake_store())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # whose output is a view, such as logits
            yield make_meshes(parallelism, "cpu")
    finally:
        dist.destroy_process_group()
        forget_meshes()
        logger.setLevel(level)


def parallelize_fakes(
    model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, meshes: Meshes
) -> dict[str, torch.Tensor]:
    """Apply the strategy to a model of fake tensors, and return the buckets of DDP, one for each trained parameter."""
    if parallelism.row.has_buckets:
        return _with_buckets(model)
    # The parameters are fake tensors in any case, and the numbers of ranks in a mesh have to have values.
    with real_tensors(), patch.object(torch, "chunk", _equal_parts):
        parallelize(model, layers, parallelism, meshes)
    return {}


def _with_buckets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Have backward reduce each parameter's gradient in a bucket for that parameter, and return the buckets.

    DDP itself reads values, which fake tensors do not have; one of its buckets holds several gradients. It broadcasts
    the buffers before forward, and copies each gradient to its bucket, which exists between the steps too.
    """
    dist = torch.distributed
    replicated: Any = model
    replicated.require_backward_grad_sync = True  # as DDP names it
    buckets = {path: torch.zeros_like(param) for path, param in model.named_parameters() if param.requires_grad}

    def broadcast(*_: Any) -> None:
        buffers = list(model.buffers())
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            flat = torch.cat([buffer.flatten() for buffer in buffers if buffer.dtype == dtype])
            dist.broadcast(flat, src=0)

    def reduce(bucket: torch.Tensor, param: torch.Tensor) -> None:
        """Reduce the bucket of a gradient, which stays a separate tensor."""
        if replicated.require_backward_grad_sync:
            dist.all_reduce(bucket)

    model.register_forward_pre_hook(broadcast)
    for path, param in model.named_parameters():
        if path in buckets:
            param.register_post_accumulate_grad_hook(partial(reduce, buckets[path]))
    return buckets


def _equal_parts(input: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Return what torch.chunk returns, equal parts first, and an empty part for each that it leaves out.

    All parts of equal size are one tensor, and so are the empty ones: FSDP divides each parameter by all ranks, which
    takes minutes for thousands of them.
    """
    size = max(-(-input.shape[dim] // chunks), 1)
    number, rest = divmod(input.shape[dim], size)
    parts = (input.narrow(dim, 0, size),) * number
    if rest:
        parts += (input.narrow(dim, number * size, rest),)
    return parts + (input.new_empty(0),) * (chunks - len(parts))
