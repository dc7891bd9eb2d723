"""The memory of oneDNN's LSTM on the CPU: the workspace that it saves for backward, and its temporary memory.

torch's shape function returns an empty workspace. Source: rnn_utils.cpp and rnn_utils.hpp of oneDNN 3.12
(get_good_ld, set_offsets); the measured bytes of fp32 are these, and 568 bytes of a scratchpad besides full pages.
"""

from typing import Any

_PAGE_BYTES, _LINE_ROW, _CACHE_ROW = 4096, 16, 256  # the rows in floats
_ITEMSIZE, _GATES = 4, 4
_SCRATCHPAD_BYTES = _PAGE_BYTES + 568  # besides the gates, and twice the state of a step


def lstm_workspace_bytes(args: Any) -> int:
    """Return the bytes of the workspace of `aten.mkldnn_rnn_layer`, by its arguments; 0 in inference.

    Tensors are rounded up to pages, and rows to lines, except those of the cell: for each step the gates and the hidden
    state; for each step and the first, in two layers, three states that may be inputs, and two of the cell.
    """
    steps, batch, inputs, hidden = _sizes(args)
    if not args[15]:
        return 0
    states = 2 * (steps + 1) * batch
    return (
        _pages(steps * batch, _GATES * hidden)
        + _pages(steps * batch, hidden)
        + 3 * _pages(states, max(inputs, hidden))
        + 2 * _full_pages(states * hidden)
    )


def scratch_bytes(args: Any) -> int:
    """Return the temporary bytes of `aten.mkldnn_rnn_layer`: the sum of the biases, both weights, and a scratchpad."""
    steps, batch, inputs, hidden = _sizes(args)
    weights = _ITEMSIZE * (inputs + hidden) * _row(_GATES * hidden)
    scratchpad = _pages(steps * batch, _GATES * hidden) + 2 * _pages(batch, hidden) + _SCRATCHPAD_BYTES
    return _ITEMSIZE * _GATES * hidden + weights + scratchpad


def backward_scratch_bytes(args: Any) -> int:
    """Return the temporary bytes of `aten.mkldnn_rnn_layer_backward`.

    In addition to those of forward: a contiguous gradient of the output, the gradients of the last states, the bias
    again, and the weights in rows of full lines, if theirs are not.
    """
    _, batch, inputs, hidden = _sizes(args)
    gates, gradient = _GATES * hidden, args[10]
    copied = 0 if gradient is None or gradient.is_contiguous() else gradient.numel() * _ITEMSIZE
    rows = sum(_ITEMSIZE * gates * _row(width) for width in (inputs, hidden) if _row(width) != width)
    return scratch_bytes(args) + copied + _ITEMSIZE * (gates + 2 * batch * hidden) + rows


def _sizes(args: Any) -> tuple[int, int, int, int]:
    """Return steps, batch, inputs and hidden size; a weight is of all gates by hidden size."""
    steps, batch, inputs = args[0].shape
    return steps, batch, inputs, args[2].shape[1]


def _row(width: int) -> int:
    """Return the floats of a row: full lines of 64 bytes, and not a multiple of 256, which would share cache sets."""
    row = -(-width // _LINE_ROW) * _LINE_ROW
    return row + _LINE_ROW if row % _CACHE_ROW == 0 else row


def _pages(rows: int, width: int) -> int:
    """Return the bytes of rows in full lines, in full pages."""
    return _full_pages(rows * _row(width))


def _full_pages(elements: int) -> int:
    return -(-elements * _ITEMSIZE // _PAGE_BYTES) * _PAGE_BYTES
