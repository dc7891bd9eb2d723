"""`bertscope.explain` and `bertscope.diagram`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from bertscope.analyses.diagram import diagram as diagrams
from bertscope.analyses.diagram.forward import Given
from bertscope.analyses.explain import steps
from bertscope.api.asked import Model, built
from bertscope.model import BertPreTrainedModel
from bertscope.model.bert import BertModel
from bertscope.reports.diagram import ClassReport, GraphReport
from bertscope.reports.explain import ExplainReport
from bertscope.settings.generate import with_keywords_of
from bertscope.sources.bert import BertSource
from bertscope.sources.find import source_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


def explain(
    model: Model,
    path: str | None = None,
    *,
    batch: int = 1,
    seq: int = 128,
    inputs: Sequence[str] = (),
    name: str | None = None,
) -> ExplainReport:
    """Return the steps of a model, or those under `path` (in any of the three namings), and the sums of its levels.

    A `path` may also be a module, or a section of a BERT: config, inputs, outputs, caches, positions, checkpointing.
    FLOPs are those of the matrix products of a forward pass, 2 for a multiply-add. The steps of a model that is no
    BERT, or that has adapters, are its modules; `inputs` such as `pixel_values=Bx3x224x224:float32` are those that
    cannot be derived. Raises SelectionError for a path that no step has.

    >>> explained = bertscope.explain(bertscope.BertConfig(), "pooler")
    >>> explained.steps[0].params.symbols, explained.steps[0].params.value
    ('hidden_size x hidden_size + hidden_size', 590592)
    """
    if isinstance(model, BertPreTrainedModel):
        has_pooler = not isinstance(model, BertModel) or model.pooler is not None
        architecture = type(model).__name__
        model = BertSource(
            name=name or architecture, config=model.config, architecture=architecture, add_pooling_layer=has_pooler
        )
    source = source_of(model, name=name)
    return steps.explain(source, path, batch=batch, seq=seq, inputs=inputs)


class ClassOptions(TypedDict, total=False):
    """Keywords of a class diagram."""

    around: str | None
    implementation: str
    nn_module: bool


@with_keywords_of(diagrams.Classes)
def diagram(
    model: Model,
    kind: str | None = None,
    path: str = "",
    *,
    name: str | None = None,
    depth: int | None = None,
    direction: str | None = None,
    given: Given | None = None,
    **classes: Unpack[ClassOptions],
) -> ClassReport | GraphReport:
    """Return one diagram of a model, by default `class` of a BERT and `tree` of any other module.

    `class` draws the classes of the whole model in an `implementation` (bertscope, transformers), or those around one
    class: `around`, or the class of the module at `path`; with `nn_module` also their base torch.nn.Module. `forward`
    draws the dataflow of the module at `path` for the inputs `given`. `tree` draws the modules at and
    below `path`. Raises SelectionError for another kind, and for a path or class that the model does not have.

    >>> print(bertscope.diagram(torch.nn.Sequential(torch.nn.Linear(3, 4)), "tree"))
    ---
    title: "Sequential, modules with their parameters in all copies"
    ---
    flowchart LR
      m0["Sequential<br/>16 params"]
      m1["0<br/>Linear<br/>16 params"]
      m0 --> m1
    <BLANKLINE>
    """
    module, shown = built(model, name)
    return diagrams.diagram(
        module, kind, path, name=shown, depth=depth, direction=direction, given=given,
        classes=diagrams.Classes(**classes),
    )  # fmt: skip
