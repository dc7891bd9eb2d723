"""The size and the structure of the package, measured: `python -m tests.rooms` prints them next to their budgets.

The budgets are in tests/budgets.yaml. A budget is raised only in the commit that needs it, with its reason, and lowered
as soon as a lower value is reached.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bertscope"
BUDGETS = yaml.safe_load((ROOT / "tests" / "budgets.yaml").read_text())
# The command whose files are counted, and its words.
COMMANDS = {
    "--help": ["--help"],
    "count": ["count", "bert-tiny"],
    "estimate": ["estimate", "bert-tiny", "--no-cache"],
    "fit": ["fit", "bert-tiny", "--budget", "1GiB", "--precision", "fp32", "--no-cache"],
    "plan": ["plan", "bert-tiny", "--budget", "64MiB", "--batch", "8", "--no-cache"],
}


class Import(NamedTuple):
    """An import of `target`, a module of the package or the name of a foreign package in <>."""

    target: str
    is_late: bool


@dataclass
class Module:
    """A file of the package, parsed once."""

    path: Path
    name: str
    text: str
    tree: ast.Module
    nodes: list[ast.AST]  # all in the tree
    imports: list[Import] = field(default_factory=list)

    @property
    def place(self) -> str:
        """The path inside the package."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def room(self) -> str:
        return room(self.name)

    def strings(self) -> Iterator[str]:
        """String literals that are no docstrings and no other bare expressions."""
        bare = {id(node.value) for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
                yield node.value


def room(name: str) -> str:
    """The first part of a module's name inside the package; a foreign package is its own room."""
    return name.removeprefix("bertscope.").partition(".")[0]


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        tree = ast.parse(text)
        found[name] = Module(path, name, text, tree, list(ast.walk(tree)))
    for module in found.values():
        module.imports += imports(module.tree.body, set(found))
    return found


def imports(body: list[ast.AST], known: set[str], is_late: bool = False) -> Iterator[Import]:
    """Imports of a module but those for the type checker and those of the standard library."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (start + alias.name for alias in node.names):
                first = name.partition(".")[0]
                if first == "bertscope":
                    yield Import(name if name in known else name.rpartition(".")[0], is_late)
                elif first not in sys.stdlib_module_names:
                    yield Import(f"<{first}>", is_late)
        else:
            inside = is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(list(ast.iter_child_nodes(node)), known, inside)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` of a name with attributes, and no text for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def line_count(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def lines_by_room() -> dict[str, int]:
    """Return the lines of each folder below the package, those of the files at its top as `top level`."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        first, *rest = path.relative_to(PACKAGE).parts
        lines[first if rest else "top level"] += len(path.read_text().splitlines())
    return dict(sorted(lines.items()))


def statements(function: ast.FunctionDef) -> int:
    """Return the number of statements in a function, at any depth, without its docstring."""
    count = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
    return count - (ast.get_docstring(function) is not None)


def import_levels() -> int:
    """Return the length of the longest chain of imports, also those inside functions; a circle counts as one level."""
    graph = {name: {item.target for item in module.imports} for name, module in modules().items()}
    circles = _circles(graph)
    level: dict[int, int] = {}
    below: defaultdict[int, set[int]] = defaultdict(set)
    for name, targets in graph.items():
        below[circles[name]] |= {circles[target] for target in targets if target in graph} - {circles[name]}

    def depth(circle: int) -> int:
        if circle not in level:
            level[circle] = 1 + max(map(depth, below[circle]), default=0)
        return level[circle]

    return max(map(depth, set(circles.values())))


def _circles(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the number of the strongly connected component of each module (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    component: dict[str, int] = {}

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target in graph and target not in component:
                if target not in index:
                    visit(target)
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            while name not in component:
                component[stack.pop()] = index[name]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    sys.setrecursionlimit(limit)  # of the tests that run later in this process, which read nested files
    return component


def structure() -> dict[str, int]:
    """Return what architecture laws limit, by its name in budgets.yaml."""
    texts = [module.text for module in modules().values()]
    nodes = [node for module in modules().values() for node in module.nodes]
    uses = Counter(node.id if isinstance(node, ast.Name) else node.attr for node in nodes
                   if isinstance(node, (ast.Name, ast.Attribute)))  # fmt: skip
    uses += Counter(alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
    calls = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
    own = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    modes = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and "__torch_dispatch__" in {getattr(item, "name", "") for item in node.body}
    }
    return {
        "lines": line_count(PACKAGE),
        "files": len(texts),
        "lines of tests": line_count(ROOT / "tests"),
        "longest file": max(len(text.splitlines()) for text in texts),
        "import levels": import_levels(),
        "imports inside functions": sum(
            item.is_late for module in modules().values() for item in module.imports if item.target in modules()
        ),
        "dispatch modes": len(modes - {"Bounded"}),  # Bounded guards the building of a model
        "function modes": sum("def __torch_function__" in text for text in texts),
        "short functions called once": sum(
            function.name.startswith("_") and not function.name.startswith("__")
            and statements(function) <= 3 and uses[function.name] == 1 and function.name in calls
            and not function.decorator_list  # nor is it passed as a value
            for function in own
        ),
        "functions above 60 statements": sum(statements(function) > 60 for function in own),
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        "fmt: skip": sum(len(re.findall("# fmt: (?:skip|off)", text)) for text in texts),
        **all_words(),
    }  # fmt: skip


# Glossary of the guide to style: names that say nothing, and coinages where the field has a word.
_NAMES = (
    "found", "given", "made", "place", "own", "way", "words", "others", "asked", "kept", "card", "tape", "growth",
    "outlook", "deepening", "flops_again",
)  # fmt: skip
_COINED = re.compile(
    r"\b(cards?|FLOPs again|(?:of|in) no tensor|outlook|deepening|in (?:the )?place of|beside|(?:of )?its own|"
    r"(?:of )?their own|so many|in passing|stands|is told|whole(?! numbers?\b)|none's|growth)\b"
)
_CHAINED = re.compile(r"\b(?:that|those) of\b")


def words(names: Iterable[str], docstrings: str, texts: str) -> dict[str, int]:
    """Return what laws of language limit, by its name in budgets.yaml."""
    prose = f"{docstrings}\n{texts}"
    return {
        "names that say nothing": sum(name in _NAMES for name in names),
        "coined words": len(_COINED.findall(prose)),
        "'of' in 1,000 words": 1000 * len(re.findall(r"\bof\b", docstrings)) // max(len(docstrings.split()), 1),
        "'that of' in 10,000 words": 10_000 * len(_CHAINED.findall(prose)) // max(len(prose.split()), 1),
    }


def words_of(modules: Iterable[Module], documents: Iterable[Path] = ()) -> dict[str, int]:
    """Return the measures of words in the names, docstrings and texts of modules and in documents."""
    names: Counter[str] = Counter()  # those of a function's arguments and variables, once a function
    docstrings, texts = [], [path.read_text() for path in documents]
    for module in modules:
        texts += module.strings()
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                docstrings.append(ast.get_docstring(node) or "")
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                inside = list(ast.walk(node))
                names.update({item.arg for item in inside if isinstance(item, ast.arg)} | {
                    item.id for item in inside if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
                })  # fmt: skip
    return words(names.elements(), "\n".join(docstrings), "\n".join(texts))


def all_words() -> dict[str, int]:
    documents = (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    return words_of(modules().values(), [*documents, *sorted((ROOT / "docs").glob("*.md"))])


_TRACED = """
import json, os, sys
import torch  # once, and untraced: it enters no file of the package
for command, words in json.loads(sys.argv[1]).items():
    if os.fork():
        os.wait()
        continue
    entered = set()
    def enter(frame, event, arg):  # it returns no tracer of lines, so that it costs a call for each call of Python code
        name = frame.f_code.co_filename
        while name not in entered and frame is not None and frame.f_code.co_name != "<module>":
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename == "<string>":  # called by no import
            entered.add(name)
    sys.argv = ["bertscope", *words]
    sys.settrace(enter)
    from bertscope.cli import _run
    try:
        _run()
    except SystemExit:
        pass
    sys.settrace(None)
    print("\\nENTERED", json.dumps([command, sorted(entered)]), file=sys.stderr, flush=True)
    os._exit(0)
"""


def files_entered() -> dict[str, int]:
    """Return in how many files of the package each command calls a function, without what runs at their import."""
    words = [sys.executable, "-c", _TRACED, json.dumps(COMMANDS)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    entered = (json.loads(line) for line in re.findall("^ENTERED (.*)$", done.stderr, re.MULTILINE))
    return {name: sum(Path(path).is_relative_to(PACKAGE) for path in paths) for name, paths in entered}


def main() -> int:
    """Print every measure, its budget and its goal; return 1 if one is above its budget.

    With the argument `words`, print the measures of words of each room.
    """
    if sys.argv[1:] == ["words"]:
        for folder in sorted({module.room for module in modules().values()}):
            print(f"{folder:24}", words_of(module for module in modules().values() if module.room == folder))
        return 0
    measured = {
        "rooms": lines_by_room(),
        "structure": structure(),
        "files entered": files_entered(),
    }
    for title, values in measured.items():
        print(f"{title:32}{'now':>8}{'budget':>8}{'goal':>8}")
        for name, value in values.items():
            budget, goal = BUDGETS[title][name]
            print(f"  {name:30}{value:>8}{budget:>8}{goal:>8}{'  above the budget' if value > budget else ''}")
    return int(any(value > BUDGETS[title][name][0] for title in measured for name, value in measured[title].items()))


if __name__ == "__main__":
    sys.exit(main())
