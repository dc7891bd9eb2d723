"""The losses that encoders train with: each a function from a model and its batch to what backward starts from.

Each runs its class's operators in sentence-transformers 6.2.0 in their order, and keeps what it keeps: the first
text of the examples in a separate forward pass, the others in one (embed_columns of merged_forward.py), the mean of
the last hidden state (pooling.py), and the loss. The batch has a list for each input, with a tensor for each text.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from itertools import islice, pairwise
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.model.lora import base_model_of
from bertscope.model.savers import chunked_loss
from bertscope.settings.rows import CodeObject
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import MODEL, loss_parts, predicts_next
from bertscope.sources.model_source import ModelSource, as_source_error
from bertscope.torch_access import always, nn, torch, tree_map
from bertscope.tracing.inputs import arguments

Batch = dict[str, Any]
_SCALE, _MARGIN = 20.0, 5  # `scale` and `triplet_margin` of the classes
_AFTER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # settings that change logits later


def batch_of_texts(run_config: RunConfig, inputs: Any) -> Any:
    """Return the batch of a loss on meta from one text's inputs; for the model's own loss the inputs.

    A reranker has its texts in one tensor, since all are pairs.
    """
    name = loss_parts(run_config.loss)[0]
    if name == MODEL:
        return inputs
    if not isinstance(inputs, Mapping):
        raise SelectionError(f"loss {run_config.loss} takes a model whose inputs have names")
    lists, rows = (1, run_config.texts) if name == "reranker" else (run_config.texts, 1)
    batch: Batch = {
        key: [tree_map(lambda like: like.new_empty(rows * len(like), *like.shape[1:]), value) for _ in range(lists)]
        for key, value in inputs.items()
    }
    if name == "cosent" or (name == "reranker" and not run_config.hard_negatives):
        batch["targets"] = torch.empty(run_config.batch, device="meta")
    return batch


def loss_function(run_config: RunConfig, *, is_short: bool = False) -> Callable[[nn.Module, Batch], Any] | None:
    """Return the function of a loss; None for that of the model.

    With `is_short` two of equal mini-batches run; the others only leave their embeddings.
    """
    if isinstance(run_config.loss, CodeObject):
        return _of_inputs(run_config.loss.value)
    name, argument = loss_parts(run_config.loss)
    if name == MODEL:
        return partial(chunked, chunks=run_config.loss_chunks) if run_config.loss_chunks else None
    options: dict[str, dict[str, Any]] = {
        "cached-mnrl": {"size": argument, "is_short": is_short},
        "reranker": {"group": run_config.texts},
    }
    return partial(_FUNCTIONS[name], **options.get(name, {}))


def _of_inputs(function: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    """Return a caller's loss as a function of the module and its inputs; with one parameter it takes the output."""
    try:
        takes = signature(function).parameters.values()
    except (TypeError, ValueError):  # some callables have none
        return function
    by_position = [item for item in takes if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    if len([item for item in by_position if item.default is item.empty]) != 1:
        return function

    def of_output(module: nn.Module, inputs: Any) -> Any:
        args, kwargs = arguments(inputs)
        return function(module(*args, **kwargs))

    return of_output


def _advice(model: nn.Module, of_bert: str, otherwise: str) -> tuple[str, str]:
    """Return the name of a model's class, and the option with the class that it should be."""
    base = base_model_of(getattr(model, "_orig_mod", model))  # of torch.compile
    name = type(base).__name__
    return name, f"{name_of('architecture')} {of_bert if name.startswith('Bert') else otherwise}"


def chunked(model: nn.Module, batch: Batch, chunks: int) -> torch.Tensor:
    """Return the loss of a language model whose logits exist for one chunk of tokens at a time."""
    base: Any = base_model_of(model)
    name, last = type(base).__name__, getattr(base, "get_output_embeddings", always(None))()
    is_causal = predicts_next(name)
    caps = [key for key in _AFTER_LOGITS if getattr(getattr(base, "config", None), key, None) not in (None, 1, 1.0)]
    if is_causal is None or last is None or caps:
        why = f"has {caps[0]}, which changes its logits" if caps else "has no logits of tokens only"
        _, advice = _advice(base, "BertForMaskedLM", "AutoModelForCausalLM")
        raise SelectionError(
            f"{name} {why}; leave {name_of('loss_chunks')} out, or choose a language model's class, such as {advice}"
        )
    return chunked_loss(model, batch, chunks, is_causal=is_causal)


def _texts(batch: Batch) -> list[Batch]:
    lists = {name: value for name, value in batch.items() if isinstance(value, list)}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _embedding(model: nn.Module, text: Batch) -> torch.Tensor:
    """Return the mean of the last hidden state over the tokens, which the text refers to from then on.

    hidden (batch, seq, hidden_size) -> (batch, hidden_size)
    """
    output = model(**text)
    hidden = output if isinstance(output, torch.Tensor) else getattr(output, "last_hidden_state", None)
    if not isinstance(hidden, torch.Tensor) or hidden.dim() not in (2, 3):
        name, advice = _advice(model.model if isinstance(model, Teacher) else model, "BertModel", "AutoModel")
        raise SelectionError(
            f"the loss embeds texts by the last hidden state, which {name} does not "
            f"return; choose a class without a head, such as {advice}, or loss reranker"
        )
    text["hidden"] = hidden
    del output
    if hidden.dim() == 2:  # of a model that pools itself
        return hidden
    mask = text.get("attention_mask")
    mask = torch.ones(hidden.shape[:-1], dtype=torch.int64, device=hidden.device) if mask is None else mask
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    wide = torch.float32 if hidden.itemsize < 4 else hidden.dtype
    total = (hidden * weights).sum(dim=1, dtype=wide)
    count = torch.clamp(weights.sum(dim=1, dtype=wide), min=1e-9)
    return torch.cat([(total / count).to(hidden.dtype)], dim=-1)


def _embeddings(model: nn.Module, texts: list[Batch]) -> list[torch.Tensor]:
    first, *further = texts
    embeddings = [_embedding(model, first)]
    if len(further) < 2:
        return embeddings + [_embedding(model, other) for other in further]
    merged = {name: torch.cat([other[name] for other in further]) for name in further[0]}
    together = _embedding(model, merged)
    return embeddings + list(together.reshape(len(further), -1, together.shape[-1]).unbind(0))


def _ranked(queries: torch.Tensor, texts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the loss of the chosen queries, each of which should find the text of its number among all texts.

    queries (batch, hidden_size), texts (texts * batch, hidden_size) -> scores (chosen, texts * batch)
    """
    numbers = torch.arange(len(chosen), device=queries.device)
    wanted, candidates = (nn.functional.normalize(rows, p=2, dim=-1) for rows in (queries[chosen], texts))
    scores = torch.mm(wanted, candidates.transpose(0, 1))
    scores = scores * _SCALE
    positives = scores[numbers, chosen]
    joint = torch.cat([scores], dim=1)
    return -(positives - torch.logsumexp(joint, dim=1)).mean()


def mnrl(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return MultipleNegativesRankingLoss: the texts of all other examples are negatives."""
    texts = _texts(batch)
    queries, *candidates = _embeddings(model, texts)
    return _ranked(queries, torch.cat(candidates), torch.arange(len(queries), device=queries.device))


def cached_mnrl(model: nn.Module, batch: Batch, size: str, is_short: bool) -> torch.Tensor:
    """Return CachedMultipleNegativesRankingLoss, whose mini-batches of `size` run twice (GradCache, arXiv:2101.06983).

    The first pass has no gradients. The loss goes back to the embeddings, and the backward pass of what is returned
    runs the mini-batches again and goes back from the gradients of their embeddings.
    """
    texts = _texts(batch)
    first = next(iter(texts[0].values()))
    count = len(first)
    rows = min(int(size), count)
    cuts = [_cuts(count, rows, number, len(texts), is_short) for number in range(len(texts))]
    parts = [(text, *cut) for text, cut_list in zip(texts, cuts, strict=True) for cut in cut_list]
    running = (0, len(parts) - 1) if is_short else range(len(parts))
    embeddings: list[torch.Tensor] = []
    states = []
    for number, (text, begin, end) in enumerate(parts):
        states.append([torch.get_rng_state() for _ in range(begin, end, rows)])
        if number in running:
            with torch.no_grad():
                embedding = _of_rows(model, text, begin, end)
        else:
            embedding = embeddings[0].new_empty(end - begin, *embeddings[0].shape[1:])
        embeddings.append(embedding.detach().requires_grad_())
    begins = sorted({0, count - rows}) if is_short else range(0, count, rows)
    value = _ranked_parts(embeddings, list(map(len, cuts)), begins, rows).detach().requires_grad_()
    gradients: list[Any] = [embedding.grad for embedding in embeddings]

    def again(outer: torch.Tensor) -> None:
        """Run the mini-batches with gradients."""
        for number in running:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.set_rng_state(states[number][0])
                embedding = _of_rows(model, *parts[number])
            with torch.enable_grad():
                wide = torch.promote_types(embedding.dtype, torch.float32)
                surrogate = torch.dot(embedding.flatten().to(wide), gradients[number].flatten().to(wide)) * outer
                surrogate.backward()

    value.register_hook(again)
    return value


def _cuts(count: int, rows: int, number: int, texts: int, is_short: bool) -> list[tuple[int, int]]:
    """Return the begin and end of the mini-batches of a text of all examples.

    With `is_short` the first of the first text and the last of the last have all rows, and others are one.
    """
    if not is_short:
        return [(begin, min(begin + rows, count)) for begin in range(0, count, rows)]
    between = [rows] * (number == 0) + [count - rows] * (number == texts - 1)
    edges = [0, *between, count]
    return [(begin, end) for begin, end in pairwise(edges) if end > begin]


def _of_rows(model: nn.Module, text: Batch, begin: int, end: int) -> torch.Tensor:
    return _embedding(model, {name: value[begin:end] for name, value in text.items()})


def _ranked_parts(embeddings: list[torch.Tensor], parts: list[int], begins: Iterable[int], size: int) -> torch.Tensor:
    """Return the sum of the losses of mini-batches of queries, each of which goes back to the embeddings.

    `parts` has the number of tensors that each text has.
    """
    rest = iter(embeddings)
    queries, *further = [torch.cat(list(islice(rest, number))) for number in parts]
    candidates = torch.cat(further)
    numbers = torch.arange(len(queries), device=queries.device)
    total = queries.new_zeros(())
    for begin in begins:
        chosen = numbers[begin : begin + size]
        loss = _ranked(queries, candidates, chosen) * len(chosen) / len(queries)
        if torch.is_grad_enabled():  # not in an evaluation
            loss.backward()
        total = total + loss.detach()
    return total


def cosent(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return CoSENTLoss: of two pairs, the one with the higher target has the higher cosine."""
    texts = _texts(batch)
    one, other = (nn.functional.normalize(rows, p=2, dim=-1) for rows in _embeddings(model, texts))
    scores = (one * other).sum(dim=-1).to(torch.float32) * _SCALE
    targets, order = batch["targets"].sort()
    scores = scores[order]
    starts = torch.searchsorted(targets, targets, right=True)
    sums = torch.logcumsumexp(-scores.flip(0), dim=0).flip(0)
    sums = torch.cat((sums, scores.new_full((1,), -torch.inf)))
    return torch.logsumexp(torch.cat((scores.new_zeros(1), scores + sums[starts])), dim=0)


def triplet(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return TripletLoss: the positive is nearer to the anchor than the negative, by a margin."""
    texts = _texts(batch)
    anchor, *compared = _embeddings(model, texts)
    near, far = (torch.linalg.vector_norm(anchor - embedding, dim=-1) for embedding in compared)
    return nn.functional.relu(near - far + _MARGIN).mean()


def reranker(model: nn.Module, batch: Batch, group: int) -> torch.Tensor:
    """Return BinaryCrossEntropyLoss of a cross-encoder's scores; with hard negatives cross-entropy over each group.

    The latter is the loss of FlagEmbedding's rerankers. A class with several labels scores by the first.
    """
    output = model(**_texts(batch)[0])
    logits = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2:
        head = "ForSequenceClassification"
        name, advice = _advice(model, f"Bert{head}", f"AutoModel{head}")
        raise SelectionError(f"loss reranker takes a class that scores each pair, such as {advice}; {name} does not")
    scores = logits.view(-1) if logits.shape[1] == 1 else logits[:, 0]
    if "targets" in batch:
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["targets"])
    grouped = scores.view(-1, group)
    return nn.functional.cross_entropy(grouped, torch.zeros(len(grouped), dtype=torch.long, device=scores.device))


def distil(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared difference of the embeddings from those of the teacher, which runs without gradients."""
    teacher: Any = model.teacher
    texts = _texts(batch)
    with torch.no_grad():
        goals = [_embedding(teacher, dict(text)) for text in texts]
    students = [teacher.projected(embedding) for embedding in _embeddings(model, texts)]
    if students[0].shape != goals[0].shape:
        shapes = " and ".join(str(list(pair[0].shape)) for pair in (goals, students))
        raise SelectionError(f"the embeddings of teacher and student differ in shape: {shapes}; choose another teacher")
    return torch.stack([nn.functional.mse_loss(*pair) for pair in zip(students, goals, strict=True)]).mean()


_OF_TEXTS: tuple[Callable[..., torch.Tensor], ...] = (mnrl, cached_mnrl, cosent, triplet, reranker, distil)
_FUNCTIONS = {function.__name__.replace("_", "-"): function for function in _OF_TEXTS}


class Teacher(nn.Module):
    """A frozen model in eval mode; if its embeddings are of another size, with a trained projection of the student's.

    Source: EmbedDistillLoss of sentence-transformers, with its `projection_dim`.
    """

    def __init__(self, model: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        width, teacher_width = (
            getattr(getattr(base_model_of(one), "config", None), "hidden_size", 0) for one in (student, model)
        )
        device = next((param.device for param in student.parameters()), None)
        self.projected = (
            nn.Linear(width, teacher_width, device=device)
            if width and teacher_width and width != teacher_width
            else nn.Identity()
        )

    def train(self, mode: bool = True) -> "Teacher":
        """Leave the model in eval mode."""
        return super().train(False)

    def forward(self, **inputs: Any) -> Any:
        """Return the model's output."""
        with as_source_error("the teacher cannot run on the student's inputs"):
            return self.model(**inputs)


def add_teacher(model: nn.Module, teachers: Iterable[ModelSource], build: Callable[[ModelSource], nn.Module]) -> None:
    """Add the teacher of loss `distil`, if there is one, to the model as its part `teacher`."""
    for source in teachers:
        model.teacher = Teacher(build(source.for_run()), model)
