"""The page: its numbers are the commands', and in a real browser it draws, sorts, searches, and asks for nothing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from fractions import Fraction
from html import unescape
from itertools import pairwise

import pytest

from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.analyses.page import report as page_analysis
from bertscope.analyses.params.count import count
from bertscope.analyses.params.tree import tree
from bertscope.errors import MissingExtraError
from bertscope.model import build
from bertscope.render.page import report as page
from bertscope.render.page.charts import flops_bars, parameter_map
from bertscope.render.page.templating import environment
from bertscope.render.table import Column, number
from bertscope.sources.find import load
from bertscope.units import bytes_text, flops_text
from tests.conftest import run_cli

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Run inside the page once it stands: draws, sorts, searches, and tells what it saw in the document's title.
PROBE = """
<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective + " " + event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  const table = document.getElementById("flops-0");
  const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "FLOPs");
  const values = () => [...table.tBodies[0].rows].filter((row) => !row.hidden)
    .map((row) => Number(row.cells[column].dataset.value));
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const down = values();
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const up = values();
  table.tHead.rows[0].cells[column].querySelector("button").click();
  const back = values();
  table.tHead.rows[0].cells[0].querySelector("button").click();
  const named = [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const field = document.querySelector('input[data-table="flops-0"]');
  field.value = "query";
  field.dispatchEvent(new Event("input", { bubbles: true }));
  const found = [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
  document.querySelector("button[data-chart]").click();
  const charts = [...document.querySelectorAll(".chart")];
  document.title = JSON.stringify({
    faults, down, up, back, named, found,
    said: field.closest(".search").querySelector("output").textContent,
    button: document.querySelector("button[data-chart]").textContent,
    charts: charts.length, drawn: charts.filter((chart) => chart.querySelector("svg")).length,
    map: document.getElementById("parameters-0-map").data[0].type,
    pictures: document.querySelectorAll("figure svg").length,
    requests: performance.getEntriesByType("resource").length,
  });
}, 500));
</script>
"""


@pytest.fixture(scope="module", autouse=True)
def _one_length():
    """Ask for one length beside that of the page: the tables grow with it, not the laws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_analysis, "LENGTHS", (64,))
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory, _one_length):
    path = tmp_path_factory.mktemp("two") / "two.html"
    result = run_cli("report", "bert-tiny", "--compare", "bert-mini", "--no-fit", "--seq", "32", "-o", str(path))
    assert result.code == 0, result.err
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory, _one_length):
    folder = tmp_path_factory.mktemp("page")
    page_file, data_file = folder / "report.html", folder / "report.json"
    for path, extra in ((page_file, ()), (data_file, ("--format", "json"))):
        result = run_cli("report", "bert-tiny", "--seq", "32", "--budget", "1GiB", "-o", str(path), *extra)
        assert result.code == 0, result.err
    return page_file, json.loads(data_file.read_text())


def commands_named(path) -> list[str]:
    """The commands that stand under the numbers of a page."""
    return [unescape(command) for command in re.findall(r"<code>(bertscope .*?)</code>", path.read_text())]


def test_every_number_of_the_page_is_that_of_the_command_named_beside_it(written, cli):
    (part,) = written[1]["models"]
    whole, *others = commands_named(written[0])
    named = iter(others)

    def said(line: str | None = None) -> dict:
        own = cli(*shlex.split(line or next(named))[1:], "--format", "json").json
        return {key: value for key, value in own.items() if key not in ("schema", "kind")}

    assert said(whole)["models"] == written[1]["models"]
    assert said() | {"notes": []} == part["fit"]  # the page has the notes as text
    assert said() | {"notes": []} == part["asked"]
    assert said() | {"notes": []} == part["memory"]
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
    drawn = parts.chart('a "name"', {"data": ["</script>"], "layout": {}})
    assert 'aria-label="a &#34;name&#34;"' in drawn
    assert "\\u003c/script\\u003e" in drawn


def test_the_page_shows_every_module_and_every_kept_tensor_of_its_data(written):
    text, (part,) = written[0].read_text(), written[1]["models"]
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
    variants = cli("estimate", "bert-tiny", *sizes, "--checkpointing", "none,full").json["variants"]
    peaks = [max(phase["peak_bytes"] for phase in variant["estimated"]["phases"]) for variant in variants]
    fits = cli("fit", "bert-tiny", "--budget", "1GiB", "--seq", "32", "--checkpointing", "none,full",
               "--precision", "fp32", "--format", "json").json["rows"]  # fmt: skip
    assert tiles == [
        ("", f"{totals['distinct_params']:,}"),
        *((f"{size:,} B", bytes_text(size)) for size in (totals["fp32_bytes"],)),
        *((f"{flops:,} FLOP", flops_text(flops)) for flops in (forward, step)),
        *((f"{peak:,} B", bytes_text(peak)) for peak in peaks), *(("", f"{row['batch']:,}") for row in fits),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("bert-tiny", None), ("bert-base-cased", None), ("bert-tiny", "BertForNextSentencePrediction")],
)
def test_the_map_holds_every_tensor_once_in_its_module(name, architecture):
    source = load(name, architecture=architecture)
    model = build(source.config, source.architecture)
    drawn = parameter_map(count(model, by="parameter"), tree(model))["data"][0]
    sizes = dict(zip(drawn["ids"], drawn["values"], strict=True))
    assert sizes["(model)"] == tree(model).totals.layer_params
    for row in tree(model).rows:
        assert sizes.get(row.path or "(model)", row.params) == row.params
    inside: dict[str, int] = {}
    for ident, parent in zip(drawn["ids"], drawn["parents"], strict=True):
        inside[parent] = inside.get(parent, 0) + sizes[ident]
    assert all(total == sizes[parent] for parent, total in inside.items() if parent)
    leaves = [ident for ident in drawn["ids"] if ident not in inside]
    distinct = {re.sub(r"layer\.\d+", "layer.*", name) for name, _ in model.named_parameters(remove_duplicate=False)}
    counted = {re.sub(r"layer\.[\d-]+", "layer.*", leaf) for leaf in leaves}
    assert counted <= distinct
    assert {name for name in distinct - counted if "cls." not in name} == set()


def test_the_bars_add_up_to_the_forward_pass():
    report = flops_model(FlopsRun(source=load("bert-tiny", architecture="BertForMaskedLM")), (2,), (16,))
    bars = flops_bars(report)["data"][0]
    assert sum(bars["x"]) == report.rows[0].forward.matmul_flops
    assert min(bars["x"]) > 0
    scores = dict(zip(bars["y"], bars["x"], strict=True))["bert.encoder.layer.0-1.attention.self"]
    config = load("bert-tiny").config
    assert scores == config.num_hidden_layers * 2 * 2 * 2 * 16 * 16 * config.hidden_size  # layers, products, FMA, batch


def test_the_page_refers_to_nothing_outside(written):
    text = written[0].read_text()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)  # plotly names addresses that it never asks
    assert not re.search(r"(?:src|href)=[\"'](?!#)", own)
    assert "@import" not in own
    assert "default-src 'none'" in own


def test_two_models_stand_side_by_side_with_their_differences(two):
    text = two.read_text()
    assert '<a href="#differences">' in text
    assert 'id="differences"' in text
    assert "<p>a: bert-tiny (BertModel)<br>b: bert-mini (BertModel)</p>" in text
    same = "--architecture BertModel --attention sdpa"
    words = "--batch 8 --seq 32 --no-fit --precision fp32 --checkpointing none,full"
    assert commands_named(two)[0] == f"bertscope report bert-tiny --compare bert-mini {words} {same}"
    assert f"bertscope diff bert-tiny bert-mini --batch 8 --seq 32 {same}" in commands_named(two)
    assert text.count("<section><h3>") == 2 * 7


def test_without_graphviz_the_page_shows_the_diagram_as_text(written, monkeypatch, cli, tmp_path):
    def missing(graph):
        raise MissingExtraError("a picture", "draw")

    monkeypatch.setattr(page, "inline_svg", missing)
    path = tmp_path / "plain.html"
    assert cli("report", "bert-tiny", "--no-fit", "--seq", "32", "-o", str(path)).code == 0
    assert "flowchart" in path.read_text()


@pytest.mark.parametrize("arguments", [("bert-tiny",), ("bert-tiny", "-o", "x.html", "--seq", "600")])
def test_a_page_without_a_file_or_with_a_wrong_size_is_one_line(cli, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("report", *arguments)
    assert (result.code, result.out) == (2, "")
    assert not list(tmp_path.iterdir())


def test_the_page_works_in_a_real_browser(written, tmp_path):
    seen = in_browser(written[0], tmp_path)
    assert seen["faults"] == []
    assert seen["requests"] == 0
    assert seen["charts"] == seen["drawn"] == 5
    assert seen["pictures"] == 2
    assert (seen["map"], seen["button"]) == ("icicle", "Show as treemap")
    assert seen["down"] == sorted(seen["down"], reverse=True)
    assert seen["up"] == sorted(seen["up"])
    assert seen["back"] == [row["total"]["matmul_flops"] for row in written[1]["models"][0]["flops"]["rows"]]
    assert seen["named"] == sorted(seen["named"], key=str.lower)
    assert seen["said"] == "1"
    assert seen["found"]
    assert all("query" in name for name in seen["found"])


def in_browser(path, folder) -> dict:
    """Return the probe's findings after the page was opened without network."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    probed = folder / "probed.html"
    probed.write_text(path.read_text().replace("</head>", f"{PROBE}</head>", 1))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1200,900",
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{probed}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, done.stderr[-2000:]
    return json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
