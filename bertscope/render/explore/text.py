"""The text and order of `explore`: labels, columns, details of a module, search. It uses no terminal."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from bertscope.reports.page import ExploreReport, ExploreRow
from bertscope.units import bytes_text, count_text, shape_text, share_text, short_count_text, tensors_text

INDENT = 2  # columns for each level of the tree, and for the mark before a name
MORE = 12  # tensors listed for a module that holds many


@dataclass(frozen=True)
class Measure:
    """A column of the tree, which it can be sorted by; `value` is None until it is computed."""

    key: str
    title: str
    width: int
    value: Callable[[ExploreRow], int | None]
    text: Callable[[int], str]

    def cell(self, row: ExploreRow) -> str:
        """Return the text of a row: `--` for 0, `...` for a value that is still computed."""
        value = self.value(row)
        return "..." if value is None else self.text(value) if value else "--"


MEASURES = (
    Measure("params", "params", 13, lambda row: row.module.params, count_text),
    Measure("flops", "FLOPs", 9, lambda row: row.work.total.matmul_flops if row.work else None, short_count_text),
    Measure("memory", "kept", 11, lambda row: row.kept_bytes, bytes_text),
)


def shown(width: int, names: int, by: str) -> tuple[Measure, ...]:
    """Return the columns that fit next to the names; the sorted column is dropped last."""
    left, found = width - names, []
    for measure in sorted(MEASURES, key=lambda measure: measure.key != by):
        left -= measure.width
        if left >= 0:
            found.append(measure)
    return tuple(measure for measure in MEASURES if measure in found)


def children(rows: Sequence[ExploreRow]) -> list[list[int]]:
    """Return for every row the rows directly below it."""
    below: list[list[int]] = [[] for _ in rows]
    above: list[int] = []
    for place, row in enumerate(rows):
        del above[row.module.depth :]
        if above:
            below[above[-1]].append(place)
        above.append(place)
    return below


def sorted_by(rows: Sequence[ExploreRow], places: Sequence[int], by: str) -> list[int]:
    """Return siblings, largest first; in the model's order if `by` is no measure."""
    measure = next((measure for measure in MEASURES if measure.key == by), None)
    return list(places) if measure is None else sorted(places, key=lambda place: -(measure.value(rows[place]) or 0))


def matches(row: ExploreRow, words: str) -> bool:
    """Check if every word is in the path, the type or the name of a tensor of the module itself."""
    text = " ".join((row.module.path, row.module.type, *(tensor.path for tensor in row.tensors))).lower()
    return all(word in text for word in words.lower().split())


def title(report: ExploreReport) -> str:
    """Return the model and its run."""
    run, about = report.run, report.subject
    precision = f"{run['autocast']} autocast" if run["autocast"] else run["dtype"]
    recomputed = "" if run["checkpointing"] == "none" else f", checkpointing {run['checkpointing']}"
    attention = f", {about.attention}" if about.attention else ""
    adapters = f", LoRA {about.lora}" if about.lora else ""
    return (
        f"{about.name}: {about.architecture}{attention}{adapters}; "
        f"step at {run['batch']} x {run['seq']}, {precision}{recomputed}"
    )


def status(report: ExploreReport) -> str:
    """Return the values that are still computed, or the sums."""
    if report.awaited:
        return f"computing {' and then '.join(report.awaited)} ..."
    root = report.rows[0]
    flops = short_count_text(root.work.total.matmul_flops if root.work else 0)
    return (
        f"{count_text(report.totals.distinct_params)} unique parameters, {flops} FLOPs, "
        f"{bytes_text(root.kept_bytes or 0)} saved for backward"
    )


def details(report: ExploreReport, place: int) -> str:
    """Return all details of one module."""
    row = report.rows[place]
    below = takewhile(lambda other: other.module.depth > row.module.depth, report.rows[place + 1 :])
    rows = [row, *below]
    return "\n".join((*_about(row), *_tensors(row, rows), *_run(row), *_kept(row, rows)))


def _about(row: ExploreRow) -> Iterator[str]:
    module = row.module
    yield f"{module.path or '(the whole model)'}"
    yield f"type        {module.type}" + (f", {module.copies} copies" if module.copies > 1 else "")
    if module.same_as is not None:
        yield f"same as     {module.same_as}"
    each = f" = {module.copies} x {count_text(module.each_params)}" if module.copies > 1 and module.params else ""
    yield f"parameters  {count_text(module.params)}{each}, {share_text(module.share)}"
    if module.distinct_params != module.params:
        yield f"  unique    {count_text(module.distinct_params)}"
    if module.trainable_params != module.params:
        yield f"  trainable {count_text(module.trainable_params)}"


def _tensors(row: ExploreRow, rows: Sequence[ExploreRow]) -> Iterator[str]:
    held = [tensor for found in rows for tensor in found.tensors]
    for tensor in held[:MORE]:
        kind = count_text(tensor.numel) if tensor.is_parameter else "buffer"
        frozen = ", frozen" if tensor.is_parameter and not tensor.trainable else ""
        tied = f", tied to {tensor.tied_to}" if tensor.tied_to else ""
        yield f"  {_inside(tensor.path, row.module.path)} {shape_text(tensor.shape)} {kind}{frozen}{tied}".rstrip()
    if len(held) > MORE:
        yield f"  and {len(held) - MORE} more tensors below"


def _inside(path: str, above: str) -> str:
    return path.removeprefix(f"{above}.") if above else path


def _run(row: ExploreRow) -> Iterator[str]:
    if row.work is None:
        yield "FLOPs       being computed"
        return
    if row.module.inputs or row.module.outputs:
        yield f"in          {tensors_text(row.module.inputs) or 'no tensor'}"
        yield f"out         {tensors_text(row.module.outputs) or 'no tensor'}"
    for name in ("forward", "backward", "recompute"):
        work = getattr(row.work, name)
        if work.bytes_moved or name != "recompute":
            elementwise = f", {count_text(work.elementwise_flops)} elementwise" if work.elementwise_flops else ""
            yield f"{name:<11} {count_text(work.matmul_flops)} FLOPs{elementwise}"


def _kept(row: ExploreRow, rows: Sequence[ExploreRow]) -> Iterator[str]:
    if row.kept_bytes is None:
        yield "kept        being computed"
        return
    yield f"kept        {bytes_text(row.kept_bytes)} made here, for backward"
    kept = sorted((found for each in rows for found in each.kept), key=lambda found: -found.kept_bytes)
    for found in kept[:MORE]:
        place = "" if found.path == row.module.path else f" of {_inside(found.path, row.module.path)}"
        times = f"{found.tensors} x " if found.tensors > 1 else ""
        words = f"{found.what or found.operator}{place}, {times}{shape_text(found.shape)} {found.dtype}"
        yield f"  {bytes_text(found.kept_bytes)}: {words}"
    if len(kept) > MORE:
        yield f"  and {len(kept) - MORE} more"
