"""The losses of encoders against plain loops, written as sentence-transformers 6.2.0 and FlagEmbedding run the step."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.measure.profiler_run import measured
from bertscope.memory.kernels import result_bytes
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import ModelStep, real_inputs, run_model, waiting_inputs
from bertscope.settings.run_config import RunConfig
from bertscope.tracing.flops import step_flops
from bertscope.tracing.losses import loss_function
from tests.memory.plain_loop import peak_bytes, tokenized
from tests.memory.steps import estimated_trace, small, without_scratch

BATCH, SEQ = 6, 24
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "num_labels",
)  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 500}
ENCODER = small("BertModel", **WIDE)
RERANKER = small("BertForSequenceClassification", **WIDE, num_labels=1)


def embedding(model, features):
    """The mean of the last hidden state over the tokens, which the features keep."""
    features["token_embeddings"] = hidden = model(**features).last_hidden_state
    mask = features["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    sums = [values.sum(1, dtype=torch.float32) for values in (hidden * mask, mask)]
    return (sums[0] / sums[1].clamp(min=1e-9)).to(hidden.dtype)


def embeddings(model, columns):
    """The first column in its own forward pass, the others together."""
    first = embedding(model, columns[0])
    if len(columns) == 2:
        return [first, embedding(model, columns[1])]
    merged = {name: torch.cat([column[name] for column in columns[1:]]) for name in columns[1]}
    return [first, *embedding(model, merged).chunk(len(columns) - 1)]


def in_batch_loss(queries, documents, wanted):
    scores = F.normalize(queries[wanted]) @ F.normalize(documents).T * 20
    return (torch.logsumexp(scores, dim=1) - scores[torch.arange(len(wanted)), wanted]).mean()


def mnrl(model, columns, labels):
    queries, *documents = embeddings(model, columns)
    return in_batch_loss(queries, torch.cat(documents), torch.arange(len(queries)))


def cached(size):
    """GradCache: embed without gradients, get those of the embeddings, and embed again with gradients and dropout."""

    def step(model, columns, labels):
        def parts():
            for column in columns:
                for begin in range(0, len(labels), size):
                    yield {name: values[begin : begin + size] for name, values in column.items()}

        states = []
        with torch.no_grad():
            leaves = []
            for part in parts():
                states.append(torch.get_rng_state())
                leaves.append(embedding(model, dict(part)).requires_grad_())
        with torch.enable_grad():
            count = len(leaves) // len(columns)
            queries, documents = torch.cat(leaves[:count]), torch.cat(leaves[count:])
            for wanted in torch.arange(len(labels)).split(size):
                (in_batch_loss(queries, documents, wanted) * len(wanted) / len(labels)).backward()
        loss = queries.new_zeros(()).requires_grad_()
        gradients = [leaf.grad for leaf in leaves]

        def again(outer):
            with torch.enable_grad():
                for part, gradient, state in zip(parts(), gradients, states, strict=True):
                    with torch.random.fork_rng(devices=[]):  # a state more during the forward pass
                        torch.set_rng_state(state)
                        found = embedding(model, dict(part))
                    surrogate = torch.dot(found.flatten(), gradient.flatten()) * outer
                    surrogate.backward()

        loss.register_hook(again)
        return loss

    return step


def cosent(model, columns, labels):
    one, other = embeddings(model, columns)
    scores = F.cosine_similarity(one, other).float() * 20
    differences = scores[:, None] - scores[None, :]
    return torch.logsumexp(differences.masked_fill(labels[:, None] >= labels[None, :], -1e12).flatten(), dim=0)


def triplet(model, columns, labels):
    anchor, near, far = embeddings(model, columns)
    return F.relu((anchor - near).norm(dim=-1) - (anchor - far).norm(dim=-1) + 5).mean()


def pairs(model, columns, labels):
    return F.binary_cross_entropy_with_logits(model(**columns[0]).logits.view(-1), labels)


def groups(model, columns, labels):
    logits = model(**columns[0]).logits.view(len(labels), -1)
    return F.cross_entropy(logits, torch.zeros(len(labels), dtype=torch.long))


class Loop(torch.nn.Module):
    """A model whose output has the loss of a step."""

    def __init__(self, model, step, teacher=None):
        super().__init__()
        self.model, self.step, self.teacher = model, step, teacher

    def forward(self, columns, labels):
        """Return the loss."""
        columns = [dict(column) for column in columns]
        if self.teacher is None:
            return SimpleNamespace(loss=self.step(self.model, columns, labels))
        with torch.no_grad():
            goal = embedding(self.teacher.eval(), dict(columns[0]))
        return SimpleNamespace(loss=F.mse_loss(embedding(self.model, columns[0]), goal))


def columns_of(count, rows=BATCH):
    return [tokenized(torch.randint(0, 500, (rows, SEQ))) for _ in range(count)]


CASES = [
    (ENCODER, {"loss": "mnrl", "hard_negatives": 2}, mnrl, (4,)),
    (ENCODER, {"loss": "cached-mnrl:4", "hard_negatives": 1}, cached(4), (3,)),  # the last mini-batch is smaller
    (ENCODER, {"loss": "cosent"}, cosent, (2,)),
    (ENCODER, {"loss": "triplet"}, triplet, (3,)),
    (RERANKER, {"loss": "reranker"}, pairs, (1,)),
    (RERANKER, {"loss": "reranker", "hard_negatives": 3}, groups, (1, 4 * BATCH)),
]


def run_of(settings, batch=BATCH):
    return RunConfig(batch=batch, seq=SEQ, loop="trainer", **settings)


@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16", "fp16", "bf16"])
@pytest.mark.parametrize(("source", "settings", "step", "shape"), CASES, ids=[str(case[1]) for case in CASES])
def test_the_estimate_is_the_peak_of_a_loop_with_transformers_and_accelerate(source, settings, step, shape, precision):
    stored = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision, torch.float32)
    labels = torch.rand(BATCH)  # outside the profiler: most of the losses have none
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16" if precision == "autocast-bf16" else "no", cpu=True)
    config = transformers.BertConfig(**{name: getattr(source.config, name) for name in SIZES})

    def model():
        return Loop(accelerator.prepare_model(getattr(transformers, source.architecture)(config).to(stored)), step)

    measured = peak_bytes(
        model, lambda _: {"columns": columns_of(*shape), "labels": labels},
        lambda params: torch.optim.AdamW(params, lr=0.0), loop="trainer",
    )  # fmt: skip
    AcceleratorState._reset_state(True)
    found = estimated_trace(source, run_of({**settings, "precision": precision})).peak_bytes
    targets = 2 * labels.nbytes if step in (cosent, pairs) else 0  # of the batch and of the one that waits
    # An estimate of mini-batches holds the embeddings of a full one during the next; of 6 rows the one before has 2.
    more = (4 - 2) * WIDE["hidden_size"] * 4 if "cached" in settings["loss"] else 0
    assert 0 <= found - targets - measured <= more


@pytest.mark.parametrize("loss", ["cached-mnrl:2", "triplet"])
def test_under_autocast_each_forward_pass_casts_the_weights_as_in_accelerate(loss):
    AcceleratorState._reset_state(True)
    plain = run_of({"loss": loss})
    model = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(run_model(ENCODER, plain, "cpu"))
    step = ModelStep(model, real_inputs(model, plain, "cpu"), plain, loss=loss_function(plain))
    step.waiting = waiting_inputs(step.inputs, plain)
    step.run_first_steps()
    AcceleratorState._reset_state(True)
    found = estimated_trace(ENCODER, replace(plain, precision="autocast-bf16"))
    assert found.peak_bytes == without_scratch(measured(step), "autocast-bf16").peak_bytes


def test_a_teacher_runs_without_gradients_next_to_its_student(tmp_path):
    teacher = small("BertModel", **WIDE, num_hidden_layers=3)
    path = tmp_path / "teacher.json"
    path.write_text(json.dumps({"model_type": "bert", **teacher.config.to_dict()}))

    def model():
        built = [own.for_run().build(device="cpu") for own in (ENCODER, teacher)]
        return Loop(built[0], None, built[1].requires_grad_(False))

    measured = peak_bytes(
        model, lambda _: {"columns": columns_of(1), "labels": torch.rand(BATCH)},
        lambda params: torch.optim.AdamW(params, lr=0.0), loop="trainer",
    )  # fmt: skip
    found = estimated_trace(ENCODER, run_of({"loss": f"distil:{path}"}))
    assert found.peak_bytes == pytest.approx(measured, rel=0.001)


def test_two_batches_give_the_memory_of_a_matrix_of_all_pairs_at_any_batch():
    run, steps = run_of({"loss": "mnrl", "hard_negatives": 2}), Simulator(ENCODER)
    scalable = steps.scalable_trace(run)
    for batch in (3, 300):
        assert scalable.scaled(batch).peak_bytes == estimated_trace(ENCODER, replace(run, batch=batch)).peak_bytes
    # 3 x 300 scores for each of 300 queries: 300 x 900 numbers of 4 bytes.
    sizes = {event.block.shape: event.size_bytes for event in scalable.scaled(300).events}
    assert abs(sizes[300, 900]) == 1_080_000


@pytest.mark.parametrize("negatives", [0, 2])
def test_two_batches_give_the_memory_of_mini_batches_on_a_card(negatives):
    run = replace(run_of({"loss": "cached-mnrl:4", "hard_negatives": negatives}), device="cuda")
    steps, alone = Simulator(ENCODER), Simulator(ENCODER, one_batch=True)
    for batch in (4, 6, 301):
        at = replace(run, batch=batch)
        assert steps.trace(at).peak_bytes == alone.trace(at).peak_bytes
    assert steps.traces.scalable_trace(replace(run, batch=2)) is not None


@pytest.mark.parametrize(("settings", "texts"), [({"loss": "mnrl"}, 2), ({"loss": "cached-mnrl:2"}, 2)], ids=str)
def test_the_flops_of_in_batch_negatives_grow_with_the_square_of_the_batch(settings, texts):
    step = cached(2) if "cached" in settings["loss"] else mnrl
    model = ENCODER.for_run().build(device="cpu")
    counter = FlopCounterMode(display=False)
    with counter:
        step(model, columns_of(texts), torch.rand(BATCH)).backward()
    assert step_flops(ENCODER, run_of(settings)) == counter.get_total_flops()
    report = bertscope.flops(ENCODER, batch=BATCH, seq=run_of(settings).seq, **settings)
    assert (report.rows[0].total.matmul_flops, report.loss) == (counter.get_total_flops(), settings["loss"])
    assert [convention.name for convention in report.conventions] == ["torch", "macs"]
    one, two = (step_flops(ENCODER, run_of(settings, batch)) for batch in (1, 2))
    assert two - 2 * one == 3 * 2 * 64 * (2 * 2 - 2)  # 3 products of 64 multiply-adds for each further pair


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
def test_the_mean_of_a_loss_keeps_the_bytes_of_its_elements(name):
    scores, labels = torch.rand(8, 5), torch.ones(8, 5)
    real, operator = getattr(F, name)(scores, labels), getattr(torch.ops.aten, name).default
    assert real.untyped_storage().nbytes() == 4 * 8 * 5
    assert result_bytes(operator, (scores, labels), 0, real, on_cuda=True) == 4 * 8 * 5


def test_a_function_of_model_and_batch_is_a_loss():
    found = bertscope.estimate("bert-tiny", batch=2, seq=16, loss=lambda model, batch: model(**batch)[0].sum())
    assert found.variants[0].memory == bertscope.estimate("bert-tiny", batch=2, seq=16).variants[0].memory
