"""The FLOPs of the same run by the counting rules of other sources."""

from collections.abc import Iterator

from bertscope.config import BertConfig
from bertscope.reports.flops import Convention, FlopsReport

_CALFLOPS = {"aten.native_layer_norm": 5, "aten._softmax": 1, "aten._safe_softmax": 1}
_FVCORE = {"aten.native_layer_norm": 5}


def conventions(
    report: FlopsReport, config: BertConfig | None, distinct_params: int, batch: int, seq: int
) -> Iterator[Convention]:
    """Yield every convention that applies to this model and mode; the closed form needs a BertConfig."""
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
