"""`tree --interactive`: the numbers are those of the reports, and the app does what its keys say."""

import asyncio
import contextlib
import os
import pty
import re
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bertscope.analyses.params import count, tree
from bertscope.checkpoints.reading import stored_report
from bertscope.config import BertConfig
from bertscope.model import build
from bertscope.sources.bert import BertSource
from bertscope.sources.find import stored_alone
from bertscope.sources.model_source import built_for_counting
from bertscope.tracing.flops import FlopsRun, source_shapes
from bertscope.tracing.module_tree import freeze
from bertscope.views.interactive import Browser, details, items_of
from tests.child_server import loaded

SIZES = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16,
         "max_position_embeddings": 12}  # fmt: skip
QUERY = "bert.encoder.layer.0-3.attention.self.query"


def bert(layers=4):
    config = BertConfig(num_hidden_layers=layers, **SIZES)
    return BertSource(name="tiny", architecture="BertForMaskedLM", config=config)


def items(source=None, *, folded=True, has_shapes=False, frozen=(), model=None):
    """The rows of the app for a source, or for a module."""
    source = source or bert()
    model = built_for_counting(source) if model is None else model
    freeze(model, frozen)
    options = {"folded": folded, "shapes": source_shapes(source, 2, 5) if has_shapes else None}
    return items_of(tree(model, **options), count(model, by="parameter", **options))


def explored(*keys, found=None, depth=None, size=(80, 24)):
    """The app after those keys, its screen, and the path under the cursor after each; `=dense` is pasted."""

    async def pressed():
        app, places = Browser("tiny: BertForMaskedLM", items() if found is None else found, depth), [""]
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            for key in keys:
                if key.startswith("="):
                    app.search.value = key[1:]
                else:
                    await pilot.press(key)
                if app._exit:
                    return app, "", places
                await pilot.pause()
                places.append(app.modules.item.path)
            lines = [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]
            return app, "\n".join(lines), places

    return asyncio.run(pressed())


def names(app) -> list[str]:
    """The names of the rows that are open, from top to bottom."""
    return [line.path[-1].data.name for line in app.modules._tree_lines]


@pytest.mark.parametrize("folded", [True, False])
def test_each_row_has_the_parameters_of_tree_and_the_forward_flops_of_flops(folded):
    rows = {row.path: row.params for row in tree(bert().build(), folded=folded).rows}
    found = items(folded=folded, has_shapes=True)
    assert {item.path: item.params for item in found} == rows
    work = {row.path: row.forward.matmul_flops for row in FlopsRun(source=bert()).at(2, 5).rows}
    same = [item for item in found if item.path in work]
    assert len(same) == len(work) if folded else len(same) > 10
    assert {item.path: item.flops for item in same} == {item.path: work[item.path] for item in same}


def test_the_details_have_class_parameters_shapes_flops_and_tensors():
    found = {item.path: item for item in items(has_shapes=True, frozen=("query.bias",))}
    assert list(details(found[QUERY], 3160)) == [
        QUERY, "class       Linear", "parameters  288 = 4 x 72, 9.11 %, summed over layers", "  unique    288",
        "  trainable 256", "size        1.12 KiB", "input       [2, 5, 8]", "output      [2, 5, 8]",
        "forward     5.12 KFLOP in matrix products", "  weight [8, 8] 64", "  bias [8] 8, frozen",
    ]  # fmt: skip
    decoder = details(found["cls.predictions.decoder"], 3160)
    assert "  weight [32, 8] 256, tied to bert.embeddings.word_embeddings.weight" in decoder
    assert "forward" not in "".join(details(items()[0], 3160))


def test_a_module_that_is_used_again_names_its_first_path():
    layer = nn.Linear(2, 2)
    *_, again = items(model=nn.Sequential(layer, nn.ReLU(), layer))
    assert "class       Linear, same module as '0'" in details(again, 6)


def test_a_checkpoint_has_the_modules_of_its_names_with_their_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    model = build(bert().config, "BertModel", device="cpu")
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    checkpoint = stored_alone(str(path))
    found = items_of(stored_report(checkpoint, by="tree"), stored_report(checkpoint))
    query = next(item for item in found if item.path == QUERY.removeprefix("bert."))
    assert list(details(query, found[0].params)) == [
        query.path, "dtype       float32", "parameters  288 = 4 x 72, 10.08 %", "size        1.12 KiB",
        "  bias [8] float32", "  weight [8, 8] float32",
    ]  # fmt: skip
    _, text, places = explored("slash", "=query", "enter", found=found)
    assert places[-1] == query.path
    assert "0-3 (4 x) float32" in text


def test_a_checkpoint_whose_layers_fold_in_several_ways_keeps_every_row(tmp_path):
    path = tmp_path / "model.safetensors"
    sizes = {"layer.0.a.w": 2, "layer.1.a.w": 2, "layer.2.a.w": 2, "layer.0.b.w": 3, "layer.1.b.w": 4, "layer.2.b.w": 4}
    save_file({name: torch.zeros(size) for name, size in sizes.items()}, path)
    checkpoint = stored_alone(str(path))
    root, *others = items_of(stored_report(checkpoint, by="tree"), stored_report(checkpoint))
    assert sum(tensor.params for item in (root, *others) for tensor in item.tensors) == root.params == 17
    assert all(item in item.parent.below for item in others)


def test_the_tree_opens_to_three_levels_or_to_the_depth():
    _, text, _ = explored()
    assert "└ + layer ModuleList" in text
    assert re.search(r"^- BertForMaskedLM +3,160 +100.00 %", text, re.MULTILINE)
    assert text.splitlines()[-1] == "q quit / search n next N back + expand all - collapse c copy path"
    assert names(explored(depth=1)[0]) == ["BertForMaskedLM", "bert", "cls"]
    assert "query" in names(explored(depth=9)[0])


def test_the_arrows_open_close_and_go_to_the_module_around():
    app, _, places = explored("down", "down", "left", "left", depth=2)
    assert places[1:] == ["bert", "bert.embeddings", "bert", "bert"]
    assert names(app) == ["BertForMaskedLM", "bert", "cls", "predictions"]
    app, _, places = explored("down", "left", "right", "down", depth=2)
    assert places[-1] == "bert.embeddings"


def test_plus_opens_everything_and_minus_closes_everything_below_the_root():
    app, _, _ = explored("plus")
    assert len(names(app)) == len(app.items)
    app, _, places = explored("plus", "end", "minus")
    assert places[1:] == ["", "cls.predictions.decoder", ""]
    assert names(app) == ["BertForMaskedLM", "bert", "cls"]


def test_a_search_goes_to_the_matches_one_after_the_other_and_round():
    layer, head = "bert.encoder.layer.0-3", "cls.predictions.transform.dense"
    matches = [f"{layer}.attention.output.dense", f"{layer}.intermediate.dense", f"{layer}.output.dense", head]
    _, text, places = explored("slash", "=dense", "enter", "n", "n", "n", "n", "N")
    assert places[2:] == [matches[0], *matches, matches[0], head]
    assert "4 of 4 that match 'dense'; n: the next" in text


def test_a_search_goes_to_the_first_match_while_it_is_typed_and_without_any_stays():
    _, text, places = explored("down", "slash", *"que", "enter", "slash", "=nothing", "enter")
    assert (places[5], places[-1], "nothing matches 'nothing'" in text) == (QUERY, QUERY, True)


def test_escape_leaves_a_search_and_goes_back_to_where_it_began():
    app, text, places = explored("down", "slash", "=query", "escape")
    assert places[1:] == ["bert", "bert", QUERY, "bert"]
    assert (app.search.display, "q quit" in text) == (False, True)


def test_c_copies_a_path_that_get_submodule_takes():
    app, text, _ = explored("slash", "=selfattention", "enter", "c")
    assert app.clipboard == "bert.encoder.layer.0.attention.self"
    assert bert().build().get_submodule(app.clipboard)
    assert f"copied {app.clipboard}" in text
    assert "the model itself has no path" in explored("c")[1]


def test_many_children_are_divided_into_pages_that_open_one_by_one_and_by_a_search():
    found = items(model=nn.ModuleList(nn.Linear(1, 1 + number % 2) for number in range(2500)))
    app, _, places = explored("plus", "down", "right", "slash", "=2345", found=found)
    assert [item.name for item in found[0].below] == ["0 ... 999", "1000 ... 1999", "2000 ... 2499"]
    assert sum(page.params for page in found[0].below) == found[0].params == 2500 * 3
    assert (len(app.modules.nodes), places[-1]) == (1 + 3 + 1000 + 500, "2345")
    assert explored("plus", found=found)[1].splitlines()[-2].startswith("more than 1,000 rows")


def test_letters_of_a_name_that_move_a_terminal_are_shown_as_escapes():
    root = nn.Sequential()
    root.add_module("a\x1b[2Jb\nc[red]", nn.Linear(1, 1))
    _, text, _ = explored("down", found=items(model=root))
    assert r"a\x1b[2Jb\nc[red] Linear" in text
    assert r"a\x1b[2Jb\nc[red]" in text.partition("───")[2]


def test_q_leaves_without_an_error_and_control_c_with_an_interrupt():
    assert explored("q")[0].return_value is None
    assert isinstance(explored("slash", "a", "ctrl+c")[0].return_value, KeyboardInterrupt)


def test_an_error_inside_the_app_reaches_the_command(monkeypatch):
    monkeypatch.setattr("bertscope.views.interactive.details", lambda *_: 1 / 0)
    assert isinstance(Browser("tiny", items()).run(headless=True), ZeroDivisionError)


def test_without_textual_it_names_the_extra(cli, monkeypatch):
    monkeypatch.setattr("bertscope.commands.model.find_spec", lambda name: None)
    result = cli("tree", "--interactive")
    assert result.code == 2
    assert result.err == "error: --interactive needs the extra 'interactive': pip install 'bertscope[interactive]'\n"


# The command.


def on_a_pty(*args, key, **variables) -> tuple[int, str]:
    """Exit code and what the terminal got; the key is sent once the keys are drawn."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"} | variables
    process = subprocess.Popen([*loaded("bertscope"), *args], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    got, is_sent = b"", False
    with contextlib.suppress(OSError):  # Linux ends a closed pty with EIO
        while chunk := os.read(master, 65536):
            got += chunk  # a chunk may end within the words
            if b"copy path" in got and not is_sent:
                is_sent = os.write(master, key) > 0
    os.close(master)
    return process.wait(timeout=300), got.decode(errors="replace")


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)])
def test_in_a_real_terminal_it_draws_without_colour_and_restores_the_screen(key, code):
    got_code, got = on_a_pty("tree", "bert-tiny", "--interactive", key=key, NO_COLOR="1")
    assert got_code == code, got[-2000:]
    assert "4,385,920" in got
    assert "\x1b[?1049h" in got
    assert "\x1b[?1049l" in got.rpartition("4,385,920")[2]
    assert not re.search(r"\x1b\[[\d;]*(38|48);[25];", got)
    assert "Traceback" not in got
