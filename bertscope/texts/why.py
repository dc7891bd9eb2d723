"""The sentences of `why` in English, by key."""

TEXTS: dict[str, str] = {
    "why_answer": "{moment}; {finding}",
    "why_oom": "out of memory: a request of {tried} failed{phase}{at}, with {held} allocated",
    "why_peak": "the peak is {held}{phase}{at}",
    "why_end": "{held} is allocated at the end of the recording",
    "why_mostly": ", of which {percent} % is {part}",
    "why_at": " at {line}",
    "why_in_forward": " in a forward pass",
    "why_in_backward": " in a backward pass",
    "why_in_optimizer": " in the optimizer step",
    "why_in_load": " while the model is loaded",
    "why_activations": (
        "activations of a forward pass{at} hold {size}; recomputing them (checkpointing full) frees up to {size_frees}"
    ),
    "why_activations_all": "activations hold {size}; recompute them (checkpointing full), or use a smaller batch",
    "why_optimizer": "optimizer state holds {size}; an 8-bit optimizer needs a quarter of it",
    "why_parameters": "parameters hold {size}; LoRA or 16 bits need less for them, their gradients and the optimizer",
    "why_graph": (
        "the graphs of {passes} earlier forward passes hold {size}{at}: something refers to a loss or an output "
        "of each; keep loss.item() or loss.detach(), and do not use retain_graph"
    ),
    "why_grad_eval": (
        "{passes} forward passes without a backward pass keep {size} for one{at}: run them under torch.no_grad() "
        "or torch.inference_mode()"
    ),
    "why_outputs": (
        "outputs of {passes} earlier forward passes hold {size}, {each} each{at}: move them to the CPU, or keep "
        "numbers only"
    ),
    "why_losses": (
        "a scalar of each of {passes} earlier forward passes is on the card ({size}, {each} each{at}), and the "
        "list grows: keep loss.item()"
    ),
    "why_previous": (
        "outputs of the forward pass before hold {size}{at}: delete them (del outputs, loss) before the next pass"
    ),
    "why_cache": (
        "the cache of keys and values of generate holds {size}{at}: generate fewer tokens or smaller batches, or "
        "move the cache to the CPU"
    ),
    "why_models": (
        "the same model is on the card twice, and the second holds {size} ({line}; {other}): delete one, or put "
        "it on the CPU"
    ),
    "why_copy": "a copy of the weights (deepcopy) holds {size}{at}: keep it on the CPU",
    "why_optimizers": (
        "the state of an optimizer exists twice, and the older one holds {size}{at}: something refers to an "
        "optimizer that was replaced; delete it, or make one optimizer only"
    ),
    "why_gradients": (
        "gradients that the optimizer has used hold {size} in the forward pass: call zero_grad(set_to_none=True) "
        "right after optimizer.step()"
    ),
    "why_fragmentation": (
        "fragmentation: {size} is reserved by torch and in use by no tensor; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it usable"
    ),
    "why_lengths": (
        "fragmentation: {size} is reserved by torch and in use by no tensor, since sizes change from batch to "
        "batch ({size_low} to {size_high}{at}); pad batches to a few lengths, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    ),
    "why_private": (
        "private pools of CUDA graphs hold {size}, which no other allocation can use: capture fewer graphs, or "
        "share one pool"
    ),
    "why_waiting": (
        "{size} is freed and waits for another stream (record_stream): free it earlier, or synchronize the streams"
    ),
    "why_attention": "attention scores hold {size}{at}: fused attention (attention sdpa) does not store them",
    "why_logits": "logits and their loss hold {size}{at}: compute the loss in pieces, or only where labels are",
    "why_foreach": (
        "temporaries of the optimizer over all parameters at once hold {size}: fused=True or foreach=False needs "
        "none of them"
    ),
    "why_buckets": (
        "buckets of DistributedDataParallel hold {size}{at}: gradient_as_bucket_view=True shares them with the "
        "gradients"
    ),
    "why_data": (
        "tensors that were put on the card before the first forward pass hold {size}{at}: keep data on the CPU, "
        "and move a batch at a time"
    ),
    "why_request": "the request itself is large: {size}{at}; a smaller batch or a shorter sequence makes it smaller",
    "why_before": (
        "{size} was allocated before the recording began: call _record_memory_history() before the model is "
        "built, or give MODEL"
    ),
    "why_other": (
        "other processes hold {size} of the card's {size_total}: end them (nvidia-smi lists them), or use another card"
    ),
    "why_limit": "this process may use {size} only: raise set_per_process_memory_fraction, or what sets it",
    "why_driver": "memory outside torch's allocator holds {size}: end other programs, or load fewer models",
    "why_shared": (
        "{size} is allocated on a card of {size_total}: the driver has moved memory to the CPU, which is slow"
    ),
    "why_free": (
        "{size} was free and {size_tried} not available: a limit, another process that ended, or a driver that "
        "needs one piece; run nvidia-smi while it trains"
    ),
    "why_full": (
        "the step is too large: {percent} % of the card is allocated ({size} of {size_total}); a smaller batch, "
        "gradient checkpointing or 16 bits need less"
    ),
    "why_estimate": "the estimate of the step is {size}; {size_held} is allocated",
    "why_more": (
        "{size} more is allocated than the step needs: a second model, outputs or graphs of earlier steps; a "
        "memory snapshot tells which"
    ),
    "why_beyond": "{part} hold {size}, and {size_estimated} in the estimate",
    "why_fits": "checkpointing {checkpointing}: the largest batch on {size_total} is {batch} (asked: {asked})",
    "why_no_frames": "no stacks were recorded: _record_memory_history(stacks='python') records them",
    "why_more_rows": "{count} more rows: -v",
    "why_events": "{count} events",
    "why_part": "part",
    "why_held": "bytes",
    "why_share": "share",
    "why_blocks": "blocks",
    "why_estimated": "estimate",
    "why_line": "line",
    "why_module": "module",
    "why_passes": "passes",
    "why_smallest": "smallest",
    "why_largest": "largest",
    "why_model": "estimate of",
    "why_number_tried": "tried to allocate",
    "why_number_allocated": "allocated to tensors",
    "why_number_unusable": "reserved, in no tensor",
    "why_number_reserved": "reserved by torch",
    "why_number_largest_free": "largest free block",
    "why_number_other": "other processes",
    "why_number_free": "free on the card",
    "why_number_total": "memory of the card",
    "part_before": "blocks from before the recording",
    "part_tensors": "tensors outside modules",
}
