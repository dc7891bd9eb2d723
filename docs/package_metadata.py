"""The hooks of pyproject.toml: authors and addresses from CITATION.cff, the README as long description, the presets."""

import re
import tempfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\]\()(?!https?:|#)(?P<path>[^)\s]+)\)")


def absolute(markdown: str, repository: str) -> str:
    """Return the page with links and pictures on GitHub; without a repository, return it as it is."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}{found['text']}{repository}/{kind}/HEAD/{found['path']})"

    return _LINK.sub(link, markdown) if repository else markdown


def people(citation: dict[str, Any]) -> list[dict[str, str]]:
    """Return the authors as a package's metadata has them."""
    return [
        {"name": row.get("name") or f"{row['given-names']} {row['family-names']}", **_email(row)}
        for row in citation["authors"]
    ]


def _email(row: dict[str, str]) -> dict[str, str]:
    return {"email": row["email"]} if "email" in row else {}


def addresses(repository: str) -> dict[str, str]:
    """Return the links of the package's page, none before the repository has an address."""
    paths = {
        "Repository": "",
        "Documentation": "/blob/HEAD/docs/index.md",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
        "Issues": "/issues",
    }
    return {name: repository + path for name, path in paths.items()} if repository else {}


class Metadata(MetadataHookInterface):
    """Hatchling's hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set authors, addresses and the long description."""
        root = Path(self.root)
        citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
        repository = citation.get("repository-code", "").rstrip("/")
        text = absolute((root / "README.md").read_text(encoding="utf-8"), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["authors"] = people(citation)
        metadata["urls"] = addresses(repository)


class Presets(BuildHookInterface):
    """Hatchling's hook that packs the presets into one file of the wheel, which takes 20 KB instead of 97."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Pack them without compression, as the wheel compresses them together."""
        if version == "editable":
            return
        self.folder = tempfile.TemporaryDirectory()
        packed = Path(self.folder.name) / "presets.zip"
        with ZipFile(packed, "w") as archive:
            for path in sorted((Path(self.root) / "presets").iterdir()):
                archive.writestr(ZipInfo(path.name), path.read_bytes())  # without its date
        build_data["force_include"][str(packed)] = "bertscope/presets.zip"
