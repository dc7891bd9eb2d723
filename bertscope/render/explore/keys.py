"""The keys of `explore`: what they do, the line at the bottom that names them, and the help."""

from textwrap import fill

from textual.binding import Binding

from bertscope.render.console import Target, wrapped

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
