"""Screens of text over the tree of `explore`: the help, and the steps of a module."""

from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from bertscope.render.explore.text import fitted


class TextScreen(ModalScreen[None]):
    """A text that is scrolled with the arrows; `text` returns its lines for a width."""

    CSS = """
    TextScreen { background: $background; }
    TextScreen #heading, TextScreen #close { height: auto; text-style: bold; }
    TextScreen #close { background: $panel; }
    TextScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """
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
