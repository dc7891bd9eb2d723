"""The names under which classes are imported."""

import sys

from bertscope import torch_access


def public(cls: type) -> type:
    """Return the class, or for one of a private module its first base outside private modules."""
    while _is_private(cls.__module__) and cls.__bases__ != (object,):
        cls = cls.__bases__[0]
    return cls


def _is_private(module: str) -> bool:
    """Return True for a private module, and for the module here that subclasses torch's classes."""
    return module == torch_access.__name__ or any(part.startswith("_") for part in module.split("."))


def type_name(cls: type, package: str) -> str:
    """Return the name of a class of `package` or of Python's builtins; the import path of any other."""
    cls = public(cls)
    return cls.__name__ if is_of(cls, package) or cls.__module__ == "builtins" else address(cls)


def is_of(cls: type, package: str) -> bool:
    """Return True if the class, or its public base, is defined in that package."""
    return public(cls).__module__.partition(".")[0] == package


def address(cls: type) -> str:
    """Return the shortest public import path of a class; that of its file's package if no package exports it.

    Examples: `torch.nn.Linear`, `bertscope.model.BertLayer`, `transformers.models.bert.BertModel`.
    """
    parts = cls.__module__.split(".")
    for length in range(min(2, len(parts)), len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    package_parts = parts[:-1] if len(parts) > 2 else parts
    return ".".join((*package_parts, cls.__name__))
