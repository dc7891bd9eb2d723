"""The tree of `explore` as a widget: Textual's own, with columns next to the names and an order that can be chosen."""

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Tree
from textual.widgets.tree import TreeNode

from bertscope.render.explore.text import INDENT, Columns, children, sorted_by
from bertscope.render.tree import row_name
from bertscope.reports.layer_ranges import LayerRange
from bertscope.reports.page import ExploreRow


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
