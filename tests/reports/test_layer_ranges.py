"""Ranges of layers in module paths: the laws of `collapse` and `expand`, and the names that only look like numbers."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertscope.reports.layer_ranges import (
    LayerRange,
    collapse,
    expand,
    in_order,
    layers_in,
    number_of,
    with_layers,
    without_numbers,
)

NUMBERS = st.integers(0, 12).map(str)
WORDS = ("dense", "03", "1-2", "0-3'", "0-3''", "3-1", "2-2", "-1", "1-", "1a", "", "٣", "²", "9" * 10, "9" * 5000, "'")
PATHS = st.lists(NUMBERS | st.sampled_from(WORDS), min_size=1, max_size=6).map(".".join)


def ranges_of(paths) -> list[str]:
    return [path for path, _, _ in collapse((path, None, path) for path in dict.fromkeys(paths))]


@settings(max_examples=100, deadline=None)
@given(st.lists(PATHS, max_size=40))
def test_expanding_collapsed_paths_gives_the_paths(paths):
    expanded = [path for shown in ranges_of(paths) for path in expand(shown)]
    assert sorted(expanded) == sorted(set(paths))


@settings(max_examples=100, deadline=None)
@given(st.lists(PATHS, max_size=40))
def test_each_collapsed_path_expands_in_the_order_of_numbers(paths):
    for shown in ranges_of(paths):
        expanded = list(expand(shown))
        assert expanded == sorted(expanded, key=in_order)


@given(st.lists(st.tuples(PATHS, st.sampled_from("ab")), max_size=30))
def test_runs_keep_every_item_with_its_key(items):
    merged = list(collapse((path, key, (path, key)) for path, key in items))
    assert sorted(item for _, _, found in merged for item in found) == sorted(items)
    assert all({key for _, key in found} == {key} for _, key, found in merged)


def test_the_first_number_of_a_path_becomes_a_range():
    paths = [f"encoder.block.{block}.layer.{part}.weight" for block in range(12) for part in range(2)]
    assert ranges_of(paths) == ["encoder.block.0-11.layer.0.weight", "encoder.block.0-11.layer.1.weight"]
    assert list(expand("b.0-1.l.0-1")) == ["b.0.l.0", "b.0.l.1", "b.1.l.0", "b.1.l.1"]


def test_a_gap_ends_a_range():
    assert ranges_of(["h.0", "h.1", "h.3", "h.4", "h.6"]) == ["h.0-1", "h.3-4", "h.6"]


def test_a_number_is_the_first_the_last_or_the_only_name_of_a_path():
    assert ranges_of(["", "0", "1", "0.weight", "1.weight", "h.0", "h.1"]) == ["", "0-1", "0-1.weight", "h.0-1"]


@pytest.mark.parametrize("name", [word for word in WORDS if word != "1-2"])
def test_a_name_that_only_looks_like_a_number_is_none(name):
    assert number_of(name) is None
    assert LayerRange.parse(name) is None


def test_a_range_knows_its_numbers():
    layers = LayerRange.parse("2-4")
    assert (list(layers), len(layers), str(layers), layers.is_run) == ([2, 3, 4], 3, "2-4", True)
    assert 2 in layers
    assert 5 not in layers
    assert (str(LayerRange(7, 7)), LayerRange(7, 7).is_run) == ("7", False)


def test_a_path_in_the_stack_of_layers_can_be_renumbered():
    assert layers_in("bert.encoder.layer.3.output") == LayerRange(3, 3)
    assert layers_in("bert/encoder/layer_0-11/output") == LayerRange(0, 11)
    assert layers_in("bert.pooler.dense") is layers_in("my_layer.3") is layers_in("layer.3x") is None
    assert with_layers("Transformer-3-FeedForward", lambda layers: layers.first + 1) == "Transformer-4-FeedForward"
    assert without_numbers("tied to a.3.w, b.12.w") == "tied to a.*.w, b.*.w"


def test_expanding_a_huge_range_begins_at_once():
    assert next(expand("layer.0-999999999.output")) == "layer.0.output"


def test_100_000_names_collapse_in_linear_time():
    def seconds(count: int) -> float:
        paths = [f"blocks.{number // 2}.parts.{number % 2}.weight" for number in range(count)]
        started = time.process_time()
        assert ranges_of(paths) == [f"blocks.0-{count // 2 - 1}.parts.{part}.weight" for part in range(2)]
        return time.process_time() - started

    assert seconds(100_000) < 20
    hostile = ".".join("1" for _ in range(20_000))
    assert len(ranges_of([f"{hostile}.{number}x" for number in range(20)])) == 20
