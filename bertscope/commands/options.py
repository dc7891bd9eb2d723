"""The options of commands that are no settings of a run, a row for each; `command.option` is a row for one command.

Typer checks their values: a whole number, one of the words, a path.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.table import COMMANDS, Command
from bertscope.config import ARCHITECTURES, LORA_EXAMPLE, LORA_RULES
from bertscope.errors import SelectionError
from bertscope.settings.checkpointing import STRATEGIES
from bertscope.settings.parallelism import SEARCHED, WORLD_SIZES
from bertscope.settings.rows import Row
from bertscope.settings.run_config import FLASH_KERNELS, QUESTIONS, RunConfig
from bertscope.sources.bert import config_paths, preset_paths
from bertscope.sources.find import DEFAULT_MODEL
from bertscope.units import FP32, PRECISIONS

_OTHER_FORMATS = re.compile(r"\.(pdf|docx?|odt|xlsx?|ods|png|jpe?g|gif|webp|svg|html?)", re.IGNORECASE)


def checked_output(path: Path | None, *, written: str, suffixes: Sequence[str]) -> Path | None:
    """Return the path of --output; raise SelectionError for a name that claims a format that is not written."""
    if path is not None and _OTHER_FORMATS.fullmatch(path.suffix) and path.suffix.lower() not in suffixes:
        raise SelectionError(f"{path.name}: this command writes no {path.suffix}; it writes {written}")
    return path


def _row(help: str, default: Any = None, kind: type = str, **properties: Any) -> Row:
    return Row(help=help, default=default, kind=kind, **{"section": "options", **properties})


def _flag(help: str, **properties: Any) -> Row:
    return _row(help, False, bool, **properties)


def _output(written: str, *suffixes: str, text: str = "Write to FILE, whole or not at all.") -> Row:
    """Return the option --output of a command that writes these formats, among them files with these suffixes."""
    check = partial(checked_output, written=written, suffixes=suffixes)
    return _row(text, kind=Path, section="common", metavar="FILE", flag="-o", convert=check)


def _format(help: str, words: tuple[str, ...], default: str | None = None) -> Row:
    return _row(help, default, words=words, section="common", option="format", flag="-f")


def _emit() -> Row:
    from bertscope.views.plan import FORMS  # and the reports of memory, which few commands need

    return _row(f"Print the answer to paste: {', '.join(FORMS)}.", words=FORMS, metavar="FORM")


def _columns() -> Row:
    from bertscope.reports.modules import TORCHINFO_COLUMNS

    names = ", ".join(TORCHINFO_COLUMNS)
    return _row(f"The columns of --style torchinfo, by its names: {names}.", metavar="NAME[,...]")


def _models() -> list[str]:
    """Return the names of presets; the shell completes file names itself if none matches."""
    return list(preset_paths())


def _kinds() -> list[str]:
    from bertscope.reports.json import report_classes

    return [*report_classes(), "config"]


_MODEL: dict[str, Any] = {"is_argument": True, "complete": _models}
_PLAN = "Recompute as the plan in the JSON of 'bertscope plan --emit json' says; its run is the default."
_TABLES = ("table", "json", "csv", "markdown")
_TORCHINFO = (
    "torchinfo's table has its numbering, its totals and by default its depth, 3; with --shapes a row for each call of "
    "a module"
)
OPTIONS: dict[str, Row | Callable[[], Row]] = {
    # MODEL and the options that change it, under the names that `find` and `load` take
    "model": _row(
        "A preset's name, its name on the Hugging Face hub, a preset file (.yaml), a config.json, a folder or a "
        "checkpoint with one, an adapter folder of peft, a model in the Hugging Face cache, or module:attribute or "
        "file.py:attribute of your own code.", DEFAULT_MODEL, metavar="[MODEL]", **_MODEL),
    "why.model": _row("A model, as for count: the estimate of its step is next to the file.", "", metavar="[MODEL]",
                      **_MODEL),
    "others": _row("Further models, one row for each.", (), metavar="[MODEL...]", **_MODEL),
    "architecture": _row(f"The class to build instead of the model's own: {', '.join(ARCHITECTURES)}.", section="model",
                         flag="-a", metavar="CLASS", complete=lambda: ARCHITECTURES),
    "attention": _row("The attention kernel instead of the model's own.", section="model",
                      words=("eager", "sdpa", *FLASH_KERNELS)),
    "add_pooling_layer": _row("BertModel with or without its pooler.", kind=bool, section="model", option="pooler"),
    "lora": _row(f"LoRA adapters as of peft, such as {LORA_EXAMPLE}; keys: {', '.join(LORA_RULES)}.", section="common",
                 metavar="KEY=VALUE[,...]"),
    "download": _flag("Download a missing model from the Hugging Face hub.", section="model"),
    "allow_code": _flag("Import the code (module:attribute) that a file names.", section="model"),
    "freeze": _row("Freeze parameters: a glob ('*.bias') or whole parts of a path ('embeddings', 'encoder.layer.0'). "
                   "Repeatable.", (), section="loop", metavar="PATTERN"),
    # the sizes and the shapes of inputs
    "batch": _row("The batch size.", RunConfig.batch, int, low=-1, section="common", metavar="N", flag="-b"),
    "seq": _row(f"The sequence length. [default: {RunConfig.seq}, or what the model takes]", kind=int, low=-1,
                section="common", metavar="N", flag="-s"),
    "inputs": _row("The shape and dtype of an input of forward, such as pixel_values=Bx3x224x224:float32, or "
                   "batch.image=... in a dictionary; B is --batch and S is --seq. Repeatable.", (), section="sizes",
                   option="input", metavar="NAME=SHAPE:DTYPE"),
    "shapes": _flag("Show input and output shapes at --batch and --seq.", section="sizes"),
    "lengths": _row("Estimate an epoch of sequences of these lengths: one number a line, .jsonl, .csv, .parquet, or "
                    "normal:256,64,16,512 (mean, deviation, least, most). --seq cuts longer ones.", section="sizes",
                    metavar="FILE"),
    "lengths_field": _row("The field with numbers, token ids or texts.", "", section="sizes", metavar="NAME"),
    "tokenizer": _row("The folder with tokenizer.json for texts.", "", section="sizes", metavar="PATH"),
    "tokens_per_batch": _row("The tokens of packed batches.", 0, int, section="sizes", metavar="N"),
    # the output
    "fmt": _format("The format.", _TABLES, "table"),
    "output": _output("--format table (.txt), json, csv and markdown (.md)"),
    "verbose": _flag("Show all columns, rows, notes and details.", section="output", flag="-v"),
    "rows": _row("Show N saved tensors; 0: all; default: none, with -v 10.", kind=int, section="output", metavar="N"),
    "timeline": _row("Draw allocated bytes over the step: .html, .svg, .png, .csv or .json.", kind=Path,
                     section="output", metavar="FILE"),
    "snapshot": _row("Write the step for PyTorch's memory viewer (.pickle).", kind=Path, section="output",
                     metavar="FILE"),
    "show_script": _flag("Print the training loop that is estimated as a script to copy, change and run.",
                         section="loop"),
    # the files from which settings of a run come
    "training_file": _row("Take the loop from TrainingArguments (the JSON of to_json_string()) or from an accelerate "
                          "config; options replace its settings.", kind=Path, section="loop", option="from",
                          metavar="FILE"),
    "plan": _row(_PLAN, kind=Path, section="loop", metavar="FILE"),
    "no_calibration": _flag("Use what is published of the card, and no calibration.", section="card"),
    # one command or two
    "by": _row("The unit of a row.", "layer", words=("group", "layer", "module", "parameter")),
    "dtype": _row("The dtype for the bytes.", FP32.name, words=tuple(PRECISIONS)),
    "count.unfold": _row("Show equal layers one by one, or as one row; default: as one row, except with --by "
                         "parameter.", kind=bool, option="unfold/--fold"),
    "sort": _row("The order of the rows.", "model", words=("model", "params", "path")),
    "untie": _flag("Count a shared tensor at each of its names, as separate tensors."),
    "style": _row(f"The layout of the table: {_TORCHINFO}.", "bertscope", words=("bertscope", "torchinfo")),
    "columns": _columns,
    "expect": _row("Exit 1 with the difference unless the model has N unique parameters or a sum over layers of N.",
                   metavar="N"),
    "stored": _flag("Count the contents of MODEL's checkpoint instead of the model."),
    "tree.style": _row(f"The layout: {_TORCHINFO}. torch: the text of print(model) in PyTorch, for a preset with the "
                       "attention kernel that it names (printed_attention), unless --attention is given.", "bertscope",
                       words=("bertscope", "torchinfo", "torch")),
    "depth": _row("The largest depth of the rows; default: all.", kind=int, metavar="N", flag="-d"),
    "interactive": _flag("Browse the tree on the screen."),
    "unfold": _flag("Show equal layers one by one."),
    "operators": _flag("List every operator instead of the modules."),
    "convention": _row("Show the total under every convention, this one first.",
                       words=("torch", "macs", "calflops", "fvcore", "palm")),
    "naming": _row("BERT: show Hugging Face, TensorFlow and Keras names side by side, this one first.",
                   words=("hf", "tf", "keras")),
    "explain.path": _row("A step or a part: embeddings, encoder.layer.3, Transformer-0-FeedForward ...; or a section "
                         "of a BERT: config, inputs, outputs, caches, positions, checkpointing.", is_argument=True,
                         metavar="[PATH]"),
    "lang": _row("The language of the text.", "en", words=("en", "zh")),
    "diagram.attention": _row("forward: the attention kernel: eager, drawn step by step, or sdpa, drawn as one box. "
                              "[default: eager]", words=("eager", "sdpa")),
    "position_embedding": _row("The type of position embedding instead of the model's.",
                               words=("absolute", "relative_key", "relative_key_query")),
    "cross_attention": _flag("Build the model as a decoder with cross-attention."),
    "path": _row("A module: encoder, encoder.layer.0, encoder.layer.0.attention.self", "", is_argument=True,
                 metavar="[PATH]"),
    "kind": _row("The classes (default of a BERT), the dataflow of a forward pass, or the tree of modules (default of "
                 "any other model).", words=("class", "forward", "tree"), flag="-k"),
    "class_name": _row("class: draw only this class, its bases and parts.", option="class", metavar="NAME"),
    "implementation": _row("class: the package of the classes (transformers needs the extra of that name). [default: "
                           "bertscope]", words=("bertscope", "transformers")),
    "nn_module": _flag("class: draw torch.nn.Module and its arrow to every class too."),
    "diagram.depth": _row("forward, tree: number of levels to open.", kind=int, low=1, metavar="N", flag="-d"),
    "cache": _row("forward: cached positions; default: --seq for a decoder's self-attention, else 0.", kind=int,
                  metavar="N"),
    "mask": _row("forward: with an attention mask.", True, bool, option="mask/--no-mask"),
    "head_mask": _row("forward: with a head mask; default: only for a self-attention.", kind=bool),
    "direction": _row("The direction; default: LR for tree, TB for forward.", words=("LR", "TB")),
    "diagram.fmt": _format("The format; by default that of the suffix of --output, else mermaid.",
                           ("mermaid", "dot", "svg", "html", "json")),
    "diagram.output": _output("mermaid (.mmd), dot, svg, html and json", ".svg", ".html"),
    "a": _row("A model, as for count.", ..., metavar="A", **_MODEL),
    "b": _row("Another model, or a checkpoint: a file with tensors as for count, an index, or a folder with one and no "
              "config.json; default: the weights of A.", metavar="[B]", **_MODEL),
    "diff.dtype": _row("The dtype of a checkpoint's floating-point tensors instead of that in the config.json.",
                       words=tuple(PRECISIONS)),
    "allow": _row("Report this difference of a checkpoint without failing. Repeatable.", (),
                  metavar="missing|unexpected|dtype", complete=lambda: ("missing", "unexpected", "dtype")),
    "strip_prefix": _row("Leave this prefix of a checkpoint's names out, such as module. or _orig_mod.; auto finds it.",
                         metavar="PREFIX|auto"),
    "exit_code": _flag("Exit 1 if two models differ."),
    "report.output": _output("the page (.html) and json", ".html", text="The page, such as report.html."),
    "report.fmt": _format("The page, or the numbers on it.", ("html", "json"), "html"),
    "compare": _row("A second model to show.", metavar="MODEL", complete=_models),
    "report.fit": _row("With or without the fit table.", True, bool),
    "name": _row("The only preset to list.", metavar="[NAME]", is_argument=True,
                 complete=lambda: [*preset_paths(), *config_paths()]),
    "config": _flag("Print the config.json of preset NAME, as transformers reads it."),
    "save": _row("With --device cuda: write a calibration (.json) for estimate, fit and plan. What FILE has of the "
                 "same card and versions stays.", kind=Path, section="output", metavar="FILE"),
    "script": _row("The training script, or with -m the name of a module.", ..., metavar="SCRIPT", is_argument=True),
    "arguments": _row("The arguments of the script.", (), metavar="[ARGUMENTS]...", is_argument=True),
    "module": _flag("Run a module, as 'python -m' does.", section="common", flag="-m"),
    "fit": _row("Find the largest value of an argument of the script that fits.", "", section="common",
                metavar="NAME=LOW..HIGH"),
    "fit.batch": _row("Find the settings with which this batch fits.", kind=int, low=1, section="common", metavar="N",
                      flag="-b"),
    "fit.batch_total": _row(f"Find the fewest GPUs on which this batch of all ranks together fits, by "
                            f"{', '.join(SEARCHED)}, or by --strategy; at most {max(WORLD_SIZES):,}.", kind=int, low=1,
                            metavar="N"),
    "plan.batch": _row("The micro-batch. [default: 8]", kind=int, low=1, section="common", metavar="N", flag="-b"),
    "batch_total": _row("The batch of an optimizer step; the micro-batch is chosen.", kind=int, low=1, metavar="N"),
    "may_change": _row("What else may change: lora, freeze, 8bit, precision, sgd.", "", metavar="WORDS"),
    "emit": _emit,
    "plan.plot": _row("Draw the memory of each plan against its FLOPs again.", kind=Path, metavar="FILE.svg"),
    "file": _row("What torch.cuda.memory._dump_snapshot wrote (.pickle), or a text with an out-of-memory message; - is "
                 "standard input.", ..., metavar="FILE", is_argument=True),
    "plot": _row("Draw the history of the memory by part.", kind=Path, metavar="FILE.svg"),
    "grid": _row("A YAML file: a value or a list for each setting (docs/sweep.md); default: grid.yaml.", "grid.yaml",
                 metavar="[GRID]", is_argument=True),
    "sweep.output": _output("JSON lines", ".jsonl", text="Append a row for each point to FILE, and leave out those it "
                            "has."),
    "init": _flag("Write a sample with comments to GRID, a new file."),
    "engine": _row("Where the points are computed: processes of this machine, or your cluster of dask.", "local",
                   words=("local", "dask")),
    "workers": _row("The number of processes on this machine; default: its usable cores.", kind=int, low=1,
                    metavar="N"),
    "address": _row("The cluster of dask, which runs already; default: DASK_SCHEDULER_ADDRESS.", metavar="ADDRESS"),
    "sweep.plan": _row(_PLAN, kind=Path, metavar="FILE"),
    "sweep.rows": _row("Show N rows of the table; 0: all.", 20, int, metavar="N"),
    "sweep.sort": _row("Sort the rows by a column of the CSV, such as peak_bytes.", metavar="COLUMN"),
    "files": _row("Expectation files (*.bertscope.yaml), folders with such files, preset files or names; default: "
                  "every *.bertscope.yaml in the working directory and below.", (), metavar="[FILES]...", **_MODEL),
    "presets": _flag("Check the packaged presets."),
    "write_to": _row("Add the current counts to a file without expectations.", kind=Path, option="write",
                     metavar="FILE"),
    "update": _flag("Show what differs, then write the current values into the files; exit code 0."),
    "check.fmt": _format("The format: text and github list failures only, the others list all.",
                         ("text", *_TABLES, "github", "junit"), "text"),
    "check.output": _output("--format text, table, json, csv, markdown, github and junit (.xml)"),
    "schema.kind": _row("A kind of report: count, flops, memory ...; config: a BERT's config.json; default: list the "
                        "kinds.", metavar="[KIND]", is_argument=True, complete=_kinds),
    "schema.fmt": _format("The format of the list; a schema is always JSON.", _TABLES),
    "schema.output": _output("JSON (.json) or a table (.txt)"),
}  # fmt: skip
INPUTS = ("training_file", "plan")  # files that are read


def option_row(command: str, name: str) -> Row:
    """Return the row of an option of a command."""
    found: Any = OPTIONS.get(f"{command}.{name}") or OPTIONS[name]
    return found() if callable(found) else found  # type: ignore[no-any-return]


def parameters(command: Command) -> list[inspect.Parameter]:
    """Return the parameters of a command: its own options, and the settings of its run instead of `*`."""
    found: list[inspect.Parameter] = []
    for name in command.options.split():
        if name == "*":
            found += _setting_parameters(command)
        elif not name.startswith("-"):
            found.append(_parameter(name, option_row(command.name, name)))
    return found


def _setting_parameters(command: Command) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each setting of the run, and for the files from which settings come."""
    question = QUESTIONS[command.name]
    for name in (names := command.settings):
        own, is_compared = question.table[name], name in question.compared
        usual = question.usual.get(name, question.defaults.get(name, own.default))
        is_flag = own.kind is bool and not own.or_file
        metavar = own.metavar or ("N" if own.kind is int else name.rpartition("_")[2].upper())
        is_listed = not own.words or bool(own.bare) or all(f"{word}: " in own.help for word in own.words)
        without_value = f"; without a value {own.bare}" if is_compared else ""
        parts = [
            own.help, "" if is_listed else f"One of {', '.join(own.words)}.",
            f"Strategies: {STRATEGIES}{without_value}." if own.bare else "", "Repeatable." if own.is_list else "",
            "" if usual in (None, (), "") or isinstance(usual, bool) else f"[default: {usual}]",
        ]  # fmt: skip
        yield _parameter(name, own, help=" ".join(filter(None, parts)), show_default=False,
                         metavar=None if is_flag else f"{metavar}[,...]" if is_compared else metavar)  # fmt: skip
    for name in ("no_calibration",) * ("calibration" in names) + question.files:
        yield _parameter(name, option_row(command.name, name), show_default=False)


def _parameter(name: str, row: Row, **others: Any) -> inspect.Parameter:
    """Return the parameter of a row; a setting of a run is text, which `read` checks, or None if it is not given."""
    is_setting, complete = bool(row.name), row.complete or (lambda: [*row.words, *filter(None, [row.bare])])
    properties: dict[str, Any] = {"help": row.help, "metavar": row.metavar or None, **others}
    if row.words or row.complete:
        properties["autocompletion"] = lambda: list(complete())
    kind: Any = row.kind if not is_setting or (row.kind is bool and not row.or_file) else str
    if row.words and not is_setting:
        kind = Literal[tuple(row.words)]
    kind = list[kind] if row.is_list else kind
    default = None if is_setting or row.is_list else inspect.Parameter.empty if row.default is ... else row.default
    info: Any = typer.Argument(**properties)
    if not row.is_argument:
        option = f"--{(row.option or name).replace('_', '-')}"
        if kind is bool and (is_setting or row.default is not False) and "/" not in option:
            option = f"{option}/--no-{option[2:]}"
        properties |= {"min": int(row.low)} if kind is int and row.low >= 0 else {}
        if row.convert and not is_setting:
            check = row.convert
            properties["callback"] = lambda value: check(value)  # Typer takes no partial
        info = typer.Option(option, *filter(None, [row.flag]), rich_help_panel=row.section, **properties)
    kind = kind if default is inspect.Parameter.empty else kind | None
    kind = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def commands_with(option: str) -> list[str]:
    """Return the commands that have an option."""
    infos = {name: [item.annotation.__metadata__[0] for item in parameters(row)] for name, row in COMMANDS.items()}
    words = {name: [str(word) for info in found for word in (info.default, *(info.param_decls or ()))]
             for name, found in infos.items()}  # fmt: skip
    return [name for name, listed in words.items() if option in [one for word in listed for one in word.split("/")]]
