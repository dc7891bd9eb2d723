"""The FLOPs of the same run by the counting rules of other sources."""

from collections.abc import Iterator

from bertscope.config import BertConfig
from bertscope.reports.flops import Convention, FlopsReport

# google-research/electra, flops_computation.py: operations for each element.
DROPOUT, LAYER_NORM, ACTIVATION, SOFTMAX = 4, 5, 8, 5
_CALFLOPS = {"aten.native_layer_norm": 5, "aten._softmax": 1, "aten._safe_softmax": 1}
_FVCORE = {"aten.native_layer_norm": 5}
ELECTRA_OUTPUT_SHARE = 0.15625  # only the masked positions go through the output softmax


def conventions(
    report: FlopsReport, config: BertConfig | None, distinct_params: int, batch: int, seq: int
) -> Iterator[Convention]:
    """Yield every convention that applies to this model and mode; closed forms need a BertConfig."""
    total, forward, training = report.rows[0].total, report.rows[0].forward, report.mode == "training"
    passes = 3 if training else 1  # forward, and backward as twice the forward
    yield Convention(
        name="torch",
        value=total.matmul_flops,
        unit="FLOPs",
        how="matrix products only, a multiply-add is 2, as dispatched",
        source="torch.utils.flop_counter",
    )
    yield Convention(
        name="macs",
        value=total.macs,
        unit="MACs",
        how="matrix products only, a multiply-add is 1",
        source="half of torch.utils.flop_counter; the MACs of calflops",
    )
    yield Convention(
        name="calflops",
        value=passes * (forward.matmul_flops + _elementwise(report, _CALFLOPS)),
        unit="FLOPs",
        how="a multiply-add is 2, LayerNorm 5 and softmax 1 for each element, GELU and additions not counted"
        + ("; backward is 2 x forward, whatever is frozen" if training else ""),
        source="calflops 0.3.2, README: BERT-base-chinese at 1 x 128",
    )
    if not training:
        yield Convention(
            name="fvcore",
            value=forward.macs + _elementwise(report, _FVCORE),
            unit="MACs",
            how="a multiply-add is 1, and LayerNorm 5 for each element",
            source="fvcore 0.1.5, FlopCountAnalysis",
        )
    if config is None:
        return
    if not config.is_decoder and config.position_embedding_type == "absolute":
        yield Convention(
            name="electra",
            value=round((2 if training else 1) * batch * electra_forward(config, seq, training=training)),
            unit="FLOPs",
            how="closed form with elementwise work and the embedding as a dense product, for any head; "
            + (
                f"backward is 1 x forward, {ELECTRA_OUTPUT_SHARE} of the positions decoded"
                if training
                else "a binary classifier on every token"
            ),
            source="google-research/electra, flops_computation.py",
        )
    yield Convention(
        name="palm",
        value=batch * seq * passes * (2 * distinct_params + 4 * config.num_hidden_layers * config.hidden_size * seq),
        unit="FLOPs",
        how=(
            "6 N + 12 L H Q T for each token"
            if training
            else "2 N + 4 L H Q T for each token (a third of a training step)"
        )
        + f", with N = {distinct_params:,} parameters, embeddings included",
        source="Chowdhery et al. 2022, arXiv:2204.02311, appendix B",
    )


def _elementwise(report: FlopsReport, weights: dict[str, int]) -> int:
    """Return the weighted elements of the operators of forward."""
    return sum(weights.get(row.operator, 0) * row.elements for row in report.operators if row.phase == "forward")


def electra_forward(config: BertConfig, seq: int, *, training: bool) -> float:
    """Return the forward FLOPs of one sequence: in training with the output softmax, else with a token classifier.

    The attention's LayerNorm counts once and not for each element, as in ELECTRA's script (its issue 121).
    """
    hidden, heads, inner, vocab = (
        config.hidden_size, config.num_attention_heads, config.intermediate_size, config.vocab_size,
    )  # fmt: skip
    attention = (
        3 * 2 * hidden * hidden + 3 * hidden  # query, key and value with their biases
        + 2 * hidden * seq + seq * heads * (SOFTMAX + DROPOUT + 1)  # scores, softmax, dropout, scale
        + 2 * hidden * seq  # weighted sum of the values
        + 2 * hidden * hidden + hidden + DROPOUT * hidden + hidden + LAYER_NORM  # output layer
    )  # fmt: skip
    feed_forward = (
        2 * hidden * inner + ACTIVATION * inner + inner
        + 2 * hidden * inner + hidden + DROPOUT * hidden + hidden + LAYER_NORM * hidden
    )  # fmt: skip
    embeddings = 2 * hidden * vocab + 2 * hidden * (seq + 2) + 2 * hidden + (LAYER_NORM + DROPOUT) * hidden
    decoder = (
        2 * hidden * vocab + 2 * hidden * hidden + hidden
        + (ACTIVATION + LAYER_NORM) * hidden + (SOFTMAX + 2) * vocab
    )  # fmt: skip
    classifier = 2 * hidden * hidden + hidden + ACTIVATION * hidden + 2 * hidden
    layers = config.num_hidden_layers * (attention + feed_forward)
    return seq * (layers + embeddings + (ELECTRA_OUTPUT_SHARE * decoder if training else classifier))
