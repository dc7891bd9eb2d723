"""The page in a real browser: it draws, sorts, searches, zooms, asks for nothing, and axe-core finds no fault in it."""

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from tests.conftest import DATA, ROOT
from tests.node_packages import node_packages

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DARK = "--blink-settings=preferredColorScheme=0"


def test_the_page_works_in_a_real_browser(written, tmp_path):
    seen = in_browser(written[0], tmp_path, (DATA / "probe.js").read_text())
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
    scripts = [path.read_text() for path in (folder / "node_modules" / "axe-core" / "axe.min.js", DATA / "axe.js")]
    for path, colors in ((written[0], ()), (two, (DARK,))):
        seen = in_browser(path, tmp_path, *scripts, flags=colors)
        assert seen["faults"] == []
        assert seen["passes"] > 20


def in_browser(path, folder, *scripts: str, flags: tuple[str, ...] = ()) -> dict:
    """Return the findings of the scripts after the page was opened without network."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    probed = folder / "probed.html"
    probes = "".join(f"<script>\n{script}</script>\n" for script in scripts)
    probed.write_text(path.read_text().replace("</head>", f"{probes}</head>", 1))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND",
         "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=1200,900", *flags,
         f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{probed}"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout, re.DOTALL)
    assert title, done.stderr[-2000:]
    return json.loads(unescape(title[1]))
