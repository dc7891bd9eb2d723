"""The texts around the steps of `explain`, whose sentences are in its report (analyses/explain/texts.py)."""

TEXTS: dict[str, tuple[str, str]] = {
    "explain_sizes": (
        "FLOPs at batch {batch}, seq {seq}: forward, matrix products only, a multiply-add is 2",
        "批大小 {batch}、序列长度 {seq} 时的 FLOPs：只计前向的矩阵乘法，一次乘加计 2",
    ),
    "explain_params": ("parameters: {formula}", "参数量：{formula}"),
    "explain_flops": ("FLOPs: {formula}", "FLOPs：{formula}"),
    "explain_each": ("{name} (each of {count})", "{name}（每层，共 {count} 层）"),
    "explain_step": ("step", "步骤"),
    "explain_flow": ("in -> out", "输入 -> 输出"),
    "explain_column_params": ("parameters", "参数量"),
    "explain_sentence": ("what it does", "作用"),
    "explain_ids": ("ids", "编号"),
    "explain_equal": ("equal to the built model", "与构建的模型一致"),
    "explain_unequal": ("NOT equal to the built model", "与构建的模型不一致"),
    "explain_sum": (
        "{group}: {params} parameters (counted {counted}){flops}: {verdict}",
        "{group}：{params} 个参数（统计得 {counted}）{flops}：{verdict}",
    ),
    "explain_sum_flops": (
        ", {flops} FLOPs (counted {counted})",
        "，{flops} FLOPs（统计得 {counted}）",
    ),
}
