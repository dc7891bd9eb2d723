"""Each planted fault is named: the snapshot of a loop with one, in torch's format, is explained by it."""

import time
from collections.abc import Callable
from io import BytesIO

import pytest

from bertscope.analyses.why.reading import report_of
from bertscope.reports.why import WhyReport
from bertscope.views.step import LINE
from bertscope.views.why import finding_text
from tests.analyses.why.recording import BERT, MIB, MODULE, TRAIN, Loop, Recording, forward, frame, load, own

FAULTS: dict[str, tuple[str, Callable[[Recording], None]]] = {}


def fault(key: str):
    """Register a loop with a fault, and the key of the finding that names it."""
    return lambda plant: FAULTS.update({plant.__name__: (f"why_{key}", plant)})


@fault("activations")
def no_fault_but_too_many_layers(card: Recording) -> None:
    loop = Loop(card, layers=12)
    loop.train(1)
    loop.forward()
    card.oom(4 * MIB, forward(431, own(31)))


@fault("graph")
def graph_kept_by_a_sum_of_losses(card: Recording) -> None:
    loop = Loop(card)
    loop.train(1)
    for _ in range(4):  # total = total + loss, and one backward for all
        loop.forward()
        loop.loss()
        card.alloc(4, own(33))


@fault("graph")
def graph_kept_by_retain_graph(card: Recording) -> None:
    loop = Loop(card)
    for _ in range(4):
        saved, output = loop.forward()
        loop.loss()
        again = [card.alloc(card.blocks[number][1], []) for number in saved]
        card.free(*again, output)
        loop.step()


@fault("losses")
def losses_in_a_list(card: Recording) -> None:
    Loop(card).train(20, keeps_loss=True, batch=1, seq=16)


@fault("outputs")
def outputs_of_an_evaluation_in_a_list(card: Recording) -> None:
    loop = Loop(card)
    for _ in range(12):
        loop.forward(own(61, "collect"), grad=False)


@fault("grad_eval")
def evaluation_with_gradients(card: Recording) -> None:
    loop = Loop(card)
    loop.train(2)
    old: list[int] = []
    for _ in range(4):  # `outputs` of the batch before lives until it is assigned again
        saved, output = loop.forward(own(61, "evaluate"), batch=16)
        card.free(*old)
        old = [*saved, output]


@fault("grad_eval")
def inference_without_no_grad(card: Recording) -> None:
    loop = Loop(card)
    for _ in range(4):
        loop.forward(own(61, "main"))


@fault("previous")
def outputs_of_the_step_before(card: Recording) -> None:
    loop, old = Loop(card), []
    for _ in range(3):
        saved, output = loop.forward(output=40 * MIB)
        card.free(*old)
        old = [output, loop.loss()]
        loop.backward(saved)
        loop.step()
        loop.zero_grad()


@fault("models")
def two_models_at_two_lines(card: Recording) -> None:
    Loop(card, caller=own(12, "main"))
    Loop(card, caller=own(19, "main")).train(2)


@fault("models")
def two_models_of_one_line(card: Recording) -> None:
    for _ in range(2):
        loop = Loop(card)
    loop.train(2)


@fault("copy")
def average_of_the_weights(card: Recording) -> None:
    loop = Loop(card)
    copied = [frame(f"{MODULE.replace('nn/modules/module', '_tensor')}", 161, "__deepcopy__"),
              frame("/usr/lib/python3.11/copy.py", 172, "deepcopy"), *own(14, "main")]  # fmt: skip
    for size in loop.sizes:
        card.alloc(size, copied)
    loop.train(2)


@fault("optimizers")
def optimizer_made_again_for_each_epoch(card: Recording) -> None:
    loop = Loop(card)
    loop.train(2)
    loop.state = []  # a list of schedulers still refers to the old optimizer
    loop.train(2)


@fault("optimizers")
def two_optimizers_of_the_same_parameters(card: Recording) -> None:
    loop = Loop(card)
    saved, _ = loop.forward()
    loop.backward(saved)
    loop.step(own(34))
    loop.state = []
    loop.step(own(35))


@fault("gradients")
def gradients_freed_after_the_forward_pass(card: Recording) -> None:
    loop = Loop(card)
    for _ in range(3):
        saved, output = loop.forward(batch=32)
        loop.zero_grad()
        loop.backward(saved)
        loop.step()
        card.free(output)


@fault("lengths")
def fragmentation_by_lengths(card: Recording) -> None:
    loop = Loop(card)
    for seq in (128, 160, 192, 224, 256, 320, 384, 448, 512):
        loop.train(1, seq=seq)
    card.oom(48 * MIB, forward(431, own(31)))


@fault("fragmentation")
def fragmentation_between_blocks_that_stay(card: Recording) -> None:
    blocks = [card.alloc(6 * MIB, load(own(12, "main"))) for _ in range(60)]
    card.free(*blocks[::2])
    card.oom(40 * MIB, forward(431, own(31)))


@fault("attention")
def scores_of_eager_attention(card: Recording) -> None:
    Loop(card).train(2, seq=512, eager=True)


@fault("logits")
def logits_in_the_loss(card: Recording) -> None:
    loop = Loop(card)
    loop.forward(batch=1)
    functional = frame(MODULE.replace("modules/module", "functional"), 3479, "cross_entropy")
    card.oom(400 * MIB, [functional, *own(32)])


@fault("foreach")
def temporaries_of_a_foreach_optimizer(card: Recording) -> None:
    Loop(card).train(2, foreach=True, batch=1, seq=16)


@fault("buckets")
def buckets_of_data_parallelism(card: Recording) -> None:
    loop = Loop(card)
    buckets = frame(MODULE.replace("modules/module", "parallel/distributed"), 1190, "_ddp_init_helper")
    card.alloc(sum(loop.sizes), [buckets, *own(16, "main")])
    loop.train(1, batch=1, seq=16)


@fault("data")
def dataset_on_the_card(card: Recording) -> None:
    for _ in range(20):
        card.alloc(8 * MIB, own(22, "__init__", TRAIN.replace("train", "data")))
    Loop(card).train(1)


@fault("cache")
def keys_and_values_of_generate(card: Recording) -> None:
    loop = Loop(card)
    cache = frame(BERT.replace("models/bert/modeling_bert", "cache_utils"), 120, "update")
    for _ in range(8):
        card.free(loop.forward(own(70, "generate"), batch=1, seq=4, grad=False)[1])
        for _ in range(4):
            card.alloc(8 * MIB, forward(310, own(70, "generate"), cache))


@fault("waiting")
def blocks_that_wait_for_a_stream(card: Recording) -> None:
    loop = Loop(card)
    for _ in range(5):
        card.states[card.alloc(20 * MIB, own(41))] = "active_awaiting_free"
    loop.forward(batch=1, seq=16)
    card.oom(40 * MIB, forward(431, own(31)))


@fault("before")
def recording_that_begins_late(card: Recording) -> None:
    loop = Loop(card)
    card.events.clear()
    for number, (block, size, _) in card.blocks.items():
        card.blocks[number] = block, size, []
    loop.train(1, batch=1, seq=16)


def no_fault(card: Recording) -> None:
    Loop(card).train(4)


def accumulated_gradients(card: Recording) -> None:
    loop = Loop(card)
    for number in range(8):
        saved, output = loop.forward()
        loss = loop.loss()
        loop.backward(saved)
        card.free(output, loss)
        if number % 4 == 3:
            loop.step()
            loop.zero_grad()


def evaluation_without_gradients(card: Recording) -> None:
    loop = Loop(card)
    loop.train(2)
    for _ in range(5):
        card.free(loop.forward(own(61, "evaluate"), grad=False)[1])


def explained(card: Recording) -> WhyReport:
    return report_of(BytesIO(card.pickled()), "snapshot.pickle")


# What a step without a fault is made of.
PARTS = {"why_activations", "why_optimizer", "why_parameters"}
# Findings that come with a fault: the blocks of another stream are tensors of the user's code, a large request is
# that of its operator too, and a short recording has few passes.
TOO = {
    "blocks_that_wait_for_a_stream": {"why_data"}, "logits_in_the_loss": {"why_request"},
    "no_fault_but_too_many_layers": {"why_fragmentation"},
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_within_three_seconds_of_the_processor_and_no_other(name):
    key, plant = FAULTS[name]
    card = Recording()
    plant(card)
    start = time.process_time()
    report = explained(card)
    assert time.process_time() - start < 3
    assert {finding.key for finding in report.findings} - PARTS - TOO.get(name, set()) == {key} - PARTS, report.findings
    assert key in [finding.key for finding in report.findings]
    assert all(len(finding_text(report, found)[0]) <= LINE for found in report.findings)


@pytest.mark.parametrize("loop", [no_fault, accumulated_gradients, evaluation_without_gradients])
def test_a_loop_without_a_fault_has_none(loop):
    card = Recording()
    loop(card)
    assert {finding.key for finding in explained(card).findings} == PARTS
