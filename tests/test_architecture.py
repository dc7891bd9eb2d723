"""The house: who may import whom, and torch behind one door."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "bertscope"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {
    "errors", "texts", "units", "reports", "flops_reports", "explain_reports", "diagram_reports", "memory_reports",
    "fit_reports", "page_reports", "cards", "tool_reports", "checkpoint_reports", "explore_reports",
}  # fmt: skip
TEXT = BASE | {
    "config",
    "spec",
    "reading",
    "expectations",
    "presets",
    "sources",
    "expectation_files",
    "foreign",
    "hub",
    "checkpoints",
}

# Room -> the rooms of bertscope and the outside packages that it may import at module level.
MAY = {
    "texts": (set(), set()),
    "errors": ({"texts"}, set()),
    "units": (set(), set()),
    "reports": ({"texts"}, set()),
    "flops_reports": ({"reports"}, set()),
    "explain_reports": ({"reports"}, set()),
    "diagram_reports": ({"reports"}, set()),
    "memory_reports": ({"reports"}, set()),
    "fit_reports": ({"reports"}, set()),
    "explore_reports": ({"reports", "flops_reports", "memory_reports"}, set()),
    "cards": ({"errors", "fit_reports"}, set()),
    "page_reports": (BASE, set()),
    "checkpoint_reports": ({"reports"}, set()),
    "reading": (BASE, {"yaml"}),
    "checkpoints": (BASE | {"reading", "checkpoints"}, set()),
    "hub": (BASE | {"checkpoints"}, set()),
    "foreign": (BASE | {"reading"}, set()),
    "config": (BASE, {"yaml"}),
    "spec": (BASE, set()),
    "child": ({""}, set()),
    "expectations": (BASE | {"reading", "spec"}, set()),
    "presets": (TEXT, {"yaml"}),
    "sources": (TEXT, {"yaml"}),
    "expectation_files": (TEXT, set()),
    "_torch": (set(), {"torch"}),
    "model": (TEXT | {"_torch", "model"}, {"torch"}),
    "analyses": (TEXT | {"_torch", "model", "analyses", "child", "report_reader", ""}, {"torch"}),
    "render": (BASE | {"render"}, set()),
    "render/explore.py": (BASE | {"render"}, {"textual"}),  # an app is made of classes; its command imports it late
    "render/explore_tree.py": (BASE | {"render"}, {"textual", "rich"}),
    "commands": (TEXT | {"render", "commands", "process"}, {"typer"}),
    "testing": (set(), set()),
    "pytest_plugin": ({"errors"}, {"pytest"}),
    "conversion": (TEXT, {"yaml"}),
    "conversion_update": (TEXT | {"conversion"}, set()),
    "schemas": (BASE | {""}, set()),
    "report_reader": (BASE | {"schemas"}, set()),
    "tool_reports": ({"reports"}, set()),
    "process": ({"errors"}, set()),
    "cli": (BASE | {"commands", "process", "render", ""}, {"typer"}),
    "__main__": ({"cli", "process"}, set()),
    "__init__": (set(), set()),
}


def room(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    if inside.as_posix() in MAY:
        return inside.as_posix()
    first = inside.parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.Module, *, everywhere: bool = False) -> set[str]:
    """Dotted names imported at module level (TYPE_CHECKING apart), or anywhere."""
    nodes = ast.walk(tree) if everywhere else _module_level(tree.body)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _module_level(body):
    for node in body:
        if isinstance(node, (ast.Try, ast.With)):
            yield from _module_level(node.body)
        else:
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path):
    rooms, packages = MAY[room(path)]
    for name in imports(ast.parse(path.read_text())):
        first, _, rest = name.partition(".")
        if first == "bertscope":
            inner = rest.split(".")[0]
            known = inner if (PACKAGE / inner).exists() or (PACKAGE / f"{inner}.py").exists() else ""
            assert known in rooms, f"{path.name} imports {name}"
        else:
            assert first in sys.stdlib_module_names | packages, f"{path.name} imports {name}"


def test_render_never_sees_torch_and_analyses_never_print():
    for path in FILES:
        tree = ast.parse(path.read_text())
        if room(path).partition("/")[0] in (
            "render",
            "reports",
            "flops_reports",
            "units",
            "config",
            "sources",
            "presets",
        ):
            assert not any(name.split(".")[0] == "torch" for name in imports(tree, everywhere=True)), path
        if room(path) in ("analyses", "model"):
            calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert not any(isinstance(call, ast.Name) and call.id == "print" for call in calls), path


def test_the_command_line_starts_without_torch():
    code = "import sys, bertscope, bertscope.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_of_the_package_is_there():
    import bertscope

    assert all(getattr(bertscope, name) is not None for name in bertscope.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        bertscope.nonsense  # noqa: B018


def test_every_public_function_and_class_says_what_it_does():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) or path.name == "__init__.py", path
        for node in _definitions(tree):
            if not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"


def _definitions(tree):
    """Functions and classes of a module, and what stands in its public classes; not functions inside functions."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _definitions(node)


def test_no_file_is_longer_than_its_room_allows():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 350, path


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
FORBIDDEN_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}


def runs_code(tree: ast.Module) -> set[str]:
    """The names in a module that run code from data, or through a shell."""
    names = imports(tree, everywhere=True)
    found = FORBIDDEN_CALLS & names | FORBIDDEN_MODULES & {name.partition(".")[0] for name in names}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found |= FORBIDDEN_CALLS & {ast.unparse(node)}
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.add("shell=")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_runs_code_from_data(path):
    assert runs_code(ast.parse(path.read_text())) == set()


@pytest.mark.parametrize(
    "code",
    ["eval('1')", "exec(x)", "import pickle", "from pickle import loads", "import marshal as m", "import shelve",
     "__import__('os')", "os.system('ls')", "run(x, shell=True)", "torch.load(path)", "from torch import load",
     "f = eval", "def g():\n    import pickle"],
)  # fmt: skip
def test_code_from_data_is_found_where_it_is(code):
    assert runs_code(ast.parse(code))
    assert not runs_code(ast.parse("model.eval(); subprocess.run(['a']); from bertscope import pickles"))
