"""The same computation as other sources count it, each by its own rules."""

from __future__ import annotations

from collections.abc import Iterator

from bertscope.config import BertConfig
from bertscope.flops_reports import Convention, FlopsReport

# google-research/electra, flops_computation.py: operations for each element.
DROPOUT, LAYER_NORM, ACTIVATION, SOFTMAX = 4, 5, 8, 5
ELECTRA_OUTPUT_SHARE = 0.15625  # the masked positions alone go through the output softmax


def conventions(
    report: FlopsReport, config: BertConfig, architecture: str, distinct_params: int, batch: int, seq: int
) -> Iterator[Convention]:
    """Every convention that applies to this model and mode."""
    total, training = report.rows[0].total, report.mode == "training"
    yield Convention(
        name="torch",
        value=total.matmul_flops,
        unit="FLOPs",
        how="matrix products alone, a multiply-add is 2, as dispatched",
        source="torch.utils.flop_counter",
    )
    yield Convention(
        name="macs",
        value=total.macs,
        unit="MACs",
        how="matrix products alone, a multiply-add is 1",
        source="fvcore, docs/flop_count.md",
    )
    if not training:
        yield Convention(
            name="calflops",
            value=total.matmul_flops + _calflops_elementwise(report),
            unit="FLOPs",
            how="a multiply-add is 2, LayerNorm 5 and softmax 1 an element, GELU and additions not seen",
            source="calflops README, Bert-base-chinese at 1 x 128",
        )
    if not config.is_decoder and config.position_embedding_type == "absolute":
        has_output = architecture in ("BertForMaskedLM", "BertForPreTraining")
        yield Convention(
            name="electra",
            value=round((2 if training else 1) * batch * electra_forward(config, seq, output=has_output)),
            unit="FLOPs",
            how="closed form with elementwise work and the embedding as a dense product; backward is 1 x forward"
            + (f"; {ELECTRA_OUTPUT_SHARE} of the positions decoded" if has_output else ""),
            source="google-research/electra, flops_computation.py",
        )
    yield Convention(
        name="palm",
        value=batch * seq * palm_per_token(config, distinct_params, seq, training=training),
        unit="FLOPs",
        how=("6 N + 12 L H Q T" if training else "2 N + 4 L H Q T")
        + f" a token, with N = {distinct_params:,} parameters, embeddings included",
        source="Chowdhery et al. 2022, arXiv:2204.02311, appendix B",
    )


def _calflops_elementwise(report: FlopsReport) -> int:
    weights = {"aten.native_layer_norm": 5, "aten._softmax": 1, "aten._safe_softmax": 1}
    return sum(weights.get(row.operator, 0) * row.elements for row in report.operators)


def palm_per_token(config: BertConfig, params: int, seq: int, *, training: bool) -> int:
    """6N + 12LHQT for a training step, a third of it for a forward."""
    forward = 2 * params + 4 * config.num_hidden_layers * config.hidden_size * seq
    return 3 * forward if training else forward


def electra_forward(config: BertConfig, seq: int, *, output: bool) -> float:
    """Forward FLOPs of one sequence; with `output` the vocabulary's softmax over the masked positions."""
    hidden, heads, inner, vocab = (
        config.hidden_size, config.num_attention_heads, config.intermediate_size, config.vocab_size,
    )  # fmt: skip
    attention = (
        3 * 2 * hidden * hidden + 3 * hidden  # query, key and value with their biases
        + 2 * hidden * seq + seq * heads * (SOFTMAX + DROPOUT + 1)  # scores, softmax, dropout, scale
        + 2 * hidden * seq  # weighted sum of the values
        + 2 * hidden * hidden + hidden + DROPOUT * hidden + hidden + LAYER_NORM * hidden  # output layer
    )  # fmt: skip
    feed_forward = (
        2 * hidden * inner + ACTIVATION * inner + inner
        + 2 * hidden * inner + hidden + DROPOUT * hidden + hidden + LAYER_NORM * hidden
    )  # fmt: skip
    embeddings = 2 * hidden * vocab + 2 * hidden * (seq + 2) + 2 * hidden + (LAYER_NORM + DROPOUT) * hidden
    head = (
        2 * hidden * vocab + 2 * hidden * hidden + hidden
        + (ACTIVATION + LAYER_NORM) * hidden + (SOFTMAX + 2) * vocab
    )  # fmt: skip
    layers = config.num_hidden_layers * (attention + feed_forward)
    return seq * (layers + embeddings + (ELECTRA_OUTPUT_SHARE * head if output else 0))
