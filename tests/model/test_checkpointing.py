"""Checkpointing: less is kept, nothing else changes."""

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.errors import BertscopeWarning
from bertscope.model import attention as attention_module

STRATEGIES = ("full", "every-2", "every-3", "layers:0", "layers:1-2", "layers:0,3", "selective")


@pytest.fixture(params=["eager", "sdpa"])
def model(tiny, request):
    """Four layers in train mode, with dropout."""
    torch.manual_seed(1)
    config = replace(tiny, num_hidden_layers=4, attn_implementation=request.param, initializer_range=0.5)
    return bertscope.BertForMaskedLM(config).train()


IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
MASK = (IDS > 0).long()


def step(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one training step with fixed dropout masks."""
    torch.manual_seed(3)
    model.zero_grad()
    loss = model(IDS, MASK, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("strategy", "reentrant"), [*((strategy, False) for strategy in STRATEGIES), ("full", True)])
def test_loss_and_gradients_are_the_same_bit_for_bit(model, strategy, reentrant):
    loss, gradients = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant}, strategy=strategy)
    again, recomputed = step(model)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, recomputed[name]), name


def layer_runs(model) -> list[int]:
    """Count the runs of each layer's feed-forward in one step."""
    runs = [0] * len(model.bert.encoder.layer)

    def count(number):
        def hook(*args):
            runs[number] += 1

        return hook

    handles = [
        layer.intermediate.register_forward_hook(count(number)) for number, layer in enumerate(model.bert.encoder.layer)
    ]
    step(model)
    for handle in handles:
        handle.remove()
    return runs


def test_it_works_in_train_mode_alone_and_can_be_switched_off(model):
    model.gradient_checkpointing_enable()
    assert model.bert.encoder.gradient_checkpointing
    model.eval()
    assert layer_runs(model) == [1, 1, 1, 1]
    model.train()
    assert layer_runs(model) == [2, 2, 2, 2]
    model.gradient_checkpointing_enable(strategy="none")
    assert layer_runs(model) == [1, 1, 1, 1]


def test_the_configuration_can_ask_for_it(tiny):
    for asked in (True, False):
        model = bertscope.BertForMaskedLM(replace(tiny, gradient_checkpointing=asked))
        assert model.bert.encoder.gradient_checkpointing is asked


def test_the_cache_is_switched_off_with_a_warning(tiny, monkeypatch):
    monkeypatch.setattr(attention_module, "_said", set())
    model = bertscope.BertLMHeadModel(replace(tiny, is_decoder=True)).train()
    assert model(IDS).past_key_values is not None
    model.gradient_checkpointing_enable()
    with pytest.warns(BertscopeWarning, match="the cache is switched off"):
        assert model(IDS).past_key_values is None
    assert model.eval()(IDS).past_key_values is not None


def test_torch_refuses_two_runs_of_selective_checkpointing_in_one_autocast_block(model):
    """A canary: the second run takes weights in bf16 from the cache of autocast, and the recomputation does not."""
    model.gradient_checkpointing_enable(strategy="selective")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, MASK, labels=IDS).loss + model(IDS, MASK, labels=IDS).loss
    with pytest.raises(RuntimeError, match="_to_copy"):
        loss.backward()


@pytest.mark.parametrize("strategy", ["full", "layers:1-2"])
def test_two_runs_in_one_autocast_block_have_the_same_gradients(model, strategy):
    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(IDS, MASK, labels=IDS).loss + model(IDS, MASK, labels=IDS).loss
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable(strategy=strategy)
    for one, other in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_checkpointing_does_not_train_the_layers_above_frozen_embeddings(model, reentrant):
    """As in torch, which warns that none of the inputs requires a gradient."""
    model.bert.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(IDS, MASK, labels=IDS).loss.backward()
    is_trained = {parameter.grad is not None for parameter in model.bert.encoder.parameters()}
    assert is_trained == {not reentrant}
    assert all(
        parameter.grad is not None for name, parameter in model.cls.named_parameters() if "decoder.w" not in name
    )
