"""transformers takes our flash-attn for the package, and each name that we replace is there."""

import json
import re
import sys
import warnings
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import pytest

import bertscope
from bertscope import transformers_access
from bertscope.errors import SelectionError
from bertscope.measure.profiler_run import measured
from bertscope.memory.fake_run import fake_run
from bertscope.memory.step import ModelStep
from bertscope.settings.run_config import FREED, RunConfig
from bertscope.sources.find import find
from bertscope.torch_access import torch
from bertscope.tracing.fake_tensors import fake_copy, fake_like, fake_tensors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    import transformers.modeling_flash_attention_utils as utilities
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 0,
         "intermediate_size": 40, "max_position_embeddings": 64}  # fmt: skip
FAMILY, MODEL, CONFIG = (
    ("modernbert", "ModernBertForMaskedLM", {**SIZES, "local_attention": 8})
    if "modernbert" in CONFIG_MAPPING
    else ("distilbert", "DistilBertForMaskedLM", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2,
                                                 "hidden_dim": 40})
)  # fmt: skip
B, S, PADDING = 6, 32, 0.7


@pytest.fixture
def kernels():
    """Kernels on the CPU that allocate what those of flash-attn allocate, in fp32, for which a CPU needs no scratch."""
    transformers_access._operators()
    library = torch.library.Library("bertscope_flash_attn", "IMPL")
    for kind in ("", "varlen_"):
        library.impl(f"_flash_attn_{kind}forward", transformers_access.results, "CPU")
        library.impl(f"_flash_attn_{kind}backward", lambda *_: None, "CPU")
    yield
    library._destroy()


def build(kernel="flash_attention_2"):
    config = CONFIG_MAPPING[FAMILY](**CONFIG, attn_implementation=kernel)
    return getattr(transformers, MODEL)(config).train()


@pytest.mark.parametrize("padding", [0.0, PADDING])
def test_a_step_on_packed_sequences_needs_the_memory_of_the_allocator(kernels, padding):
    run_config = RunConfig(batch=B, seq=S, padding=padding, optimizer="sgd", loop=FREED)
    mask = torch.ones(B, S, dtype=torch.long)
    mask[:, S - round(padding * S) :] = 0
    inputs = {"input_ids": torch.randint(1, 99, (B, S)), "attention_mask": mask, "labels": torch.randint(0, 99, (B, S))}
    with transformers_access.flash_attn_stand_in():
        model = build()
        model(**inputs)  # the tables of rotary embeddings exist from the first call on
        with fake_tensors():
            estimated = fake_run(ModelStep(fake_copy(model), fake_like(inputs), run_config)).peak_bytes
        step = ModelStep(model, inputs, run_config)
        step.run_first_steps()
        assert estimated == pytest.approx(measured(step).peak_bytes, rel=1e-3)


def test_attention_saves_its_inputs_its_output_and_the_sums_of_softmax():
    """Of 2 sequences of 16 with 4 heads of 8 in bf16: q, k, v and out of 2,048 bytes, 512 of fp32 sums, 16 of state."""
    saved = []

    def note(tensor):
        saved.append(tensor.nbytes)
        return tensor

    with transformers_access.flash_attn_stand_in():
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        q, k, v = (torch.empty(2, 16, 4, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
        ends = torch.empty(3, dtype=torch.int32, device="meta")
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            flash_attn_func(q, k, v).sum().backward()
            assert sorted(saved) == [16, 512, 2048, 2048, 2048, 2048]
            saved.clear()
            packed = [tensor.flatten(0, 1) for tensor in (q, k, v)]
            flash_attn_varlen_func(*packed, ends, ends, 16, 16, window_size=(4, 4)).sum().backward()
            assert sorted(saved) == [12, 12, 16, 512, 2048, 2048, 2048, 2048]
    assert q.grad.shape == q.shape


def test_after_the_stand_in_transformers_is_as_before():
    def state():
        modules = [module for name, module in sys.modules.items() if name.startswith("transformers")]
        seen = {(m.__name__, name): vars(m)[name] for m in modules for name in transformers_access._ANSWERS
                if name in vars(m)}  # fmt: skip
        methods = {name: vars(transformers.PreTrainedModel).get(name) for name in transformers_access._CHECKS}
        return seen | methods | {name: vars(utilities).get(name) for name in transformers_access._IMPORTED.split()}

    build("eager")
    before = state()
    with transformers_access.flash_attn_stand_in():
        build()
        assert utilities.is_flash_attn_2_available()
        assert "flash_attn" in sys.modules
    assert {name: value for name, value in state().items() if name in before} == before
    assert not any(name.partition(".")[0] in ("flash_attn", "flash_attn_interface") for name in sys.modules)
    with pytest.raises((ImportError, ValueError)):
        build()


UNPADDED = """
from transformers.utils import is_flash_attn_2_available
if is_flash_attn_2_available():
    from flash_attn.layers.rotary import RotaryEmbedding
else:
    RotaryEmbedding = object
class OfRows(RotaryEmbedding): pass
"""  # as in ModernBERT of transformers 4.48 to 4.57


def test_a_module_that_was_imported_without_flash_attn_gets_its_names(tmp_path, monkeypatch):
    (tmp_path / "unpadded.py").write_text(UNPADDED)
    monkeypatch.setattr(transformers.models, "__path__", [*transformers.models.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "transformers.models.unpadded", None)  # the end removes it
    del sys.modules["transformers.models.unpadded"]
    module = import_module("transformers.models.unpadded")
    assert module.OfRows.__bases__ == (object,)
    with transformers_access.flash_attn_stand_in():
        assert module.OfRows.__bases__ == (transformers_access._RotaryEmbedding,)


def test_every_name_of_transformers_is_there():
    """Canary: without these names a model says that flash-attn is not installed."""
    assert "is_flash_attn_2_available" in vars(utilities)
    checks = [name for name in transformers_access._CHECKS if name in vars(transformers.PreTrainedModel)]
    assert checks, "transformers looks for flash-attn elsewhere"
    if int(transformers.__version__.partition(".")[0]) >= 5:
        assert set(transformers_access._IMPORTED.split()) <= vars(utilities).keys()
        assert utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["general_availability_check"]
        assert checks == ["_flash_attn_can_dispatch"]


def test_a_class_without_flash_attention_says_so():
    config = CONFIG_MAPPING["albert" if FAMILY == "distilbert" else "longformer"](
        vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, attn_implementation="flash_attention_2"
    )
    kind = transformers.AlbertModel if FAMILY == "distilbert" else transformers.LongformerModel
    with transformers_access.flash_attn_stand_in(), pytest.raises(ValueError, match="has no flash attention in this"):
        kind(config)


def test_an_item_comes_back_at_the_end():
    items = {"held": 1}
    with ExitStack() as stack:
        transformers_access.replace_item(stack, items, "held", 2)
        transformers_access.replace_item(stack, items, "new", 3)
        assert items == {"held": 2, "new": 3}
    assert items == {"held": 1}


def source(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": FAMILY, "architectures": [MODEL], **CONFIG, **keys}))
    return path


def test_a_config_may_name_flash_attention_which_an_estimate_takes_for_a_card_only(tmp_path):
    path = source(tmp_path, _attn_implementation="flash_attention_2")
    half = {"batch": 4, "seq": 32, "precision": "bf16"}
    report = bertscope.estimate(path, device="cuda", **half)
    assert report.subject.attention == "flash_attention_2"
    with pytest.raises(SelectionError, match="flash_attention_2 runs on a GPU only: estimate it for one with gpu"):
        bertscope.estimate(path, **half)
    if FAMILY == "modernbert" and transformers.__version__ < "5":  # which converts its queries to bf16
        assert bertscope.estimate(path, device="cuda", **half | {"precision": "fp32"}).variants
        return
    with pytest.raises(SelectionError, match=r"takes fp16 and bf16 .* got float32 and 16; add precision bf16"):
        bertscope.estimate(path, device="cuda", **half | {"precision": "fp32"})


def test_packed_attention_has_the_peak_of_the_valid_tokens(tmp_path):
    """Without padding the batch takes the kernel of fixed lengths; 70 % of padding leave a third of the tokens."""
    full, padded = (
        bertscope.estimate(source(tmp_path, attn_implementation="flash_attention_2"), batch=64, seq=64, mode="forward",
                           precision="bf16", device="cuda", padding=share)
        for share in (0.0, 0.7)
    )  # fmt: skip
    assert padded.variants[0].estimated.cost.saved_bytes < full.variants[0].estimated.cost.saved_bytes


def test_a_run_of_the_built_in_bert_has_no_flash_attention_and_names_what_it_has(tmp_path):
    config = tmp_path / "bert.json"
    config.write_text(json.dumps({"model_type": "bert", "attn_implementation": "flash_attention_2", "hidden_size": 24}))
    for model in (find("bert-tiny", attention="flash_attention_2"), find(config)):
        assert bertscope.count(model).rows
        with pytest.raises(SelectionError, match="eager and sdpa, not flash_attention_2; take attention sdpa"):
            bertscope.estimate(model)
    assert find(config, attention="eager").flash == ""


def test_what_this_transformers_imports_of_flash_attn_is_known():
    folder = Path(transformers.__file__).parent
    names = re.compile(r"^\s*from (flash_attn(?!\.cute)[\w.]*) import ([\w, ]+)", re.MULTILINE)
    found = {(module, name.strip()) for path in folder.rglob("*.py") if b"from flash_attn" in path.read_bytes()
             for module, imported in names.findall(path.read_text()) for name in imported.split(",")}  # fmt: skip
    assert len(found) >= 5
    assert [item for item in found if item[1] not in transformers_access.modules()[item[0]]] == []


def test_flash_attention_counts_the_flops_of_eager_attention_in_a_model_without_linear_layers(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 40}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    eager, flash = (
        bertscope.flops(find(str(tmp_path), attention=kernel), batch=1, seq=8).total
        for kernel in ("eager", "flash_attention_2")
    )
    assert eager == flash > 0
