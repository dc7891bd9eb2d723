"""Graph of one run of a module: every function that it calls is a node, every tensor an arrow.

`TorchFunctionMode` sees each call that Python makes into torch. A submodule is either one box, or is opened: then the
calls inside it are recorded instead. Views (view, transpose, an index) are not nodes but labels of the arrow.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from bertscope.analyses.modules.class_names import type_name
from bertscope.analyses.tracing.module_tracker import hooks
from bertscope.analyses.tracing.operator_costs import shape_of, tensors
from bertscope.reports.diagram import DiagramEdge, DiagramNode
from bertscope.reports.layer_ranges import number_of
from bertscope.torch_access import nn, storage_key, torch

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rsub": "-", "__rsub__": "-", "__rdiv__": "/"}
_SAME_CONTENT = ("reshape", "contiguous", "to")  # may copy; the diagram shows no values


@dataclass(frozen=True)
class Flowing:
    """A recorded tensor: the node that made it, and the views since."""

    tensor: torch.Tensor  # kept alive, so that its id is not reused
    source: str
    views: tuple[str, ...] = ()


@dataclass
class Flow:
    """The recorded graph: nodes and edges in the order of the run, edges into a node in the order of its arguments."""

    nodes: dict[str, DiagramNode] = field(default_factory=dict)
    edges: list[DiagramEdge] = field(default_factory=list)
    seen: list[Flowing] = field(default_factory=list)
    opened: dict[str, nn.Module] = field(default_factory=dict)

    def add(self, node: DiagramNode) -> str:
        """Add a node and return its id: its own or one from its name, with a number where that is taken."""
        base = "".join(letter if letter.isalnum() else "_" for letter in node.id or node.name).strip("_")
        idents = (f"{base}_{number}" if number > 1 else base for number in count(1))
        ident = next(ident for ident in idents if ident not in self.nodes)
        self.nodes[ident] = replace(node, id=ident)
        return ident

    def into(self, ident: str) -> list[DiagramEdge]:
        """Return the edges into a node, in the order of its arguments."""
        return [edge for edge in self.edges if edge.target == ident]

    def out_of(self, ident: str) -> list[DiagramEdge]:
        """Return the edges out of a node."""
        return [edge for edge in self.edges if edge.source == ident]


def dataflow(scope: nn.Module, run: Callable[[], Any], *, path: str, opens: Callable[[nn.Module, int], bool]) -> Flow:
    """Record the first call of `scope` during `run`; return an empty graph if it is not called.

    `path` precedes the names of its submodules. `opens(submodule, number of open modules around it)` decides whether
    a submodule is opened.
    """
    recorder = _Recorder(scope, opens)
    with hooks(scope, path, recorder.enter, recorder.leave), recorder, torch.no_grad():
        run()
    return recorder.flow


class _Recorder(torch.overrides.TorchFunctionMode):
    def __init__(self, scope: nn.Module, opens: Callable[[nn.Module, int], bool]) -> None:
        super().__init__()
        self.scope, self.opens = scope, opens
        self.flow = Flow()
        self.alive: dict[int, Flowing] = {}
        self.is_recording = False
        self.box: str | None = None  # the path of the unopened module that runs
        self.groups: list[str] = [""]
        self.held = {id(held): name for name, held in (*scope.named_parameters(), *scope.named_buffers())}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if self.is_recording and self.box is None and tensors(out):
            given = tensors((args, kwargs))
            if {id(tensor) for tensor in given}.isdisjoint(map(id, tensors(out))):
                self._record(function, args, kwargs or {}, given, out)
        return out

    def _record(self, function: Any, args: Any, kwargs: Mapping[str, Any], given: list[torch.Tensor], out: Any) -> None:
        name = torch.overrides.resolve_name(function) or function.__name__
        short = name.rsplit(".", 1)[-1]
        first = self._flowing(given[0]) if len(given) == 1 else None
        storages = {storage_key(tensor) for tensor in (*given, *tensors(out))}
        if first is not None and (short in _SAME_CONTENT or len(storages) == 1):
            view = _index_text(args[1]) if short == "__getitem__" else short
            for tensor in tensors(out):
                self._saw(Flowing(tensor, first.source, (*first.views, view)))
            return
        shown, words = _public_name(name), [value for value in args if isinstance(value, str)]
        if short in _SIGNS:
            scalars = [f"{value:g}" for value in (*args, *kwargs.values()) if type(value) in (int, float)]
            is_reversed = bool(scalars) and short.startswith(("r", "__r"))
            shown, *words = (*scalars, _SIGNS[short]) if is_reversed else (_SIGNS[short], *scalars)
        node = DiagramNode(id=short, role="function", name=shown, detail=" ".join(words), group=self.groups[-1])
        self._connect(self.flow.add(node), given, out)

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the recording at the scope, a group at a module to open, a box at any other."""
        if module is self.scope and not self.flow.nodes:
            self._begin(args, kwargs)
        elif self.is_recording and self.box is None:
            if self.opens(module, len(self.groups)):
                self.groups.append(path)
                self.flow.opened[path] = module
            else:
                self.box = path

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """End the recording, a group or a box; return the result of a box."""
        if not self.is_recording:
            return None
        if module is self.scope:
            self._end(out)
        elif self.groups[-1] == path:
            self.groups.pop()
        elif self.box == path:
            given = tensors((args, kwargs))
            if any(out is tensor for tensor in given):
                out = torch.ops.aten.alias(out)  # a dropout that returns its input is drawn as a result
            self.box = None
            kind = type_name(type(module), "bertscope")
            name = path.rsplit(".", 1)[-1]
            ident = f"layer_{name}" if number_of(name) is not None else name
            node = DiagramNode(id=ident, role="module", name=name, path=path, detail=kind, group=self.groups[-1])
            self._connect(self.flow.add(node), given, out)
            return out
        return None

    def _begin(self, args: Any, kwargs: Any) -> None:
        self.is_recording = True
        given = inspect.signature(self.scope.forward).bind(*args, **kwargs).arguments
        for name, tensor in _named(given):
            if id(tensor) not in self.alive:
                node = DiagramNode(id="", role="input", name=name, shape=shape_of(tensor))
                self._saw(Flowing(tensor, self.flow.add(node)))

    def _end(self, out: Any) -> None:
        self.is_recording = False
        named = list(_named(dict(out.items()) if hasattr(out, "items") else {"output": out}))
        for name, tensor in named:
            shown = name if len(named) > 1 else name.partition("[")[0]
            node = DiagramNode(id="", role="output", name=shown, shape=shape_of(tensor))
            self._connect(self.flow.add(node), [tensor], None)

    def _connect(self, ident: str, given: list[torch.Tensor], out: Any) -> None:
        """Add edges from the origins of the given tensors, and record the results as made by the node."""
        for tensor in given:
            origin = self._flowing(tensor)
            if origin is not None:
                edge = DiagramEdge(source=origin.source, target=ident, shape=shape_of(tensor), views=origin.views)
                if edge not in self.flow.edges:
                    self.flow.edges.append(edge)
        for tensor in tensors(out):
            self._saw(Flowing(tensor, ident))

    def _flowing(self, tensor: torch.Tensor) -> Flowing | None:
        """Return the origin of a tensor; a parameter or buffer of the scope becomes a node at its first use."""
        if id(tensor) not in self.alive and id(tensor) in self.held:
            node = DiagramNode(id="", role="parameter", name=self.held[id(tensor)], shape=shape_of(tensor))
            self._saw(Flowing(tensor, self.flow.add(node)))
        return self.alive.get(id(tensor))

    def _saw(self, flowing: Flowing) -> None:
        self.alive[id(flowing.tensor)] = flowing
        self.flow.seen.append(flowing)


def _named(given: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested arguments with a name such as `past_key_value[0]`."""
    if isinstance(given, torch.Tensor):
        yield name, given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(given, (tuple, list)):
        for place, value in enumerate(given):
            yield from _named(value, f"{name}[{place}]")


def _index_text(index: Any) -> str:
    """Return an index as Python writes it: `[:, None]`."""
    parts = index if isinstance(index, tuple) else (index,)
    return f"[{', '.join(_slice_text(part) if isinstance(part, slice) else str(part) for part in parts)}]"


def _slice_text(part: slice) -> str:
    ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join(ends if part.step is None else [*ends, str(part.step)])


def _public_name(name: str) -> str:
    """Return `torch.matmul` for `torch.Tensor.matmul`, `torch.einsum` for `torch.functional.einsum`."""
    short = name.rsplit(".", 1)[-1]
    return f"torch.{short}" if name.startswith(("torch.Tensor.", "torch.functional.")) else name
