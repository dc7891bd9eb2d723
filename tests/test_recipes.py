"""What CONTRIBUTING.md says a change takes: each recipe on a copy of the package, in so many files, and it works."""

import ast
import json
import re
import shutil

import pytest

from tests.conftest import ROOT, data, run_python

RECIPES = data("recipes.yaml")
FILES = {"setting": 2, "column of a step": 2, "optimizer": 1, "formula of an operator": 1, "command": 4}
STEP = '"estimate", "bert-tiny", "--batch", "2", "--seq", "8"'
PROGRAM = f"""
import io, json, sys
from contextlib import redirect_stdout
from bertscope import cli
def run(*words):
    sys.argv = ["bertscope", *words]
    with redirect_stdout(io.StringIO()) as out:
        assert cli._run() in (None, 0), words
    return out.getvalue()
def parts(*words):
    cost = json.loads(run({STEP}, "--format", "json", *words))["variants"][0]["estimated"]
    return [phase["parts"] for phase in cost["phases"]][-1]
import bertscope, torch
class Both(torch.nn.Module):
    def forward(self, x):
        return torch.logaddexp(x, x)
json.dump({{
    "setting": [parts("--optimizer", "sgd", *more) for more in ((), ("--copy-gradients",))],
    "keyword": bertscope.estimate("bert-tiny", batch=2, seq=8, copy_gradients=True).run.copy_gradients,
    "column of a step": run({STEP}),
    "optimizer": [parts("--optimizer", name)["optimizer_state"] for name in ("adadelta", "adamw")],
    "formula of an operator": bertscope.flops(Both(), torch.ones(3, 5)).rows[0].total.elementwise_flops,
    "command": [run("widths", "bert-tiny"), json.loads(run("widths", "bert-tiny", "-f", "json"))["width"],
                run("schema", "widths"), run("--help")],
}}, sys.stdout)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a copy of the package answers that has all of the changes."""
    folder = tmp_path_factory.mktemp("changed")
    for name in ("bertscope", "presets"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for files in RECIPES.values():
        for name, (pattern, text) in files.items():
            path = folder / "bertscope" / name
            before = path.read_text() if pattern else ""
            place = re.search(pattern, before)
            assert place, f"{name} has no {pattern}"
            path.write_text(before[: place.start()] + text + before[place.start() :])
            ast.parse(path.read_text())
    changed = {"cwd": folder, "check": True, "env": {"PYTHONPATH": str(folder)}}
    run_python("import runpy; runpy.run_module('bertscope.settings.generate', run_name='__main__')", **changed)
    return json.loads(run_python(PROGRAM, **changed).stdout)


def test_a_recipe_takes_so_many_files():
    assert {name: len(files) for name, files in RECIPES.items()} == FILES


def test_a_setting_is_an_option_a_keyword_and_memory(found):
    plain, copied = found["setting"]
    assert copied["temporaries"] == plain["gradients"] > plain["temporaries"]  # the copies are live at the peak
    assert found["keyword"] is True


def test_a_column_is_in_the_table_of_a_step(found):
    assert "half of it" in found["column of a step"]


def test_an_optimizer_of_torch_has_its_state(found):
    other, adamw = found["optimizer"]
    assert other == adamw > 0


def test_a_formula_counts_its_operator(found):
    assert found["formula of an operator"] == 7 * 3 * 5


def test_a_command_has_its_table_its_json_its_schema_and_its_line_of_the_help(found):
    table, width, schema, text = found["command"]
    assert ("128 wide" in table, width, "width" in schema, " widths " in text) == (True, 128, True, True)
