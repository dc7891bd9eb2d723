"""`diagram`: a model as a class diagram, as the dataflow of its forward pass, or as its modules' tree."""

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from bertscope.analyses.dataflow import forward_diagram
from bertscope.analyses.params import tree
from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import SelectionError, name_of, suggestion
from bertscope.model import BertPreTrainedModel, build
from bertscope.model.lora import base_model_of
from bertscope.reports.diagram import (
    ClassAttribute,
    ClassBox,
    ClassLink,
    ClassReport,
    DiagramEdge,
    DiagramNode,
    GraphReport,
)
from bertscope.reports.layer_ranges import expand, is_run
from bertscope.sources.transformers_models import quiet_transformers
from bertscope.torch_access import nn, torch
from bertscope.tracing.module_tree import address, is_of, public, subject, type_name

IMPLEMENTATIONS = ("bertscope", "transformers")
# The settings that add attributes to the classes.
_SETTINGS: dict[str, dict[str, Any]] = {
    "add_cross_attention = true": {"is_decoder": True, "add_cross_attention": True},
    "position_embedding_type = relative_key": {"position_embedding_type": "relative_key"},
    "a class that generates, as BertLMHeadModel": {"architecture": "BertLMHeadModel", "is_decoder": True},
}
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)  # an instance has what they contain as its parts
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def class_diagram(
    model: nn.Module, path: str = "", *, name: str | None = None, around: str | None = None,
    implementation: str = "bertscope", nn_module: bool = False, config: bool = False,
) -> ClassReport:  # fmt: skip
    """Return the classes that a model is made of; a model that is no BERT has classes of its package.

    All, or those `around` one class, by default of the module at `path`: its bases and its parts. With
    `implementation` "transformers" a BERT of the same architecture and configuration is built from the classes of
    transformers. With `nn_module` the drawing shows torch.nn.Module and the arrow from it to each class, with `config`
    the configuration. Raises SelectionError for a class that the model does not have, MissingExtraError without
    transformers.
    """
    if path and not around:
        modules = dict(model.named_modules())
        if path not in modules:
            raise SelectionError(f"no module {path!r} in this model; {suggestion(path, filter(None, modules))}")
        around = type(modules[path]).__name__
    base, package = base_model_of(model), implementation
    if base is not model and package != "bertscope":
        raise SelectionError(f"the classes of {package} are drawn without adapters; leave {name_of('lora')} out")
    models: dict[str, nn.Module] = {"": base}
    if isinstance(base, BertPreTrainedModel):
        models = {"": base if package == "bertscope" else _build(base, package)}
        models |= {when: _build(base, package, **changes, num_hidden_layers=1) for when, changes in _SETTINGS.items()}
    else:
        packages = (public(type(module)).__module__.partition(".")[0] for module in base.modules())
        package = next((package for package in packages if package != "torch"), "torch")
    reader = _ClassReader(package)
    for when, instance in models.items():
        reader.read(instance, when)
    classes, links = tuple(reader.boxes()), tuple(reader.links.values())
    if around is not None:
        known = {box.name: box for box in classes}
        if around not in known:
            raise SelectionError(f"no class {around!r} in this model; {suggestion(around, known)}")
        links = tuple(link for link in links if link.owner == around)
        wanted, pending = set[str](), [around, *(link.part for link in links)]
        while pending:
            box = known[pending.pop()]
            wanted.add(box.name)
            pending += box.bases
        classes = tuple(box for box in classes if box.name in wanted)
    return ClassReport(
        subject=subject(model, name),
        package=package,
        package_version=str(getattr(sys.modules.get(package), "__version__", "")),
        around=around,
        classes=classes,
        links=links,
        nn_module=nn_module,
        config=config,
    )


def _build(model: BertPreTrainedModel, package: str, **changes: Any) -> nn.Module:
    if package not in IMPLEMENTATIONS:
        raise SelectionError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}; got {package!r}")
    architecture = changes.pop("architecture", type(model).__name__)
    has_pooler = getattr(model, "pooler", True) is not None
    if "num_hidden_layers" in changes:
        changes["pruned_heads"] = {}
    few = {"num_hidden_layers": 2} if model.config.num_hidden_layers > MAX_BUILT_LAYERS else {}  # whose classes are all
    config = replace(model.config, **few | changes)
    if package == "bertscope":
        return build(config, architecture, add_pooling_layer=has_pooler)
    options = {} if architecture != "BertModel" else {"add_pooling_layer": has_pooler}
    with quiet_transformers(f"{name_of('implementation')} transformers") as transformers, torch.device("meta"):
        built: nn.Module = getattr(transformers, architecture)(transformers.BertConfig(**config.to_dict()), **options)
    return built


class _ClassReader:
    def __init__(self, package: str) -> None:
        self.package = package
        self.config_class: type | None = None
        self.classes: dict[type, dict[str, ClassAttribute]] = {}
        self.links: dict[tuple[str, str, str], ClassLink] = {}

    def read(self, model: nn.Module, when: str) -> None:
        config = getattr(model, "config", None)
        self.config_class = None if config is None else type(config)
        for module in model.modules():
            if is_of(type(module), self.package):
                self._read_instance(module, when)
        if when or self.config_class is None:
            return
        self._meet(self.config_class)
        self.classes[self.config_class] = {field.name: field for field in _fields(self.config_class)}

    def _read_instance(self, module: nn.Module, when: str) -> None:
        held = _held(module)
        ancestors: list[Any] = [cls for cls in type(module).__mro__ if nn.Module in cls.__mro__[1:]]
        stored = {name for cls in ancestors for name in _stored(cls)}
        if not when and not _is_private(type(module)):
            self._meet(type(module))
        owner: type = nn.Module
        for cls in ancestors:
            owner = owner if _is_private(cls) else cls  # what a private base stores belongs to its public subclass
            if owner is nn.Module or owner not in self.classes:
                continue
            rest = [name for name in held if name not in stored] if cls is type(module) else []
            for name in [*_stored(cls), *rest]:
                if name in held:
                    self._add(owner, name, held[name], when)

    def _add(self, cls: type, name: str, value: Any, when: str) -> None:
        attribute = ClassAttribute(name=name, type=self._type_of(cls, name, value), when=when)
        if name not in self.classes[cls] or (self.classes[cls][name].type == "None" and value is not None):
            self.classes[cls][name] = attribute
        items = value._modules.values() if type(value) in _CONTAINERS else [value]
        for part, count in Counter(map(type, items)).items():
            is_part = issubclass(part, nn.Module) and is_of(part, self.package) and not _is_private(part)
            if is_part or part is self.config_class:
                link = ClassLink(owner=cls.__name__, part=part.__name__, attribute=name, count=count, is_part=is_part)
                self.links.setdefault((link.owner, link.part, name), link)

    def _meet(self, cls: type) -> None:
        for base in _public_bases(cls):
            if base is not object:
                self._meet(base) if base is not nn.Module else self.classes.setdefault(base, {})
        self.classes.setdefault(cls, {})

    def _type_of(self, cls: type, name: str, value: Any) -> str:
        declared = cls.__init__.__annotations__.get(name)  # type: ignore[misc]
        if isinstance(declared, type) and isinstance(value, declared):
            return type_name(declared, self.package)
        if isinstance(value, nn.ModuleList) and len(value):
            return f"{type_name(nn.ModuleList, self.package)}[{type_name(type(value[0]), self.package)}]"
        return "None" if value is None else type_name(type(value), self.package)

    def boxes(self) -> Iterator[ClassBox]:
        for cls, attributes in self.classes.items():
            order = dict.fromkeys((*(name for name in _stored(cls) if name in attributes), *attributes))
            yield ClassBox(
                name=cls.__name__,
                address=address(cls),
                bases=tuple(base.__name__ for base in _public_bases(cls) if base in self.classes),
                attributes=tuple(attributes[name] for name in order),
            )


def _is_private(cls: type) -> bool:
    return cls.__name__.startswith("_")


def _public_bases(cls: type) -> Iterator[type]:
    """Yield the bases of a class, and instead of a private base its bases."""
    for base in cls.__bases__:
        yield from _public_bases(base) if _is_private(base) else (base,)


def _held(module: nn.Module) -> dict[str, Any]:
    items = vars(module).items()
    attributes = {name: value for name, value in items if name not in _OF_EVERY_MODULE and name[0] != "_"}
    return attributes | module._modules | module._parameters | module._buffers


@lru_cache(maxsize=1024)
def _stored(cls: type) -> tuple[str, ...]:
    code = getattr(vars(cls).get("__init__"), "__code__", None)
    steps = dis.get_instructions(code) if code else ()
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname == "STORE_ATTR"))


def _fields(config_class: type) -> Iterator[ClassAttribute]:
    for parameter in list(inspect.signature(config_class.__init__).parameters.values())[1:]:  # type: ignore[misc]
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        annotation, default = parameter.annotation, parameter.default
        kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        if annotation is parameter.empty:
            kind = type(default).__name__ if default is not None else "Any"
        shown = repr(default) if isinstance(default, (int, float, str, tuple, list, dict, type(None))) else None
        yield ClassAttribute(name=parameter.name, type=kind, default=shown)


def tree_diagram(
    model: nn.Module, path: str = "", *, name: str | None = None, depth: int | None = None, direction: str = "LR"
) -> GraphReport:
    """Return the modules at and below `path`, `depth` levels down, equal layers folded; parameters as in `tree`."""
    report = tree(model, name=name)
    root = next((row for row in report.rows if path in (row.path, *expand(row.path))), None)  # of equal layers one row
    if root is None:
        known = [row.path for row in report.rows if row.path]
        raise SelectionError(f"no module {path!r} in this model; {suggestion(path, known)}")
    start = f"{root.path}." if root.path else ""
    below = [row for row in report.rows if row is root or row.path.startswith(start)]
    ids: dict[str, str] = {}
    nodes, edges = list[DiagramNode](), list[DiagramEdge]()
    for row in below:
        if depth is not None and row.depth - root.depth > depth:
            continue
        ids[row.path] = f"m{len(ids)}"
        nodes.append(
            DiagramNode(
                id=ids[row.path],
                role="module",
                name=row.name or row.type,
                detail=row.type,
                path=row.path,
                copies=row.copies if is_run(row.name) else 1,
                params=row.params,
            )
        )
        if row is not root:
            edges.append(DiagramEdge(source=ids[row.path.rpartition(".")[0]], target=ids[row.path]))
    return GraphReport(
        diagram="tree",
        subject=report.subject,
        path=root.path,
        batch=None,
        seq=None,
        cache=0,
        direction=direction,
        nodes=tuple(nodes),
        edges=tuple(edges),
    )


# The kinds of diagrams; each function takes the keywords of `bertscope.diagram` that have an effect on it.
_Draw = Callable[..., ClassReport | GraphReport]
KINDS: dict[str, _Draw] = {"class": class_diagram, "forward": forward_diagram, "tree": tree_diagram}
