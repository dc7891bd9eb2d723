"""`explore` in the terminal: the app around the tree. The reports come in one after another, each fuller.

One thread computes everything, since torch traces one model at a time: the reports of a run and, between two of them,
the steps of a module and the first report of another run.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from textwrap import fill
from threading import Thread
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from bertscope.errors import BertscopeError
from bertscope.render import explain
from bertscope.render.console import Target, stdout_target, wrapped
from bertscope.render.explore.text import (
    ModuleTree,
    copied_path,
    details,
    fitted,
    matches,
    next_precision,
    node_title,
    status,
)
from bertscope.reports.explain import ExplainReport
from bertscope.reports.page import ExploreReport

BINDINGS = (
    Binding("q", "quit", "quit", tooltip="quit, as ctrl+c does"),
    Binding("question_mark", "help", "help", key_display="?", tooltip="show this page"),
    Binding("slash", "ask('filter')", "filter", key_display="/", tooltip="show only the modules that match"),
    Binding("n", "next(1)", "next", tooltip="go to the next match"),
    Binding("N", "next(-1)", "prev", tooltip="go to the match before"),
    Binding("escape", "leave", "back", key_display="esc", tooltip="leave the input line; remove the filter"),
    Binding("o", "sort('order')", "order", tooltip="sort in the model's order"),
    Binding("p", "sort('params')", "params", tooltip="sort by parameters"),
    Binding("f", "sort('flops')", "FLOPs", tooltip="sort by FLOPs"),
    Binding("m", "sort('memory')", "memory", tooltip="sort by the bytes saved for backward"),
    Binding("x", "all", "all", tooltip="open everything; if all is open, close everything"),
    Binding("b", "ask('batch')", "batch", tooltip="change the batch size"),
    Binding("l", "ask('seq')", "length", tooltip="change the sequence length"),
    Binding("d", "precision", "precision", tooltip="change the precision: fp32, autocast, 16 bits"),
    Binding("e", "explain", "explain", tooltip="explain the module step by step, with formulas"),
    Binding("c", "copy", "copy", tooltip="copy the path of the module"),
    Binding("tab", "app.focus_next", "details", tooltip="go to the details of the module, and back"),
    Binding("ctrl+c", "quit", "quit", show=False, priority=True),
    Binding("up", "scale(2)", show=False),  # in the input line; elsewhere the arrows move
    Binding("down", "scale(0.5)", show=False),
)
_SHOWN = [binding for binding in BINDINGS if binding.show]
_ARROWS = (("up, down", "move"), ("right, left", "open a module and go into it; close it and go out of it"))

_COLUMNS = """
Columns
  params      parameters of the module and all below it
  FLOPs       those of matrix products in a training step: forward, backward and recomputation
  saved       bytes that the forward pass of a training step saves for backward
  share       of the whole model: of the sorted column, of params in the model's order
  0-11 (12 x) equal layers in one row: the row shows the sum of all of them

Filter        every word must be in the path, the type or the name of a tensor of a module
Batch, length type a number, or up and down to double and halve; FLOPs and saved bytes are computed anew
Copy          the terminal receives the path by the sequence OSC 52, which some terminals ignore
"""


def keys_text(width: int) -> str:
    """Return the keys in lines of that width, each key with its word."""
    named = (f"{item.key_display or item.key}\u00a0{item.description}" for item in _SHOWN)
    return fill("  ".join(named), width).replace("\u00a0", " ")


def help_text(width: int) -> str:
    """Return the keys, one a line, and the meaning of the columns."""
    keys = [*_ARROWS, *((item.key_display or item.key, item.tooltip) for item in _SHOWN)]
    lines = ["Keys", *(f"  {key:<11} {words}" for key, words in keys), *_COLUMNS.splitlines()]
    return "".join(wrapped(line, Target(width), 14) for line in lines)


class TextScreen(ModalScreen[None]):
    """A text that is scrolled with the arrows; `text` returns its lines for a width."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,e,question_mark", "dismiss", "close")]

    def __init__(self, heading: str, text: Callable[[int], str]) -> None:
        super().__init__()
        self.heading, self.text = heading, text

    def compose(self) -> ComposeResult:
        """Yield the heading, the text and the keys."""
        yield Static(id="heading", markup=False)
        with VerticalScroll():
            yield Static(id="text", markup=False)
        yield Static("esc close  arrows, page up and page down move", id="close", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        """Break the lines for the new width."""
        self._draw(event.size.width)

    def show(self, text: Callable[[int], str]) -> None:
        """Show another text; nothing happens if the screen is closed."""
        self.text = text
        if self.is_mounted and self.is_attached:
            self._draw(self.size.width)

    def _draw(self, width: int) -> None:
        self.query_one("#heading", Static).update(fitted(self.heading, width).rstrip())
        self.query_one("#text", Static).update(self.text(width - 1))  # without the scrollbar


_WIDE = 120  # from this number of columns on, the details are next to the tree
_DETAILS = 44  # columns that they have there at least
_PROMPTS = {"filter": "filter: ", "batch": "batch: ", "seq": "length: "}

Again = Callable[..., Iterator[ExploreReport]]  # the reports of a run with other fields of its RunConfig
Explain = Callable[[str, dict[str, Any]], tuple[str, ExplainReport]]  # of a path and a run: the path that has steps


class Explorer(App[BaseException]):
    """The tree, the module under the cursor, and an input line; it returns an error of `later`, if any.

    `again` returns the reports of another run, `explained` the steps of a module.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "explorer.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*BINDINGS]

    def __init__(
        self, report: ExploreReport, later: Iterable[ExploreReport], again: Again, explained: Explain, *, color: bool
    ) -> None:
        given = os.environ.pop("NO_COLOR", None)  # Textual reads only this variable, and takes an empty one too
        if not color:
            os.environ["NO_COLOR"] = "1"
        super().__init__(ansi_color=not color)  # with NO_COLOR it leaves the colours out, instead of making them grey
        os.environ.pop("NO_COLOR", None)
        os.environ.update({} if given is None else {"NO_COLOR": given})
        self.report, self.again, self.explained = report, again, explained
        self.first = self.later = iter(later)
        self.run_fields = {name: getattr(report.run, name) for name in ("batch", "seq", "precision")}
        self.run_at_start = dict(self.run_fields)
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.words, self.asked, self.origin = "", "", 0  # of the filter; of the input line; before it
        self.said = status(report)
        self.width, self.detailed = 0, 0  # of the terminal; the module in the details

    def compose(self) -> ComposeResult:
        """Yield the widgets from top to bottom."""
        self.modules = ModuleTree(self.report.rows)
        self.body = Static(markup=False)
        yield Static(id="title", markup=False)
        yield Static(id="header", markup=False)
        with Container(id="main"):
            yield self.modules
            with VerticalScroll(id="details"):
                yield self.body
        yield Static(id="status", markup=False)
        with Horizontal(id="prompt"):
            yield Static(id="question", markup=False)
            yield Input(id="answer", compact=True)
        # Textual's own Footer is made anew with every change of focus, for 50 ms.
        yield Static(id="keys", markup=False)

    # ---- computing ----

    def on_mount(self) -> None:
        """Begin to load the missing values after the first screen is drawn."""
        self.modules.focus()
        self.jobs.put(partial(self._continue, self.later))
        # A daemon, so that quitting need not wait for it.
        self.call_after_refresh(Thread(target=self._work, daemon=True).start)

    def _work(self) -> None:
        try:
            while True:
                self.jobs.get()()
        except BaseException as error:  # it must reach the person, whatever it is
            self.call_later(self.exit, error)

    def _continue(self, reports: Iterator[ExploreReport]) -> None:
        """Compute the next report of a run, unless another run has begun since."""
        if reports is not self.later:
            return
        try:
            report = next(reports, None)
        except BertscopeError as error:
            if reports is self.first:
                raise
            self.call_later(self._say, str(error))
            return
        if report is not None:
            self.call_later(self._show, report)  # in the app's own thread
            self.jobs.put(partial(self._continue, reports))

    def _begin(self, asked: dict[str, Any]) -> None:
        """Begin another run, unless one more is wanted since; if it is impossible, say why and keep the one before."""
        if asked != self.run_fields:
            return
        try:
            reports = self.again(**asked)
            report = next(reports)
        except BertscopeError as error:
            self.call_later(self._refuse, str(error))
            return
        self.later = reports
        self.call_later(self._show, report)
        self.jobs.put(partial(self._continue, reports))

    def _refuse(self, message: str) -> None:
        self.run_fields = {name: getattr(self.report.run, name) for name in self.run_fields}
        self._say(message)

    def _explain(self, path: str, screen: TextScreen) -> None:
        """Compute the steps of a module, and show them on its screen."""
        try:
            found, report = self.explained(path, self.run_fields)
        except BertscopeError as error:
            message = str(error)
            self.call_later(screen.show, lambda width: wrapped(message, Target(width)))
            return
        note = "" if found == path else f"The module has no separate step; these are those of {found or 'the model'}."
        self.call_later(screen.show, partial(_explain_text, report, note))

    def _change(self, **changes: Any) -> None:
        self.run_fields |= changes
        self.jobs.put(partial(self._begin, dict(self.run_fields)))

    # ---- drawing ----

    def _show(self, report: ExploreReport) -> None:
        """Show the same rows with more values, or with those of another run."""
        self.report = report
        self.modules.rows = report.rows
        self._say(status(report))
        self._redraw()

    def on_resize(self, event: events.Resize) -> None:
        """Put the details next to the tree or below it, and show as many columns as fit."""
        self.width = event.size.width  # the app's own size is still the one before
        self.query_one("#main").set_class(self.width >= _WIDE, "wide")
        self.query_one("#keys", Static).update(keys_text(self.width))
        self._say(self.said)
        self._redraw()

    def _redraw(self) -> None:
        is_wide = self.width >= _WIDE
        self.modules.show_measures((self.width - _DETAILS if is_wide else self.width) - 1)  # without the scrollbar
        used = self.modules.names + self.modules.columns.width
        self.modules.styles.width = used + 1 if is_wide else "100%"
        self.query_one("#title", Static).update(wrapped(node_title(self.report), Target(self.width)).rstrip())
        self.query_one("#header", Static).update(self.modules.header())
        self.on_tree_node_highlighted()

    def on_tree_node_highlighted(self) -> None:
        """Show the details of the module under the cursor."""
        place = self.modules.place
        used = self.modules.names + self.modules.columns.width + 2 if self.width >= _WIDE else 0
        self.body.update(details(self.report, place, self.width - used - 3))  # without padding and scrollbar
        if place != self.detailed:
            self.query_one("#details").scroll_home(animate=False)
        self.detailed = place

    def _say(self, text: str) -> None:
        self.said = text
        self.query_one("#status", Static).update(fitted(text, self.width).rstrip())

    # ---- keys ----

    def action_help(self) -> None:
        """Show all keys and the meaning of the columns."""
        self.push_screen(TextScreen("bertscope explore: help", help_text))

    def action_explain(self) -> None:
        """Show the steps of the module under the cursor."""
        path = self.report.rows[self.modules.place].module.path
        screen = TextScreen(f"explain {path}".rstrip(), lambda _: "computing ...")
        self.push_screen(screen)
        self.jobs.put(partial(self._explain, path, screen))

    def action_copy(self) -> None:
        """Copy the path of the module under the cursor."""
        row = self.report.rows[self.modules.place]
        path = copied_path(row)
        first = f", the first of {row.module.copies}" if row.module.copies > 1 else ""
        if path:
            self.copy_to_clipboard(path)
        self._say(f"copied {path}{first}" if path else "the model itself has no path")

    def action_precision(self) -> None:
        """Change the precision of the run to the next one."""
        self._change(precision=next_precision(self.run_fields["precision"], self.run_at_start["precision"]))

    def action_sort(self, by: str) -> None:
        """Sort siblings by that measure, largest first; `order` is the model's own."""
        self.modules.by = by
        self._redraw()

    def action_all(self) -> None:
        """Open everything, or close everything but the root."""
        self.modules.toggle_all()

    # ---- the input line ----

    def action_ask(self, what: str) -> None:
        """Open the line for a filter, a batch size or a length."""
        self.asked, self.origin = what, self.modules.place
        answer = self.query_one("#answer", Input)
        answer.value = self.words if what == "filter" else str(self.run_fields[what])
        answer.placeholder = "parts of a path, a type or a tensor's name" if what == "filter" else ""
        self.query_one("#question", Static).update(_PROMPTS[what])
        self.query_one("#prompt").display = True
        answer.focus()
        if what != "filter":
            self._say("type a number and enter; up doubles it, down halves it")

    def action_scale(self, factor: float) -> None:
        """Double or halve the batch size or the length, and run with it."""
        if self.asked in ("batch", "seq"):
            value = max(int(self.run_fields[self.asked] * factor), 1)
            self.query_one("#answer", Input).value = str(value)
            self._change(**{self.asked: value})

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter the tree anew on each key."""
        if self.asked == "filter":
            self._filter(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the answer, and go back to the tree."""
        asked, value = self.asked, event.value
        self._close_prompt()
        if asked in ("batch", "seq") and value.strip() != str(self.run_fields[asked]):
            try:
                self._change(**{asked: int(value)})
            except ValueError:
                self._say(f"{_PROMPTS[asked]}a whole number is needed; got {value[:40]!r}")

    def _close_prompt(self) -> None:
        self.asked = ""
        self.query_one("#prompt").display = False
        self.modules.focus()

    def action_leave(self) -> None:
        """Close the input line, or remove the filter."""
        was_filter, place = self.asked == "filter", self.modules.place
        self._close_prompt()
        if self.words:
            self.words = ""
            self._leave_only(None, self.origin if was_filter else place)
        self._say(status(self.report))

    def _filter(self, words: str) -> None:
        """Show only the modules that match, and go to the first of them below the cursor at the start."""
        self.words = words.strip()
        if not self.words:
            self._leave_only(None, self.origin)
            self._say(status(self.report))
            return
        order, found = self.modules.order(), self._matching()
        ahead = found and [place for place in found if order.index(place) >= order.index(self.origin)]
        self._leave_only(set(found), (ahead or found or [0])[0])
        self._say_match()

    def _leave_only(self, matching: set[int] | None, place: int) -> None:
        self.modules.filter(matching, place)
        self.on_tree_node_highlighted()  # the tree is silent if another module comes to the line of the cursor

    def _matching(self) -> list[int]:
        order = self.modules.order()
        return [place for place in order if self.words and matches(self.report.rows[place], self.words)]

    def _say_match(self) -> None:
        found = self._matching()
        if not found:
            self._say(f"nothing matches {self.words!r}" if self.words else "type / to filter")
            return
        at = f"{found.index(self.modules.place) + 1} of " if self.modules.place in found else ""
        self._say(f"{at}{len(found)} that match {self.words!r}; n is the next, esc shows all modules")

    def action_next(self, step: int) -> None:
        """Go to the next match, or the one before."""
        order, found = self.modules.order(), self._matching()
        if found:
            here = order.index(self.modules.place)
            others = [place for place in found if (order.index(place) - here) * step > 0] or found
            self.modules.go_to(others[-1 if step < 0 else 0])
        self._say_match()


def _explain_text(report: ExplainReport, note: str, width: int) -> str:
    """Return the text of the command `explain`, in lines of that width."""
    text = (f"{note}\n\n" if note else "") + explain.table(report, Target(width))
    return "".join(fitted(line, width) if len(line) > width else f"{line}\n" for line in text.splitlines())


def run_app(report: ExploreReport, later: Iterable[ExploreReport], again: Again, explained: Explain) -> None:
    """Show it until the person leaves; raises what loading raised."""
    failure = Explorer(report, later, again, explained, color=stdout_target().color).run()
    if failure is not None:
        raise failure
