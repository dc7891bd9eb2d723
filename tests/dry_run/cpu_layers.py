"""Recurrent layers as a CPU computes them without oneDNN: aten/src/ATen/native/RNN.cpp in single operators.

On a GPU's tensors torch takes kernels that a CPU has not, so that a dry run with the kernels of a CPU would differ.
"""

from itertools import accumulate

import torch
from torch.nn import functional


def recurrent(original, cell, device):
    """Return a replacement for a function of `torch.nn.modules.rnn._VF`, whose layers have this cell."""

    def run(data, *args):
        if not device.has(data):
            return original(data, *args)
        sizes, args = (args[0].tolist(), args[1:]) if isinstance(args[2], (list, tuple)) else (None, args)
        state, weights, has_biases, layers, dropout, trains, is_bidirectional, *batch_first = args
        data = data.transpose(0, 1) if any(batch_first) else data
        parts = state if isinstance(state, (list, tuple)) else (state,)
        begins, ends = list(zip(*(part.unbind(0) for part in parts), strict=True)), []
        each = 4 if has_biases else 2
        for layer in range(layers):
            outputs = []
            for order in (1, -1)[: 1 + is_bidirectional]:
                of_input, of_state, *biases = weights[len(ends) * each : (len(ends) + 1) * each]
                inputs = functional.linear(data, of_input, *biases[:1])
                out, end = _steps(cell, _rows(inputs, sizes, order), begins[len(ends)], of_state, biases[1:])
                outputs.append(torch.stack(out[::order]) if sizes is None else torch.cat(out))
                ends.append(end)
            data = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
            del inputs
            if dropout and trains and layer < layers - 1:
                data = functional.dropout(data, dropout)
        last = [torch.stack(part) for part in zip(*ends, strict=True)]
        return data.transpose(0, 1) if any(batch_first) else data, *last

    return run


def _rows(inputs, sizes, order):
    """Yield the inputs of each step; of a packed batch each is taken when it is needed, which backward follows."""
    if sizes is None:
        yield from inputs.unbind(0)[::order]
    for start, size in zip(accumulate(sizes or (), initial=0), sizes or (), strict=False):
        yield inputs.narrow(0, start, size)


def _steps(cell, inputs, state, weight, bias):
    """The outputs of a layer and its last state: sequences of a packed batch end one after the other."""
    outputs, ended = [], []
    for step in inputs:
        if (rows := len(step)) < len(state[0]):
            ended.append([part[rows:] for part in state])
            state = [part[:rows] for part in state]
        state = cell(step, functional.linear(state[0], weight, *bias), *state)
        outputs.append(state[0])
    if ended:
        state = [torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True)]
    return outputs, state


def lstm_cell(inputs, gates, _, cell):
    enters, forgets, value, leaves = gates.add_(inputs).unsafe_chunk(4, 1)
    enters, forgets, value, leaves = enters.sigmoid_(), forgets.sigmoid_(), value.tanh_(), leaves.sigmoid_()
    cell = (forgets * cell).add_(enters * value)
    return leaves * cell.tanh(), cell


def gru_cell(inputs, gates, state):
    inputs, gates = inputs.unsafe_chunk(3, 1), gates.unsafe_chunk(3, 1)
    reset, update = gates[0].add_(inputs[0]).sigmoid_(), gates[1].add_(inputs[1]).sigmoid_()
    new = inputs[2].add(gates[2].mul_(reset)).tanh_()
    return ((state - new).mul_(update).add_(new),)


def tanh_cell(inputs, gates, _):
    return (gates.add_(inputs).tanh(),)


CELLS = {"lstm": lstm_cell, "gru": gru_cell, "rnn_tanh": tanh_cell}
