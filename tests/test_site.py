"""Links between the pages, and the site that mkdocs makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page, without those in blocks of code."""
    return re.findall(r"\]\(([^)\s]+)", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_in_it(page):
    for link in links(page):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]  # --quiet would hide warnings from strict
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of the files of the site."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("copied")
    for name in ("docs", "mkdocs.yml", *(page.name for page in ROOT.glob("*.md"))):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    return folder


def test_the_site_has_every_page_and_loads_nothing_from_a_network(copied, tmp_path):
    done = build(copied, tmp_path)
    assert done.returncode == 0, done.stderr
    made = {page.stem for page in tmp_path.glob("*.html")}
    assert {page.stem.lower() for page in PAGES} <= made
    for page in tmp_path.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert len(loaded) > 5
        assert [place for place in loaded if re.match(r"(?:https?:)?//", place)] == [], page.name


def test_a_dead_link_and_a_dead_anchor_fail_the_build(copied, tmp_path):
    with (copied / "docs" / "flops.md").open("a") as page:
        page.write("\n[one](nowhere.md) and [two](fit.md#nowhere)\n")
    done = build(copied, tmp_path)
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
    assert "#nowhere" in done.stderr
