"""Operators on fake tensors: a result that is taken from its description is the result that torch computes."""

from __future__ import annotations

import pytest

from bertscope import load
from bertscope.analyses.memory import fake_run
from bertscope.analyses.memory.estimate import module_trace
from bertscope.analyses.memory.step import meta_inputs, run_model
from bertscope.analyses.tracing import fake_tensors as fake_tensors_module
from bertscope.analyses.tracing.fake_tensors import OperatorResults, fake_tensors
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import is_plain_meta, operator_name, storage_key, torch

aten = torch.ops.aten


def layout(tensor):
    """All that is known of a fake tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def described(run, operator, args, kwargs):
    """The layouts of the results, the arguments whose storage they have, and those that they are."""
    out = run(operator, args, kwargs)
    given = [arg for arg in args if isinstance(arg, torch.Tensor)]
    found = [
        result if result is None else (
            layout(result), [storage_key(arg) == storage_key(result) for arg in given], [arg is result for arg in given]
        )
        for result in (out if isinstance(out, (tuple, list)) else (out,))
    ]  # fmt: skip
    return type(out) if isinstance(out, (tuple, list)) else None, found


CASES = {
    "product": (aten.mm.default, lambda t: (t(2, 3), t(3, 4)), {}),
    "sum of two dtypes": (aten.add.Tensor, lambda t: (t(2, 3), t(3, dtype=torch.half)), {}),
    "sum with an integer": (aten.add.Tensor, lambda t: (t(2, dtype=torch.long), 2), {}),
    "sum with a real number": (aten.add.Tensor, lambda t: (t(2, dtype=torch.long), 2.0), {}),
    "copy in another dtype": (aten._to_copy.default, lambda t: (t(2, 3).t(),), {"dtype": torch.bfloat16}),
    "view": (aten.view.default, lambda t: (t(2, 6), [3, 4]), {}),
    "hidden view": (aten._unsafe_view.default, lambda t: (t(2, 6), [3, 4]), {}),
    "slice": (aten.slice.Tensor, lambda t: (t(4, 6), 0, 1, 3), {}),
    "expansion": (aten.expand.default, lambda t: (t(1, 6), [5, 6]), {}),
    "in place": (aten.mul_.Tensor, lambda t: (t(2, 3), t(3)), {}),
    "several results": (aten.native_layer_norm.default, lambda t: (t(2, 4), [4], t(4), t(4), 1e-5), {}),
    "a result that is None": (
        aten.native_layer_norm_backward.default,
        lambda t: (t(2, 4), t(2, 4), [4], t(2, 1), t(2, 1), t(4), t(4), [True, True, False]), {},
    ),
    "list of tensors": (aten.cat.default, lambda t: ([t(2, 3), t(2, 3)],), {}),
    "list of views": (aten.split.Tensor, lambda t: (t(4, 2), 2), {}),
    "part of a storage": (aten.slice.Tensor, lambda t: (t(4, 6)[2:], 0, 1, 2), {}),
    "resized": (aten.resize_.default, lambda t: (t(2, 3), [5, 5]), {}),
    "transposed in place": (aten.t_.default, lambda t: (t(2, 3),), {}),
    "new tensor": (aten.ones.default, lambda t: ([2, 3],), {}),
    "complex": (aten.mul.Tensor, lambda t: (t(2, dtype=torch.cfloat), t(2)), {}),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "args", "kwargs"), CASES.values(), ids=CASES)
def test_the_first_result_and_a_second_are_like_one_of_torch(operator, args, kwargs):
    known = OperatorResults().run

    def by_torch(operator, args, kwargs):
        return operator(*args, **kwargs)

    with fake_tensors():
        first, second, of_torch = (
            described(run, operator, args(torch.empty), kwargs) for run in (known, known, by_torch)
        )
    assert first == second == of_torch
    with torch.device("meta"):
        known = OperatorResults(is_plain_meta).run
        assert of_torch == described(by_torch, operator, args(torch.empty), kwargs)
        assert [described(known, operator, args(torch.empty), kwargs) for _ in range(2)] == [of_torch] * 2


def test_each_operator_that_runs_on_meta_gives_what_fake_tensors_give(monkeypatch):
    on_meta, met = fake_tensors_module._described_on_meta, set()

    def plain(found):
        """The description without the strides of dimensions of size 1, which lead nowhere."""
        results, is_tuple = found
        return is_tuple, [
            result if result is None or isinstance(result, int) else
            (result[0][0], [stride for size, stride in zip(*result[0][:2], strict=True) if size > 1], *result[0][2:],
             result[1])
            for result in results
        ]  # fmt: skip

    def compared(operator, args, kwargs):
        found = on_meta(operator, args, kwargs)
        if found is not None:
            by_torch = fake_tensors_module._described(operator(*args, **kwargs), args, args)
            assert plain(found) == plain(by_torch), operator
            met.add(operator_name(operator))
        return found

    monkeypatch.setattr(fake_tensors_module, "_described_on_meta", compared)
    for head, attention, device, settings in (
        ("BertForMaskedLM", "eager", "cpu", {"precision": "autocast-bf16"}),
        (
            "BertForSequenceClassification",
            "sdpa",
            "cuda",
            {"precision": "autocast-fp16", "optimizer_implementation": "loop"},
        ),
        ("BertModel", "sdpa", "cpu", {"checkpointing": "full", "precision": "bf16"}),
        ("BertForQuestionAnswering", "eager", "cuda", {"optimizer": "adafactor"}),
    ):
        monkeypatch.setattr(fake_run, "_RESULTS", OperatorResults())
        source = load("bert-tiny", architecture=head, attention=attention)
        run_config = RunConfig(batch=3, seq=7, device=device, **settings)
        model = run_model(source, run_config)
        module_trace(model, meta_inputs(model, run_config), run_config, None)
    listed = fake_tensors_module._SAME_EVERYWHERE | {fake_tensors_module._LAYER_NORM}
    assert met == listed  # none is in the list without need


@pytest.mark.parametrize("other", ["cpu", "meta"])
def test_an_operator_between_devices_is_left_to_torch(other):
    with fake_tensors():
        given = torch.empty(2, 3, device="cuda")
        kwargs = {"dtype": torch.half, "device": torch.device(other)}
        assert fake_tensors_module._described_on_meta(aten._to_copy.default, (given,), kwargs) is None
        made = OperatorResults().run(aten._to_copy.default, (given,), kwargs)
    assert made.device.type == other


def test_arguments_that_differ_in_layout_dtype_or_kind_of_number_have_own_results():
    known = OperatorResults()
    with fake_tensors():
        found = [
            known.run(aten.add.Tensor, (torch.empty(2, 3, dtype=dtype), number), {}).dtype
            for dtype in (torch.long, torch.half) for number in (1, 1.0, True)
        ]  # fmt: skip
        turned = [
            known.run(aten.add.Tensor, (given, 1), {}).stride() for given in (torch.ones(3, 3), torch.ones(3, 3).t())
        ]
    assert found == [torch.long, torch.float, torch.long, torch.half, torch.half, torch.half]
    assert turned == [(3, 1), (1, 3)]


def test_an_operator_that_fails_fails_each_time():
    known = OperatorResults()
    with fake_tensors():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                known.run(aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3)), {})


def test_so_many_results_are_kept_and_no_more(monkeypatch):
    monkeypatch.setattr(fake_tensors_module, "_MOST_OPERATIONS", 3)
    known = OperatorResults()
    with fake_tensors():
        sizes = [known.run(aten.t.default, (torch.empty(2, size),), {}).shape for size in range(1, 9)]
    assert sizes == [(size, 2) for size in range(1, 9)]
    assert len(known.known) == 3
