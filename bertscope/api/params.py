"""`bertscope.count` and `bertscope.tree`."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bertscope.analyses.modules.module_tree import InOut
from bertscope.analyses.params import count as counting
from bertscope.analyses.params import tree as trees
from bertscope.api.asked import Model, Size, built, inputs_of, shapes_of_run
from bertscope.reports.params import CountReport, TreeReport
from bertscope.torch_access import torch


def count(
    model: Model,
    *,
    by: Literal["group", "layer", "module", "parameter"] = "layer",
    name: str | None = None,
    dtype: str | None = None,
    folded: bool | None = None,
    sort: Literal["model", "params", "path"] = "model",
    shapes: Mapping[str, InOut] | bool | None = None,
    batch: int = 1,
    seq: int = 128,
    input_size: Size | None = None,
    inputs: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> CountReport:
    """Count the parameters of any model from the shapes of its tensors, without running it.

    `by` is one of group, layer, module, parameter. Equal layers are folded unless `by="parameter"`; `folded`
    overrides this. `dtype` (fp32, bf16, fp16) sets the bytes; by default they are those of the tensors. The inputs and
    outputs of a run on meta are shown with `shapes=True`, at `batch` and `seq`, or with the inputs of a module, by
    their `input_size` (and `dtypes`) or as `inputs`.

    >>> report = bertscope.count("bert-base-cased")
    >>> f"{report.totals.distinct_params:,} unique, {report.totals.layer_params:,} over layers"
    '108,340,804 unique, 130,609,732 over layers'
    >>> bertscope.count(torch.nn.Linear(3, 4)).totals.distinct_params
    16
    """
    module, shown = built(model, name)
    found = shapes_of_run(model, shapes, inputs_of(inputs, input_size, dtypes), batch, seq)
    return counting.count(module, by=by, name=shown, dtype=dtype, folded=folded, sort=sort, shapes=found)


def tree(
    model: Model,
    *,
    depth: int | None = None,
    name: str | None = None,
    folded: bool = True,
    shapes: Mapping[str, InOut] | bool | None = None,
    batch: int = 1,
    seq: int = 128,
    input_size: Size | None = None,
    inputs: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> TreeReport:
    """Return the modules down to `depth` (default: all); each row sums everything at and below its module.

    The root has depth 0, so the totals are the same for every `depth`. The other arguments are those of `count`.

    >>> report = bertscope.tree("bert-base-cased", depth=2)
    >>> report["encoder"].params
    85054464
    >>> report = bertscope.tree(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), input_size=(1, 3, 224, 224))
    >>> report["0"].outputs[0].shape
    (1, 8, 222, 222)
    """
    module, shown = built(model, name)
    found = shapes_of_run(model, shapes, inputs_of(inputs, input_size, dtypes), batch, seq)
    return trees.tree(module, depth=depth, name=shown, folded=folded, shapes=found)
