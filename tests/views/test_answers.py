"""What a person reads first: one sentence, a dim line of settings, one table, and the next command."""

import re
import shlex
from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.commands import call
from bertscope.settings.run_config import MARGIN
from bertscope.units import bytes_text
from bertscope.views.console import Target, painted, stdout_target
from bertscope.views.step import LINE
from bertscope.views.views import display
from tests.conftest import EVERY_CASE, OOM, TERMINAL, run_cli

MOST_WORDS = 200  # of the text of -v, without tables and bars
NO = "bert-tiny --gpu t4 --seq 512 --batch 8192"
ANSWERS = (
    "estimate bert-tiny", "estimate bert-tiny --gpu t4 --checkpointing", f"estimate {NO} --checkpointing --time",
    "estimate bert-tiny bert-mini", "estimate bert-tiny --mode inference --gpu t4",
    "estimate bert-tiny --strategy fsdp --world-size 8", "fit bert-tiny --gpu t4", "fit bert-tiny --budget 30MiB",
    "estimate bert-tiny --lengths normal:64,32,8,128 --batch 32 --gpu t4",
    "fit bert-tiny --budget 64MiB --seq 64,128 --precision fp32", "fit bert-tiny --gpu t4,a10 --batch 8",
    "plan bert-tiny --budget 160MiB --batch 64", "plan bert-tiny --budget 4GiB --batch 8",
    "plan bert-tiny --budget 60MiB --batch 16 --may-change lora",
    "estimate bert-tiny --gpu t4 --eval-batch 65536 --seq 512",
    "profile bert-tiny --steps 0 --seq 16", "run --gpu t4 train.py", "sweep grid.yaml --output results.jsonl",
    *EVERY_CASE * (
        "fit bert-tiny --gpu t4 --mode inference --precision fp16", "estimate bert-tiny --checkpointing",
        "fit bert-tiny --budget 96MiB --lengths normal:64,32,8,128",
        "fit bert-tiny --budget 160MiB --batch-total 96 --seq 128 --precision fp32 --checkpointing full",
        "plan bert-mini --budget 300MiB --batch-total 64 --may-change 8bit", f"estimate {NO}",
        "estimate bert-tiny --device cuda --loop freed",
        "estimate bert-tiny --strategy fsdp --world-size 8 --checkpointing",
        "estimate bert-tiny --lengths normal:64,32,8,128 --batch 32", "fit bert-tiny --gpu t4,a10 --seq 512",
        "fit bert-tiny --gpu t4 --batch 64", f"fit {NO} --attention eager", "plan bert-mini --budget 500MiB --batch 64",
        "fit bert-mini --gpu k80 --batch-total 1024 --seq 512 --precision fp32", "run --budget 2GiB train.py",
    ),
)  # fmt: skip
NEED = re.compile(r"([Dd]oes not fit|[Mm]ay fit|[Ff]its)\b[^:;]*: (needs [0-9.]+ (?:GiB more|[^;,]*of [0-9.]+ GiB))")
OTHERS = (
    "count bert-base-cased --shapes", "tree bert-tiny --shapes", "flops bert-tiny --mode training --checkpointing full",
    "flops bert-tiny --operators", "diff bert-tiny bert-base-cased", "presets", "doctor", "schema",
    f"why oom.log {NO}",
)  # fmt: skip
RULE = re.compile(r"^ ?[─-]{3,}", re.MULTILINE)
TABLE = re.compile(r"(?:^|\n)( [^\n]+\n [─-]{3,}\n(?:[^\n]+\n)*)(?:\nand [0-9]+ more, [^\n]+\n)?")


@pytest.fixture(scope="session")
def answered(once, user_folder, tmp_path_factory):
    """A function that runs a command once for all tests: its code, and its texts by width (0: a pipe) and verbosity."""

    def run(words: str) -> tuple[int, dict[tuple[int, bool], str]]:
        folder, texts = tmp_path_factory.mktemp("answered"), {}
        for name in ("grid.yaml", "train.py", "oom.log"):
            (folder / name).write_bytes((user_folder / name).read_bytes())

        def show(self, report, *, fmt="", view="", lang="", **options):
            for width in (0, 400, 80):
                for is_verbose in (False, True):
                    target = stdout_target()
                    target = replace(target, verbose=is_verbose, width=width or target.width)
                    texts[width, is_verbose] = display(report, "table", view=view, target=target, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name in TERMINAL:
                patch.delenv(name, raising=False)
            patch.setattr(call.CommandLine, "show", show)
            result = run_cli(*shlex.split(words))
        assert result.code in (0, 1), result.err
        return result.code, texts

    return once(run)


@pytest.mark.parametrize("words", ANSWERS)
def test_an_answer_is_a_sentence_a_line_of_settings_a_table_and_the_next_command(answered, words):
    text = answered(words)[1][0, False]
    first, settings, *_ = text.splitlines()
    assert len(first) <= LINE, first
    assert "..." not in first, first
    assert first[0].isupper() or first[0].isdigit(), first
    assert first.endswith("."), first
    assert re.search(r"\d", first), first
    assert len(settings) <= LINE, settings
    assert "more note" not in text
    assert RULE.search(text)
    *_, last = text.rstrip("\n").splitlines()
    if "Next: " in text:
        assert last.startswith("  bertscope "), text
        if EVERY_CASE or "--strategy" not in last:  # tests/test_docs.py has one of several ranks
            assert answered(last.strip().removeprefix("bertscope "))[0] in (0, 1), last


@pytest.mark.parametrize("batch", ["exact_batch", "batch_without_margin", "batch_by_bytes", ""])
def test_commands_say_the_same_of_one_step_near_the_limit(cli, tmp_path, batch):
    """The largest batch with a margin and without it, the largest that may fit, and one more."""
    settings = {"seq": 512, "precision": "autocast-fp16", "checkpointing": "none"}
    row = bertscope.fit("bert-tiny", gpu="t4", **settings).rows[0]
    size = getattr(row, batch or "batch_by_bytes") + (not batch)
    (tmp_path / "oom.log").write_text(OOM)
    step = f"bert-tiny --gpu t4 --batch {size} " + " ".join(f"--{name} {value}" for name, value in settings.items())
    said = set()
    for command in ("estimate", "fit", f"why {tmp_path / 'oom.log'}"):
        out = " ".join(cli(*shlex.split(f"{command} {step}")).out.split())
        verb, need = NEED.search(out).groups()
        said.add((verb.lower(), need))
    assert len(said) == 1, said
    assert said.pop()[0] == {"exact_batch": "fits", "": "does not fit"}.get(batch, "may fit")


@pytest.mark.parametrize("words", [*ANSWERS, *OTHERS])
def test_verbose_text_is_in_sections_and_short(answered, words):
    text = answered(words)[1][0, True]
    rest = TABLE.sub("\n", text).partition("Next: ")[0]
    rest = rest.partition("\n")[2]  # the sentence
    assert len(rest.split()) <= MOST_WORDS, rest


@pytest.mark.parametrize("words", ANSWERS)
@pytest.mark.parametrize("verbose", [False, True])
def test_a_table_fits_80_columns_and_no_row_breaks_in_two(answered, words, verbose):
    wide, narrow = (answered(words)[1][width, verbose] for width in (400, 80))
    command = [line for line in narrow.splitlines() if line.startswith("  bertscope ")]
    assert max(len(line) for line in narrow.splitlines() if line not in command) <= 80

    def rows(text: str) -> set[int]:
        tables = (table[1].splitlines() for table in TABLE.finditer(text))
        return {len(lines) - 1 - next(n for n, line in enumerate(lines) if RULE.match(line)) for lines in tables}

    assert max(rows(narrow)) <= max(rows(wide))


PRICED = "fit bert-tiny --gpu t4,rtx-a5000 --seq 64 --precision autocast-fp16 --checkpointing none --batch 4096"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("estimate bert-tiny", " on a CPU in the optimizer step."),
        ("fit bert-tiny --budget 1GiB --seq 64 --precision fp32", "CPU (--device cuda for a GPU)"),
        ("fit bert-tiny --budget 1GiB --seq 64 --precision fp32 --checkpointing full", "seq 64, fp32, multiples of 8"),
        ("fit bert-tiny --gpu t4 --seq 64 --precision fp32 --checkpointing full", "t4 has 14.56 GiB"),
        ("fit bert-tiny --gpu t4 --seq 64 --precision fp32 --checkpointing none", f"{100 * MARGIN:g} % margin"),
        ("estimate bert-tiny --gpu t4 --batch 9999", "more than 14.56 GiB"),
        ("fit bert-tiny --gpu t4 --batch 9999 --precision fp32", "does not fit on t4: needs "),
        ("estimate bert-tiny --gpu t4 --precision fp16", "mixed precision is autocast-fp16)"),
        (
            f"{PRICED} --price t4=1,rtx-a5000=1 --sequences 9999",
            "bert-tiny: BertModel (no head), batch 4,096, seq 64, autocast-fp16",
        ),
        (f"{PRICED} --price t4=1,rtx-a5000=1 --sequences 9999", "; no time is known for rtx-a5000."),
        (
            "fit bert-tiny --gpu t4,l4 --seq 512 --precision autocast-fp16 --checkpointing none --price t4=1,l4=1 "
            "--sequences 99999",
            "Cheapest epoch: probably l4",
        ),
    ],
)
def test_an_answer_says_what_its_number_depends_on(cli, words, said):
    assert said in "\n".join(cli(*shlex.split(words)).out.splitlines()[:2])


WORDS = """
import torch
class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 3)
    def forward(self, ids):
        return self.head(self.table(ids))
"""
OF_MODULES = (
    "count bert-tiny", "tree bert-tiny", "tree bert-tiny --shapes", "flops bert-tiny",
    "count words.py:Words", "tree words.py:Words", "tree words.py:Words --shapes --input ids=2x5:int64",
    "flops words.py:Words --input ids=2x5:int64", "estimate words.py:Words --input ids=BxS:int64", "count net.pt",
    "diff bert-tiny bert-base-cased", "check wrong.bertscope.yaml",
)  # fmt: skip


@pytest.mark.parametrize("words", OF_MODULES)
def test_the_next_command_of_a_report_on_modules_runs(cli, tmp_path, monkeypatch, words):
    """Also for a module whose inputs nobody knows: such a tip names the input that was typed, or needs none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(WORDS)
    (tmp_path / "wrong.bertscope.yaml").write_text("model: bert-tiny\nexpected:\n  distinct_params: 5\n")
    torch.save({"model": torch.nn.Linear(3, 4).state_dict(), "epoch": torch.ones(3)}, tmp_path / "net.pt")
    done = cli(*shlex.split(words))
    assert "Next: " in done.out, done.err
    command = done.out.rpartition("\n  bertscope ")[2].replace("\\\n", "")
    again = cli(*shlex.split(command))
    assert again.code in (0, 1), (command, again.err)


def test_the_next_call_in_python_names_the_inputs_of_a_module():
    model, inputs = torch.nn.Linear(3, 4), torch.ones(2, 3)
    assert "bertscope.estimate('bert-tiny')" in str(bertscope.count("bert-tiny"))  # the name that the call gave
    reports = bertscope.count(model), bertscope.tree(model), bertscope.flops(model, inputs)
    for report in (*reports, bertscope.tree(model, inputs=inputs)):
        code = str(report).rpartition("\n  ")[2]
        eval(code, {"bertscope": bertscope, "model": model, "inputs": inputs})


def test_a_verdict_is_coloured_its_numbers_are_bold_and_a_pipe_has_neither():
    line = "Fits on t4: needs 5.07 of 14.56 GiB.\n"
    assert painted(line, "yes", Target(color=True)) == (
        "\x1b[32mFits on t4: needs \x1b[1m5.07\x1b[22m of \x1b[1m14.56 GiB\x1b[22m.\x1b[0m\n"
    )
    assert painted(line, "no", Target(color=True)).startswith("\x1b[31m")
    assert painted(line, "dim", Target(color=True)).startswith("\x1b[2m")
    assert painted(line, "yes", Target()) == line


@pytest.mark.parametrize(
    ("words", "codes"),
    [
        ("fit bert-tiny --gpu t4 --batch 8 --precision fp32 --checkpointing none", "32"),
        (f"fit {NO} --precision fp32 --checkpointing none", "31"),
        ("fit bert-tiny --gpu t4 --margin 0.8 --batch 2000", "33"),
    ],
)
def test_a_terminal_sees_green_red_or_yellow_and_dim_settings(cli, words, codes, monkeypatch):
    first, settings, *_ = cli("--color", "always", *shlex.split(words)).out.splitlines()
    assert first.startswith(f"\x1b[{codes}m"), first
    assert settings.startswith("\x1b[2m")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in cli(*shlex.split(words)).out


@pytest.mark.parametrize("words", ["estimate", "fit --gpu t4", "fit --gpu t4 --batch 8", "estimate --gpu t4"])
def test_the_first_sentence_says_that_inference_of_a_decoder_is_no_generation(cli, words):
    name, *options = words.split()
    inference = ("bert-tiny", "--architecture", "BertLMHeadModel", "--mode", "inference", "--seq", "8")
    assert ("generation" in cli(name, *inference, *options).out.splitlines()[0]) is True
    assert "generation" not in cli(name, *inference[:3], *inference[5:], *options).out


def test_a_step_that_does_not_fit_is_a_no_for_estimate_and_for_fit(cli):
    model, *settings = NO.split()
    estimated, fitted = cli("estimate", model, *settings), cli("fit", model, *settings, "--precision", "fp32")
    assert (estimated.code, estimated.out.startswith("Does not fit on t4")) == (1, True)
    assert (fitted.code, fitted.out.startswith("No: batch 8,192")) == (1, True)
    words = ("fit", "bert-tiny", "--budget", "200MiB", "--device", "cuda", "--seq", "512", "--batch", "2")
    costs = [row["cost"] for row in cli(*words, "--format", "json").json["rows"]]
    least = min(cost["gpu_bytes"] - cost["limit_bytes"] for cost in costs)
    assert f"needs {bytes_text(least)} more" in cli(*words).out.splitlines()[0]


def test_two_families_are_not_compared_as_one_class(cli):
    assert "Next: " not in cli("diff", "bert-tiny", "distilgpt2").out


def test_a_no_with_long_numbers_and_names_ends_with_the_batch_that_fits(cli):
    first = cli("fit", "bert-tiny", "--batch", "20000", "--budget", "177237386B").out.split("\n")[0]
    assert re.fullmatch(r"No: batch 20,000 does not fit in 169.03 MiB on a CPU.*; [0-9,]+ fits\.", first), first


def test_an_evaluation_that_does_not_fit_is_told_to_take_smaller_batches_and_then_fits(cli):
    words = ("estimate", "bert-tiny", "--gpu", "t4", "--seq", "512", "--eval-batch")
    out = cli(*words, "65536").out
    assert "more than 14.56 GiB in evaluation" in out
    assert "--eval-batch 8" in out.partition("Next: evaluate in smaller batches")[2]
    assert cli(*words, "8").out.startswith("Fits on t4")
