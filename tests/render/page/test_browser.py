"""The page in a real browser: it draws, sorts, searches, zooms, asks for nothing, and axe-core finds no fault in it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from tests.conftest import ROOT
from tests.node_packages import node_packages

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DARK = "--blink-settings=preferredColorScheme=0"
PROBE = """
<script>
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective + " " + event.blockedURI));
const begin = () => {
  const charts = [...document.querySelectorAll(".chart")];
  if (!charts.every((chart) => chart.querySelector("svg"))) return setTimeout(begin, 50);
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
  const chosen = (chart, ...keys) => keys.map((key) => {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const tip = chart.querySelector(".tip");
    const rows = tip.hidden ? [] : [...tip.children].map((row) => row.textContent);
    return [rows.join(" | "), !chart.querySelector(".back").hidden];
  });
  const map = document.getElementById("parameters-0-map");
  const zoomed = chosen(map, "ArrowRight", "Enter", "Escape", "Escape");
  const [memory] = charts, dot = memory.querySelector(".peak").getBBox();
  const area = document.createElementNS("http://www.w3.org/2000/svg", "svg").createSVGPoint();
  [area.x, area.y] = [dot.x + dot.width / 2, dot.y + dot.height / 2 + 1];
  const stepped = chosen(memory, "ArrowRight", "End", "Enter", "Escape");
  const widths = () => charts.map((chart) => chart.querySelector("svg").viewBox.baseVal.width);
  const screen = widths();
  dispatchEvent(new Event("beforeprint"));
  const paper = widths();
  dispatchEvent(new Event("afterprint"));
  document.title = JSON.stringify({
    paper, restored: JSON.stringify(screen) === JSON.stringify(widths()),
    faults, down, up, back, named, found, zoomed,
    said: field.closest(".search").querySelector("output").textContent,
    stepped, isOnArea: [...memory.querySelectorAll("path")].some((path) => path.isPointInFill(area)),
    charts: charts.length, drawn: charts.filter((chart) => chart.querySelector("svg")).length,
    pictures: document.querySelectorAll("figure svg.wide").length,
    requests: performance.getEntriesByType("resource").length,
  });
};
addEventListener("load", () => setTimeout(begin, 500));
</script>
"""
AXE = """
<script>
addEventListener("load", () => setTimeout(async () => {
  const outside = { exclude: [".chart svg", "figure svg"] };  // pictures with a name
  const found = await axe.run(outside, { resultTypes: ["violations"] });
  const faults = found.violations.map(({ id, nodes }) => [id, nodes.length, nodes[0].html.slice(0, 200)]);
  document.title = JSON.stringify({ faults, passes: found.passes.length });
}, 1500));
</script>
"""


def test_the_page_works_in_a_real_browser(written, tmp_path):
    seen = in_browser(written[0], tmp_path, PROBE)
    assert seen["faults"] == []
    assert seen["requests"] == 0
    assert seen["charts"] == seen["drawn"] == 5
    assert seen["pictures"] == 2
    assert (set(seen["paper"]), seen["restored"]) == ({680}, True)  # pixels between the margins of A4
    assert seen["isOnArea"]  # the dot of the peak
    (box, _), (inside, is_zoomed), (_, is_back), (closed, _) = seen["zoomed"]
    assert box.startswith("embeddings | BertEmbeddings | ")
    assert (inside.split(" | ")[0], is_zoomed, is_back, closed) == ("embeddings", True, False, "")
    (first, _), (last, _), (near, is_near), (_, is_whole) = seen["stepped"]
    assert first.startswith("forward")
    assert re.match(r"optimizer · \w+ \| .*parameters [\d.]+ MiB.* \| total [\d.]+ MiB$", last)
    assert near.startswith("optimizer")
    assert (is_near, is_whole) == (True, False)
    assert seen["down"] == sorted(seen["down"], reverse=True)
    assert seen["up"] == sorted(seen["up"])
    assert seen["back"] == [row["total"]["matmul_flops"] for row in written[1]["models"][0]["flops"]["rows"]]
    assert seen["named"] == sorted(seen["named"], key=str.lower)
    assert seen["said"] == "1"
    assert seen["found"]
    assert all("query" in name for name in seen["found"])


def test_axe_finds_no_fault_in_a_page_of_one_model_or_of_two(written, two, tmp_path, request):
    folder = node_packages(request.config, ROOT / "tests" / "axe", "axe-core")
    script = (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()
    for path, colors in ((written[0], ()), (two, (DARK,))):
        seen = in_browser(path, tmp_path, f"<script>{script}</script>{AXE}", *colors)
        assert seen["faults"] == []
        assert seen["passes"] > 20


def in_browser(path, folder, probe: str, *flags: str) -> dict:
    """Return the probe's findings after the page was opened without network."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    probed = folder / "probed.html"
    probed.write_text(path.read_text().replace("</head>", f"{probe}</head>", 1))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=1200,900", *flags,
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{probed}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    return json.loads(unescape(title[1]))
