"""The options that are no settings, a row each; `command.option` is a row for one command.

Typer checks their values: a whole number, one of the words, a path.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import eq, ne, not_
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.table import COMMANDS, Command
from bertscope.config import ARCHITECTURES, LORA_EXAMPLE, LORA_RULES
from bertscope.errors import SelectionError, either_of
from bertscope.settings.checkpointing import STRATEGIES
from bertscope.settings.parallelism import SEARCHED, WORLD_SIZES
from bertscope.settings.rows import WHOLE, Row, rows
from bertscope.settings.run_config import FLASH_KERNELS, PLAN_FORMS, QUESTIONS, SETTINGS, STORED, Engine, RunConfig
from bertscope.settings.training import MAY_CHANGE, SAVERS
from bertscope.sources.bert import preset_paths
from bertscope.sources.find import DEFAULT_MODEL
from bertscope.units import FP32, PRECISIONS, decimal

_PLAIN = "", ".txt", ".log", ".out"  # endings of any text


def checked_output(path: Path | None, *, suffixes: Sequence[str], more: str = "") -> Path | None:
    """Return the path in --output; raise SelectionError for a name that claims a format that is not written."""
    if path is not None and path.suffix.lower() not in (*suffixes, *_PLAIN) and decimal(path.suffix[1:]) is None:
        writes = f"it writes {', '.join(suffixes)}{more}"
        raise SelectionError(f"{path.name}: this command cannot write {path.suffix}; {writes}")
    return path


def _checked_picture(path: Path | None, *, what: str) -> Path | None:
    if path is not None and path.suffix.lower() != ".svg":
        raise SelectionError(f"{path.name}: {what} an .svg file")
    return path


def _checked_timeline(path: Path | None) -> Path | None:
    if path is not None:
        from bertscope.views.timeline import check_suffix

        check_suffix(path.suffix)
    return path


def _row(help: str, default: Any = None, kind: type = str, **properties: Any) -> Row:
    return Row(help=help, default=default, kind=kind, **{"section": "options", **properties})


def _flag(help: str, **properties: Any) -> Row:
    return _row(help, False, bool, **properties)


def _output(*suffixes: str, text: str = "Write to FILE (atomically).", more: str = "") -> Row:
    check = partial(checked_output, suffixes=suffixes, more=more)
    return _row(text, kind=Path, section="common", metavar="FILE", flag="-o", convert=check)


def _format(help: str, formats: tuple[str, ...], default: str | None = None) -> Row:
    forms: dict[str, Any] = {"option": "format", "flag": "-f", "metavar": "FORMAT", "concerns": _WITH_FORMATS}
    return _row(help, default, choices=formats, section="common", **forms)


def _columns() -> Row:
    from bertscope.reports.modules import TORCHINFO_COLUMNS

    names = ", ".join(TORCHINFO_COLUMNS)
    text = f"The columns of --style torchinfo. One or several of {names}."
    return _row(text, metavar="NAME[,...]", concerns={"style": partial(eq, "torchinfo")})


def _kinds() -> list[str]:
    from bertscope.reports.json import report_classes

    return [*report_classes(), "config"]


# What the options of the tree and of one run have an effect with; torchinfo's layout is a table of all types.
_NO_TORCHINFO, _NO_TORCH = {"style": partial(ne, "torchinfo")}, {"style": partial(ne, "torch")}
_WITH_SHAPES = {"shapes": bool}  # in count and tree, which run the model for its shapes only
_WITH_FORMATS = {**_NO_TORCHINFO, "interactive": not_}
_OF_LENGTHS, _OF_ONE_RUN = {"lengths": bool}, {"lengths": not_, "fit": not_}
_OF_ONE_MODEL = ("stored", "expect", "operators", "convention", "lengths", "timeline", "snapshot", "show_script")
_MODEL: dict[str, Any] = {"is_argument": True, "complete": preset_paths}
_PLAN = "Use the checkpointing plan of 'bertscope plan --emit json'. Its settings are the defaults."
_TABLES, _TABLE_FILES = ("table", "json", "csv", "markdown"), (".txt", ".json", ".csv", ".md")
_FORMAT = "The output format: table, json, csv or markdown."
_TORCHINFO = "torchinfo shows 3 levels; with --shapes each call of a module has a row."
OPTIONS: dict[str, Row | Callable[[], Row]] = {
    # MODEL and the options that change it, under the names that `find` and `load` take
    "model": _row(
        "A preset, a Hugging Face name, a file, a folder or module:attribute. Files are a preset (.yaml), a "
        "config.json or a checkpoint; a folder has one of them, or an adapter of peft. Code is module:attribute or "
        "file.py:attribute.", DEFAULT_MODEL, metavar="[MODEL]", **_MODEL),
    "why.model": _row("The model, to compare an estimate of its step with the file.", "", metavar="[MODEL]", **_MODEL),
    "others": _row("More models, one row each.", (), metavar="[MODEL...]", **_MODEL, concerns={
        "by": lambda unit: unit not in ("module", "parameter"), "fmt": partial(ne, "badge"), **_NO_TORCHINFO,
        **dict.fromkeys(_OF_ONE_MODEL, not_)}),
    "architecture": _row(f"The model class to build, such as BertForMaskedLM. One of {', '.join(ARCHITECTURES)}.",
                         section="model", flag="-a", metavar="CLASS", complete=partial(tuple, ARCHITECTURES)),
    "attention": _row("The attention kernel instead of the model's own.", section="model", metavar="KERNEL",
                      choices=("eager", "sdpa", *FLASH_KERNELS)),
    "add_pooling_layer": _row("Build BertModel with or without its pooler.", kind=bool, section="model",
                              option="pooler"),
    "lora": _row(f"LoRA adapters, such as r=8, or peft's adapter_config.json. Keys: "
                 f"{', '.join(LORA_RULES)}; with all: {LORA_EXAMPLE}.", section="common",
                 metavar="KEY=VALUE[,...]"),
    "download": _flag("Download a missing model from the Hugging Face hub.", section="model"),
    "allow_code": _flag("Import the code (module:attribute) that a file names.", section="model"),
    "quantize": _row("Pack the weights of linear layers as bitsandbytes does. stored is what the config.json says.",
                     STORED, choices=SETTINGS["quantize"].choices, section="model"),
    "freeze": _row("Freeze parameters by name or glob, such as embeddings or '*.bias'. Repeatable.", (), section="loop",
                   metavar="PATTERN", concerns=_NO_TORCH),
    # the sizes and the shapes of inputs
    "batch": _row("The batch size.", RunConfig.batch, int, low=-1, section="common", metavar="N", flag="-b",
                  concerns=_WITH_SHAPES),
    "seq": _row(f"The sequence length in tokens. [default: {RunConfig.seq}, or the model's maximum]", kind=int, low=-1,
                section="common", metavar="N", flag="-s", concerns=_WITH_SHAPES),
    "inputs": _row("An input of forward, such as pixel_values=Bx3x224x224:float32. B is --batch and S is --seq; "
                   "batch.image=... is a key of a dictionary. Repeatable.", (), section="sizes",
                   option="input", metavar="NAME=SHAPE:DTYPE", concerns=_WITH_SHAPES),
    "shapes": _flag("Show input and output shapes at --batch and --seq.", section="sizes", concerns=_NO_TORCH),
    "lengths": _row("Estimate an epoch with the sequence lengths in a file. One number per line, .jsonl, .csv, "
                    "or normal:256,64,16,512 (mean, deviation, minimum, maximum) for a distribution; --seq truncates.",
                    section="sizes", metavar="FILE"),
    "lengths_field": _row("The field of --lengths with numbers, token ids or texts.", "", section="sizes",
                          metavar="NAME", concerns=_OF_LENGTHS),
    "tokenizer": _row("A folder with a tokenizer.json, for texts in --lengths.", "", section="sizes", metavar="PATH",
                      concerns=_OF_LENGTHS),
    "seeds": _row("Show what torch reserves in 20 steps of random batches of --lengths on a GPU, over N seeds.", 0, int,
                  section="sizes", metavar="N", concerns=_OF_LENGTHS),
    # the output
    "fmt": _format(_FORMAT, _TABLES, "table"),
    "output": _output(*_TABLE_FILES),
    **dict.fromkeys(("estimate.output", "plan.output"), _output(*_TABLE_FILES, ".py")),
    "verbose": _flag("Show all columns, rows, notes and details.", section="output", flag="-v"),
    "rows": _row("Show the N largest saved tensors; 0 shows all. With -v the default is 10.", kind=int,
                 section="output", metavar="N", concerns=_OF_ONE_RUN),
    "timeline": _row("Plot memory over the step (.html, .svg, .png, .csv or .json).", kind=Path, section="output",
                     metavar="FILE", concerns=_OF_ONE_RUN, convert=_checked_timeline),
    "snapshot": _row("Write a snapshot for pytorch.org/memory_viz (.pickle).", kind=Path, section="output",
                     metavar="FILE", concerns=_OF_ONE_RUN),
    "show_script": _flag("Print the estimated training loop as a script.", section="loop"),
    # the files from which settings of a run come
    "training_file": _row("Read the settings of TrainingArguments (JSON), accelerate, axolotl or LLaMA-Factory. "
                          "Other options override them.", kind=Path, section="loop", option="from", metavar="FILE"),
    "plan": _row(_PLAN, kind=Path, section="loop", metavar="FILE"),
    "no_calibration": _flag("Use published values of the GPU instead of a calibration.", section="gpu",
                            concerns={"calibration": not_}),
    "count.fmt": _format(f"{_FORMAT[:-1]}; badge is shields' endpoint JSON.", (*_TABLES, "badge"), "table"),
    # one command or two
    "by": _row("What a row is: a group, layer, module or parameter.", "layer", metavar="UNIT",
               choices=("group", "layer", "module", "parameter"), concerns=_NO_TORCHINFO),
    "dtype": _row("The dtype for the sizes in bytes.", FP32.name, choices=tuple(PRECISIONS), metavar="DTYPE"),
    "count.unfold": _row("Show equal layers one by one, or in one row. They have one row by default, except with --by "
                         "parameter.", kind=bool, option="unfold/--fold"),
    "sort": _row("Sort the rows by model order, params or path.", "model", choices=("model", "params", "path"),
                 metavar="KEY"),
    "untie": _flag("Count a tied tensor at each of its names.", concerns=_NO_TORCHINFO),
    "style": _row(f"The layout: bertscope or torchinfo. {_TORCHINFO}", "bertscope", metavar="STYLE",
                  choices=("bertscope", "torchinfo")),
    "columns": _columns,
    "expect": _row("Exit with code 1 unless the model has N parameters. N is the number of unique parameters or the "
                   "sum over layers.", metavar="N", concerns=_NO_TORCHINFO),
    "stored": _flag("Count the tensors in the model's checkpoint instead.", concerns=_NO_TORCHINFO),
    "tree.style": _row(f"The layout: bertscope, torchinfo or torch. {_TORCHINFO} torch is the text of print(model).",
                       "bertscope", choices=("bertscope", "torchinfo", "torch"), metavar="STYLE"),
    "depth": _row("The number of levels to show; all by default.", kind=int, metavar="N", flag="-d",
                  concerns=_NO_TORCH),
    "interactive": _flag("Browse the tree in the terminal.", concerns={"style": partial(eq, "bertscope"),
                                                                       **dict.fromkeys(("output", "verbose"), not_)}),
    "unfold": _flag("Show equal layers one by one.", concerns=_NO_TORCH),
    "operators": _flag("Show operators instead of modules."),
    "convention": _row("Show the total as other tools count it. One of torch, macs, calflops, fvcore, palm is first.",
                       choices=("torch", "macs", "calflops", "fvcore", "palm"), metavar="NAME"),
    "naming": _row("Show the names in hf, tf and keras, this one first.", choices=("hf", "tf", "keras"),
                   metavar="NAME"),
    "explain.path": _row("A module or section, such as encoder.layer.3 or config. Sections of a BERT: config, inputs, "
                         "outputs, caches, positions, checkpointing; names of TensorFlow are understood too.",
                         is_argument=True, metavar="[PATH]"),
    "lang": _row("The language: en or zh.", "en", choices=("en", "zh"), metavar="LANG"),
    "diagram.attention": _row("Draw attention in steps (eager) or as one box (sdpa).",
                              choices=("eager", "sdpa"), metavar="KERNEL"),
    "position_embedding": _row("The type of position embedding.", metavar="TYPE",
                               choices=("absolute", "relative_key", "relative_key_query")),
    "cross_attention": _flag("Build a decoder with cross-attention."),
    "path": _row("A module, such as encoder.layer.0.attention.self.", "", is_argument=True, metavar="[PATH]"),
    "kind": _row("What to draw: class, forward or tree. class is the default for a BERT, tree for other models.",
                 choices=("class", "forward", "tree"), flag="-k", metavar="KIND"),
    "class_name": _row("Draw this class with its bases and parts.", option="class", metavar="NAME",
                       concerns={"kind": (None, "class").__contains__, "path": not_}),
    "implementation": _row("Draw the classes of bertscope or transformers.", metavar="NAME",
                           choices=("bertscope", "transformers")),
    "diagram.config": _flag("Draw the configuration and all attributes."),
    "nn_module": _flag("Draw torch.nn.Module as a base class too."),
    "diagram.depth": _row("The levels to open in forward or tree.", kind=int, low=1, metavar="N", flag="-d"),
    "cache": _row("The cached positions in forward. For the self-attention of a decoder the default is --seq, else 0.",
                  kind=int, metavar="N"),
    "mask": _row("Draw forward with an attention mask.", True, bool, option="mask/--no-mask"),
    "head_mask": _row("Draw forward with a head mask. A self-attention has one by default.", kind=bool),
    "direction": _row("The direction: LR (to the right) or TB (down). The default is LR for tree, TB for forward.",
                      choices=("LR", "TB"), metavar="DIR"),
    "diagram.fmt": _format("The format: mermaid, dot, svg, html or json. The suffix of --output decides by default, "
                           "else mermaid.", ("mermaid", "dot", "svg", "html", "json")),
    "diagram.output": _output(".svg", ".html", ".mmd", ".mermaid", ".dot", ".gv", ".json"),
    "a": _row("A model, as for count.", ..., metavar="A", **_MODEL),
    "b": _row("Another model or a checkpoint; by default the weights of A. A checkpoint is a file with tensors, an "
              "index, or a folder with one and no config.json.", metavar="[B]", **_MODEL),
    "base": _row("Compare A at this git revision with A as it is now.", metavar="REF",
                 concerns=dict.fromkeys(("b", "dtype", "allow", "strip_prefix"), not_)),
    "diff.dtype": _row("The expected dtype of a checkpoint's tensors.", choices=tuple(PRECISIONS), metavar="DTYPE"),
    "allow": _row("Accept this difference: missing, unexpected or dtype. Repeatable.", (), metavar="KIND",
                  complete=lambda: ("missing", "unexpected", "dtype")),
    "strip_prefix": _row("Remove this prefix from a checkpoint's names, such as module. or auto.", metavar="PREFIX"),
    "exit_code": _flag("Exit with code 1 if two models differ."),
    "report.output": _output(".html", ".json", text="The HTML file, such as report.html."),
    "report.fmt": _format("The output format: html, or json for the numbers.", ("html", "json"), "html"),
    "compare": _row("A second model to show next to it.", metavar="MODEL", complete=preset_paths),
    "report.fit": _row("Show the largest batches that fit.", True, bool),
    "name": _row("A preset, a family or a part of a name; all by default.", metavar="[NAME]", is_argument=True,
                 complete=preset_paths),
    "config": _flag("Print the config.json of preset NAME."),
    "save": _row("Write a calibration of this GPU (.json), with --device cuda. Other measurements in FILE stay.",
                 kind=Path, section="output", metavar="FILE"),
    "script": _row("The training script, or with -m a module.", ..., metavar="SCRIPT", is_argument=True),
    "arguments": _row("The arguments of the script.", (), metavar="[ARGUMENTS]...", is_argument=True),
    "module": _flag("Run a module, as 'python -m' does.", section="common", flag="-m"),
    "fit": _row("Find the largest value of a script argument that fits.", "", section="common",
                metavar="NAME=LOW..HIGH"),
    "fit.batch": _row("Find settings with which this batch fits.", kind=int, low=1, section="common",
                      metavar="N", flag="-b"),
    "fit.batch_total": _row(f"Find the number of GPUs for this global batch size. Strategies: {', '.join(SEARCHED)}, "
                            f"or --strategy; at most {max(WORLD_SIZES):,} GPUs.", kind=int, low=1, metavar="N",
                            concerns={"lengths": not_}),
    "exact": _flag("Do not round the largest batch down to a multiple of 8."),
    "plan.batch": _row("The micro-batch size. [default: 8]", kind=int, low=1, section="common", metavar="N", flag="-b"),
    "batch_total": _row("The batch per optimizer step, in micro-batches.", kind=int, low=1,
                        metavar="N"),
    "may_change": _row(f"What else may change: {', '.join(SAVERS)} (same result); {', '.join(MAY_CHANGE)}.",
                       metavar="NAME[,...]"),
    "emit": _row(f"Print the plan as {either_of(PLAN_FORMS)}.", choices=PLAN_FORMS, metavar="FORM"),
    "plan.plot": _row("Plot memory against recompute FLOPs (.svg).", kind=Path, metavar="FILE",
                      convert=partial(_checked_picture, what="the chart of plans is")),
    "file": _row("A snapshot (.pickle) or a log with the error message; - reads stdin. A snapshot is the file of "
                 "torch.cuda.memory._dump_snapshot.", ..., metavar="FILE", is_argument=True),
    "plot": _row("Plot the history of the memory by part (.svg).", kind=Path, metavar="FILE",
                 convert=partial(_checked_picture, what="the history is drawn as")),
    "grid": _row("The grid, a YAML file (docs/sweep.md); grid.yaml by default.", metavar="[GRID]", is_argument=True),
    "sweep.output": _output(".jsonl", ".yaml", ".yml", text="Append a row for each point to FILE (.jsonl).",
                            more=" (--init), and prints --format csv"),
    "init": _flag("Print a sample grid with comments, or write it to GRID."),
    **{name: replace(row, name="") for name, row in rows(Engine).items()},
    "sweep.plan": _row(_PLAN, kind=Path, metavar="FILE"),
    "sweep.rows": _row("Show N rows; 0 shows all.", 20, int, metavar="N"),
    "sweep.sort": _row("Sort the rows by a CSV column, such as peak_bytes.", metavar="COLUMN"),
    "files": _row("Files (*.bertscope.yaml), folders with such files, or presets; all below this folder by default.",
                  (), metavar="[FILES]...", **_MODEL),
    "presets": _flag("Check the built-in presets.", concerns=dict.fromkeys(("files", "update"), not_)),
    "write_to": _row("Add the current counts to FILE. FILE has no expectations; a new one gets the model in FILES.",
                     kind=Path, option="write", metavar="FILE",
                     concerns=dict.fromkeys(("presets", "output", "update"), not_)),
    "update": _flag("Write the current values into the files, and exit with 0."),
    "check.fmt": _format("The format: text, table, json, csv, markdown, github or junit. text and github list failures "
                         "only.", ("text", *_TABLES, "github", "junit"), "text"),
    "check.output": _output(*_TABLE_FILES, ".xml"),
    "schema.kind": _row("The report, such as count, or config; a list by default. config is a BERT's config.json.",
                        metavar="[KIND]", is_argument=True, complete=_kinds),
    "schema.fmt": _format("The format of the list: table, json, csv or markdown. A schema is always JSON.", _TABLES),
    "schema.output": _output(*_TABLE_FILES),
}  # fmt: skip
INPUTS = ("training_file", "plan")  # files that are read


def option_row(command: str, name: str) -> Row:
    """Return a command's row for an option."""
    row: Any = OPTIONS.get(f"{command}.{name}") or OPTIONS[name]
    return row() if callable(row) else row  # type: ignore[no-any-return]


def parameters(command: Command) -> list[inspect.Parameter]:
    """Return a command's parameters: its options, with its settings instead of `*`."""
    listed: list[inspect.Parameter] = []
    for name in command.options.split():
        if name == "*":
            listed += _setting_parameters(command)
        elif not name.startswith("-"):
            listed.append(_parameter(name, option_row(command.name, name)))
    return listed


def _setting_parameters(command: Command) -> Iterator[inspect.Parameter]:
    question = QUESTIONS[command.name]
    for name in (names := command.settings):
        row, is_compared = question.table[name], name in question.compared
        usual = question.usual.get(name, question.defaults.get(name, row.default))
        is_flag = row.kind is bool and not row.or_file
        metavar = row.metavar or ("N" if row.kind is int else name.rpartition("_")[2].upper())
        is_listed = not row.choices or bool(row.bare) or all(word in row.help for word in row.choices)
        without_value = f"; without a value {row.bare}" if is_compared else ""
        parts = [
            row.help, "" if is_listed else f"One of {', '.join(row.choices)}.",
            f"Strategies: {STRATEGIES}{without_value}." if row.bare else "", "Repeatable." if row.is_list else "",
            "" if usual in (None, (), "") or isinstance(usual, bool) else f"[default: {usual}]",
        ]  # fmt: skip
        form = None if is_flag else f"{metavar}[,...]" if is_compared else metavar
        yield _parameter(name, row, help=" ".join(filter(None, parts)), show_default=False, metavar=form)
    for name in ("no_calibration",) * ("calibration" in names) + question.files:
        yield _parameter(name, option_row(command.name, name), show_default=False)


def _parameter(name: str, row: Row, **changes: Any) -> inspect.Parameter:
    """Return a row's parameter; a setting is text, which `read` checks, or None by default."""
    is_setting, complete = bool(row.name), row.complete or (lambda: [*row.choices, *filter(None, [row.bare])])
    properties: dict[str, Any] = {"help": row.help, "metavar": row.metavar or None, **changes}
    if row.choices or row.complete:
        properties["autocompletion"] = lambda: list(complete())
    kind: Any = row.kind if not is_setting or (row.kind is bool and not row.or_file) else str
    if row.choices and not is_setting:
        kind = Literal[tuple(row.choices)]
    is_list = row.is_list or "[," in str(properties["metavar"])  # of values with commas, also by an option for each
    kind = list[kind] if is_list else kind
    default = None if is_setting or is_list else inspect.Parameter.empty if row.default is ... else row.default
    info: Any = typer.Argument(**properties)
    if not row.is_argument:
        option = f"--{(row.option or name).replace('_', '-')}"
        if kind is bool and (is_setting or row.default is not False) and "/" not in option:
            option = f"{option}/--no-{option[2:]}"
        properties |= {"parser": _whole(int(row.low))} if kind is int else {}
        if row.convert and not is_setting:
            check = row.convert
            properties["callback"] = lambda value: check(value)  # Typer takes no partial
        info = typer.Option(option, *filter(None, [row.flag]), rich_help_panel=row.section, **properties)
    kind = kind if default is inspect.Parameter.empty else kind | None
    kind = Annotated[kind, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _whole(low: int) -> Callable[[str | int], int]:
    """Return the reader of a whole number from `low` on; a `low` below 0 is none, and the command checks the number."""

    def number(text: str | int) -> int:
        if isinstance(text, str) and not WHOLE.fullmatch(text):
            raise typer.BadParameter(f"{text!r} is not a valid integer")
        if int(text) < low >= 0:
            raise typer.BadParameter(f"{text} is not in the range x>={low}")
        return int(text)

    return number


def commands_with(option: str) -> list[str]:
    """Return the commands that have an option."""
    infos = {name: [item.annotation.__metadata__[0] for item in parameters(row)] for name, row in COMMANDS.items()}
    names = {name: [str(word) for info in parameters_found for word in (info.default, *(info.param_decls or ()))]
             for name, parameters_found in infos.items()}  # fmt: skip
    return [name for name, listed in names.items() if option in [one for word in listed for one in word.split("/")]]
