"""The counts of a model with repeated layers as written sums: of the model, of one layer, and of each of its parts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

from bertscope.reports.params import CountRow, WrittenSum

_MOST_TERMS = 8  # of a sum; one with more is not written
_MOST_LAYERS = 2  # kinds of repeated layers, such as those of an encoder and of a decoder


def written_sums(groups: Sequence[CountRow], layers: Sequence[CountRow]) -> Iterator[WrittenSum]:
    """Yield the sums from the rows of the groups and of the folded layers; nothing if no layer is repeated."""
    repeated = [row for row in layers if row.copies > 1 and row.parts]
    if not 1 <= len(repeated) <= _MOST_LAYERS:
        return
    terms: list[tuple[int, int]] = []  # (times, params)
    for group in groups:
        inside = [row for row in repeated if row.path.startswith(f"{group.path}.")]
        rest = group.params - sum(row.params for row in inside)
        terms += [(1, rest)] if rest else []
        terms += [(row.copies, row.each_params) for row in inside]
    yield from _written("total", "", terms)
    for row in repeated:
        yield from _written("layer", row.path, [(1, part.each_params) for part in row.parts])
        for part in row.parts:
            yield from _of_shapes(part)


def _written(name: str, path: str, terms: Sequence[tuple[int, int]]) -> Iterator[WrittenSum]:
    """Yield `22,163,456 + 24 x 12,596,224`, unless it has too many terms, or only one."""
    if 1 < len(terms) <= _MOST_TERMS:
        text = " + ".join(f"{times} x {params:,}" if times > 1 else f"{params:,}" for times, params in terms)
        yield WrittenSum(name=name, path=path, terms=text, params=sum(times * params for times, params in terms))


def _of_shapes(part: CountRow) -> Iterator[WrittenSum]:
    """Yield `4 x (1024 x 1024 + 1024)` for a part with matrices, each of which is followed by its bias."""
    layers: list[list[tuple[int, ...]]] = []
    for shape in part.shapes:
        if shape is None:
            return
        if len(shape) < 2 and layers and len(layers[-1]) == 1 and len(layers[-1][0]) > 1:
            layers[-1].append(shape)
        else:
            layers.append([shape])
    counts = Counter(map(tuple, layers))
    values = [times * sum(map(prod, shapes)) for shapes, times in counts.items()]
    has_matrix = any(len(shape) > 1 for shapes in counts for shape in shapes)
    if has_matrix and len(counts) <= _MOST_TERMS // 2 and sum(values) == part.each_params:
        terms = (f"{times} x {_term(shapes)}" if times > 1 else _term(shapes) for shapes, times in counts.items())
        text = " + ".join(terms)
        if len(values) > 1:
            text += " = " + " + ".join(f"{value:,}" for value in values)
        yield WrittenSum(name=part.name, path=part.path, terms=text, params=part.each_params)


def _term(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return `(in x out + out)` for a dense layer, whichever way its weight is stored; other sizes as stored."""
    first, *bias = shapes
    sizes = first[::-1] if len(first) == 2 and bias and bias[0] == first[:1] else first
    product = " x ".join(map(str, sizes)) or "1"
    return f"({product} + {prod(bias[0])})" if bias else product
