"""The texts on the ranks of a training job and their traffic."""

TEXTS: dict[str, tuple[str, str]] = {
    "rank_of": ("{strategy}, rank {rank} of {ranks}", "{strategy}，{ranks} 个 rank 中的 rank {rank}"),
    "each_rank": ("{strategy}, each of {ranks} ranks", "{strategy}，{ranks} 个 rank 各自"),
    "param_dtype": ("parameters gathered in {dtype}", "以 {dtype} 聚集参数"),
    "reduce_dtype": ("gradients reduced in {dtype}", "以 {dtype} 归约梯度"),
    "bucket_view": ("gradients in DDP's buckets", "梯度位于 DDP 的桶中"),
    "travels": ("between ranks, per step", "每步在 rank 之间"),
    "call_in": ("{collective} {phase}", "{phase} {collective}"),
    "call_of": ("{text} of {path}", "{path} 的{text}"),
    "call_ranks": ("{text}, {ranks} ranks", "{text}，{ranks} 个 rank"),
    "calls": ("calls", "调用次数"),
    "full_tensors": ("whole tensors", "完整张量"),
    "rank_sends": ("a rank sends", "每个 rank 发送"),
    "rank_sends_by": ("sent: {name}", "发送：{name}"),
    "note_ranks": (
        "parameters to update: {own} of rank {rank}, {count} of rank {ranks}; --rank estimates another one",
        "rank {rank} 更新 {own} 个参数，rank {ranks} 更新 {count} 个；用 --rank 估算另一个",
    ),
    "note_ring": (
        "a rank sends: in a ring, (n-1)/n of the whole tensor for all-gather, reduce-scatter and broadcast, twice that "
        "for all-reduce",
        "每个 rank 发送：环形通信，all-gather、reduce-scatter 和 broadcast 为完整张量的 (n-1)/n，all-reduce 为其两倍",
    ),
    "gpus": ("GPUs", "GPU 数"),
    "strategy": ("strategy", "策略"),
    "strategy_none": ("one process", "单进程"),
    "setting": ("setting", "设置"),
    "rank_batch": ("batch each", "每卡批大小"),
    "times": (" x {name}", " 块 {name}"),
    "verdict_ranks_yes": (
        "{ranks}{on}: batch {total} fits at seq {seq} with {strategy}, {way}: batch {batch} each, {memory}",
        "{ranks}{on}：放得下总批大小 {total}（序列长度 {seq}，{strategy}，{way}）：每卡批大小 {batch}，{memory}",
    ),
    "verdict_ranks_no": (
        "no: batch {total} does not fit on {ranks}{on} at seq {seq} with {strategy}, {way}: batch {batch} each, {memory}",
        "不行：{ranks}{on}放不下总批大小 {total}（序列长度 {seq}，{strategy}，{way}）：每卡批大小 {batch}，{memory}",
    ),
    "note_fewest": (
        "tried: 1 to 8 GPUs and multiples of 8; strategies after the first row with the setting that needs the least memory",
        "试过 1 至 8 块及 8 的倍数；第一行之后的策略只试最省内存的设置",
    ),
    "note_ranks_unknown": (
        "not counted: buffers of NCCL, and separate memory pools of CUDA streams",
        "未计入：NCCL 的缓冲区，以及各 CUDA 流各自的内存池",
    ),
    # real ranks
    "measured_rank": ("rank", "rank 编号"),
    "between_steps": ("between steps", "两步之间"),
    "sends": ("sends per step", "每步发送"),
    "step_time": ("step", "一步的用时"),
    "ranks_agree": ("ranks {ranks} agree in memory and traffic", "rank {ranks} 的内存与通信量一致"),
    "rank_differs": (
        "rank {ranks} differs from {others}: {differences}",
        "rank {ranks} 与 {others} 不同：{differences}",
    ),
    "difference": ("{name} {own}, not {others} ({by} bytes)", "{name} {own}，而非 {others}（{by} 字节）"),
    "note_ranks_measured": (
        "measured: the tensors that each real rank allocates and frees, without temporary memory inside kernels, on "
        "{machine}; times from separate steps",
        "实测：{machine} 上每个真实 rank 分配和释放的张量，不含算子内部的临时内存；用时来自另外几步",
    ),
    "note_gloo": (
        "gloo reduces a copy of the gradients, which NCCL does not: such a copy is part of the estimate and of the "
        "measurement",
        "gloo 归约的是梯度的副本，NCCL 不产生副本：估算与实测均包含它",
    ),
}
