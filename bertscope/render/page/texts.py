"""The words and sentences of the page, in English and in Chinese, by key; a sentence has its values in braces."""

LANGUAGES = ("en", "zh")

TEXTS: dict[str, tuple[str, str]] = {
    # Sections
    "overview": ("Overview", "概览"),
    "differences": ("Differences", "差异"),
    "parameters": ("Parameters", "参数量"),
    "FLOPs": ("FLOPs", "计算量（FLOPs）"),
    "memory": ("Memory of a step", "训练一步的内存"),
    "fit": ("What fits", "能否放下"),
    "forward": ("Data flow", "数据流"),
    "configuration": ("Configuration", "配置"),
    "contents": ("Sections", "目录"),
    # Verdict
    "size": ("batch {batch}, sequence length {seq}", "批大小 {batch}、序列长度 {seq}"),
    "place_budget": ("in {memory}", "在 {memory} 内"),
    "place_gpu": ("on {card} ({memory})", "在 {card}（{memory}）上"),
    "yes": ("Fits {place}", "{place}放得下"),
    "uncertain": ("May fit {place}", "{place}可能放得下"),
    "no": ("Does not fit {place}", "{place}放不下"),
    "needs": ("{size}, {way}: peak {peak}.", "{size}，{way}：峰值 {peak}。"),
    "short": ("It is short by {bytes}.", "还差 {bytes}。"),
    "unasked": ("Peak {peak}", "峰值 {peak}"),
    "reserved": ("{context} of it is the CUDA context with workspaces; with fragmentation {bytes} are reserved.",
                 "其中 CUDA 上下文与工作区占 {context}；连同显存碎片共预留 {bytes}。"),
    "way": ("{precision} without checkpointing", "{precision}，不使用梯度检查点"),
    "way_checkpointed": ("{precision}, checkpointing {strategy}", "{precision}，梯度检查点 {strategy}"),
    "other_ways": ("This batch fits with {ways}.", "改用以下设置时，该批大小放得下：{ways}。"),
    "largest": ("Largest batch", "最大批大小"),
    "largest_of": ("{batch} with {way}", "{way}：{batch}"),
    "none_fits": ("none with {way}", "{way}：无"),
    "assumed": ("Assumed", "假定"),
    "peak_bar": ("parts of the memory at the peak, {way}: {parts}", "峰值时刻的内存构成，{way}：{parts}"),
    # Figures
    "unique": ("Unique parameters", "参数量（去重）"),
    "unique_how": ("every tensor once", "每个张量只计一次"),
    "layers": ("Sum over layers", "参数量（按层累加）"),
    "layers_how": ("tied tensors at each layer", "共享张量在每个使用它的层都计一次"),
    "weights": ("Weights in fp32", "fp32 权重"),
    "weights_how": ("{bf16} in bf16", "bf16 为 {bf16}"),
    "forward_flops": ("Forward pass", "一次前向的 FLOPs"),
    "step_flops": ("Training step", "训练一步的 FLOPs"),
    "flops_how": ("batch {batch}, sequence {seq}", "批大小 {batch}，序列长度 {seq}"),
    # Page
    "written": ("Written on {date} by bertscope {bertscope} with torch {torch}.",
                "由 bertscope {bertscope}（torch {torch}）于 {date} 生成。"),
    "obtained": ("How these numbers were obtained", "这些数字的来源与条件"),
    "the_command": ("Command", "命令"),
    "copy": ("copy", "复制"),
    "copied": ("copied", "已复制"),
    "search": ("Search {name}", "搜索{name}"),
    "modules": ("modules", "模块"),
    "FLOPs by module": ("FLOPs by module", "各模块的 FLOPs"),
    "parts": ("parts", "构成"),
    "what is kept": ("saved tensors", "保存的张量"),
    "peaks": ("Peaks", "峰值"),
    "ways": ("batches that fit", "放得下的批大小"),
    "settings": ("settings", "配置项"),
    "differing": ("differing {name}s", "不同的{name}"),
    "side_a": ("a: {name} ({architecture})", "a：{name}（{architecture}）"),
    "side_b": ("b: {name} ({architecture})", "b：{name}（{architecture}）"),
    "as_icicle": ("Show as icicle", "显示为冰柱图"),
    "as_treemap": ("Show as treemap", "显示为矩形树图"),
    "map": ("Parameters by module, down to tensors", "各模块参数量，细到张量"),
    "map_help": ("Click a box to zoom. Keyboard: arrow keys choose, Enter zooms in, Escape goes back.",
                 "点击方块放大；键盘：方向键选择，Enter 放大，Esc 返回。"),
    "bars": ("Forward FLOPs by module", "各模块的前向 FLOPs"),
    "lengths": ("Forward FLOPs over the sequence length", "前向 FLOPs 随序列长度的变化"),
    "axis_flops": ("forward FLOPs, matrix products", "前向 FLOPs（矩阵乘法）"),
    "axis_length": ("sequence length", "序列长度"),
    "not_asked": ("not asked for", "未要求"),
    "whole_model": ("the whole model", "整个模型"),
    "no_dataflow": ("left out: the dataflow is drawn for BERTs only; diagram --kind tree draws any model",
                    "未绘制：只为 BERT 绘制数据流；diagram --kind tree 可绘制任意模型"),
    "flops_of_forward": ("forward, {size}: {flops} FLOPs", "前向，{size}：{flops} FLOPs"),
    "flops_of_step": ("training step, {size}: {flops} FLOPs", "训练一步，{size}：{flops} FLOPs"),
    "convention": ("as {name} counts: {value} {unit} ({how}; {source})", "按 {name} 的计法：{value} {unit}（{how}；{source}）"),
    "flops_obtained": ("computed: the operators that torch dispatches; matrix products, a multiply-add is 2",
                       "由 torch 分派的算子计算；只计矩阵乘法，一次乘加计 2"),
    "axis_note": (
        "The horizontal axis follows the order in which the step allocates and frees memory; it is not time. "
        "A long step is thinned out: in each stretch the highest and the last point are drawn, so the peak is never "
        "lost. 1 GiB = 2**30 B, 1 MiB = 2**20 B.",
        "横轴是这一步分配与释放内存的先后次序，不是时间。步骤很多时会抽稀：每一小段只画最高点和最后一点，因此不会漏掉峰值。"
        "1 GiB = 2**30 B，1 MiB = 2**20 B。",
    ),
    # Parts of the memory and roles of the modules
    "part parameters": ("parameters", "参数"),
    "part buffers": ("buffers", "缓冲区"),
    "part optimizer_state": ("optimizer state", "优化器状态"),
    "part inputs": ("inputs", "输入"),
    "part gradients": ("gradients", "梯度"),
    "part activations": ("activations", "激活值"),
    "part temporaries": ("temporaries", "临时张量"),
    "part context": ("CUDA context and workspaces", "CUDA 上下文与工作区"),
    "role embeddings": ("embeddings", "嵌入层"),
    "role attention": ("attention", "注意力"),
    "role feed-forward": ("feed-forward", "前馈网络"),
    "role LayerNorm": ("LayerNorm", "LayerNorm"),
    "role pooler and heads": ("pooler and heads", "池化层与任务头"),
    # Titles of columns
    "column module": ("module", "模块"),
    "column type": ("type", "类型"),
    "column copies": ("copies", "份数"),
    "column each": ("each", "每份"),
    "column per layer": ("per layer", "每层"),
    "column params": ("params", "参数量"),
    "column share": ("share", "占比"),
    "column elementwise": ("elementwise", "逐元素"),
    "column bytes moved": ("bytes moved", "访存量"),
    "column checkpointing": ("checkpointing", "梯度检查点"),
    "column phase": ("phase", "阶段"),
    "column peak": ("peak", "峰值"),
    "column obtained": ("obtained", "来源"),
    "column operator": ("operator", "算子"),
    "column shape": ("shape", "形状"),
    "column tensors": ("tensors", "张量数"),
    "column precision": ("precision", "精度"),
    "column batch": ("batch", "批大小"),
    "column by bytes": ("by bytes", "按字节"),
    "column reserved": ("reserved", "预留"),
    "column peak of batch + 1": ("peak of batch + 1", "批大小加 1 的峰值"),
    "column tokens": ("tokens", "token 数"),
    "column FLOPs of the step": ("FLOPs of the step", "一步的 FLOPs"),
    "column more FLOPs": ("more FLOPs", "FLOPs 增加"),
    "column field": ("field", "字段"),
    "column value": ("value", "值"),
    "column setting": ("setting", "配置项"),
    "column parameter": ("parameter", "参数"),
    "column total": ("total", "合计"),
    "column change": ("change", "变化"),
    "column difference": ("difference", "差值"),
    "column seq": ("seq", "序列长度"),
}  # fmt: skip


class Words:
    """The words of one language."""

    def __init__(self, language: str = "en") -> None:
        self.language, self.place = language, LANGUAGES.index(language)

    def __call__(self, key: str, **values: object) -> str:
        """Return the text of a key, with its values."""
        return TEXTS[key][self.place].format(**values)

    def of(self, kind: str, name: str) -> str:
        """Return the text of a `part`, `role` or `column`; its name if there is none."""
        return TEXTS.get(f"{kind} {name}", (name, name))[self.place]
