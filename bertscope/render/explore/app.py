"""`explore` in the terminal: the app around the tree. The reports come in one after another, each fuller."""

import os
from collections.abc import Iterable
from textwrap import fill
from threading import Thread
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.widgets import Input, Static

from bertscope.render.explore.text import details, matches, status, title
from bertscope.render.explore.tree import ModuleTree
from bertscope.reports.page import ExploreReport

_WIDE = 120  # from this number of columns on, the details are next to the tree


def _keys(bindings: Iterable[BindingType], width: int) -> str:
    """Return the keys that are shown, in lines of that width, each key with its word."""
    named = "  ".join(
        f"{item.key_display or item.key}\u00a0{item.description}"
        for item in bindings
        if isinstance(item, Binding) and item.show
    )
    return fill(named, width).replace("\u00a0", " ")


class Explorer(App[BaseException]):
    """The tree, the module under the cursor, and a line to search in; it returns an error of `later`, if any."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #title, #header, #status { height: 1; }
    #keys { height: auto; max-height: 2; }
    #title, #header, #keys { text-style: bold; }
    #keys { background: $panel; }
    #status { color: $text-muted; }
    #search { display: none; height: 1; }
    #main { height: 1fr; layout: vertical; }
    ModuleTree { height: 3fr; scrollbar-size-horizontal: 0; }
    #details { height: 2fr; border-top: solid $primary; padding: 0 1; }
    #main.wide { layout: horizontal; }
    #main.wide ModuleTree { height: 1fr; width: auto; min-width: 76; }
    #main.wide #details { height: 1fr; width: 1fr; border-top: none; border-left: solid $primary; }
    ModuleTree:nocolor > .tree--cursor { text-style: reverse; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("slash", "search", "search", key_display="/"),
        Binding("n", "next(1)", "next"),
        Binding("N", "next(-1)", "previous", show=False),
        Binding("o", "sort('order')", "order"),
        Binding("p", "sort('params')", "params"),
        Binding("f", "sort('flops')", "FLOPs"),
        Binding("m", "sort('memory')", "memory"),
        Binding("x", "all", "all"),
        Binding("tab", "app.focus_next", "details", show=False),
        Binding("escape", "leave_search", "back", show=False),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    ]

    def __init__(self, report: ExploreReport, later: Iterable[ExploreReport] = ()) -> None:
        is_colourless = bool(os.environ.get("NO_COLOR"))
        if not is_colourless:
            os.environ.pop("NO_COLOR", None)  # an empty one means nothing; Textual would take it
        super().__init__(ansi_color=is_colourless)  # Textual then uses no colours
        self.report, self.later = report, later
        self.words, self.origin = "", 0
        self.width, self.detailed = 0, 0  # of the terminal; the module in the details

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        self.modules = ModuleTree(self.report.rows)
        self.body = Static(markup=False)
        yield Static(title(self.report), id="title", markup=False)
        yield Static(id="header", markup=False)
        with Container(id="main"):
            yield self.modules
            with VerticalScroll(id="details"):
                yield self.body
        yield Static(status(self.report), id="status", markup=False)
        yield Input(id="search", compact=True, placeholder="part of a path, a type or a tensor's name")
        # Textual's own Footer is made anew with every change of focus, for 50 ms.
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Begin to load the missing values after the first screen is drawn."""
        self.modules.focus()
        # A daemon, so that quitting need not wait for it.
        self.call_after_refresh(Thread(target=self._load, daemon=True).start)

    def _load(self) -> None:
        try:
            for report in self.later:
                self.call_later(self._show, report)  # in the app's own thread
        except BaseException as error:  # it must reach the person, whatever it is
            self.call_later(self.exit, error)

    def _show(self, report: ExploreReport) -> None:
        """Show the same rows with more values."""
        self.report = report
        self.modules.rows = report.rows
        self._say(status(report))
        self._redraw()

    def on_resize(self, event: events.Resize) -> None:
        """Put the details next to the tree or below it, and show as many columns as fit."""
        self.width = event.size.width  # the app's own size is still the one before
        self.query_one("#main").set_class(self.width >= _WIDE, "wide")
        self.query_one("#keys", Static).update(_keys(self.BINDINGS, self.width))
        self._redraw()

    def _redraw(self) -> None:
        self.modules.show_measures(self.width if self.width < _WIDE else 76)
        self.query_one("#header", Static).update(self.modules.header())
        self.on_tree_node_highlighted()

    def on_tree_node_highlighted(self) -> None:
        """Show the details of the module under the cursor."""
        place = self.modules.place
        self.body.update(details(self.report, place))
        if place != self.detailed:
            self.query_one("#details").scroll_home(animate=False)
        self.detailed = place

    def _say(self, text: str) -> None:
        self.query_one("#status", Static).update(text)

    def action_sort(self, by: str) -> None:
        """Sort siblings by that measure, largest first; `order` is the model's own."""
        self.modules.by = by
        self._redraw()

    def action_all(self) -> None:
        """Open everything, or close everything but the root."""
        self.modules.toggle_all()

    def action_search(self) -> None:
        """Open the line to search in."""
        self.origin = self.modules.place
        search = self.query_one("#search", Input)
        search.value = ""
        search.display = True
        search.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Go to the first match from the start of the search, on each key."""
        if self.query_one("#search").display:
            self.words = event.value
            self._find(self.origin, 0)

    def on_input_submitted(self) -> None:
        """Close the line, and stay at the match."""
        self.query_one("#search").display = False
        self.modules.focus()

    def action_leave_search(self) -> None:
        """Go back to the start of the search."""
        if self.query_one("#search").display:
            self.on_input_submitted()
            self.modules.go_to(self.origin)
            self._say(status(self.report))

    def action_next(self, step: int) -> None:
        """Go to the next match, or the one before."""
        self._find(self.modules.place, step)

    def _find(self, start: int, step: int) -> None:
        order = self.modules.order()
        found = [place for place in order if self.words.strip() and matches(self.report.rows[place], self.words)]
        if not found:
            self.modules.go_to(start)
            self._say(f"nothing matches {self.words!r}" if self.words.strip() else "type / to search")
            return
        here = order.index(start)
        ahead = [place for place in found if order.index(place) >= here + max(step, 0)]
        before = [place for place in found if order.index(place) < here]
        target = (before or found)[-1] if step < 0 else (ahead or found)[0]
        self.modules.go_to(target)
        self._say(f"{found.index(target) + 1} of {len(found)} that match {self.words!r}; n is the next")


def run(report: ExploreReport, later: Iterable[ExploreReport]) -> None:
    """Show it until the person leaves; raises what loading raised."""
    failure = Explorer(report, later).run()
    if failure is not None:
        raise failure
