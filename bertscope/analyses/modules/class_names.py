"""What a class is called by those who import it."""

from __future__ import annotations

import sys

from bertscope import torch_access


def public(cls: type) -> type:
    """The class, or the first base of one that lives in a private module."""
    while _is_private(cls.__module__) and cls.__bases__ != (object,):
        cls = cls.__bases__[0]
    return cls


def _is_private(module: str) -> bool:
    """Return True for a private module, and for the module here that subclasses torch's classes."""
    return module == torch_access.__name__ or any(part.startswith("_") for part in module.split("."))


def type_name(cls: type, package: str) -> str:
    """A class of `package`, and a plain one of Python, by its name; any other by its address."""
    cls = public(cls)
    return cls.__name__ if is_of(cls, package) or cls.__module__ == "builtins" else address(cls)


def is_of(cls: type, package: str) -> bool:
    """Whether the class, or what it stands for, is defined in that package."""
    return public(cls).__module__.partition(".")[0] == package


def address(cls: type) -> str:
    """Where a class is at home: the shortest inner package that exports it, else that of its file.

    `torch.nn.Linear`, `bertscope.model.BertLayer`, `transformers.models.bert.BertModel`.
    """
    parts = cls.__module__.split(".")
    for length in range(min(2, len(parts)), len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    home = parts[:-1] if len(parts) > 2 else parts
    return ".".join((*home, cls.__name__))
