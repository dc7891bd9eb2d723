"""Freezing of the parameters that match patterns."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from bertscope.errors import SelectionError
from bertscope.torch_access import nn


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Set `requires_grad` to False for the parameters that match a pattern.

    A pattern is a glob over parameter paths (`*.bias`) or consecutive path components (`embeddings`,
    `encoder.layer.0`, `LayerNorm`). Raises SelectionError for a pattern that matches nothing.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        forms = (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
        chosen = [parameter for path, parameter in named if any(fnmatchcase(path, form) for form in forms)]
        if not chosen:
            tops = sorted({path.split(".")[0] for path, _ in named})
            raise SelectionError(
                f"the pattern {pattern!r} matches no parameter; use a glob ('*.bias') or whole parts of a path "
                f"('embeddings', 'encoder.layer.0'); the top modules are {', '.join(tops)}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
