"""The texts of `count`, `tree`, `flops` and `check`."""

TEXTS: dict[str, tuple[str, str]] = {
    # count and tree
    "params_in_all": ("{count} parameters", "{count} 个参数"),
    "params_and_uses": (
        "{unique} unique parameters; {uses} with tied tensors counted at each use",
        "去重参数量 {unique}；共享张量在每个使用处各计一次时为 {uses}",
    ),
    "tree_forward": ("forward pass", "一次前向"),
    "forward_flops": (
        "{flops}, {macs} multiply-adds (matrix products, at these shapes)",
        "{flops}，{macs} 次乘加（只计矩阵乘法，按以上形状）",
    ),
    # flops
    "flops_run": ("run", "运行"),
    "flops_sizes": ("batch {batch}, seq {seq}, {mode}", "批大小 {batch}，序列长度 {seq}，{mode}"),
    "flops_forward": ("forward", "前向"),
    "flops_backward": ("backward", "反向"),
    "flops_recomputed": ("recomputed", "重计算"),
    "flops_total": ("total", "合计"),
    "flops_elementwise": ("elementwise", "逐元素"),
    "flops_count": ("{count} FLOPs", "{count} FLOPs"),
    "flops_from_loss": ("{count} FLOPs, from {loss}", "{count} FLOPs，起点为 {loss}"),
    "flops_by_strategy": (
        "{count} FLOPs (checkpointing {strategy})",
        "{count} FLOPs（梯度检查点 {strategy}）",
    ),
    "flops_and_macs": (
        "{count} FLOPs = {macs} MACs, matrix products only",
        "{count} FLOPs = {macs} MACs，只计矩阵乘法",
    ),
    "flops_more": (
        "{count} more (GELU 8, LayerNorm 5, softmax 5 for each element)",
        "另有 {count}（每个元素：GELU 计 8，LayerNorm 计 5，softmax 计 5）",
    ),
    "flops_polynomial": (
        "batch * ({terms}), verified at batch {batch}, seq {seq}",
        "batch * ({terms})，已在批大小 {batch}、序列长度 {seq} 处验证",
    ),
    "flops_convention": ("convention", "约定"),
    "flops_rules": (
        "a multiply-add is 2 FLOPs; bytes moved: the sum of what each operator reads and writes",
        "一次乘加计 2 FLOPs；访存量：各算子读写的字节数之和",
    ),
    "flops_all_known": ("nothing: all operators are known", "无：所有算子均已计入"),
    "flops_dispatched": (
        "from the operators that torch dispatches{layers}; torch {version}",
        "由 torch 分派的算子得出{layers}；torch {version}",
    ),
    "flops_layers": (
        "; {count} equal layers ran, the others are extrapolated",
        "；运行了 {count} 个相同的层，其余由此推算",
    ),
    # check
    "check_passed": (
        "{files}: {passed} passed, {failed} failed{errors}",
        "{files}：{passed}通过，{failed} 条未通过{errors}",
    ),
    "check_one_file": ("1 file", "1 个文件"),
    "check_files": ("{count} files", "{count} 个文件"),
    "check_one_expectation": ("1 expectation", "1 条期望值"),
    "check_expectations": ("{count} expectations", "{count} 条期望值"),
    "check_errors": (", {count} could not be checked", "，{count} 条无法检查"),
    # verify, and count of a checkpoint
    "verify_yes": ("yes: {stored} holds {model}", "是：{stored} 与 {model} 相符"),
    "verify_no": ("no: {stored} does not hold {model}: {found}", "否：{stored} 与 {model} 不符：{found}"),
    "verify_missing": ("{count} missing", "缺少 {count} 个"),
    "verify_unexpected": ("{count} unexpected", "多余 {count} 个"),
    "verify_shape": ("{count} of another shape", "形状不同 {count} 个"),
    "verify_dtype": ("{count} of another dtype", "dtype 不同 {count} 个"),
    "verify_problems": ("{count} problems of the file", "文件有 {count} 个问题"),
    "verify_counts": (
        "{count} unique parameters; {matched} of {tensors} names are stored",
        "{count} 个参数（去重）；{tensors} 个名称中存有 {matched} 个",
    ),
    "what_fits": ("what fits", "相符的类"),
    "verified": ("verified", "核对方式"),
    "stored": ("stored", "存储"),
    "stored_tensors": ("{count} tensors", "{count} 个张量"),
    "stored_once": ("{count} elements (every storage once): {dtypes}", "{count} 个元素（每块存储只计一次）：{dtypes}"),
    "stored_dtype": ("{count} in {dtype} ({size})", "{dtype} {count} 个（{size}）"),
    "stored_bytes": ("{count} bytes ({size}) = {parts}", "{count} 字节（{size}）= {parts}"),
    "no_calibration": ("no card, by a file in {path}", "没有，文件夹为 {path}"),
    "count_in": ("{count} in {path}", "{count} 个，位于 {path}"),
    "under_all_names": ("under all names", "按全部名称"),
    "files": ("files", "文件"),
    "more_files": (" and {count} more", " 等，另有 {count} 个"),
    "problem": ("problem", "问题"),
    "metadata": ("metadata", "元数据"),
    "read": ("read", "读取"),
    "header_only": ("only the header; nothing was loaded or run", "只读文件头；没有加载或运行任何内容"),
}
