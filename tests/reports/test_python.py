"""A report in Python: its text, HTML, data, and rows by name."""

import csv
import io
import json
import re
import sys
from types import SimpleNamespace

import pytest

import bertscope
from bertscope.errors import BertscopeError, MissingExtraError, RowError
from bertscope.reports.base import Report, TableReport
from bertscope.reports.json import report_classes
from bertscope.views.views import view_of


@pytest.fixture(scope="module")
def model():
    return bertscope.load("bert-tiny").build()


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.mark.parametrize(("name", "options"), [("count", {"dtype": "fp32"}), ("tree", {})])
def test_the_text_of_a_report_is_what_the_command_prints(cli, model, name, options):
    report = getattr(bertscope, name)(model, name="bert-tiny", **options)
    (text, call), (printed, line) = (
        shown.rsplit("\n  ", 1)
        for shown in (str(report), cli(name, "bert-tiny").out)  # the next step is a call there
    )
    assert repr(report) == str(report)
    assert (text, call.partition("(")[0]) == (printed, ".".join(line.split()[:2]))
    assert report.to_markdown() == cli(name, "bert-tiny", "--format", "markdown").out
    assert report.to_csv() == cli(name, "bert-tiny", "--format", "csv").out
    assert report.to_json() == cli(name, "bert-tiny", "--format", "json").out


def test_a_report_becomes_the_data_of_its_json(model):
    report = bertscope.tree(model)
    assert json.loads(json.dumps(report.to_dict())) == json.loads(report.to_json())
    assert bertscope.from_json(report.to_json()) == report


def test_a_notebook_shows_the_whole_text_escaped(model):
    html = bertscope.tree(model, name="<script>")._repr_html_()
    assert html.startswith("<div>")
    assert "&lt;script&gt;: BertModel" in html
    assert "<script>" not in html


def test_a_notebook_has_tables_with_sums_in_bold_bars_of_shares_and_the_answer(model):
    html = bertscope.count(model)._repr_html_()
    rows = re.findall(r"<tr style=.*?</tr>", html, re.DOTALL)
    assert len(rows) > 5
    strong = [re.sub(r"<.*?>", " ", row).split()[0] for row in rows if "font-weight:600" in row]
    assert "total" in strong
    shares = re.findall(r"transparent ([\d.]+)%\);\">([\d.]+) %", html)
    assert shares
    assert all(float(width) == float(share) for width, share in shares)
    assert "color:" not in re.sub(r"background-color:", "", html).replace(
        "rgba", ""
    )  # text keeps the notebook's colour
    fit = bertscope.fit("bert-tiny", gpu="t4")
    assert fit.shown("printed").splitlines()[0][:30] in fit._repr_html_()
    assert "<pre" not in html + fit._repr_html_()


def test_a_memory_report_is_drawn_by_matplotlib_or_says_what_is_missing(monkeypatch):
    report = bertscope.estimate("bert-tiny", batch=2, seq=16)
    figure = report.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.axes[0].get_ylim()[1] * 2**20 > report.variants[0].memory.peak.peak_bytes
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BertscopeError, match=r"pip install 'bertscope\[plot\]'"):
        report.plot()


def test_a_row_is_found_by_path_end_of_a_path_or_name(model):
    report = bertscope.tree(model)
    linear = 128 * 128 + 128
    assert report["encoder.layer.0-1"] is report["encoder.layer.1"] is report["layer.0"]
    assert report["pooler"].params == report["pooler.dense"].params == linear
    assert report["encoder.layer.0.attention.self.query"].each_params == linear
    assert [key in report for key in ("encoder", "decoder", 3)] == [True, False, False]
    assert next(iter(report)).params == report.totals.layer_params


def test_a_part_of_a_layer_is_found_in_a_count(model):
    assert bertscope.count(model)["feed_forward"].params == 2 * (2 * 128 * 512 + 128 + 512)


@pytest.mark.parametrize("by", ["layer", "group", "parameter"])
def test_a_module_around_the_rows_of_a_count_is_their_sum(by):
    report = bertscope.count(bertscope.load("bert-tiny", architecture="BertForMaskedLM"), by=by)
    layer = 4 * (128 * 128 + 128) + (128 * 512 + 512) + (512 * 128 + 128) + 4 * 128
    assert report["encoder"].params == report["bert.encoder"].params == 2 * layer
    assert report["embeddings"].params == (30522 + 512 + 2 + 2) * 128
    assert report[""].params == report.totals.layer_params
    assert report[""].distinct_params == report.totals.distinct_params


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("encodr", "did you mean 'encoder'"),
        ("LayerNorm", "3 rows are named 'LayerNorm'.*embeddings.LayerNorm"),
        (3, "no row '3'"),
    ],
)
def test_a_name_of_no_row_or_of_several_is_a_key_error_with_a_suggestion(model, key, message):
    with pytest.raises(RowError, match=message) as found:
        bertscope.tree(model)[key]
    assert isinstance(found.value, KeyError)


def test_without_pandas_one_line_says_how_to_install_it(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="'pandas'"):
        bertscope.tree(model).to_pandas()


def test_pandas_gets_the_columns_of_the_csv(model, monkeypatch):
    reader = SimpleNamespace(read_csv=lambda file: list(csv.DictReader(file)))
    monkeypatch.setitem(sys.modules, "pandas", reader)
    report = bertscope.tree(model)
    assert report.to_pandas() == list(csv.DictReader(io.StringIO(report.to_csv())))
    assert report.to_pandas()[1]["path"] == "embeddings"


def test_every_report_shows_itself():
    for classes in report_classes().values():
        for item in classes:
            assert issubclass(item, Report)
            renderer = view_of(item.kind)
            assert not issubclass(item, TableReport) or (renderer.table and renderer.csv and renderer.markdown)


def test_a_diagram_is_the_text_of_mermaid(cli):
    model = bertscope.load("bert-tiny", attention="eager").build()
    report = bertscope.diagram(model, "tree", name="bert-tiny")
    assert str(report) == cli("diagram", "bert-tiny", "--kind", "tree").out
    assert report.to_markdown() == f"```mermaid\n{report}```\n"
