"""`tree --interactive`: the module tree in the terminal, and the details of the module under the cursor."""

from __future__ import annotations

import gc
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import Footer, Input, Static, Tree
from textual.widgets.tree import TreeNode

from bertscope.reports.checkpoint import CheckpointReport, StoredRow
from bertscope.reports.layer_ranges import expand, is_run
from bertscope.reports.modules import CountReport, TreeReport, TreeRow
from bertscope.units import bytes_text, count_text, flops_text, shape_text, share_text, tensors_text, visible
from bertscope.views.console import stdout_target
from bertscope.views.views import view_of

MOST_ROWS = 1000  # children of a node, and rows that one key opens: Textual adds 30,000 nodes a second


@dataclass(eq=False)
class Item:
    """A module, or a page of the children of a module that has more than MOST_ROWS."""

    row: Any  # a TreeRow, or a StoredRow of a checkpoint
    path: str
    name: str
    type: str
    params: int
    parent: Item | None = None
    below: list[Item] = field(default_factory=list)
    tensors: list[Any] = field(default_factory=list)
    flops: int = 0  # of the forward pass that gave the shapes

    @cached_property
    def level(self) -> int:
        """Return the number of nodes around it in the tree."""
        return 0 if self.parent is None else self.parent.level + 1


def items_of(report: TreeReport | CheckpointReport, tensors: CountReport | CheckpointReport) -> list[Item]:
    """Return a report's modules in its order, the root first, each with its tensors."""
    by_path: dict[str, Item] = {}
    for row in report.rows:
        path, kind = (row.path, row.type) if isinstance(row, TreeRow) else (row.name if by_path else "", row.dtype)
        by_path[path] = Item(row, path, row.name or kind, kind if row.name else "", row.params)

    def around(path: str) -> Item:
        """Return the module around a path; a checkpoint may have no row for the nearest."""
        while (path := path.rpartition(".")[0]) not in by_path:
            pass
        return by_path[path]

    items = list(by_path.values())
    for item in items[1:]:
        item.parent = around(item.path)
        item.parent.below.append(item)
        item.name = item.path.removeprefix(f"{item.parent.path}.")
        if any(map(is_run, item.name.split("."))):
            item.name += f" ({item.row.copies} x)"
    for tensor in tensors.rows:
        name = tensor.name.replace("/", ".") if isinstance(tensor, StoredRow) else tensor.name
        around(name).tensors.append(tensor)
    flops: Counter[str] = Counter()
    for call in getattr(report, "calls", ()):
        flops[call.path] += call.matmul_flops
    for item in reversed(items):
        if called := [flops[path] for path in expand(item.path) if path in flops]:
            item.flops += sum(called) * item.row.copies // len(called)  # of more than 256 equal layers two are called
        if item.parent is not None:
            item.parent.flops += item.flops
        if len(item.below) > MOST_ROWS:
            item.below = list(_pages(item))
    return items


def _pages(item: Item) -> Iterator[Item]:
    for start in range(0, len(item.below), MOST_ROWS):
        below = item.below[start : start + MOST_ROWS]
        name, params = f"{below[0].name} ... {below[-1].name}", sum(child.params for child in below)
        page = replace(item, name=name, type="", params=params, parent=item, below=below)
        for child in below:
            child.parent = page
        yield page


def details(item: Item, total: int) -> Iterator[str]:
    """Yield the lines about a module; `total` is the number of parameters of the model."""
    row, is_stored = item.row, isinstance(item.row, StoredRow)
    copies = f" = {row.copies} x {count_text(row.params // row.copies)}" if row.copies > 1 else ""
    share = f", {share_text(row.params / total)}" if total else ""
    yield item.path or "(the model)"
    same = "" if is_stored or row.same_as is None else f", same module as '{row.same_as}'"
    yield f"dtype       {row.dtype}" if is_stored else f"class       {row.type}{same}"
    yield f"parameters  {count_text(row.params)}{copies}{share}" + ("" if is_stored else ", summed over layers")
    if not is_stored:
        yield f"  unique    {count_text(row.distinct_params)}"
        yield f"  trainable {count_text(row.trainable_params)}"
    yield f"size        {bytes_text(row.bytes)}"
    if not is_stored and (row.inputs or row.outputs):
        yield f"input       {tensors_text(row.inputs) or 'no tensor'}"
        yield f"output      {tensors_text(row.outputs) or 'no tensor'}"
        yield f"forward     {flops_text(item.flops)} in matrix products"
    for tensor in item.tensors:
        shape, size = (tensor.shape, tensor.dtype) if is_stored else (tensor.shapes[0], count_text(tensor.each_params))
        frozen = ", frozen" if not is_stored and tensor.params > tensor.trainable_params else ""
        tied = f", tied to {other}" if (other := tensor.shares if is_stored else tensor.tied_to) else ""
        yield f"  {tensor.name.removeprefix(f'{item.path}.')} {shape_text(shape)} {size}{tied}{frozen}"


def matches(item: Item, text: str) -> bool:
    """Return True if the words are in the class, or in the path and not only in the path of the module around it."""
    path, wanted = item.path.lower(), text.lower()
    return wanted in item.type.lower() or (wanted in path and wanted not in path.rpartition(".")[0])


class ModuleTree(Tree[Item]):
    """The modules with their parameters and shares in columns."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("right", "turn(True)"), Binding("left", "turn(False)")]

    def __init__(self, items: Sequence[Item]) -> None:
        self.items, self.whole = items, items[0].params
        super().__init__("module", data=items[0])
        self.nodes: dict[Item, TreeNode[Item]] = {items[0]: self.root}
        self.guide_depth = 2

    @property
    def item(self) -> Item:
        """Return the item under the cursor."""
        return self.items[0] if self.cursor_node is None else self.cursor_node.data or self.items[0]

    def get_label_width(self, node: TreeNode[Item]) -> int:
        """Return a label's width, up to the right border."""
        return max(self.scrollable_content_region.width, 40) - 2 * (node.data or self.items[0]).level

    def render_label(self, node: TreeNode[Item], base_style: Style, style: Style) -> Text:
        """Return the name, class, parameters and share."""
        item = node.data or self.items[0]
        share = share_text(item.params / self.whole) if item.params else ""
        numbers = f"  {count_text(item.params) if item.params else '--'}{share:>10}"
        mark = ("- " if node.is_expanded else "+ ") if node.allow_expand else "  "
        label = Text.assemble((f"{mark}{visible(item.name)} ", style), (visible(item.type), style + Style(dim=True)))
        label.truncate(self.get_label_width(node) - len(numbers), overflow="ellipsis", pad=True)
        return label.append(numbers, style)

    def fill(self, item: Item) -> TreeNode[Item]:
        """Return the node of an item, with its children's nodes."""
        node = self.nodes[item]
        for child in () if node.children else item.below:
            self.nodes[child] = node.add("module", child, allow_expand=bool(child.below))
        return node

    def open(self, is_wanted: Callable[[Item], bool]) -> bool:
        """Open the wanted items level by level; return False if their children are more than MOST_ROWS."""
        left, queue = MOST_ROWS, deque(self.items[:1])
        while queue:
            item = queue.popleft()
            if item.below and is_wanted(item):
                left -= len(item.below)
                if left < 0:
                    return False
                self.fill(item).expand()
                queue += item.below
        return True

    def go_to(self, item: Item) -> None:
        """Open everything around an item, and move the cursor to it."""
        around = [item]
        while (parent := around[-1].parent) is not None:
            around.append(parent)
        for parent in around[:0:-1]:
            self.fill(parent).expand()
        _ = self.last_line  # reading it numbers the lines, which the cursor needs
        self.move_cursor(self.nodes[item])

    def _on_tree_node_expanded(self, event: Tree.NodeExpanded[Item]) -> None:
        self.fill(event.node.data or self.items[0])

    def _action_turn(self, is_open: bool) -> None:
        item, node = self.item, self.nodes[self.item]
        if item.below and node.is_expanded != is_open:
            node.toggle()
        elif not is_open:
            self.action_cursor_parent()


class Browser(App[BaseException]):
    """The tree, the details of a module, a status line and the keys; its result is an error, or Ctrl-C."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012  as in the class of Textual
    CSS = """
    #title { text-style: bold; }
    Input { display: none; }
    #main { height: 1fr; }
    ModuleTree { height: 3fr; scrollbar-size: 1 1; scrollbar-gutter: stable; }
    ModuleTree:nocolor > .tree--cursor { text-style: reverse; }
    ModuleTree:nocolor > .tree--guides { color: ansi_default; }
    #details { height: 2fr; border-top: solid $primary; scrollbar-size: 1 1; }
    .-wide #main { layout: horizontal; }
    .-wide ModuleTree { width: 3fr; height: 1fr; }
    .-wide #details { width: 2fr; height: 1fr; border-top: none; border-left: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "next(1)", "next"),
        Binding("N", "next(-1)", "back", key_display="N"),
        Binding("plus", "open_all", "expand all", key_display="+"),
        Binding("minus", "close_all", "collapse", key_display="-"),
        Binding("c", "copy", "copy path"),
        Binding("escape", "leave", show=False),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, heading: str, items: Sequence[Item], depth: int | None = None) -> None:
        super().__init__(ansi_color="NO_COLOR" in os.environ)  # then colours are left out, and not made grey
        self.heading, self.items, self.depth = heading, items, 3 if depth is None else depth
        self.choices, self.origin = "", items[0]  # of the search, and where it began

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        self.modules, self.body = ModuleTree(self.items), Static(markup=False)
        self.status, self.keys = Static("arrows move, open and close; tab goes to the details"), Footer()
        self.search = Input(placeholder="a part of a path or of a class; enter, or esc to go back", compact=True)
        yield Static(visible(self.heading), id="title", markup=False)
        with Container(id="main"):
            yield self.modules
            with VerticalScroll(id="details"):
                yield self.body
        yield self.status
        yield self.search
        self.keys.compact = True
        yield self.keys

    def on_mount(self) -> None:
        """Open the first levels."""
        self.modules.open(lambda item: item.level < self.depth)
        self.modules.focus()

    def _on_tree_node_highlighted(self) -> None:
        self.body.update("\n".join(map(visible, details(self.modules.item, self.modules.whole))))
        self.query_one("#details").scroll_home(animate=False)

    def _action_open_all(self) -> None:
        if not self.modules.open(lambda item: True):
            self.status.update(f"more than {count_text(MOST_ROWS)} rows: the right arrow opens those that are closed")

    def _action_close_all(self) -> None:
        self.modules.root.collapse_all()
        self.modules.root.expand()
        self.modules.go_to(self.items[0])

    def _action_copy(self) -> None:
        """Copy the module's path, as `get_submodule` takes it; for equal layers, the first one's."""
        path = visible(next(expand(self.modules.item.path)))  # a name in a file may have a line of a shell in it
        self.copy_to_clipboard(path)
        self.status.update(Text(f"copied {path}" if path else "the model itself has no path"))

    def _action_interrupt(self) -> None:
        self.exit(KeyboardInterrupt())

    def _handle_exception(self, error: Exception) -> None:
        self.exit(error)  # Textual prints its traceback

    def _action_search(self) -> None:
        self.origin, self.search.value = self.modules.item, ""
        self.search.display, self.keys.display = True, False
        self.search.focus()

    def _on_input_changed(self, event: Input.Changed) -> None:
        self.choices = event.value.strip()
        self._action_next(1, self.origin)

    def _on_input_submitted(self) -> None:
        self.search.display, self.keys.display = False, True
        self.modules.focus()

    def _action_leave(self) -> None:
        if self.search.display:
            self._on_input_submitted()
            self.modules.go_to(self.origin)

    def _action_next(self, step: int, start: Item | None = None) -> None:
        """Go to the first match from `start` on, or beyond the cursor; after the last match comes the first."""
        hits = [number for number, item in enumerate(self.items) if self.choices and matches(item, self.choices)]
        if not hits:
            self.status.update(Text(f"nothing matches {self.choices!r}" if self.choices else "type / to search"))
            return
        row = (start or self.modules.item).row
        here = next(number for number, item in enumerate(self.items) if item.row is row)
        ahead = [number for number in hits[::step] if (number - here) * step >= (start is None)]
        number = (ahead or hits[::step])[0]
        self.modules.go_to(self.items[number])
        self.status.update(Text(f"{hits.index(number) + 1} of {len(hits)} that match {self.choices!r}; n: the next"))


def browse(report: TreeReport | CheckpointReport, tensors: CountReport | CheckpointReport, depth: int | None) -> None:
    """Show the reports until the user leaves; raises KeyboardInterrupt after Ctrl-C."""
    color = stdout_target().color  # by --color too
    os.environ.pop("NO_COLOR", None)  # Textual takes an empty one too
    os.environ.update({} if color else {"NO_COLOR": "1"})
    app = Browser(view_of(report.kind).title(report), items_of(report, tensors), depth)
    gc.freeze()  # scanning the objects of torch would delay a key by 0.3 s
    gc.enable()
    if (failure := app.run()) is not None:
        raise failure
