"""Live memory over a step, as data and as a picture."""

import csv
import io
import json
import re
import sys
from dataclasses import replace
from itertools import accumulate, chain
from xml.etree import ElementTree

import pytest

from bertscope import from_json, load
from bertscope.errors import BertscopeError
from bertscope.memory.simulator import Simulator
from bertscope.reports.base import Subject
from bertscope.reports.memory import MemoryReport, Variant
from bertscope.reports.step import Parts
from bertscope.settings.run_config import RunConfig
from bertscope.units import bytes_text
from bertscope.views.timeline import pictured, timeline
from tests.conftest import assert_stands_alone

PARTS = tuple(vars(Parts()))
SUBJECT = Subject(name="bert-tiny", architecture="BertForMaskedLM", dtype="stored", attention="sdpa",
                  torch_version="0", bertscope_version="0")  # fmt: skip


def reporting(*variants: Variant, name: str = "bert-tiny") -> MemoryReport:
    run = RunConfig(batch=2, seq=16)
    return MemoryReport(subject=replace(SUBJECT, name=name), run=run, machine="fake tensors", variants=variants)


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    """A step of bert-tiny without and with checkpointing, short enough to hold every event."""
    run_configs = [RunConfig(batch=2, seq=16, checkpointing=strategy) for strategy in ("none", "full")]
    return reporting(*Simulator(load("bert-tiny")).report(run_configs).variants)


def records(report: MemoryReport) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(timeline(report, "csv").decode())))


def test_the_csv_has_every_sample_and_its_parts_add_up(report):
    found = records(report)
    samples = [sample for variant in report.variants for sample in variant.memory.timeline]
    assert len(found) == len(samples) > 200
    for record, sample in zip(found, samples, strict=True):
        assert (record["phase"], int(record["total_bytes"])) == (sample.phase, sample.parts.total)
        assert int(record["total_bytes"]) == sum(int(record[f"{part}_bytes"]) for part in PARTS)
    assert [record["index"] for record in found if record["variant"] == "full"] == [
        str(index) for index in range(len(report.variants[1].memory.timeline))
    ]


def test_the_json_is_the_report(report):
    assert from_json(timeline(report, "json")) == report


def words(report: MemoryReport) -> set[str]:
    """Return the texts that every picture of the report must show."""
    parts = {"parameters", "buffers", "optimizer state", "inputs", "gradients", "activations", "temporaries"}
    peaks = {f"peak {bytes_text(variant.memory.peak.peak_bytes)}" for variant in report.variants}
    phases = {bytes_text(phase.peak_bytes) for variant in report.variants for phase in variant.memory.phases}
    titles = {"checkpointing: none (estimated)", "checkpointing: full (estimated)", "bert-tiny: BertForMaskedLM"}
    return parts | peaks | phases | titles | {"forward", "backward", "optimizer", "not time"}


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_names_the_phases_the_parts_and_the_peaks(report, suffix):
    text = timeline(report, suffix).decode()
    text = text[text.rindex("<body>") :] if suffix == "html" else text
    assert {word for word in words(report) if word not in text} == set()


def test_the_areas_of_the_svg_are_as_high_as_the_parts(report):
    root = ElementTree.fromstring(timeline(reporting(report.variants[1]), "svg"))
    peak = report.variants[1].memory.peak.parts
    edges = {}
    for part in pictured(report).parts:
        path = root.find(f".//*[@id='{part}']/*").get("d")
        heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path)]
        edges[part] = (max(heights), min(heights))
    floor = edges["parameters"][0]
    assert all(bottom == floor for bottom, _ in edges.values())
    per_byte = (floor - edges["temporaries"][1]) / peak.total  # the highest area ends at the peak
    assert (floor - edges["parameters"][1]) / per_byte == pytest.approx(peak.parameters, rel=1e-4)
    assert (floor - edges["optimizer_state"][1]) / per_byte == pytest.approx(
        peak.parameters + peak.buffers + peak.optimizer_state, rel=1e-3
    )


def figures(page: str) -> list[dict]:
    return [json.loads(found) for found in re.findall(r'class="figure">(.*?)</script>', page)]


def test_the_areas_of_the_page_stack_up_to_the_totals_and_the_dot_is_on_the_highest(report):
    found = figures(timeline(report, "html").decode())
    assert len(found) == 2
    for variant, chart in zip(report.variants, found, strict=True):
        texts = [[[0] * int(item) if isinstance(item, str) else [item] for item in items] for items in chart["changes"]]
        areas = [list(accumulate(chain.from_iterable(items))) for items in texts]
        totals = [sum(heights) for heights in zip(*areas, strict=True)]
        assert totals == [sample.parts.total for sample in variant.memory.timeline]
        assert totals[chart["peak"][0]] == max(totals) == chart["top"] == variant.memory.peak.peak_bytes


def test_a_sample_of_the_page_has_the_phase_module_and_operator_of_its_event(report):
    (chart, _) = figures(timeline(report, "html").decode())
    peak = report.variants[0].memory.peak
    at = [names[column[chart["peak"][0]]] for names, column in zip(chart["names"], chart["places"], strict=True)]
    assert at == [peak.phase, peak.path, peak.operator]
    assert at[0] == "optimizer"
    modules = {(sample.path, sample.operator) for sample in report.variants[0].memory.timeline}
    assert ("encoder.layer.1.intermediate.dense", "addmm") in modules


def test_the_page_fetches_nothing(report):
    page = timeline(report, "html").decode()
    assert_stands_alone(page)
    assert len(page) < 150_000


def test_the_svg_fetches_nothing(report):
    root = ElementTree.fromstring(timeline(report, "svg"))
    links = [value for item in root.iter() for name, value in item.attrib.items() if name.endswith(("href", "src"))]
    assert all(link.startswith("#") for link in links)
    assert not [item.text for item in root.iter() if item.text and re.search(r"@import|url\(|https?:", item.text)]


@pytest.mark.parametrize("suffix", ["svg", "png", "html", "csv", "json"])
def test_the_same_report_gives_the_same_bytes(report, suffix):
    assert timeline(report, suffix) == timeline(report, f".{suffix.upper()}")


@pytest.mark.parametrize("suffix", ["svg", "png", "html", "csv", "json"])
def test_a_variant_without_a_measurement_says_why(report, suffix):
    failed = Variant(checkpointing="none", reentrant=False, failure="the child ran out of memory")
    content = timeline(replace(report, variants=(failed, report.variants[1])), suffix)
    if suffix not in ("png", "csv"):
        assert "ran out of memory" in content.decode()
    assert timeline(replace(report, variants=(failed,)), suffix)


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_name_is_text_and_never_markup(report, suffix):
    name = "</script><script>alert(1)</script> a$b$ &amp; %{y}"
    plain = timeline(report, suffix).decode()
    text = timeline(replace(report, subject=replace(SUBJECT, name=name)), suffix).decode()
    assert text.count("<script>") == plain.count("<script>")
    assert "a$b$ &amp;amp; %{y}" in text


@pytest.mark.parametrize(("suffix", "library"), [("svg", "matplotlib"), ("png", "matplotlib")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(report, monkeypatch, suffix, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BertscopeError, match=rf"needs {library}.*pip install 'bertscope\[plot\]'"):
        timeline(report, suffix)
    assert timeline(report, "csv")
