"""The hooks of mkdocs.yml: the pages of the repository's root join those of docs/, and index.md is the navigation."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# mkdocs takes a README.md for the first page of a folder; that is index.md here.
ROOT_PAGES = {
    "README.md": "readme.md",
    "README.zh.md": "readme.zh.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(?<=\]\()(?:\.\./|docs/)?([^)#\s:]+)")
_ITEM = re.compile(r"^\*\*(?P<section>.+?)\*\*|\[(?P<title>[^\]]+)\]\((?P<target>[\w./-]+\.md)\)", re.MULTILINE)


def in_site(markdown: str) -> str:
    """Return a page with its links between docs/ and the root as links within one folder, that of the site."""
    return _LINK.sub(lambda found: ROOT_PAGES.get(found[1], found[1]), markdown)


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the links of index.md below its sections, the lines in bold."""
    sections: list[dict[str, Any]] = [{"Home": "index.md"}]
    for found in _ITEM.finditer(in_site(index)):
        if found["section"]:
            sections.append({found["section"]: []})
        else:
            (pages,) = sections[-1].values()
            title = found["title"]
            pages.append({title[:1].upper() + title[1:]: found["target"]})
    return sections


def on_config(config: Any) -> Any:
    """Set the navigation."""
    config.nav = navigation((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Correct the links of a page."""
    return in_site(markdown)
