"""A trace: its fake tensors, example inputs, the shapes of its modules, and windows of attention."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope import load
from bertscope.memory import fake_run
from bertscope.memory.estimate import module_trace
from bertscope.memory.step import meta_inputs, run_model
from bertscope.model import CLASSES, build
from bertscope.settings.run_config import INFERENCE, TRAINING, RunConfig
from bertscope.sources.find import find
from bertscope.torch_access import is_plain_meta, operator_name, storage_key
from bertscope.tracing import fake_tensors as fake_tensors_module
from bertscope.tracing.fake_tensors import OperatorResults, fake_tensors
from bertscope.tracing.flops import FlopsRun, shapes_of
from bertscope.tracing.inputs import inputs_for, known_shapes
from bertscope.tracing.log import Window, windows_of

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


def test_an_error_of_a_bert_whose_inputs_are_derived_stays_an_internal_error(cli, monkeypatch):
    monkeypatch.setattr(bertscope.BertModel, "forward", lambda self, input_ids: input_ids.nonsense)
    result = cli("flops", "bert-tiny", "--seq", "23")
    assert result.code == 70
    assert "AttributeError" in result.err


def test_the_shapes_in_the_line_are_those_that_are_derived():
    model = bertscope.load("bert-tiny", architecture="BertForMultipleChoice").build()
    assert known_shapes(model, ("input_ids",)) == {
        "attention_mask": "Bx2xS:int64", "token_type_ids": "Bx2xS:int64", "position_ids": "Bx2xS:int64",
        "input_ids": "Bx2xS:int64", "labels": "B:int64",
    }  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_the_output_of_a_layer_is_the_input_of_the_next(tiny, name):
    config = replace(tiny, num_hidden_layers=3)
    found = shapes_of(model := build(config, name), inputs_for(model, 2, 5))
    prefix = "" if name == "BertModel" else "bert."
    hidden = found[f"{prefix}embeddings"][1][0]
    for number in range(3):
        given, returned = found[f"{prefix}encoder.layer.{number}"]
        assert given[0] == hidden
        hidden = returned[0]
    assert hidden.shape[-2:] == (5, 8)


def test_shapes_on_meta_are_those_of_a_real_run(tiny):
    seen = {}
    model = bertscope.BertForMaskedLM(tiny).eval()

    def remember(path):
        def hook(module, given, out):
            seen.setdefault(path, tuple(getattr(out, "shape", ())))

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(remember(path))
    model(torch.ones(3, 7, dtype=torch.long))
    found = shapes_of(model := build(tiny, "BertForMaskedLM"), inputs_for(model, 3, 7))
    for path, shape in seen.items():
        if shape:
            assert found[path][1][0].shape == shape, path


def test_folded_layers_stay_folded_and_sums_do_not_change(tiny):
    model = build(tiny, "BertForMaskedLM")
    found = shapes_of(model, inputs_for(model, 2, 5))
    for analyse in (bertscope.count, bertscope.tree):
        plain, shaped = analyse(model), analyse(model, shapes=found)
        assert [(row.path, row.params, row.copies) for row in plain.rows] == [
            (row.path, row.params, row.copies) for row in shaped.rows
        ]
        assert plain.totals == shaped.totals


def test_parts_of_a_layer_show_what_goes_in_and_comes_out(tiny):
    model = build(tiny)
    (layer,) = [
        row
        for row in bertscope.count(model, shapes=shapes_of(model, inputs_for(model, 2, 5))).rows
        if row.name == "layer"
    ]
    parts = {part.name: part for part in layer.parts}
    assert parts["feed_forward"].inputs[0].shape == parts["feed_forward"].outputs[0].shape == (2, 5, 8)
    assert parts["self_attention"].outputs[0].shape == (2, 5, 8)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

H, S, LAYERS = 32, 24, 3
SIZES = {"vocab_size": 99, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "pad_token_id": 0,
         "intermediate_size": 40, "max_position_embeddings": 64}  # fmt: skip
_GROUPS = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
# model_type -> class, configuration, and the pairs of each layer
FAMILIES = {
    "modernbert": ("ModernBertModel", {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 3},
                   [S * S, S * 9 - 4 * 5, S * 9 - 4 * 5]),
    "mistral": ("MistralModel", {**_GROUPS, "sliding_window": 4}, [10 + (S - 4) * 4] * LAYERS),
    "gemma2": ("Gemma2Model", {**_GROUPS, "sliding_window": 4},
               [10 + (S - 4) * 4, S * (S + 1) // 2, 10 + (S - 4) * 4]),
    "gemma3_text": ("Gemma3TextModel", {**_GROUPS, "sliding_window": 4, "sliding_window_pattern": 2},
                    [10 + (S - 4) * 4, S * (S + 1) // 2, 10 + (S - 4) * 4]),
}  # fmt: skip
known = pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING])


def source(folder, family, config, architecture, attention=None):
    path = folder / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, "architectures": [architecture], **config}))
    return find(path, attention=attention)


def work(source, **run):
    return FlopsRun(source=source, run=RunConfig(**{"mode": INFERENCE, **run})).of_all_layers(1, S).rows[0].total


@pytest.mark.parametrize(("left", "right"), [(2, 2), (4, 0), (-1, 0), (3, -1), (90, 90), (0, 0)])
def test_pairs_are_the_ones_of_a_mask(left, right):
    shown = [i - j <= left or left < 0 for i in range(7) for j in range(7) if j <= i]
    shown += [j - i <= right or right < 0 for i in range(7) for j in range(7) if j > i]
    assert Window(left, right).pairs(7) == sum(shown)


def test_a_window_of_one_to_each_side_shows_seven_of_nine_pairs():
    assert Window(1, 1).pairs(3) == 7


@known
def test_the_windows_are_those_of_the_attention_weights(family):
    architecture, config, pairs = FAMILIES[family]
    model = getattr(transformers, architecture)(CONFIG_MAPPING[family](**config, attn_implementation="eager")).eval()
    weights = model(torch.randint(1, 99, (1, S)), output_attentions=True).attentions
    assert [int((layer[0, 0] > 0).sum()) for layer in weights] == pairs
    assert [window.pairs(S) for window in windows_of(model).values()] == [own for own in pairs if own < S * S]


@known
def test_flops_within_windows_equal_the_closed_form(tmp_path, family):
    """Scores and context are 4 FLOPs for each pair and element of the width; those of hidden pairs are not needed."""
    architecture, config, pairs = FAMILIES[family]
    own = source(tmp_path, family, config, architecture)
    found = work(own)
    assert found.matmul_flops - found.needed_flops == sum(4 * H * (S * S - shown) for shown in pairs)
    trained = work(own, mode=TRAINING)
    assert trained.matmul_flops - trained.needed_flops == 3 * (found.matmul_flops - found.needed_flops)


@known
def test_flash_attention_has_the_flops_of_eager_attention(tmp_path, family):
    architecture, config, _ = FAMILIES[family]
    eager, flash = (work(source(tmp_path, family, config, architecture, kernel), mode=TRAINING)
                    for kernel in ("eager", "flash_attention_2"))  # fmt: skip
    assert (flash.matmul_flops, flash.needed_flops) == (eager.matmul_flops, eager.needed_flops)


def test_longformers_chunks_are_wider_than_its_window(tmp_path):
    """With 4 keys to each side: scores of 5 chunks of 8 x 8, context of 24 queries with 12 keys, needed 24 x 9 - 20."""
    config = {**SIZES, "attention_window": [8] * LAYERS}
    found = work(source(tmp_path, "longformer", config, "LongformerModel"))
    computed, needed = 5 * 64 + S * 12, 2 * (S * 9 - 20)
    assert found.matmul_flops - found.needed_flops == LAYERS * 2 * H * (computed - needed)


def test_padding_takes_the_flops_of_packed_attention(tmp_path):
    """Half of the tokens have a quarter of the pairs."""
    config = {"vocab_size": 99, "dim": H, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 40}
    own = source(tmp_path, "distilbert", config, "DistilBertModel", "flash_attention_2")
    full, half = (work(own, padding=share) for share in (0.0, 0.5))
    assert full.matmul_flops - half.matmul_flops == LAYERS * 4 * H * (S * S - S * S // 4)


def test_a_model_without_windows_has_no_such_column(tmp_path):
    report = bertscope.flops("bert-tiny")
    assert not report.is_local
    assert report.rows[0].total.needed_flops == report.rows[0].total.matmul_flops


def test_modernbert_at_8192_tokens_needs_three_fifths(tmp_path, cli):
    """8 layers see all of 8,192 tokens, 14 see 64 to each side: 8,192 x 129 - 64 x 65 pairs of 768 x 4 FLOPs."""
    if "modernbert" not in CONFIG_MAPPING:
        pytest.skip("this version of transformers has no ModernBERT")
    base = {"vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
            "intermediate_size": 1152, "local_attention": 128, "global_attn_every_n_layers": 3,
            "max_position_embeddings": 8192, "pad_token_id": 0}  # fmt: skip
    own = source(tmp_path, "modernbert", base, "ModernBertForMaskedLM")
    total = FlopsRun(source=own).at(1, 8192).rows[0].total
    layer = 2 * 8192 * (768 * 3 * 768 + 768 * 768 + 768 * 2 * 1152 + 1152 * 768)
    linear = 22 * layer + 2 * 8192 * 768 * (768 + 50368)
    local, whole = 4 * 768 * (8192 * 129 - 64 * 65), 4 * 768 * 8192**2
    rotary = total.matmul_flops - linear - 22 * whole  # transformers 4 has tables by a product
    assert total.needed_flops - rotary == linear + 8 * whole + 14 * local == 4_145_085_284_352
    assert rotary in (0, 11_534_336)
