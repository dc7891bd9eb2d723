"""The texts of `fit`, `estimate` and `profile`, in English and in Chinese, by key.

The sentences of `explain` are in its report, so analyses/explain/texts.py has them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LANGUAGES = ("en", "zh")
_chosen: ContextVar[int] = ContextVar("language", default=0)


def choose_language(language: str) -> None:
    """Set the language of the texts, one of LANGUAGES, for the rest of this run."""
    _chosen.set(LANGUAGES.index(language))


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """Set the language of the texts within a `with` statement."""
    token = _chosen.set(LANGUAGES.index(language))
    try:
        yield
    finally:
        _chosen.reset(token)


def say(key: str, **values: Any) -> str:
    """Return a text in the chosen language, with the values in its places."""
    return TEXTS[key][_chosen.get()].format(**values)


def phrase(english: str) -> str:
    """Return a phrase of a report in the chosen language, as it is if PHRASES does not have it."""
    return PHRASES.get(english, english) if _chosen.get() else english


TEXTS: dict[str, tuple[str, str]] = {
    # between parts of a sentence
    "comma": (", ", "，"),
    "semicolon": ("; ", "；"),
    "named": ("{name}: {text}", "{name}：{text}"),
    "range": ("{low} to {high}", "{low} 至 {high}"),
    # the model and the run
    "attention": ("{name} attention", "{name} 注意力"),
    "as_in": ("as in {name}", "与 {name} 的实现一致"),
    "own": ("bertscope's own", "bertscope 自带的实现"),
    "mode_training": ("training", "训练"),
    "mode_forward": ("forward", "训练模式的前向"),
    "mode_inference": ("inference", "推理"),
    "batch": ("batch {count}", "批大小 {count}"),
    "sequence": ("sequence {count}", "序列长度 {count}"),
    "own_dtypes": ("the dtypes of its parameters", "参数自身的 dtype"),
    "autocast": ("{dtype} autocast", "{dtype} autocast"),
    "optimizer": ("optimizer {name}", "优化器 {name}"),
    "momentum": ("momentum {value}", "动量 {value}"),
    "amsgrad": ("amsgrad", "amsgrad"),
    "micro_batches": ("{count} micro-batches", "{count} 个微批次"),
    "gradients_kept": ("gradients kept", "梯度保留（不置为 None）"),
    "gradients_clipped": ("gradients clipped", "梯度裁剪"),
    "ema": ("average of the weights", "权重的滑动平均"),
    "outputs_held": ("outputs held", "反向期间保留输出"),
    "grad_scaler": ("GradScaler", "GradScaler"),
    "assumed": ("{answer}; assumed: {settings}", "{answer}；假定：{settings}"),
    "more_notes": ("{note} (-v: {count} more notes)", "{note}（另有 {count} 条说明，用 -v 显示）"),
    "left_out": (
        "(columns left out: {names}; widen the terminal, or pipe)",
        "（未显示的列：{names}；加宽终端或输出到管道即可显示）",
    ),
    # parts of the memory and phases
    "part_parameters": ("parameters", "参数"),
    "part_buffers": ("buffers", "缓冲区"),
    "part_optimizer_state": ("optimizer state", "优化器状态"),
    "part_inputs": ("inputs", "输入"),
    "part_gradients": ("gradients", "梯度"),
    "part_activations": ("activations", "激活"),
    "part_temporaries": ("temporaries", "临时张量"),
    "in_forward": ("in forward", "前向"),
    "in_backward": ("in backward", "反向"),
    "in_optimizer": ("in the optimizer step", "优化器步"),
    "row_forward": ("  in forward", "  前向"),
    "row_backward": ("  in backward", "  反向"),
    "row_optimizer": ("  in optimizer step", "  优化器步"),
    # the table of estimate and profile
    "at_peak": ("at the peak of the step", "一步的峰值时刻"),
    "peak": ("peak", "峰值"),
    "saved": ("saved for backward", "为反向保存"),
    "allocated": ("allocated on the device", "设备上已分配"),
    "reserved_by_torch": ("reserved by torch", "torch 预留"),
    "estimated_peak": ("estimated peak", "估计的峰值"),
    "worst_error": ("  worst error", "  最大误差"),
    "process_step": ("process: one step", "进程：一步"),
    "process_run": ("process: whole run", "进程：全程"),
    "step_median": ("step, median of {count}", "一步的用时，{count} 步的中位数"),
    "spread": ("  fastest to slowest", "  最快至最慢"),
    "tokens_per_second": ("tokens per second", "每秒 token 数"),
    "flops_per_second": ("FLOP/s", "FLOP/s"),
    "obtained_estimated": ("estimated", "估计"),
    "obtained_measured": ("measured", "实测"),
    "obtained_nothing": ("nothing measured", "未测得"),
    "variant": ("{name} ({obtained})", "{name}（{obtained}）"),
    "bytes": ("{count} bytes", "{count} 字节"),
    "saved_by_module": ("saved for backward, by module", "为反向保存，按模块"),
    "whole_model": ("(model)", "（模型）"),
    "what": ("what", "内容"),
    "each": ("each", "每个"),
    "tensors": ("tensors", "张量数"),
    "more_rows": (
        "and {count} more, {sizes}; --rows 0 lists them all",
        "另有 {count} 行，{sizes}；--rows 0 全部列出",
    ),
    # the verdict and the conclusions of estimate and profile
    "peak_of": ("peak {size} {place}", "峰值 {size}（{place}）"),
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
    "saves": (
        "{name} saves {size} for backward instead of {before}; ",
        "{name} 为反向保存 {size}，原为 {before}；",
    ),
    "peak_falls": ("the peak falls by {size} ({percent} %)", "峰值降低 {size}（{percent} %）"),
    "peak_stays": (
        "the peak does not change: no tensor saved for backward exists at the peak",
        "峰值不变：峰值时刻已没有为反向保存的张量",
    ),
    "peak_rises": ("the peak rises by {size}", "峰值升高 {size}"),
    "takes": ("; a step takes {ratio} x as long", "；一步的用时为 {ratio} 倍"),
    "takes_flops": (" ({ratio} x the FLOPs)", "（FLOPs 为 {ratio} 倍）"),
    "times_overlap": (
        "; the times overlap: more --steps tell more",
        "；两者用时有重叠：增大 --steps 可看得更清楚",
    ),
    "lower_from": (
        "the peak is lower from batch {batch} on{points} (estimated)",
        "从批大小 {batch} 起峰值才会降低{points}（估计）",
    ),
    "lower_at": (
        "; at batch {batch}: {size} instead of {before}",
        "；批大小 {batch}：{size}，原为 {before}",
    ),
    # the notes of estimate and profile
    "note_measured": (
        "measured: the allocator's events on {machine}; times from separate steps without the profiler",
        "实测：{machine} 上分配器的事件；用时来自不开性能分析器的另外几步",
    ),
    "note_estimated": (
        "estimated for {device}: a run on fake tensors; torch dispatches every operator, nothing is allocated; "
        "{accuracy}",
        "{device} 上的估计：在 fake tensor 上运行，torch 分派每个算子，但不分配内存；{accuracy}",
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
    # the table of fit
    "answer_yes": ("yes", "可以"),
    "answer_uncertain": ("not certain", "不确定"),
    "answer_no": ("no", "不行"),
    "short_by": ("{answer}, short by {size}", "{answer}，差 {size}"),
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
    "step_flops": ("FLOPs of the step", "一步的 FLOPs"),
    "more_flops": ("more FLOPs", "FLOPs 增加"),
    # the verdict of fit
    "verdict_yes": (
        "yes: batch {batch} fits{on} at seq {seq} with {way}: {memory}",
        "可以：{on}批大小 {batch} 放得下（序列长度 {seq}，{way}）：{memory}",
    ),
    "verdict_uncertain": (
        "not certain: batch {batch} may fit{on} at seq {seq} with {way}: {memory}",
        "不确定：{on}批大小 {batch} 可能放得下（序列长度 {seq}，{way}）：{memory}",
    ),
    "verdict_no": (
        "no: not even batch {batch} fits{on} at seq {seq} with {way}: {memory}",
        "不行：{on}连批大小 {batch} 也放不下（序列长度 {seq}，{way}）：{memory}",
    ),
    "on": (" on {name}", "{name} 上"),
    "way": ("{precision}, checkpointing {strategy}", "{precision}，梯度检查点 {strategy}"),
    "peak_size": ("peak {size}", "峰值 {size}"),
    "of_budget": ("{text} of {size}", "{text}，可用 {size}"),
    "chosen_kernel": ("the kernel that torch chooses", "由 torch 选择的内核"),
    "kernel": ("{name} kernel", "{name} 内核"),
    "budget": ("{settings}, budget {place}{size}", "{settings}，可用 {place}{size}"),
    "both": (" and ", "和"),
    # the notes of fit
    "note_head": (
        "the head matters: with --architecture {head} the answer is {answers}",
        "结论与任务头有关：用 --architecture {head} 时，{answers}",
    ),
    "note_head_answer": ("{answer} for {way} at seq {seq}", "{way}、序列长度 {seq}：{answer}"),
    "note_answers": (
        "yes: the simulated allocator serves it; no: not even the tensors fit; else it is not certain",
        "可以：模拟的分配器能满足全部请求；不行：单是张量就放不下；其余为不确定",
    ),
    "note_batches": (
        "batch: the simulated allocator serves it; by bytes: only the tensors fit, so it is not certain",
        "批大小：模拟的分配器能满足全部请求；按字节：仅张量放得下，因此不确定",
    ),
    "note_cheapest": (
        "cheapest setting for batch {batch} at seq {seq}: {way}",
        "批大小 {batch}、序列长度 {seq} 时计算量最小的设置：{way}",
    ),
    "nothing_tried": ("nothing that was tried", "试过的设置都不行"),
    "note_fit_estimated": (
        "estimated: every operator of the step dispatched, nothing allocated",
        "估计：分派了这一步的每个算子，没有分配内存",
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
        "1 MiB = 2**20 B；FLOPs 只计矩阵乘积，一次乘加计 2",
    ),
    # tables of several models or GPUs
    "model": ("model", "模型"),
    "class": ("class", "类"),
    "parameters_in": ("parameters in", "参数精度"),
    "phase": ("in", "阶段"),
    "phase_forward": ("forward", "前向"),
    "phase_backward": ("backward", "反向"),
    "phase_optimizer": ("optimizer", "优化器步"),
    "gpu": ("GPU", "GPU"),
    "answer": ("answer", "结论"),
    "memory": ("memory", "显存"),
}

# What the tensors saved for backward are, as analyses/memory/summary.py names them.
PHRASES = {
    "attention probabilities": "注意力概率",
    "attention dropout mask": "注意力的 dropout 掩码",
    "dropped probabilities and mask": "dropout 后的概率和掩码",
    "dropped probabilities, or scaled query and key": "dropout 后的概率，或缩放后的 Q 和 K",
    "query, key, value and context, by head": "按头划分的 Q、K、V 和上下文",
    "query, key, value": "Q、K、V",
    "attention output and logsumexp": "注意力输出和 logsumexp",
    "activation's input": "激活函数的输入",
    "activation's output": "激活函数的输出",
    "dropout mask": "dropout 掩码",
    "dropout's output and mask": "dropout 的输出和掩码",
    "dropout's output": "dropout 的输出",
    "adapter's inner activations": "适配器内部的激活",
    "LayerNorm's output, mean and deviation": "LayerNorm 的输出、均值和标准差",
    "residual sum, LayerNorm's input": "残差和，即 LayerNorm 的输入",
    "copy in another dtype": "另一 dtype 的副本",
    "log-probabilities of the vocabulary": "词表上的对数概率",
    "random state for recomputation": "重计算所需的随机数状态",
}
