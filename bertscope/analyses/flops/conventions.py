"""The FLOPs of the same run by the counting rules of other sources."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bertscope.config import BertConfig
from bertscope.reports.flops import Convention, FlopsReport

# google-research/electra, flops_computation.py: operations for each element.
DROPOUT, LAYER_NORM, ACTIVATION, SOFTMAX = 4, 5, 8, 5
_CALFLOPS = {"aten.native_layer_norm": 5, "aten._softmax": 1, "aten._safe_softmax": 1}
_FVCORE = {"aten.native_layer_norm": 5}
ELECTRA_DISCRIMINATOR = "ElectraForPreTraining"  # classifies every token, also in training
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
    sizes = ElectraSizes.of(config.to_dict() if config else report.subject.config or {})
    if sizes is not None:
        is_decoded = training and report.subject.architecture != ELECTRA_DISCRIMINATOR
        head = (
            f"{ELECTRA_OUTPUT_SHARE} of the positions decoded" if is_decoded else "a binary classifier on every token"
        )
        yield Convention(
            name="electra",
            value=round((2 if training else 1) * batch * electra_forward(sizes, seq, decoded=is_decoded)),
            unit="FLOPs",
            how="closed form with elementwise work and the embedding as a dense product, for any head; "
            + ("backward is 1 x forward, " if training else "")
            + head,
            source="google-research/electra, flops_computation.py",
        )
    if config is None:
        return
    terms = "6 N + 12 L H Q T" if training else "2 N + 4 L H Q T"
    share = "" if training else " (a third of a training step)"
    yield Convention(
        name="palm",
        value=batch * seq * passes * (2 * distinct_params + 4 * config.num_hidden_layers * config.hidden_size * seq),
        unit="FLOPs",
        how=f"{terms} for each token{share}, with N = {distinct_params:,} parameters, embeddings included",
        source="Chowdhery et al. 2022, arXiv:2204.02311, appendix B",
    )


def _elementwise(report: FlopsReport, weights: dict[str, int]) -> int:
    """Return the weighted elements of the operators of forward."""
    return sum(weights.get(row.operator, 0) * row.elements for row in report.operators if row.phase == "forward")


@dataclass(frozen=True, kw_only=True)
class ElectraSizes:
    """The sizes that ELECTRA's script counts with; `embedding` is the hidden size in a BERT."""

    hidden: int
    embedding: int
    layers: int
    heads: int
    inner: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ElectraSizes | None":
        """Return the sizes of a BERT or ELECTRA that is an encoder with absolute positions; None of another model."""
        is_encoder = config.get("position_embedding_type") == "absolute" and not config.get("is_decoder")
        if config.get("model_type") not in ("bert", "electra") or not is_encoder:
            return None
        hidden = config["hidden_size"]
        return cls(
            hidden=hidden, embedding=config.get("embedding_size", hidden), layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"], inner=config["intermediate_size"], vocab=config["vocab_size"],
        )  # fmt: skip


def electra_forward(sizes: ElectraSizes, seq: int, *, decoded: bool) -> float:
    """Return the forward FLOPs of one sequence: with the output softmax if `decoded`, else with a token classifier.

    The attention's LayerNorm counts once and not for each element, as in ELECTRA's script (its issue 121).
    """
    hidden, narrow, heads, inner, vocab = sizes.hidden, sizes.embedding, sizes.heads, sizes.inner, sizes.vocab
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
    embeddings = 2 * narrow * vocab + 2 * narrow * (seq + 2) + 2 * narrow + (LAYER_NORM + DROPOUT) * narrow
    if narrow != hidden:
        embeddings += 2 * hidden * narrow + hidden  # projection to the hidden size
    decoder = (
        2 * narrow * vocab + 2 * hidden * narrow + narrow
        + (ACTIVATION + LAYER_NORM) * narrow + (SOFTMAX + 2) * vocab
    )  # fmt: skip
    classifier = 2 * hidden * hidden + hidden + ACTIVATION * hidden + 2 * hidden
    layers = sizes.layers * (attention + feed_forward)
    return seq * (layers + embeddings + (ELECTRA_OUTPUT_SHARE * decoder if decoded else classifier))
