"""Run the cells of docs/tour.ipynb and write their outputs into it, without Jupyter: `python docs/make_tour.py`."""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parent / "tour.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return the notebook with the outputs of its cells, which run one after the other; an error ends the run."""
    names: dict[str, Any] = {}
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell = cell | {"execution_count": number, "outputs": _outputs("".join(cell["source"]), names, number)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(code: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Return what the cell prints, and its last expression if it has a value, as Jupyter stores them."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, PATH.name, "exec"), names)  # noqa: S102 the cells of this folder
        value = eval(compile(ast.Expression(last.value), PATH.name, "eval"), names) if last else None  # noqa: S307
        data = {} if value is None else _data(value)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if data:
        found.append({"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}})
    return found


def _data(value: Any) -> dict[str, Any]:
    """Return a value in the forms that Jupyter shows: text, HTML, a picture."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if html := getattr(value, "_repr_html_", lambda: None)():
        data["text/html"] = _lines(html)
    if hasattr(value, "savefig"):
        picture = io.BytesIO()
        value.savefig(picture, format="png", dpi=80)
        data["image/png"] = base64.b64encode(picture.getvalue()).decode()
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def text(notebook: dict[str, Any]) -> str:
    """Return the notebook as the text of its file."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.environ.pop("COLUMNS", None)  # tables have their full width
    PATH.write_text(text(executed(json.loads(PATH.read_text()))))
