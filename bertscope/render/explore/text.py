"""The text and order of `explore`: labels, columns, details of a module, filter. It uses no terminal."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from bertscope.render.console import Target, wrapped
from bertscope.render.tree import row_name
from bertscope.reports.layer_ranges import LayerRange, expand
from bertscope.reports.page import ExploreReport, ExploreRow
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import AUTOCAST, RUN_PRECISIONS, STORED
from bertscope.units import (
    FP32,
    bytes_text,
    count_text,
    flops_text,
    shape_text,
    share_text,
    short_count_text,
    tensors_text,
)


class ModuleTree(Tree[int]):
    """The modules; the data of a node is the place of its row."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"tree--bar"}  # besides those of Tree
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "open", "Open", show=False),
        Binding("left", "close", "Close", show=False),
    ]

    def __init__(self, rows: Sequence[ExploreRow]) -> None:
        self.rows, self.by = rows, "order"
        self.below = children(rows)
        # the width of the branches and names, in characters
        self.names = max(INDENT * (row.module.depth + 1) + len(row_name(row.module)) for row in rows)
        self.columns = Columns.fitting(0, rows, self.by)
        self.matching: set[int] | None = None  # the modules that the filter matches; None without a filter
        self.nodes: dict[int, TreeNode[int]] = {}
        # Layers are closed: there are many of them, or one that represents all.
        self.open = {place for place, row in enumerate(rows) if LayerRange.parse(row.module.name) is None}
        super().__init__(row_name(rows[0].module), data=0)
        self.guide_depth = INDENT

    def toggle_all(self) -> None:
        """Open everything; if all is open, close everything but the root."""
        parents = [place for place in self.nodes if self.below[place]]
        all_open = all(self.nodes[place].is_expanded for place in parents)
        for place in parents:
            node = self.nodes[place]
            node.collapse() if all_open and place else node.expand()
        self.go_to(0 if all_open else self.place)

    def filter(self, matching: set[int] | None, place: int) -> None:
        """Show only these modules, those around them and those below them; None shows all. Go to `place`."""
        self._remember()
        self.matching = matching
        self._fill(place)

    def _remember(self) -> None:
        """Keep what is open, to build the nodes again; a filter opens modules for itself."""
        if self.nodes and self.matching is None:
            self.open = {place for place, node in self.nodes.items() if node.is_expanded}

    def _fill(self, place: int) -> None:
        above = set[int]()  # the modules around those that match
        if self.matching is not None:
            trail: list[int] = []
            for row, found in enumerate(self.rows):
                del trail[found.module.depth :]
                above |= set(trail) if row in self.matching else set()
                trail.append(row)
        opened = self.open if self.matching is None else above
        self.clear()
        self.nodes = {0: self.root}
        self._add(0, opened, is_whole=self.matching is None or 0 in self.matching)
        self.root.expand() if 0 in opened else self.root.collapse()
        self.go_to(place if place in self.nodes else 0)

    def _add(self, place: int, opened: set[int], *, is_whole: bool) -> None:
        """Add the modules below one: all, or those that match or are around a match."""
        for child in sorted_by(self.rows, self.below[place], self.by):
            is_match = is_whole or child in (self.matching or ())
            if is_match or child in opened:
                name, has_parts = row_name(self.rows[child].module), bool(self.below[child])
                self.nodes[child] = self.nodes[place].add(name, child, expand=child in opened, allow_expand=has_parts)
                self._add(child, opened, is_whole=is_match)

    @property
    def place(self) -> int:
        """Return the row under the cursor."""
        node = self.cursor_node
        return node.data if node is not None and node.data is not None else 0

    def order(self, place: int = 0) -> list[int]:
        """Return a row and all rows below it from top to bottom, the closed ones too."""
        found = [place]
        for child in sorted_by(self.rows, self.below[place], self.by):
            found += self.order(child)
        return found

    def go_to(self, place: int) -> None:
        """Move the cursor to that row, and open all above it."""
        node = self.nodes[place]
        above = node.parent
        while above is not None:
            above.expand()
            above = above.parent
        _ = self.last_line  # reading it numbers the lines, which the cursor needs
        self.move_cursor(node)
        self.scroll_to_line(node.line, animate=False)

    def show_measures(self, width: int) -> None:
        """Choose the columns for a width, and build all nodes again; the cursor and the open nodes stay."""
        self.columns = Columns.fitting(width - self.names, self.rows, self.by)
        self._remember()
        self._fill(self.place)

    def header(self) -> str:
        """Return the titles over the columns."""
        return f"{'module':<{self.names}}{self.columns.titles(self.by)}"

    def render_label(self, node: TreeNode[int], base_style: Style, style: Style) -> Text:
        """Return the name and columns, aligned at every depth."""
        if node.data is None:
            return super().render_label(node, base_style, style)
        row = self.rows[node.data]
        mark = ("- " if node.is_expanded else "+ ") if node.allow_expand else "  "
        width = self.names - INDENT * row.module.depth
        bar, percent = self.columns.share(row, self.rows[0])
        colour = Style() if node is self.cursor_node else self.get_component_rich_style("tree--bar", partial=True)
        text = Text(f"{mark}{row_name(row.module)}".ljust(width) + self.columns.numbers(row), style=style)
        return text.append(bar, colour).append(percent)

    def action_open(self) -> None:
        """Open the module, or go to the first below it."""
        node = self.cursor_node
        if node is None or not node.allow_expand:
            return
        if node.is_expanded:
            self.move_cursor(node.children[0])
        else:
            node.expand()

    def action_close(self) -> None:
        """Close the module, or go to the one above it."""
        node = self.cursor_node
        if node is not None and node.allow_expand and node.is_expanded:
            node.collapse()
        elif node is not None and node.parent is not None:
            self.move_cursor(node.parent)


INDENT = 2  # columns for each level of the tree, and for the mark before a name
MORE = 12  # tensors listed for a module that holds many
GAP = 2  # columns before each number
BAR_LEAST, BAR_MOST = 5, 20  # cells of a bar
PERCENT = len(" 100.0 %")


@dataclass(frozen=True)
class Measure:
    """A column of the tree, which it can be sorted by; `value` is None until it is computed."""

    key: str
    title: str
    width: int  # at least
    value: Callable[[ExploreRow], int | None]
    text: Callable[[int], str]

    def cell(self, row: ExploreRow) -> str:
        """Return the text of a row: `--` for 0, `...` for a value that is still computed."""
        value = self.value(row)
        return "..." if value is None else self.text(value) if value else "--"

    def fitted(self, rows: Iterable[ExploreRow]) -> "Measure":
        """Return the column as wide as its widest cell."""
        widest = max(len(self.cell(row)) for row in rows)
        return replace(self, width=max(self.width, widest + GAP))


MEASURES = (
    Measure("params", "params", 12, lambda row: row.module.params, count_text),
    Measure("flops", "FLOPs", 9, lambda row: row.work.total.matmul_flops if row.work else None, short_count_text),
    Measure("memory", "saved", 12, lambda row: row.kept_bytes, bytes_text),
)


@dataclass(frozen=True)
class Columns:
    """The columns that fit next to the names: some of the measures, and the share as a bar and a percentage."""

    measures: tuple[Measure, ...]
    shared: Measure  # the measure of the share
    bar: int = 0  # cells, 0 for no bar
    has_percent: bool = False

    @classmethod
    def fitting(cls, width: int, rows: Sequence[ExploreRow], by: str) -> "Columns":
        """Return those for a width; the column that the tree is sorted by is the last to be dropped."""
        every, found = [measure.fitted(rows) for measure in MEASURES], []
        for measure in sorted(every, key=lambda measure: measure.key != by):
            width -= measure.width
            if width >= 0:
                found.append(measure)
        chosen = tuple(measure for measure in every if measure in found)
        shared = next((measure for measure in every if measure.key == by), every[0])
        left = width - GAP if chosen == tuple(every) else 0
        if left >= BAR_LEAST + PERCENT:
            return cls(chosen, shared, min(left - PERCENT, BAR_MOST), has_percent=True)
        return cls(chosen, shared, left if left >= BAR_LEAST else 0)

    @property
    def width(self) -> int:
        """Return the width of all columns."""
        share = GAP + self.bar + PERCENT * self.has_percent if self.bar else 0
        return sum(measure.width for measure in self.measures) + share

    def titles(self, by: str) -> str:
        """Return the titles, with an arrow at the sorted one."""
        texts = (f"{'v ' if item.key == by else ''}{item.title}".rjust(item.width) for item in self.measures)
        return "".join(texts) + (f"{' ' * GAP}share" if self.bar else "")

    def numbers(self, row: ExploreRow) -> str:
        """Return the cells of the measures of a row."""
        return "".join(item.cell(row).rjust(item.width) for item in self.measures)

    def share(self, row: ExploreRow, root: ExploreRow) -> tuple[str, str]:
        """Return the bar and the percentage of a row."""
        value, whole = self.shared.value(row), self.shared.value(root)
        if not (self.bar and value and whole):
            return "", ""
        share = min(value / whole, 1.0)
        percent = f"{100 * share:.1f} %".rjust(PERCENT) if self.has_percent else ""
        return " " * GAP + bar(share, self.bar).ljust(self.bar), percent


def bar(share: float, cells: int) -> str:
    """Return a bar of eighths of a cell; a share above 0 has at least one."""
    full, part = divmod(max(round(share * cells * 8), share > 0), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[part].strip()


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
    """Check if every word is in the path, type or a tensor's name of the module, and one not only in the path above."""
    module = row.module
    above = module.path.removesuffix(module.name).lower()
    tensors = " ".join(_inside(tensor.path, module.path) for tensor in row.tensors)
    own = f"{module.name} {module.type} {tensors}".lower()
    asked = words.lower().split()
    return all(word in f"{above}{own}" for word in asked) and any(word in own or word not in above for word in asked)


def copied_path(row: ExploreRow) -> str:
    """Return the path of the module, or of the first one that the row represents, as `get_submodule` takes it."""
    return next(expand(row.module.path))


def next_precision(precision: str, first: str) -> str:
    """Return the precision after this one; `first` is that at the start, `stored` only if it is."""
    kept = STORED if first == STORED else FP32.name
    others = [name for name in RUN_PRECISIONS if name not in (kept, STORED)]
    every = [kept, *sorted(others, key=lambda name: not name.startswith(AUTOCAST))]
    return every[(every.index(precision) + 1) % len(every)]


def node_title(report: ExploreReport) -> str:
    """Return the model and its run."""
    run, about = report.run, report.subject
    precision = "the model's own dtypes" if run.precision == STORED else run.precision
    recomputed = "" if run.checkpointing == NONE else f", checkpointing {run.checkpointing}"
    attention = f", {about.attention}" if about.attention else ""
    adapters = f", LoRA {about.lora}" if about.lora else ""
    return (
        f"{about.name}: {about.architecture}{attention}{adapters}; "
        f"training step at batch {run.batch}, length {run.seq}, {precision}{recomputed}"
    )


def status(report: ExploreReport) -> str:
    """Return the values that are still computed, or the sums."""
    if report.awaited:
        return f"computing {' and then '.join(report.awaited)} ..."
    root = report.rows[0]
    flops = flops_text(root.work.total.matmul_flops if root.work else 0)
    return (
        f"{count_text(report.totals.distinct_params)} unique parameters, {flops}, "
        f"{bytes_text(root.kept_bytes or 0)} saved for backward"
    )


def details(report: ExploreReport, place: int, width: int) -> str:
    """Return all details of one module, in lines of that width."""
    row = report.rows[place]
    below = takewhile(lambda other: other.module.depth > row.module.depth, report.rows[place + 1 :])
    rows = [row, *below]
    return "".join(fitted(line, width) for line in (*_about(row), *_tensors(row, rows), *_run(row), *_kept(row, rows)))


def fitted(line: str, width: int) -> str:
    """Return a line in lines of that width: no shape is broken, and only a path longer than a line is, at its dots."""
    start = len(line) - len(line.lstrip())
    most = max(width - start - INDENT, 1)
    parts = re.compile(rf"\S{{1,{most}}}(?:(?<=\.)|$)|\S+?(?:\.|$)")
    whole = re.sub(rf"\S{{{most + 1},}}", lambda path: "  ".join(parts.findall(path[0])), line)
    joined = re.sub(r"\[[^\[\]]*\]", lambda shape: shape[0].replace(" ", "\u00a0"), whole)
    return wrapped(joined, Target(max(width, 1)), start + INDENT)


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
        yield "saved       being computed"
        return
    yield f"saved       {bytes_text(row.kept_bytes)} made here, for backward"
    kept = sorted((found for each in rows for found in each.kept), key=lambda found: -found.kept_bytes)
    for found in kept[:MORE]:
        place = "" if found.path == row.module.path else f" of {_inside(found.path, row.module.path)}"
        times = f"{found.tensors} x " if found.tensors > 1 else ""
        words = f"{found.what or found.operator}{place}, {times}{shape_text(found.shape)} {found.dtype}"
        yield f"  {bytes_text(found.kept_bytes)}: {words}"
    if len(kept) > MORE:
        yield f"  and {len(kept) - MORE} more"
