"""The strategies of settings/parallelism.py applied to a model, as a training script does; torch does the work."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bertscope.errors import SelectionError
from bertscope.model.encoder import BertLayer
from bertscope.settings.parallelism import TENSOR, Parallelism
from bertscope.torch_access import nn, torch
from bertscope.units import PRECISIONS

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
    """Return the layers of the list at `path`; none without a path."""
    return list(model.get_submodule(path).children()) if path else []


def parallelize(model: nn.Module, layers: list[nn.Module], parallelism: Parallelism, meshes: Meshes) -> None:
    """Divide the parameters of a model among the ranks: of each layer, then of what is left.

    The model changes: the parameters become DTensors, which hold the part of this rank. DDP leaves the parameters
    as they are. Raises SelectionError for a model that the strategy cannot divide.
    """
    if meshes.tensor is not None:
        for layer in layers or [model]:
            _divide_projections(layer, meshes.tensor)
    if meshes.shard is not None:
        _shard((*layers, model), parallelism, meshes.shard)


def _shard(modules: Iterable[nn.Module], parallelism: Parallelism, mesh: Any) -> None:
    """Shard the parameters of each module that are not sharded yet."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = (parallelism.param_dtype, parallelism.reduce_dtype)
    param_dtype, reduce_dtype = (getattr(torch, PRECISIONS[name].torch_name) if name else None for name in names)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for module in modules:
        fully_shard(module, mesh=mesh, reshard_after_forward=parallelism.row.reshards, mp_policy=policy)


def _divide_projections(layer: nn.Module, mesh: Any) -> None:
    """Divide the heads and the intermediate units of a layer among the ranks of a mesh."""
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
