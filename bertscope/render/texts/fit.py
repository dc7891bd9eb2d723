"""The texts of `fit`."""

TEXTS: dict[str, tuple[str, str]] = {
    # the table of fit
    "answer_yes": ("yes", "可以"),
    "answer_uncertain": ("not certain", "不确定"),
    "answer_no": ("no", "不行"),
    "short_by": ("{answer}, short by {size}", "{answer}，还差 {size}"),
    "short_by_least": ("{answer}, short by at least {size}", "{answer}，至少还差 {size}"),
    "seq": ("seq", "序列长度"),
    "precision": ("precision", "精度"),
    "checkpointing": ("checkpointing", "梯度检查点"),
    "largest_batch": ("batch", "批大小"),
    "fits": ("fits", "能否放下"),
    "by_bytes": ("by bytes", "按字节"),
    "reserved": ("reserved", "预留"),
    "nvidia_smi": ("nvidia-smi", "nvidia-smi"),
    "next_peak": ("peak of batch + 1", "批大小加 1 的峰值"),
    "tokens": ("tokens", "token 数"),
    "step_flops": ("step FLOPs", "一步的 FLOPs"),
    "more_flops": ("more FLOPs", "FLOPs 增加"),
    # the verdict of fit
    "verdict_yes": (
        "yes: batch {batch} fits{on} at seq {seq} with {way}: {memory}",
        "可以：{on}放得下批大小 {batch}（序列长度 {seq}，{way}）：{memory}",
    ),
    "verdict_uncertain": (
        "not certain: batch {batch} may fit{on} at seq {seq} with {way}: {memory}",
        "不确定：{on}可能放得下批大小 {batch}（序列长度 {seq}，{way}）：{memory}",
    ),
    "verdict_no": (
        "no: batch {batch} does not fit{on} at seq {seq}; the closest setting is {way}: {memory}",
        "不行：{on}批大小 {batch} 放不下（序列长度 {seq}），最接近的设置是 {way}：{memory}",
    ),
    "verdict_no_batch": (
        "no: not even batch {batch} fits{on} at seq {seq} with {way}: {memory}",
        "不行：{on}连批大小 {batch} 都放不下（序列长度 {seq}，{way}）：{memory}",
    ),
    "on": (" on {name}", "{name} 上"),
    "way": ("{precision}, checkpointing {strategy}", "{precision}，梯度检查点 {strategy}"),
    "peak_size": ("peak {size}", "峰值 {size}"),
    "of_budget": ("{text} of {size}", "{text}，可用 {size}"),
    "chosen_kernel": ("the kernel that torch chooses", "由 torch 选择的内核"),
    "kernel": ("{name} kernel", "{name} 内核"),
    "both": (" and ", " 和 "),
    # the notes of fit
    "note_head": (
        "the head matters: with --architecture {head} the answer is {answers}",
        "结论与任务头有关：改用 --architecture {head} 时，{answers}",
    ),
    "note_head_answer": ("{answer} for {way} at seq {seq}", "{way}、序列长度 {seq}：{answer}"),
    "note_answers": (
        "not certain: only the tensors fit, the allocator may fail",
        "不确定：仅张量放得下，分配器可能失败",
    ),
    "note_batches": (
        "by bytes: only the tensors fit, so it is not certain",
        "按字节：仅张量放得下，因此不确定",
    ),
    "note_cheapest": (
        "cheapest setting for batch {batch} at seq {seq}: {way}",
        "批大小 {batch}、序列长度 {seq} 时计算量最小的设置：{way}",
    ),
    "nothing_tried": ("nothing that was tried", "试过的设置都不行"),
    "note_fit_estimated": (
        "estimated: every operator of the step dispatched, nothing allocated",
        "估算：分派了这一步的每个算子，没有实际分配内存",
    ),
    "note_no_fused_kernel": (
        "{dtype}: no fused kernel for it on {gpu}, attention saves its scores; {other} has one",
        "{dtype}：{gpu} 上没有相应的融合内核，注意力要保存分数矩阵；{other} 有",
    ),
    "note_upper_context": (
        "the simulated allocator serves a batch with the upper context",
        "模拟分配器时，上下文按上限计",
    ),
    "note_given_context": (
        "the simulated allocator serves a batch with the context",
        "模拟分配器时，已扣除上下文",
    ),
    "note_margin": (
        "the simulated allocator serves a batch in {percent} % of what the upper context leaves",
        "模拟分配器时，只用扣除上下文上限后显存的 {percent} %",
    ),
    "note_lower_context": (
        "a batch whose tensors do not even fit with the lower context does not fit",
        "即使上下文按下限计，张量也放不下的批大小，判为“不行”",
    ),
    "note_published_context": (
        "CUDA context: {range}, {where}; --context sets yours",
        "CUDA 上下文：{range}，{where}；用 --context 给出实际值",
    ),
    "published_for_it": ("published for it ({source})", "为该 GPU 的公开数据（{source}）"),
    "published_for_others": ("published for other GPUs", "为其他 GPU 的公开数据"),
    "note_included": (
        "peak and reserved include {context} for the context and {workspaces} for cuBLAS",
        "峰值和预留均含上下文 {context} 和 cuBLAS 的 {workspaces}",
    ),
    "note_softmax": (
        "reserved: with the inputs of softmax, which eager attention saves before torch 1.11 (not with --context)",
        "预留：含 softmax 的输入，torch 1.11 之前 eager 注意力会保存它（给出 --context 时不含）",
    ),
    "note_fit_smi": (
        "nvidia-smi: from the tensors with the lower context to reserved; not compared with a GPU",
        "nvidia-smi：从张量加上下文下限到预留；未与 GPU 实测比对",
    ),
    "note_fit_units": (
        "1 MiB = 2**20 B; FLOPs are matrix products, a multiply-add is 2",
        "1 MiB = 2**20 B；FLOPs 只计矩阵乘法，一次乘加计 2",
    ),
}
