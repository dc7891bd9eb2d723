"""`bertscope.count` and `bertscope.tree`, which load no more than a count needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from bertscope.api.requests import built, public_function, shapes_of_run
from bertscope.errors import refuse_negative
from bertscope.reports.modules import CountReport, TreeReport
from bertscope.settings.request import read_settings
from bertscope.settings.run_config import STORED
from bertscope.sources.find import Model, stored_alone

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.api.requests import ShapesOfRun


@public_function(shapes_of_run)
def count(
    model: Model,
    *,
    by: Literal["group", "layer", "module", "parameter"] = "layer",
    name: str | None = None,
    dtype: str | None = None,
    folded: bool | None = None,
    sort: Literal["model", "params", "path"] = "model",
    quantize: str = STORED,
    **run: Unpack[ShapesOfRun],
) -> CountReport | Any:
    """Count the parameters of any model from its tensors' shapes, without running it.

    `by` is group, layer, module or parameter. Equal layers are folded unless `by="parameter"`; `folded`
    overrides this. `dtype` (fp32, bf16, fp16) sets the bytes; by default the tensors' own dtypes do. `quantize`
    (nf4, fp4, int8, none) packs the weights of linear layers, by default as the model's file says. The inputs and
    outputs in a run on meta are shown with `shapes=True`, at `batch` and `seq`, or with a module's inputs, by
    their `input_size` (and `dtypes`) or as `inputs`. A file with tensors and no configuration is counted by its header.

    >>> report = bertscope.count("bert-base-cased")
    >>> f"{report.totals.distinct_params:,} unique, {report.totals.layer_params:,} over layers"
    '108,340,804 unique, 130,609,732 over layers'
    >>> bertscope.count(torch.nn.Linear(3, 4)).totals.distinct_params
    16
    """
    named = {"name": name, "dtype": dtype, "folded": folded, "sort": sort != "model", "quantize": quantize != STORED}
    options = {"by": by, "dtype": dtype, "folded": folded, "sort": sort}
    return _counted("count", model, name, run, named, {"by": by}, options, quantize)


@public_function(shapes_of_run)
def tree(
    model: Model, *, depth: int | None = None, name: str | None = None, folded: bool = True, **run: Unpack[ShapesOfRun]
) -> TreeReport | Any:
    """Return the modules down to `depth` (default: all); each row sums everything at and below its module.

    The root has depth 0, so the totals are the same for every `depth`. The other arguments are as for `count`. A file
    with tensors and no configuration has the modules in its names.

    >>> report = bertscope.tree("bert-base-cased", depth=2)
    >>> report["encoder"].params
    85054464
    >>> report = bertscope.tree(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)), input_size=(1, 3, 224, 224))
    >>> report["0"].outputs[0].shape
    (1, 8, 222, 222)
    """
    named = {"name": name, "folded": not folded, "beside_config": False}
    return _counted("tree", model, name, run, named, {"by": "tree", "depth": depth}, {"depth": depth, "folded": folded})


@public_function(shapes_of_run)
def summary(  # type: ignore[misc]  # `input_size`, or the inputs, may be given by position, as to torchinfo
    model: Model,
    input_size: Any = None,
    *,
    depth: int = 3,
    col_names: Sequence[str] | None = None,
    **run: Unpack[ShapesOfRun],
) -> str:
    """Return the table of `torchinfo.summary` for any model, called as it; `tree` returns the numbers.

    `col_names` are torchinfo's columns. Shapes and mult_adds need a run, with `input_size` (and `dtypes`), `input_data`
    or, for a named model, `shapes=True` at `batch` and `seq`.

    >>> print(bertscope.summary(torch.nn.Linear(3, 4), (2, 3), col_names=("output_size", "num_params")))
    ==========================================================================================
    Layer (type:depth-idx)                   Output Shape              Param #
    ==========================================================================================
    Linear                                   [2, 4]                    16
    ...
    """
    if input_size is not None:
        is_data = isinstance(input_size, Mapping) or hasattr(input_size, "dtype")
        is_data = is_data or (isinstance(input_size, Sequence) and any(hasattr(item, "dtype") for item in input_size))
        run["input_data" if is_data else "input_size"] = input_size
    refuse_negative(depth=depth)
    return tree(model, **run).to_torchinfo(depth, col_names)


def _counted(
    question: str,
    model: Model,
    name: str | None,
    run: Any,
    named: dict[str, Any],
    stored: Any,
    options: dict[str, Any],
    quantize: str = STORED,
) -> Any:
    """Return the report on a file with tensors and no configuration by its header, else that on a model."""
    refuse_negative(depth=options.get("depth"))
    read_settings({"quantize": quantize})
    if checkpoint := stored_alone(model, **named, **run):
        from bertscope.checkpoints.reading import stored_report

        return stored_report(checkpoint, **stored)
    from bertscope.analyses import params  # torch, which the header of a checkpoint needs not

    module, shown = built(model, name, quantize)
    return getattr(params, question)(module, name=shown, shapes=shapes_of_run(model, **run), **options)
