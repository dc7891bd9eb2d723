"""`diagram`: a model as a class diagram, as the dataflow of its forward pass, or as the tree of its modules."""

from bertscope.analyses.diagram.classes import class_diagram
from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.params.tree import tree
from bertscope.errors import SelectionError, suggestion
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.reports.diagram import ClassReport, DiagramEdge, DiagramNode, GraphReport
from bertscope.reports.layer_ranges import expand, is_run
from bertscope.reports.params import TreeRow
from bertscope.torch_access import nn

KINDS = ("class", "forward", "tree")


def diagram(
    model: nn.Module,
    kind: str | None = None,
    path: str = "",
    *,
    name: str | None = None,
    depth: int | None = None,
    direction: str | None = None,
    given: Given | None = None,
    around: str | None = None,
    implementation: str = "bertscope",
    nn_module: bool = False,
) -> ClassReport | GraphReport:
    """Return one diagram of a model, by default `class` of a BERT and `tree` of any other module.

    `class` draws the classes of the whole model, or those around one class: `around`, or the class of the module at
    `path`; with `nn_module` also their common base torch.nn.Module. `forward`, of a BERT only, draws the dataflow of
    the module at `path` for the inputs `given`. `tree` draws the modules at and below `path`. Raises SelectionError for
    another kind, and for a path or class that the model does not have.
    """
    bert = model if isinstance(model, BertPreTrainedModel | PeftModel) else None
    kind = kind or ("class" if bert or around else "tree")
    if kind == "forward":
        if bert is None:
            raise SelectionError(f"kind forward draws a BERT only; got {type(model).__name__}; class and tree draw any")
        return forward_diagram(bert, path, name=name, given=given, depth=depth, direction=direction)
    if kind == "tree":
        return tree_diagram(model, path, name=name, depth=depth, direction=direction)
    if kind != "class":
        raise SelectionError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if path and not around:
        modules = dict(model.named_modules())
        if path not in modules:
            raise SelectionError(f"no module {path!r} in this model; {suggestion(path, filter(None, modules))}")
        around = type(modules[path]).__name__
    return class_diagram(model, name=name, around=around, package=implementation, nn_module=nn_module)


def tree_diagram(
    model: nn.Module, path: str = "", *, name: str | None = None, depth: int | None = None,
    direction: str | None = None,
) -> GraphReport:  # fmt: skip
    """Return the modules at and below `path`, `depth` levels down, equal layers folded; parameters as in `tree`."""
    report = tree(model, name=name)
    root = _row_at(report.rows, path)
    start = f"{root.path}." if root.path else ""
    below = [row for row in report.rows if row is root or row.path.startswith(start)]
    rows = [row for row in below if depth is None or row.depth - root.depth <= depth]
    ids = {row.path: f"m{number}" for number, row in enumerate(rows)}
    return GraphReport(
        diagram="tree",
        subject=report.subject,
        path=root.path,
        batch=None,
        seq=None,
        cache=0,
        direction=direction or "LR",
        nodes=tuple(
            DiagramNode(
                id=ids[row.path],
                role="module",
                name=row.name or row.type,
                detail=row.type,
                path=row.path,
                copies=row.copies if is_run(row.name) else 1,
                params=row.params,
            )
            for row in rows
        ),
        edges=tuple(
            DiagramEdge(source=ids[row.path.rpartition(".")[0]], target=ids[row.path])
            for row in rows
            if row is not root
        ),
    )


def _row_at(rows: tuple[TreeRow, ...], path: str) -> TreeRow:
    """Return the row of a path; for one of several equal layers, such as `encoder.layer.7`, their common row."""
    for row in rows:
        if path in (row.path, *expand(row.path)):
            return row
    known = [row.path for row in rows if row.path]
    raise SelectionError(f"no module {path!r} in this model; {suggestion(path, known)}")
