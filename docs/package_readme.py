"""The metadata hook of pyproject.toml: the README as the long description on a package index."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[[^\]]*\]\()(?!https?:|#)(?P<path>[^)\s]+)\)")


def absolute(markdown: str, repository: str) -> str:
    """Return the page with links and pictures on GitHub; without a repository, return it as it is."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}{found['text']}{repository}/{kind}/HEAD/{found['path']})"

    return _LINK.sub(link, markdown) if repository else markdown


class Readme(MetadataHookInterface):
    """Hatchling's hook; its one option is `repository`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the long description."""
        page = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(page, self.config["repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
