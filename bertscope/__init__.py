"""bertscope: parameters, FLOPs, memory and diagrams of BERT models, computed before a run and checked by measurement.

Names load on first use, so that `import bertscope` does not import torch. Type checkers read `__init__.pyi`, which
docs/make_cli.py writes from the same names.
"""

from importlib import import_module

from bertscope.commands.table import COMMANDS

__version__ = "0.1.0"

_NAMES = {
    "bertscope.analyses.verify": "verify",
    "bertscope.api.counts": "summary",
    "bertscope.api.watch": "watch TrainerCallback LightningCallback",
    "bertscope.api.memory": "fits lengths training_script",
    "bertscope.checkpoints.reading": "read_checkpoint",
    "bertscope.config": "BertConfig Lora",
    "bertscope.errors": "BertscopeError",
    "bertscope.memory.extension_kernels": "kernel",
    "bertscope.model": "build",
    "bertscope.model.bert": "BertModel",
    "bertscope.progress": "listening",
    "bertscope.reports.base": "to_json",
    "bertscope.reports.json": "from_json",
    "bertscope.sources.find": "load",
    "bertscope.sources.training_files": "read_training_file",
}
_HOMES = {command.name: command.function.partition(":")[0] for command in COMMANDS.values()}
_HOMES |= {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    homes = public_names() if name.startswith("Bert") or name == "__all__" else _HOMES
    if name == "__all__":
        return ["__version__", *homes]
    if name not in homes:
        raise AttributeError(f"module 'bertscope' has no attribute {name!r}")
    with import_module("bertscope.errors").importing(name):
        import_module("bertscope.reports.base").set_display(_display)
        return getattr(import_module(homes[name]), name)


def public_names() -> dict[str, str]:
    """Return the public names, each with its module; the classes with a head are the rows of HEADS."""
    from bertscope.config import HEADS  # which the commands that read no model need not

    return dict.fromkeys(HEADS, "bertscope.model.heads") | _HOMES


def _display(report: object, form: str, **options: object) -> str:
    return import_module("bertscope.views.views").display(report, form, **options)


def __dir__() -> list[str]:
    return sorted(["__version__", *public_names()])
