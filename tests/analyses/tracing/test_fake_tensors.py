"""Operators on fake tensors: a result that is taken from its description is the result that torch computes."""

from __future__ import annotations

import pytest

from bertscope.analyses.tracing.fake_tensors import OperatorResults, fake_tensors
from bertscope.torch_access import storage_key, torch

aten = torch.ops.aten


def layout(tensor):
    """All that is known of a fake tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def described(operator, args, kwargs, known):
    """The layouts of the results, the arguments whose storage they have, and those that they are."""
    out = known.run(operator, args, kwargs)
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
def test_a_second_result_is_described_like_one_of_torch(operator, args, kwargs):
    known = OperatorResults()
    with fake_tensors():
        first, second, by_torch = (
            described(operator, args(torch.empty), kwargs, found) for found in (known, known, OperatorResults())
        )
    assert first == second == by_torch


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
