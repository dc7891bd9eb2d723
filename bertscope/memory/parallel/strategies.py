"""The strategies of settings/parallelism.py applied to a model, as a training script does; torch does the work."""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod
from typing import Any

from bertscope.errors import SelectionError
from bertscope.model.encoder import BertLayer
from bertscope.model.modules import layer_lists, outermost
from bertscope.reports.memory import RankGroup
from bertscope.settings.parallelism import TENSOR, Parallelism
from bertscope.sources.model_source import REPEATED, all_parameters
from bertscope.torch_access import nn, torch
from bertscope.units import PRECISIONS


def rank_groups(model: nn.Module, parallelism: Parallelism, layer_path: str = "") -> tuple[RankGroup, ...]:
    """Return the ranks in groups that update the same number of the model's trained parameters."""
    runs = (
        _zero_runs(model, parallelism) if parallelism.row.divides_optimizer else _runs(model, parallelism, layer_path)
    )
    groups: list[RankGroup] = []
    first = 0
    for count, run in groupby((run for run in runs if run[0]), key=lambda run: run[1]):
        last = first + sum(ranks for ranks, _ in run) - 1
        groups.append(RankGroup(first=first, last=last, updated_params=count))
        first = last + 1
    return tuple(groups)


def _runs(model: nn.Module, parallelism: Parallelism, layer_path: str) -> Iterator[tuple[int, int]]:
    """Yield how many ranks follow each other with a share of so many parameters."""
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


def _zero_runs(model: nn.Module, parallelism: Parallelism) -> Iterator[tuple[int, int]]:
    """Yield each rank with its share; ranks without a parameter are one run."""
    sizes = [param.numel() for _, param in all_parameters(model) if param.requires_grad]
    shares = zero_shares(sizes, parallelism.world_size)
    yield from ((1, sum(sizes[number] for number in share)) for share in shares)
    yield parallelism.world_size - len(shares), 0


def zero_shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the parameters of these sizes that each rank updates, in the order of its update.

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
    """Return a job with one rank more than there are trained parameters in place of a larger one.

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
    return Meshes(
        shard=mesh[sharded] if parallelism.row.is_sharded else None, tensor=mesh[TENSOR] if TENSOR in names else None
    )


def layers_of(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the units that a strategy divides one by one: the layers of the list at `path`.

    Without a path those modules that transformers does not split among devices, else the layers of lists of one class,
    else the children of the model: what accelerate and users of fully_shard take.
    """
    if path:
        return list(model.get_submodule(path).children())
    whole = set(getattr(model, "_no_split_modules", None) or ())
    found = [*outermost(model, lambda module: type(module).__name__ in whole).values()]
    paths = () if found else (layer for layers in layer_lists(model).values() for layer in layers)
    units = found or map(model.get_submodule, paths)
    return [unit for unit in dict.fromkeys(units) if any(True for _ in unit.parameters())]


def units_text(model: nn.Module, parallelism: Parallelism, path: str) -> str:
    """Return the units of FSDP, such as `32 x LlamaDecoderLayer`; empty for a strategy that does not shard."""
    counts = Counter(type(unit).__name__ for unit in layers_of(model, path)) if parallelism.row.is_sharded else {}
    if layers := path and vars(model.get_submodule(path)).get(REPEATED):
        counts = dict.fromkeys(counts, layers)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def parallelize(model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, meshes: Meshes) -> None:
    """Divide the parameters of a model among the ranks: of each layer, then of what is left.

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
    for name, count in (("attention heads", attention.num_attention_heads),
                        ("intermediate units", layer.intermediate.dense.out_features)):  # fmt: skip
        if count % ranks:
            raise SelectionError(
                f"{count:,} {name} cannot be divided by {ranks:,} ranks; choose a divisor of {count:,}"
            )
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
