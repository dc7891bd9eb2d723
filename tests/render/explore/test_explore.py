"""`explore`: the join holds the sums of its sources; the app does what its keys say."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from bertscope.analyses.flops import FlopsRun
from bertscope.analyses.memory.steps import estimate_memory
from bertscope.analyses.page import explore
from bertscope.analyses.tracing.trace import shapes
from bertscope.api.asked import source_of
from bertscope.commands.explore import around, steps_at
from bertscope.config import BertConfig
from bertscope.model import build
from bertscope.render.explore.app import BINDINGS
from bertscope.render.explore.text import bar, details, matches, next_precision
from bertscope.reports.layer_ranges import expand
from bertscope.settings.run_config import RunConfig
from bertscope.sources.bert import BertSource
from bertscope.sources.find import load
from bertscope.units import short_count_text
from tests.child_server import loaded
from tests.conftest import shortened

TINY = BertConfig(
    vocab_size=32, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=12,
)  # fmt: skip


def source(architecture="BertForMaskedLM", **changes):
    return BertSource(name="tiny", architecture=architecture, config=replace(TINY, **changes))


@cache
def reports(run_config=None, *, folded=True, **changes):
    return list(explore(source(**changes), run_config or RunConfig(batch=2, seq=5), folded=folded))


@pytest.mark.parametrize("run", [{}, {"checkpointing": "every-2"}, {"freeze": ("encoder.layer.1",)}])
@pytest.mark.parametrize("folded", [True, False])
def test_the_root_holds_what_count_flops_and_estimate_say(run, folded):
    run_config = RunConfig(batch=2, seq=5, **run)
    root = reports(run_config, folded=folded)[-1].rows[0]
    model = build(TINY, "BertForMaskedLM")
    flops = FlopsRun(source=source(), run=RunConfig(mode="training", **run)).at(2, 5).rows[0]
    assert root.module.distinct_params == sum(parameter.numel() for parameter in model.parameters())
    assert (root.work.forward, root.work.backward, root.work.recompute) == (
        flops.forward, flops.backward, flops.recompute
    )  # fmt: skip
    assert root.kept_bytes == estimate_memory(source(), run_config).kept_bytes > 0


@pytest.mark.parametrize("run", [{}, {"checkpointing": "layers:0,3"}])
def test_a_module_holds_what_is_below_it_and_its_own(run):
    rows = reports(RunConfig(batch=2, seq=5, **run))[-1].rows
    for place, row in enumerate(rows):
        below = []
        for other in rows[place + 1 :]:
            if other.module.depth <= row.module.depth:
                break
            below.append(other)
        direct = [other for other in below if other.module.depth == row.module.depth + 1]
        own_bytes = sum(found.kept_bytes for found in row.kept)
        assert row.kept_bytes == own_bytes + sum(other.kept_bytes for other in direct), row.module.path
        assert row.work.total.matmul_flops >= sum(other.work.total.matmul_flops for other in direct)


def test_a_folded_row_is_the_sum_of_the_rows_that_it_stands_for():
    run_config = RunConfig(batch=2, seq=5, checkpointing="every-2")
    folded, single = (
        reports(run_config)[-1],
        {row.module.path: row for row in reports(run_config, folded=False)[-1].rows},
    )
    assert any(len(list(expand(row.module.path))) == 4 for row in folded.rows)
    for row in folded.rows:
        alone = [single[path] for path in expand(row.module.path)]
        assert row.kept_bytes == sum(other.kept_bytes for other in alone)
        assert row.work.total == sum((other.work.total for other in alone[1:]), alone[0].work.total)
        assert row.module.params == sum(other.module.params for other in alone)
        assert Counter(found.what for found in row.kept).keys() == {
            found.what for other in alone for found in other.kept
        }


def test_shapes_and_ties_are_those_of_the_model():
    last = reports(folded=False)[-1]
    found = shapes(build(TINY, "BertForMaskedLM").eval(), 2, 5)
    assert {row.module.path: (row.module.inputs, row.module.outputs) for row in last.rows if row.module.outputs} == {
        path: pair for path, pair in found.items() if pair[1]
    }
    tied = {tensor.path: tensor.tied_to for row in last.rows for tensor in row.tensors if tensor.tied_to}
    assert tied == {tie.path: tie.is_path for tie in last.ties}
    assert "cls.predictions.decoder.weight" in tied


def test_each_report_holds_more_than_the_one_before():
    first, second, third = reports()
    assert [found.awaited for found in (first, second, third)] == [("FLOPs and shapes", "memory"), ("memory",), ()]
    assert first.rows[0].work is None
    assert second.rows[0].work is not None
    assert second.rows[0].kept_bytes is None
    assert [row.module.path for row in first.rows] == [row.module.path for row in third.rows]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 K"), (8_040_229_208_064, "8.04 T"), (302_309_376, "302.3 M")],
)
def test_a_short_count_has_three_or_four_digits(count, text):
    assert short_count_text(count) == text


# The app, by Textual's own pilot.


def again(**changes):
    """The reports of another run, as the command makes them."""
    return iter(reports(RunConfig(**changes)))


def explorer(first, later=(), *, color=True):
    from bertscope.render.explore.app import Explorer

    return Explorer(first, later, again, partial(steps_at, source(), RunConfig()), color=color)


async def settled(pilot):
    """Wait until all that was asked for is computed and drawn."""
    app = pilot.app
    while app.return_value is None and (app.report.awaited or app.jobs.qsize() or app.run_fields != run_of(app)):
        await pilot.pause(0.01)
    await pilot.pause(0.02)
    await pilot.pause()


def run_of(app) -> dict:
    return {name: getattr(app.report.run, name) for name in app.run_fields}


def explored(*keys, size=(80, 24), all_reports=True, run=None, **changes):
    """The app after those keys and texts (`=dense`), and what its screen shows."""
    first, *later = reports(run, **changes)

    async def pressed():
        app = explorer(first, later if all_reports else ())
        async with app.run_test(size=size) as pilot:
            if all_reports:
                await settled(pilot)
            for key in keys:
                if key.startswith("="):  # pasted, as typing takes long
                    app.query_one("#answer").value = key[1:]
                    await pilot.pause()
                    continue
                await pilot.press(key)
                if all_reports and key in ("up", "d", "e", "enter"):
                    await settled(pilot)
            await pilot.pause()
            return app, screen(app), app.modules.place

    return asyncio.run(pressed())


def screen(app) -> str:
    """The text on the screen, line by line."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()[:height]
    return "\n".join("".join(segment.text for segment in strip)[:width].rstrip() for strip in lines)


def path_of(app, place) -> str:
    return app.report.rows[place].module.path


def test_the_tree_opens_with_the_layers_as_one():
    app, text, _ = explored()
    root = app.report.rows[0]
    assert re.search(r"\+ 0-3 \(4 x\) +2,400 ", text)
    assert "query" not in text
    assert f"{app.report.totals.distinct_params:,} unique parameters" in text
    assert f"forward     {root.work.forward.matmul_flops:,} FLOPs" in "\n".join(app.body.content.splitlines())
    assert text.splitlines()[-2:] == [
        "q quit  ? help  / filter  n next  N prev  esc back  o order  p params  f FLOPs",
        "m memory  x all  b batch  l length  d precision  e explain  c copy  tab details",
    ]


def test_arrows_open_close_and_go_up_and_down():
    app, _, place = explored("down", "down", "right")
    assert path_of(app, place) == "bert.embeddings.word_embeddings"
    assert "weight [32, 8] 256" in app.body.content
    app, text, place = explored("down", "down", "right", "left", "left")
    assert path_of(app, place) == "bert.embeddings"
    assert "word_embeddings  " not in text.partition("bert.embeddings")[0]


def test_a_filter_opens_what_is_closed_and_goes_on_and_back():
    app, text, place = explored("slash", "=dense", "enter")
    assert path_of(app, place) == "bert.encoder.layer.0-3.attention.output.dense"
    assert "1 of 4 that match 'dense'" in text
    app, _, place = explored("slash", "=dense", "enter", "n", "n")
    assert path_of(app, place) == "bert.encoder.layer.0-3.output.dense"
    app, _, place = explored("slash", "=dense", "enter", "N")
    assert path_of(app, place) == "cls.predictions.transform.dense"
    _, text, place = explored("slash", "=nothing", "enter")
    assert (place, "nothing matches 'nothing'" in text) == (0, True)


def drawn_paths(app) -> set[str]:
    return {path_of(app, place) for place in app.modules.nodes}


def test_a_filter_leaves_the_matches_and_what_is_around_and_below_them():
    app, text, _ = explored("slash", "=selfoutput")
    output = "bert.encoder.layer.0-3.attention.output"
    names = ["", "bert", "bert.encoder", "bert.encoder.layer", "bert.encoder.layer.0-3",
             "bert.encoder.layer.0-3.attention", output]  # fmt: skip
    assert drawn_paths(app) == {*names, f"{output}.dense", f"{output}.LayerNorm", f"{output}.dropout"}
    assert "dropout" not in text.partition("───")[0]  # below a match, and closed
    assert "embeddings" not in text.partition("───")[0]
    whole = len(app.report.rows)
    app, *_ = explored("slash", *"selfo", *["backspace"] * 5)
    assert len(drawn_paths(app)) == whole


@pytest.mark.parametrize(
    ("words", "count"),
    [("dense", 4), ("DENSE encoder", 3), ("linear", 8), ("query.weight", 0), ("weight attention.self", 3), ("cls", 1),
     ("word_embeddings.weight", 0), ("layer.0-3.attention.self", 1), ("attention", 2)],
)  # fmt: skip
def test_a_filter_takes_the_modules_that_it_names_and_not_all_below_them(words, count):
    found = [row.module.path for row in reports()[-1].rows if matches(row, words)]
    assert len(found) == count, found


def test_escape_removes_the_filter_and_goes_back_to_where_it_began():
    app, _, place = explored("down", "down", "slash", "=value", "escape")
    assert path_of(app, place) == "bert.embeddings"
    assert len(app.modules.nodes) == len(app.report.rows)
    app, _, place = explored("down", "down", "slash", "=value", "enter", "escape")
    assert path_of(app, place) == "bert.encoder.layer.0-3.attention.self.value"
    assert len(app.modules.nodes) == len(app.report.rows)


@pytest.mark.parametrize(
    ("share", "text"), [(0, ""), (0.0001, "▏"), (0.5, "████"), (0.52, "████▏"), (0.9999, "████████"), (1, "████████")]
)
def test_a_bar_of_8_cells_has_a_length_in_eighths_of_a_cell(share, text):
    assert bar(share, 8) == text


def test_the_bar_shows_the_share_of_the_sorted_column():
    for keys, share in (((), 2784 / 3160), (("m",), 23.83 / 27.36)):
        _, text, _ = explored(*keys, size=(110, 40))
        (line,) = [line for line in text.splitlines() if line.startswith("├ - bert ")]
        assert line.endswith(f"{100 * share:.1f} %")
        assert line.count("█") == int(20 * share)


def test_batch_length_and_precision_change_the_run():
    app, text, _ = explored("b", "3", "enter", "l", "up", "down", "down", "enter", "d")
    assert app.report.rows == reports(RunConfig(batch=3, seq=2, precision="autocast-bf16"))[-1].rows
    assert "batch 3, length 2, autocast-bf16" in text


def test_a_wrong_batch_or_length_leaves_the_run():
    async def answers():
        first, *later = reports()
        app, said = explorer(first, later), []
        async with app.run_test() as pilot:
            for keys in ("bx", "b0", "l99"):
                await settled(pilot)
                await pilot.press(*keys, "enter")
                await settled(pilot)
                said.append(app.said)
                assert "batch 2, length 5, fp32" in screen(app)
                assert run_of(app) == app.run_fields
                assert app.report.rows == reports()[-1].rows
        return said

    word, batch, length = asyncio.run(answers())
    assert word == "batch: a whole number is needed; got 'x'"
    assert "batch takes a whole number from 1" in batch
    assert "at most max_position_embeddings 12; got 99" in length


def test_the_last_of_several_runs_is_shown_and_the_others_are_left_out():
    begun = []

    def counting(**changes):
        begun.append(changes["batch"])
        return again(**changes)

    async def last():
        first, *later = reports()
        app = explorer(first, later)
        app.again = counting
        async with app.run_test() as pilot:
            await settled(pilot)
            for batch in (4, 8, 16, 2):
                app._change(batch=batch)
            await settled(pilot)
            return app.report.run.batch

    assert asyncio.run(last()) == 2
    assert begun[-1] == 2
    assert begun.count(2) == 1


def test_precisions_take_turns_and_return_to_that_of_the_start():
    def turns(start):
        run, found = start, []
        while True:
            run = next_precision(run, start)
            found.append(run)
            assert RunConfig(precision=run)
            if run == start:
                return found

    assert turns("fp32") == ["autocast-bf16", "autocast-fp16", "bf16", "fp16", "fp32"]
    assert turns("autocast-fp16")[-1] == "autocast-fp16"
    assert turns("stored") == ["autocast-bf16", "autocast-fp16", "fp32", "bf16", "fp16", "stored"]


def test_c_copies_a_path_that_get_submodule_takes():
    app, text, _ = explored("slash", "=selfattention", "enter", "c")
    assert app.clipboard == "bert.encoder.layer.0.attention.self"
    assert build(TINY, "BertForMaskedLM").get_submodule(app.clipboard)
    assert f"copied {app.clipboard}, the first of 4" in text
    app, text, _ = explored("c")
    assert app.clipboard == ""
    assert "the model itself has no path" in text


def test_e_explains_the_module_and_escape_goes_back():
    app, text, place = explored("slash", "=query", "enter", "e", size=(100, 40))
    assert text.splitlines()[0] == "explain bert.encoder.layer.0-3.attention.self.query"
    assert "in_features x out_features + out_features = 8 x 8 + 8 = 72" in text
    app, text, after = explored("slash", "=query", "enter", "e", "escape", size=(100, 40))
    assert after == app.modules.place == place
    assert "n is the next" in text


def test_modules_of_any_model_are_explained_with_the_steps_of_the_nearest_one_around_them():
    model = source_of(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
    path, report = steps_at(model, RunConfig(), "0", {"batch": 1, "seq": 1})
    assert (path, [step.params.value for step in report.steps]) == ("0", [16])
    assert list(around("h.0-2.attn")) == ["h.0-2.attn", "h.0.attn", "h.0-2", "h.0", "h"]
    run = {"batch": 2, "seq": 5}
    assert steps_at(source(), RunConfig(), "nowhere", run)[0] == ""
    assert steps_at(source(), RunConfig(), "bert.encoder", run)[0] == "bert.encoder"


def test_the_help_has_a_line_for_each_key_of_the_bottom_line():
    _, text, _ = explored("question_mark", size=(100, 45))
    for binding in BINDINGS:
        if binding.show:
            assert f"  {(binding.key_display or binding.key):<11} {binding.tooltip}" in text
    assert "saved       bytes that the forward pass" in text
    _, text, _ = explored("question_mark", "escape")
    assert text.splitlines()[1].startswith("module")


@pytest.mark.parametrize("width", [30, 38, 41, 60])
def test_no_name_and_no_shape_is_broken_in_the_details(width):
    report = reports(folded=False)[-1]
    for place, row in enumerate(report.rows):
        text = details(report, place, width)
        assert max(map(len, text.splitlines())) <= width
        words = set(re.findall(r"[\w\[\], -]+", text))
        for name in [*row.module.path.split("."), *(f"[{', '.join(map(str, item.shape))}]" for item in row.tensors)]:
            assert any(name in word for word in words), name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("p", lambda row: row.module.params),
        ("f", lambda row: row.work.total.matmul_flops),
        ("m", lambda row: row.kept_bytes),
    ],
)
def test_neighbours_are_sorted_by_what_was_asked_for_and_back(key, value):
    app, text, _ = explored("x", key, size=(100, 60))
    assert "v " in text.splitlines()[1]
    for node in app.modules.nodes.values():
        values = [value(app.report.rows[child.data]) for child in node.children]
        assert values == sorted(values, reverse=True)
    assert app.modules.order() != sorted(app.modules.order())
    app, _, _ = explored("x", key, "o")
    assert app.modules.order() == list(range(len(app.report.rows)))


def test_the_details_are_those_of_the_match_that_comes_to_the_line_of_the_cursor():
    app, _, place = explored("slash", "=attention.self.key", "=attention.self.value")
    assert path_of(app, place).endswith("attention.self.value")
    assert app.body.content.splitlines()[0] == path_of(app, place)


def test_the_cursor_stays_at_its_module_when_the_order_changes():
    app, _, place = explored("slash", "=key", "enter", "p", "m")
    assert path_of(app, place) == "bert.encoder.layer.0-3.attention.self.key"


def test_before_the_numbers_are_there_it_says_so_and_keys_work():
    app, text, place = explored("down", "m", all_reports=False)
    assert "computing FLOPs and shapes and then memory ..." in text
    assert "being computed" in app.body.content
    assert path_of(app, place) == "bert"
    assert "..." in text.splitlines()[3]


def test_details_name_ties_and_what_is_kept():
    app, _, _ = explored("slash", "=decoder", "enter")
    assert "tied to bert.embeddings.word_embeddings.weight" in app.body.content
    app, _, _ = explored("slash", "=attention.self", "enter")
    assert "query.weight [8, 8] 64" in app.body.content
    assert "attention" in app.body.content.partition("saved")[2]
    assert "in          [2, 5, 8]" in app.body.content


@pytest.mark.parametrize("width", [30, 46, 60, 80, 119, 120, 200])
def test_no_width_cuts_a_number(width):
    app, text, _ = explored("x", "m", size=(width, 40))
    kept = [line for line in text.splitlines() if "intermediate_act_fn" in line]
    assert kept or width == 30
    columns = app.modules.columns
    for measure in columns.measures:
        assert f" {measure.title}" in text
        assert all(len(measure.cell(row)) < measure.width for row in app.report.rows)
    assert app.modules.names + columns.width < max(width, app.modules.names + 1)  # one column is the scrollbar's
    if width >= 46:
        assert columns.measures[-1].key == "memory"
    bars = {80: (11, False), 119: (20, True), 120: (7, False), 200: (20, True)}  # cells, percentage
    assert (columns.bar, columns.has_percent) == bars.get(width, (0, False))


async def resized(pilot, width: int, height: int) -> str:
    """Return the screen once the terminal has that size."""
    await pilot.resize_terminal(width, height)
    await pilot.pause()
    return screen(pilot.app)


def test_columns_go_when_the_terminal_narrows_and_come_back_when_it_widens():
    async def titles():
        *_, full = reports()
        async with explorer(full).run_test(size=(100, 30)) as pilot:
            screens = [await resized(pilot, width, 20) for width in (100, 30, 160, 30, 100)]
        lines = [line for text in screens for line in text.splitlines()]
        return [line.split() for line in lines if line.startswith("module")]

    every, none = ["module", "params", "FLOPs", "saved", "share"], ["module"]
    assert asyncio.run(titles()) == [every, none, every, none, every]


def test_every_key_is_named_on_a_small_terminal():
    _, text, _ = explored(size=(40, 12))
    for key in ("q quit", "? help", "/ filter", "n next", "o order", "p params", "f FLOPs", "m memory", "x all"):
        assert key in text


def test_details_of_another_module_begin_at_their_top():
    async def tops():
        *_, full = reports()
        async with explorer(full).run_test(size=(80, 12)) as pilot:
            details = pilot.app.query_one("#details")
            await pilot.press("tab", "down", "down")
            await pilot.pause()
            scrolled = details.scroll_y
            await pilot.press("tab", "down")
            await pilot.pause()
            return scrolled, details.scroll_y

    scrolled, top = asyncio.run(tops())
    assert scrolled > 0
    assert top == 0


@pytest.mark.parametrize("keys", [("q",), ("ctrl+c",), ("slash", "a", "ctrl+c")])
def test_q_and_control_c_quit(keys):
    app, _, _ = explored(*keys)
    assert app._exit
    assert app.return_value is None


def test_what_loading_raises_reaches_the_command():
    def failing():
        raise ValueError("it went wrong")
        yield

    async def started():
        app = explorer(reports()[0], failing())
        async with app.run_test() as pilot:
            for _ in range(500):
                if app.return_value is not None:
                    break
                await pilot.pause(0.01)
        return app

    assert str(asyncio.run(started()).return_value) == "it went wrong"


@pytest.mark.parametrize("variable", [None, "", "1"])
def test_without_colour_every_colour_is_left_out(monkeypatch, variable):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable is not None:
        monkeypatch.setenv("NO_COLOR", variable)
    assert not explorer(reports()[0]).no_color
    app = explorer(reports()[0], color=False)
    assert app.no_color
    assert app.native_ansi_color  # then Textual takes all colours out, instead of making them grey
    assert os.environ.get("NO_COLOR") == variable


# The command.


def test_without_a_terminal_it_says_so_in_one_line(cli):
    result = cli("explore", "bert-tiny")
    assert (result.code, result.out) == (2, "")
    assert (
        result.err == "error: explore needs a terminal; 'bertscope tree --shapes' writes the same modules to a pipe\n"
    )


def test_without_textual_it_names_the_extra(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.setattr("bertscope.commands.explore.find_spec", lambda name: None)
    result = cli("explore")
    assert result.code == 2
    assert result.err == "error: explore needs the extra 'explore': pip install 'bertscope[explore]'\n"


@pytest.mark.parametrize(
    ("run", "words"),
    [({"seq": 13}, "max_position_embeddings 12"), ({"checkpointing": "layers:9"}, "has 4 layers")],
)
def test_what_cannot_be_run_is_said_before_the_screen_opens(run, words):
    from bertscope.errors import BertscopeError

    with pytest.raises(BertscopeError, match=words):
        next(explore(source(), RunConfig(**{"seq": 5, **run})))


def examples():
    from bertscope.commands.explore import EXAMPLES

    return [line.strip() for line in EXAMPLES.splitlines() if line.strip().startswith("bertscope ")]


@pytest.mark.parametrize("example", examples())
def test_every_example_of_the_help_brings_up_all_data(cli, monkeypatch, example):
    shown = []
    monkeypatch.setattr("bertscope.commands.explore._check_terminal", lambda: None)
    monkeypatch.setattr("bertscope.render.explore.app.run_app", lambda first, later, *_: shown.extend((first, *later)))
    result = cli(*shortened(example).split()[1:])
    assert (result.code, result.out) == (0, ""), result.err
    assert (len(shown), shown[-1].awaited) == (3, ())


def on_a_pty(*args: str, keys: bytes, after: str, **variables: str) -> tuple[int, str]:
    """Exit code and what the terminal got; the keys are sent once `after` has been drawn."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | variables
    command = [*loaded("bertscope"), *args]
    process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave, env=environment, close_fds=True)
    os.close(slave)
    got, deadline, sent = b"", time.monotonic() + 120, False
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                got += os.read(master, 65536)
            except OSError:  # Linux ends a closed pty with EIO
                break
        if not sent and after.encode() in got:
            os.write(master, keys)
            sent = True
    code = process.wait(timeout=10)
    os.close(master)
    return code, got.decode(errors="replace")


@pytest.mark.parametrize("key", [b"q", b"e\x03"])
def test_in_a_real_terminal_it_draws_quits_and_restores_the_screen(key):
    code, got = on_a_pty("explore", "bert-tiny", keys=key, after="unique parameters", NO_COLOR="1")
    assert "loading torch, and building bert-tiny ..." in got.partition("unique parameters")[0]
    assert code == 0, got[-2000:]
    assert "4,385,920" in got
    assert "\x1b[?1049h" in got
    assert "\x1b[?1049l" in got
    assert not re.search(r"\x1b\[[\d;]*(38|48);[25];", got)
    assert "Traceback" not in got


def test_every_preset_can_be_explored():
    run_config = RunConfig(batch=1, seq=16)
    assert all(next(explore(load(name), run_config)).rows for name in ("bert-tiny", "bert-base-cased", "bert-large-zh"))
