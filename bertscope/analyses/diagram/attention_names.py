"""Names of self-attention's tensors in a recorded dataflow: `query_layer`, `attention_scores` ...

They are the names of transformers' `modeling_bert.py`. A tensor is named by the operator that uses it: the first
operand of the first product is the query. A graph without these products raises an error.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bertscope.analyses.diagram.dataflow import Flow
from bertscope.analyses.tracing.operator_costs import shape_of
from bertscope.model import BertSelfAttention
from bertscope.reports.diagram import DiagramEdge, DiagramNode

_SOFTMAX = "torch.nn.functional.softmax"
FUSED = "torch.nn.functional.scaled_dot_product_attention"


def name_attention(flow: Flow, attention: BertSelfAttention, group: str) -> None:
    """Insert a node with each name between the operator that makes a tensor and those that use it."""
    inside = [node for node in flow.nodes.values() if node.group == group and node.role == "function"]
    found = {name: [node.id for node in inside if node.name == name] for name in (FUSED, "torch.matmul", _SOFTMAX)}
    if found[FUSED]:
        (product,) = found[FUSED]
        for edge, name in zip(flow.into(product), ("query_layer", "key_layer", "value_layer"), strict=False):
            _name(flow, edge.source, edge.views, name, group)
    else:
        scores, product = found["torch.matmul"]
        (softmax,) = found[_SOFTMAX]
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
        _name_scale(flow, attention, group)
    _name(flow, product, (), "context_layer", group)


def _name(flow: Flow, source: str, views: tuple[str, ...], name: str, group: str) -> str:
    """Insert a node after `source` and `views`, and before every user of that tensor; return its id."""
    (shape, *_) = [shape_of(seen.tensor) for seen in flow.seen if (seen.source, seen.views) == (source, views)]
    ident = flow.add(DiagramNode(id="", role="tensor", name=name, shape=shape, group=group))
    size = len(views)
    takers = [place for place, edge in enumerate(flow.edges) if (edge.source, edge.views[:size]) == (source, views)]
    for place in takers:
        flow.edges[place] = replace(flow.edges[place], source=ident, views=flow.edges[place].views[size:])
    flow.edges.insert(takers[0], DiagramEdge(source=source, target=ident, shape=shape, views=views))
    return ident


def _name_on_the_way(flow: Flow, start: str, end: str, name: str, group: str) -> None:
    """Give the same name to the results of `start` and of each node after it, up to `end`."""
    at = start
    while at != end:
        (taker,) = flow.out_of(_name(flow, at, (), name, group))
        at = taker.target


def _name_scale(flow: Flow, attention: BertSelfAttention, group: str) -> None:
    """Insert a node for the divisor of the scores, written as in transformers."""
    scale = f"{math.sqrt(attention.attention_head_size):g}"
    (divide,) = [
        node for node in flow.nodes.values() if node.group == group and (node.name, node.detail) == ("/", scale)
    ]
    flow.nodes[divide.id] = replace(divide, detail="")
    name = "math.sqrt(self.attention_head_size)"
    scalar = DiagramNode(id="sqrt_head_size", role="scalar", name=name, detail=f"= {scale}", group=group)
    flow.edges.append(DiagramEdge(source=flow.add(scalar), target=divide.id))
