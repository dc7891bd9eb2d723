"""`diagram --kind forward`: the dataflow of a forward pass of a model or of one module in it.

It is recorded in a run on meta (see `dataflow`) with this configuration and these inputs. Equal layers are run and
drawn once.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from bertscope.config import BertConfig
from bertscope.errors import SelectionError, SourceError, suggestion
from bertscope.frozen import Record
from bertscope.model import BertEmbeddings, BertLayer, BertPooler, BertPreTrainedModel, BertSelfAttention
from bertscope.model.lora import WRAPPED, base_model_of
from bertscope.reports.diagram import DiagramEdge, DiagramGroup, DiagramNode, GraphReport
from bertscope.reports.layer_ranges import LayerRange, expand, number_of
from bertscope.settings.run_config import CPU
from bertscope.torch_access import nn, storage_key, torch
from bertscope.tracing.fake_tensors import fake_copy, fake_like, fake_tensors, on_meta
from bertscope.tracing.flops import trace
from bertscope.tracing.inputs import arguments, example_inputs, inputs_for, positions, running_module
from bertscope.tracing.log import shape_of, tensors
from bertscope.tracing.module_tree import Node, address, fold, is_of, moved, public, read, subject
from bertscope.tracing.record import hooks

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

    def add(self, role: str, name: str, ident: str = "", **fields: Any) -> str:
        """Add a node and return its id: from `ident` or its name, with a number where that is taken."""
        base = "".join(letter if letter.isalnum() else "_" for letter in ident or name).strip("_")
        idents = (f"{base}_{number}" if number > 1 else base for number in count(1))
        free = next(ident for ident in idents if ident not in self.nodes)
        self.nodes[free] = DiagramNode(id=free, role=role, name=name, **fields)
        return free

    def into(self, ident: str) -> list[DiagramEdge]:
        """Return the edges into a node, in the order of its arguments."""
        return [edge for edge in self.edges if edge.target == ident]

    def out_of(self, ident: str) -> list[DiagramEdge]:
        """Return the edges out of a node."""
        return [edge for edge in self.edges if edge.source == ident]


def dataflow(scope: nn.Module, run: Callable[[], Any], *, path: str, opens: Callable[[nn.Module, int], bool]) -> Flow:
    """Record the first call of `scope` during `run`; return an empty graph if it is not called.

    `path` precedes its submodules' names. `opens(submodule, number of open modules around it)` decides whether
    a submodule is opened.
    """
    recorder = _GraphRecorder(scope, opens)
    with hooks(scope, path, recorder.enter, recorder.leave), recorder, torch.no_grad():
        run()
    return recorder.flow


class _GraphRecorder(torch.overrides.TorchFunctionMode):
    """The edges of a run, from tensor to tensor; an operator has not the names and the arguments of a function."""

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
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if not self.is_recording or self.box is not None:
            return out
        inputs, results = tensors((args, kwargs)), tensors(out)
        if not results or {*map(id, inputs)} & {*map(id, results)}:
            return out
        name = torch.overrides.resolve_name(function) or function.__name__
        short = name.rsplit(".", 1)[-1]
        first = self._flowing(inputs[0]) if len(inputs) == 1 else None
        storages = {storage_key(tensor) for tensor in (*inputs, *results)}
        if first is not None and (short in _SAME_CONTENT or len(storages) == 1):
            view = _index_text(args[1]) if short == "__getitem__" else short
            for tensor in results:
                self._saw(tensor, first.source, (*first.views, view))
            return out
        if name.startswith(("torch.Tensor.", "torch.functional.")):
            name = f"torch.{short}"
        details = [value for value in args if isinstance(value, str)]
        if short in _SIGNS:
            scalars = [f"{value:g}" for value in (*args, *kwargs.values()) if type(value) in (int, float)]
            is_reversed = bool(scalars) and short.startswith(("r", "__r"))
            name, *details = (*scalars, _SIGNS[short]) if is_reversed else (_SIGNS[short], *scalars)
        node = self.flow.add("function", name, short, detail=" ".join(details), group=self.groups[-1])
        self._connect(node, inputs, out)
        return out

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the recording at the scope, a group at a module to open, a box at any other."""
        if module is self.scope and not self.flow.nodes:
            self.is_recording = True
            for name, tensor in _named(inspect.signature(module.forward).bind(*args, **kwargs).arguments):
                if id(tensor) not in self.alive:
                    self._saw(tensor, self.flow.add("input", name, shape=shape_of(tensor)))
        elif self.is_recording and self.box is None:
            if self.opens(module, len(self.groups)):
                self.groups.append(path)
                self.flow.opened[path] = module
            else:
                self.box = path

    def leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """End the recording, a group or a box; return a box's result."""
        if not self.is_recording:
            return None
        if module is self.scope:
            self.is_recording = False
            named = list(_named(dict(out.items()) if hasattr(out, "items") else {"output": out}))
            for name, tensor in named:
                shown = name if len(named) > 1 else name.partition("[")[0]
                self._connect(self.flow.add("output", shown, shape=shape_of(tensor)), [tensor], None)
        elif self.groups[-1] == path:
            self.groups.pop()
        elif self.box == path:
            self.box = None
            inputs = tensors((args, kwargs))
            if any(out is tensor for tensor in inputs):
                out = torch.ops.aten.alias(out)  # a dropout that returns its input is drawn as a result
            kind, name = _class_name(module), path.rpartition(".")[2]
            ident = name if number_of(name) is None else f"layer_{name}"
            node = self.flow.add("module", name, ident, path=path, detail=kind, group=self.groups[-1])
            self._connect(node, inputs, out)
            return out
        return None

    def _connect(self, ident: str, inputs: list[torch.Tensor], out: Any) -> None:
        for tensor in inputs:
            origin = self._flowing(tensor)
            if origin is not None:
                edge = DiagramEdge(source=origin.source, target=ident, shape=shape_of(tensor), views=origin.views)
                if edge not in self.flow.edges:
                    self.flow.edges.append(edge)
        for tensor in tensors(out):
            self._saw(tensor, ident)

    def _flowing(self, tensor: torch.Tensor) -> Flowing | None:
        """Return a tensor's origin; a parameter or buffer of the scope becomes a node at its first use."""
        if id(tensor) not in self.alive and id(tensor) in self.held:
            self._saw(tensor, self.flow.add("parameter", self.held[id(tensor)], shape=shape_of(tensor)))
        return self.alive.get(id(tensor))

    def _saw(self, tensor: torch.Tensor, source: str, views: tuple[str, ...] = ()) -> None:
        self.alive[id(tensor)] = Flowing(tensor, source, views)
        self.flow.seen.append(self.alive[id(tensor)])


def _named(value_tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested arguments with a name such as `past_key_value[0]`."""
    if isinstance(value_tree, torch.Tensor):
        yield name, value_tree
    elif isinstance(value_tree, Mapping):
        for key, value in value_tree.items():
            yield from _named(value, f"{name}.{key}" if name else str(key))
    elif isinstance(value_tree, (tuple, list)):
        for number, value in enumerate(value_tree):
            yield from _named(value, f"{name}[{number}]")


def _index_text(index: Any) -> str:
    texts = []
    for part in index if isinstance(index, tuple) else (index,):
        ends = [part]
        if isinstance(part, slice):
            ends = [part.start, part.stop] if part.step is None else [part.start, part.stop, part.step]
            ends = ["" if end is None else end for end in ends]
        texts.append(":".join(map(str, ends)))
    return f"[{', '.join(texts)}]"


# Boxes unless the diagram is of one of them.
_CLOSED = (BertEmbeddings, BertLayer, BertSelfAttention, BertPooler)
_SOFTMAX = "torch.nn.functional.softmax"
_FUSED = "torch.nn.functional.scaled_dot_product_attention"


class ForwardInputs(Record):
    """The inputs of the run besides ids; None: the default of `forward_diagram`."""

    batch: int = 1
    seq: int = 128
    cache: int | None = None
    mask: bool = True
    head_mask: bool | None = None
    input: tuple[str, ...] = ()  # of a model that is no BERT, such as `x=Bx10:float32`


def forward_diagram(
    model: nn.Module,
    path: str = "",
    *,
    name: str | None = None,
    forward_inputs: ForwardInputs | None = None,
    depth: int | None = None,
    direction: str = "TB",
) -> GraphReport:
    """Return the module's dataflow at `path`, or of the model, which is not changed.

    `depth` is the number of levels to open; without it a stack's layers are boxes, and so are the modules without
    a stack below them. For a self-attention of a BERT as the scope, the default is a head mask if the kernel takes one
    and, in a decoder, as many cached positions as new ones; for any other module neither. Raises SelectionError for a
    path that the run does not enter, and for sizes that the model cannot run.
    """
    forward_inputs = forward_inputs or ForwardInputs(seq=min(ForwardInputs.seq, positions(base_model_of(model))))
    drawn = partial(_drawn, model, path, forward_inputs, name, depth, direction)
    try:
        return drawn("meta")
    except SourceError:  # a forward that creates tensors on the CPU, or asks torch about its device
        with suppress(Exception), fake_tensors():
            return drawn(CPU)
        raise


def _drawn(
    model: nn.Module,
    path: str,
    settings: ForwardInputs,
    name: str | None,
    depth: int | None,
    direction: str,
    device: str,
) -> GraphReport:
    base: Any = base_model_of(model)
    is_bert = isinstance(base, BertPreTrainedModel)
    if is_bert:
        short, names = _with_each_layer_once(base, device)
    else:
        inputs = _other_inputs(base, settings, device)
        short, names = _verified_short(base, inputs, name, device)
    path = path.removeprefix(WRAPPED)
    at = next((short for short, shown in names.items() if path == shown or path in expand(shown)), None)
    if at is None:
        raise SelectionError(f"no module {path!r} in this model; {suggestion(path, filter(None, names.values()))}")
    scope = short.get_submodule(at)
    if is_bert:
        settings = _completed(settings, short, scope, at)
        inputs = _inputs(short, settings)
    stacks = [module for module in short.modules() if isinstance(module, nn.ModuleList)]
    layers = {id(layer) for stack in stacks for layer in stack}

    def opens(module: nn.Module, level: int) -> bool:
        if depth is not None or is_bert:
            has_parts = any(True for _ in module.children())
            return has_parts and (not isinstance(module, _CLOSED) if depth is None else level < depth)
        return id(module) not in layers and any(stack in stacks for stack in module.modules())

    flow = dataflow(scope, partial(_run, short, inputs, device), path=at, opens=opens)
    if not flow.nodes:
        raise SelectionError(f"a forward pass does not call {path!r}; choose the module around it or one inside it")
    for group, module in {"": scope, **flow.opened}.items():
        if isinstance(module, BertSelfAttention):
            _name_attention(flow, module, group)
    sizes = {"batch": settings.batch, "seq": settings.seq, "cache": settings.cache or 0, "direction": direction}
    runs = _layers(short, names) if is_bert else []
    return _report(flow, names, at, runs, diagram="forward", subject=subject(model, name), **sizes)


def _run(model: nn.Module, inputs: Any, device: str) -> Any:
    positional, named = arguments(inputs)
    with torch.device(device), torch.no_grad():
        return trace(model, partial(model, *positional, **named))[1]


def _other_inputs(model: nn.Module, settings: ForwardInputs, device: str) -> Any:
    inputs = inputs_for(model, settings.batch, settings.seq, described=settings.input)
    inputs = fake_like(inputs) if device == CPU else on_meta(inputs)
    if not isinstance(inputs, Mapping):
        return inputs
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    shown = (name for name in inputs if settings.mask or not name.endswith("attention_mask"))
    return options | {name: inputs[name] for name in shown}


def _verified_short(model: nn.Module, inputs: Any, name: str | None, device: str) -> tuple[nn.Module, dict[str, str]]:
    """Return the model with equal layers once in each stack in which that leaves the outputs' shapes."""
    whole = fake_copy(model, device).eval()
    with running_module(name or type(model).__name__, model, "meta"):
        wanted = set(map(shape_of, tensors(_run(whole, inputs, device))))

    def shortened(stacks: Collection[str]) -> tuple[nn.Module, dict[str, str]] | None:
        with suppress(Exception):  # of the model's code, which may count its layers
            short = _with_each_layer_once(model, device, stacks)
            if set(map(shape_of, tensors(_run(short[0], inputs, device)))) == wanted:
                return short
        return None

    stacks = [node.path for node in fold(read(model)).walk() if any(child.copies > 1 for child in node.children)]
    short = shortened(stacks) or shortened([stack for stack in stacks if shortened([stack])])
    return short or (whole, {path: path for path, _ in whole.named_modules()})


def _with_each_layer_once(
    model: nn.Module, device: str, stacks: Collection[str] | None = None
) -> tuple[Any, dict[str, str]]:
    # A copy without layers equal to the one before, and the path of the range for each path in it. `stacks` are the
    # lists to shorten, by their paths in a folded tree; None for all.
    short = fake_copy(model, device).eval()
    names: dict[str, str] = {}

    def visit(node: Node, module: nn.Module, at: str) -> None:
        names[at] = node.path
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not (stacks is None or node.path in stacks):
            for name, part in module.named_children():
                if below := next((child for child in node.children if name in expand(child.name)), None):
                    below = below if name == below.name else moved(below, below.path, f"{node.path}.{name}".strip("."))
                    visit(below, part, f"{at}.{name}".strip("."))
            return
        parts = [(child, module.get_submodule(next(expand(child.name)))) for child in node.children]
        module._modules.clear()
        for number, (child, part) in enumerate(parts):
            module.add_module(str(number), part)
            visit(child, part, f"{at}.{number}".strip("."))

    visit(fold(read(short)), short, "")
    if isinstance(short, BertPreTrainedModel):
        firsts = [layers.first for layers in _layers(short, names)]
        heads = {number: short.config.pruned_heads.get(first, ()) for number, first in enumerate(firsts)}
        config = replace(short.config, num_hidden_layers=len(firsts), pruned_heads=heads)
        for part in short.modules():
            if isinstance(getattr(part, "config", None), BertConfig):
                part.config = config  # type: ignore[assignment]
    return short, names


def _layers(model: BertPreTrainedModel, names: Mapping[str, str]) -> list[LayerRange]:
    stack = next(path for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    shown = (name.rpartition(".")[2] for path, name in names.items() if path.rpartition(".")[0] == stack)
    return [layers for name in shown if (layers := LayerRange.parse(name))]


def _completed(settings: ForwardInputs, model: BertPreTrainedModel, scope: nn.Module, path: str) -> ForwardInputs:
    """Return the inputs with defaults for the cache and head mask; an encoder has no cache unless one is given."""
    config = model.config
    is_attention = isinstance(scope, BertSelfAttention) and "crossattention" not in path
    takes = inspect.signature(model.forward).parameters
    room = max(0, config.max_position_embeddings - settings.seq)
    cache, head_mask = settings.cache, settings.head_mask
    if cache is None:
        is_cached = is_attention and config.is_decoder and "past_key_values" in takes
        cache = min(settings.seq, room) if is_cached else 0
    if head_mask is None:
        head_mask = is_attention and config.attn_implementation == "eager"
    if cache and "past_key_values" not in takes:
        raise SelectionError(f"{type(model).__name__} takes no cache; leave it out or choose BertModel")
    if not 0 <= cache <= room:
        raise SelectionError(
            f"cache must be at least 0 and, with seq {settings.seq}, at most {room}, since max_position_embeddings is "
            f"{config.max_position_embeddings}; got {cache}"
        )
    return replace(settings, cache=cache, head_mask=head_mask)


def _inputs(model: BertPreTrainedModel, settings: ForwardInputs) -> dict[str, Any]:
    config, cache = model.config, settings.cache or 0
    inputs: dict[str, Any] = example_inputs(model, settings.batch, settings.seq)
    if settings.mask:
        ids = inputs["input_ids"]
        inputs["attention_mask"] = torch.empty(*ids.shape[:-1], cache + settings.seq, device="meta")
        if "encoder_hidden_states" in inputs:
            inputs["encoder_attention_mask"] = torch.empty(inputs["encoder_hidden_states"].shape[:2], device="meta")
    if settings.head_mask:
        inputs["head_mask"] = torch.empty(config.num_hidden_layers, config.num_attention_heads, device="meta")
    if cache:
        states = inputs.get("encoder_hidden_states")
        lengths = {"attention": cache} | ({} if states is None else {"crossattention": states.shape[1]})
        inputs["past_key_values"] = tuple(  # key and value of each attention
            tuple(
                torch.empty(settings.batch, block.num_attention_heads, length, block.attention_head_size, device="meta")
                for block, length in ((layer.get_submodule(name).self, length) for name, length in lengths.items())
                for _ in ("key", "value")
            )
            for layer in model.base_model.encoder.layer
        )
    return inputs


def _name_attention(flow: Flow, attention: BertSelfAttention, group: str) -> None:
    """Insert nodes with the names of transformers' `modeling_bert.py`: `query_layer`, `attention_scores` ...

    A tensor is named by the operator that uses it: the first operand of the first product is the query. A graph
    without these products raises an error. Each node is between the operator that makes a tensor and those that use it.
    """
    inside = [node for node in flow.nodes.values() if node.group == group and node.role == "function"]
    idents = {name: [node.id for node in inside if node.name == name] for name in (_FUSED, "torch.matmul", _SOFTMAX)}
    if idents[_FUSED]:
        (product,) = idents[_FUSED]
        for edge, name in zip(flow.into(product), ("query_layer", "key_layer", "value_layer"), strict=False):
            _name(flow, edge.source, edge.views, name, group)
    else:
        scores, product = idents["torch.matmul"]
        (softmax,) = idents[_SOFTMAX]
        query, key = flow.into(scores)
        if key.views[-1] != "transpose":
            raise ValueError("the scores are not query @ key.transpose(-1, -2)")
        value = flow.into(product)[1]
        _name(flow, query.source, query.views, "query_layer", group)
        _name(flow, key.source, key.views[:-1], "key_layer", group)
        _name(flow, value.source, value.views, "value_layer", group)
        _name_on_the_way(flow, scores, softmax, "attention_scores", group)
        (dropout,) = flow.out_of(softmax)
        _name_on_the_way(flow, dropout.target, product, "attention_probs", group)
        scale = f"{math.sqrt(attention.attention_head_size):g}"
        (divide,) = [node for node in inside if (node.name, node.detail) == ("/", scale)]
        flow.nodes[divide.id] = replace(divide, detail="")
        root = "math.sqrt(self.attention_head_size)"
        scalar = flow.add("scalar", root, "sqrt_head_size", detail=f"= {scale}", group=group)
        flow.edges.append(DiagramEdge(source=scalar, target=divide.id))
    _name(flow, product, (), "context_layer", group)


def _name(flow: Flow, source: str, views: tuple[str, ...], name: str, group: str) -> str:
    (shape, *_) = [shape_of(seen.tensor) for seen in flow.seen if (seen.source, seen.views) == (source, views)]
    ident = flow.add("tensor", name, shape=shape, group=group)
    size = len(views)
    takers = [number for number, edge in enumerate(flow.edges) if (edge.source, edge.views[:size]) == (source, views)]
    for number in takers:
        flow.edges[number] = replace(flow.edges[number], source=ident, views=flow.edges[number].views[size:])
    flow.edges.insert(takers[0], DiagramEdge(source=source, target=ident, shape=shape, views=views))
    return ident


def _name_on_the_way(flow: Flow, start: str, end: str, name: str, group: str) -> None:
    """Give the same name to the results of `start` and of each node after it, up to `end`."""
    at = start
    while at != end:
        (taker,) = flow.out_of(_name(flow, at, (), name, group))
        at = taker.target


def _report(flow: Flow, names: Mapping[str, str], scope: str, runs: Sequence[LayerRange], **about: Any) -> GraphReport:

    def below(path: str, group: str) -> str:
        around = group or names[scope]
        return path.removeprefix(f"{around}.") if around else path

    def copies_of(path: str) -> int:
        layers = LayerRange.parse(names[path].rpartition(".")[2])
        return len(layers) if layers and path != scope else 1

    def numbered(text: str) -> str:
        """Return `past_key_values[0-11][0]` for an input of equal layers, `[0-11]` for their row of `head_mask`."""
        pattern = r"^(past_key_values|)\[([0-9]+)\]"
        return re.sub(pattern, lambda at: f"{at[1]}[{runs[int(at[2])]}]", text) if runs else text

    edges = tuple(replace(edge, views=tuple(map(numbered, edge.views))) for edge in flow.edges)
    used = {end for edge in edges for end in (edge.source, edge.target)}
    nodes = []
    for node in (node for node in flow.nodes.values() if node.id in used):
        group, path = names[node.group], names[node.path]
        if node.role == "module":
            node = replace(node, name=below(path, group), path=path, copies=copies_of(node.path), group=group)
        else:
            node = replace(node, name=numbered(node.name), group=group)
        nodes.append(node)
    groups = []
    for path, module in flow.opened.items():
        around = max((other for other in flow.opened if path.startswith(f"{other}.")), key=len, default="")
        shown, parent, kind = names[path], names[around], _class_name(module)
        name, copies = below(shown, parent), copies_of(path)
        groups.append(DiagramGroup(path=shown, name=name, type=kind, copies=copies, parent=parent))
    return GraphReport(path=names[scope], nodes=tuple(nodes), edges=edges, groups=tuple(groups), **about)


def _class_name(module: nn.Module) -> str:
    cls = public(type(module))
    return address(cls) if is_of(cls, "torch") else cls.__name__
