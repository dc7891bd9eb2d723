"""The texts of `estimate` and `profile`, and of the file of --from."""

_NO_TIME = "; 'bertscope calibrate' on the machine with the card measures the rates that it needs"
_NO_TIME_ZH = "；在带有该卡的机器上运行 'bertscope calibrate' 会测量所需的速率"
TEXTS: dict[str, tuple[str, str]] = {
    "no_time_cpu": (
        "no time: it is predicted for CUDA only; give --gpu or --device cuda",
        "没有时间：只对 CUDA 预测；请给出 --gpu 或 --device cuda",
    ),
    "no_time_uncalibrated": (
        f"no time: there is no calibration of {{card}}{_NO_TIME}",
        f"没有时间：没有 {{card}} 的校准{_NO_TIME_ZH}",
    ),
    "no_time_precision": (
        f"no time: nothing that fits in one process runs in a precision that the calibration has{_NO_TIME}",
        f"没有时间：在单个进程中放得下的设置里，没有校准包含的精度{_NO_TIME_ZH}",
    ),
    # the table of estimate and profile
    "at_peak": ("at the peak", "峰值时刻"),
    "peak": ("peak", "峰值"),
    "saved": ("saved for backward", "为反向保存的张量"),
    "allocated": ("allocated on the device", "设备上已分配"),
    "reserved_by_torch": ("reserved by torch", "torch 预留"),
    "estimated_peak": ("estimated peak", "估算的峰值"),
    "worst_error": ("  worst error", "  最大误差"),
    "process_step": ("process: one step", "进程：一步"),
    "process_run": ("process: whole run", "进程：全程"),
    "step_median": ("step, median of {count}", "一步的用时，{count} 步的中位数"),
    "spread": ("  slowest - fastest", "  最慢减最快"),
    "tokens_per_second": ("tokens per second", "每秒 token 数"),
    "flops_per_second": ("FLOP/s", "FLOP/s"),
    "obtained_estimated": ("estimated", "估算"),
    "obtained_measured": ("measured", "实测"),
    "obtained_nothing": ("nothing measured", "未测得"),
    "variant": ("{name} ({obtained})", "{name}（{obtained}）"),
    "bytes": ("{count} bytes", "{count} 字节"),
    "saved_by_module": ("saved for backward, by module", "为反向保存的张量，按模块"),
    "whole_model": ("(model)", "（模型）"),
    "what": ("what", "内容"),
    "each": ("each", "每个"),
    "tensors": ("tensors", "张量数"),
    "more_rows": (
        "and {count} more, {sizes}; --rows 0 lists them all",
        "另有 {count} 行，{sizes}；--rows 0 全部列出",
    ),
    # the pictures of a step
    "live_memory": ("live memory, {unit}", "内存，{unit}"),
    "order": ("in the order of allocations (not time)", "按分配的先后次序（不是时间）"),
    "sample": ("sample", "采样点"),
    # the verdict and the conclusions of estimate and profile
    "card": ("{name} with {size}", "{name}（显存 {size}）"),
    "fits_yes": ("fits", "放得下"),
    "fits_uncertain": ("may fit", "可能放得下"),
    "fits_no": ("does not fit", "放不下"),
    "every": ("each of {count} ", " {count} 种都"),
    "fits_one": ("{name} {answer}", "{name} {answer}"),
    "fits_on": ("{every}{answer} on {card}: ", "{card}上{every}{answer}："),
    "fits_each": ("fits on {card}: {each}; ", "{card}上是否放得下：{each}；"),
    "fits_row": ("fits on {name}", "{name} 上放得下"),
    "peak_of": ("peak {size} {place}", "峰值 {size}（{place}）"),
    "lowest_peak": ("{peak}, the lowest of {count}", "{peak}，{count} 种中最低"),
    "equal_peaks": ("each of {count} peaks is {size}, {place}", "{count} 种的峰值都是 {size}（{place}）"),
    "with_reserved": ("{text}, reserved {size}", "{text}，预留 {size}"),
    "nothing_measured": ("nothing was measured", "没有测得结果"),
    "operator_of": ("{phase}, in {operator} of {path}", "{phase}，{path} 的 {operator}"),
    "operator_of_own_code": (
        "{phase}, in {operator} of the model's own code",
        "{phase}，模型自身代码中的 {operator}",
    ),
    "operator": ("{phase}, in {operator}", "{phase}，{operator}"),
    "of": ("{phase} of {path}", "{phase}，{path}"),
    "of_own_code": ("{phase} of the model's own code", "{phase}，模型自身的代码"),
    "peak_is": ("{name}: peak {place}", "{name}：峰值位于{place}"),
    "peak_falls": ("the peak falls by {size} ({percent} %)", "峰值降低 {size}（{percent} %）"),
    "peak_stays": (
        "the peak does not change: no tensor saved for backward exists at the peak",
        "峰值不变：峰值时刻已没有为反向保存的张量",
    ),
    "peak_rises": ("the peak rises by {size}", "峰值升高 {size}"),
    "takes": ("; a step takes {ratio} x as long", "；一步的用时为原来的 {ratio} 倍"),
    "takes_flops": (" ({ratio} x the FLOPs)", "（FLOPs 为 {ratio} 倍）"),
    "times_overlap": (
        "; the times overlap: raise --steps",
        "；两者用时有重叠：增大 --steps 可以更准确",
    ),
    "lower_from": (
        "the peak is lower from batch {batch} on{points} (estimated)",
        "从批大小 {batch} 起峰值才会降低{points}（估算）",
    ),
    "lower_at": (
        "; at batch {batch}: {size} instead of {before}",
        "；批大小 {batch} 时为 {size}，原为 {before}",
    ),
    # the notes of estimate and profile
    "note_measured": (
        "measured: the allocator's events on {machine}; times from separate steps without the profiler",
        "实测：{machine} 上分配器的事件；用时来自不开性能分析器的另外几步",
    ),
    "note_estimated": (
        "estimated for {device}: a run on fake tensors; torch dispatches every operator, nothing is allocated; "
        "{accuracy}",
        "{device} 上的估算：用 fake tensor 运行，torch 分派每个算子，但不实际分配内存；{accuracy}",
    ),
    "accuracy_cpu": (
        "within 0.1 % of the measured peak of BERTs in training (docs/accuracy.md)",
        "与 BERT 训练时的实测峰值相差不到 0.1 %（docs/accuracy.md）",
    ),
    "accuracy_cuda": ("not compared with a GPU", "未与 GPU 实测比对"),
    "note_layers": (
        "{count} layers ran; the other layers are extrapolated (verified)",
        "实际运行了 {count} 层，其余各层为外推所得（已验证）",
    ),
    "note_units": (
        "1 MiB = 2**20 B; tied tensors once; not the first step: it starts with optimizer state, without gradients",
        "1 MiB = 2**20 B；共享张量只计一次；不是第一步：开始时已有优化器状态，尚无梯度",
    ),
    "note_units_kept": (
        "1 MiB = 2**20 B; tied tensors once; not the first step: it starts with optimizer state, and adds to existing "
        "gradients",
        "1 MiB = 2**20 B；共享张量只计一次；不是第一步：开始时已有优化器状态，并累加到已有的梯度上",
    ),
    "note_context_measured": (
        "context and other memory in use on the GPU: {size}, measured",
        "GPU 上的上下文及其他已用显存：{size}（实测）",
    ),
    "note_allocated": (
        "allocated: in blocks of 512 B, with {size} for cuBLAS (on Hopper 32 MiB for each thread)",
        "已分配：按 512 B 的块计，含 cuBLAS 的 {size}（Hopper 上每个线程 32 MiB）",
    ),
    "note_not_counted": (
        "not counted: cuBLASLt's workspace of 1 MiB for each thread, and that of cuDNN, if attention runs there",
        "未计入：cuBLASLt 每个线程 1 MiB 的工作区；若注意力由 cuDNN 计算，还有 cuDNN 的工作区",
    ),
    "note_reserved": (
        "reserved: the simulated caching allocator over three steps; the real one may differ by a tenth",
        "预留：模拟缓存分配器运行三步的结果；实际可能相差十分之一",
    ),
    "note_context": (
        "the CUDA context adds {range} outside torch, by GPU and version of torch",
        "CUDA 上下文在 torch 之外另占 {range}，因 GPU 和 torch 版本而异",
    ),
    "predicted_step": ("step time (predicted)", "一步用时（预测）"),
    "mfu": ("MFU of {peak} TFLOP/s", "MFU（峰值 {peak} TFLOP/s）"),
    "mfu_column": ("MFU", "MFU"),
    "note_time": (
        "time: matrix products and bytes moved at the rates of the card, corrected by one measured step of each "
        "precision and strategy",
        "用时：按该卡的速率计算矩阵乘法和搬运的字节，并以每种精度和策略实测的一步校正",
    ),
    "note_mfu": (
        "MFU: FLOPs of matrix products without recomputation, by the dense peak of {peak} TFLOP/s ({source})",
        "MFU：不含重计算的矩阵乘法 FLOPs 与稠密峰值 {peak} TFLOP/s 之比（{source}）",
    ),
    "note_no_peak": ("no MFU: no peak is published for it here", "没有 MFU：此处没有该卡的公开峰值"),
    "note_context_calibrated": (
        "the CUDA context adds {range} outside torch, as measured in steps",
        "CUDA 上下文在 torch 之外另占 {range}（各步中实测）",
    ),
    "note_smi": (
        "nvidia-smi would show {range}: reserved memory and the context",
        "nvidia-smi 将显示 {range}：预留的显存加上下文",
    ),
    # the file of --from
    "file": ("{path} ({format}): {keys}", "{path}（{format}）：{keys}"),
    "file_nothing": ("sets nothing that changes the memory of a step", "没有影响一步内存的设置"),
    "file_not_used": ("not used of {path}: {keys}", "{path} 中未采用：{keys}"),
    "file_not_modelled": ("not modelled: {keys}", "未建模：{keys}"),
    "file_unknown": ("unknown keys, not used: {keys}", "未知的键，未采用：{keys}"),
    "file_no_effect": (
        "{count} other keys have no effect on the memory of a training step (--format json lists them)",
        "另有 {count} 个键不影响训练步的内存（--format json 会列出）",
    ),
}
