"""Optimizer objects and loss functions of a caller's program: against plain loops; nothing of the caller's changes."""

import copy
import gc
import pickle
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bertscope
from bertscope.errors import BertscopeError
from tests.conftest import EVERY_CASE
from tests.memory.plain_loop import peak_bytes

TARGETS = torch.arange(8) % 5


class Masters(torch.optim.Optimizer):
    """SGD with momentum on copies of the parameters in fp32, as packages for mixed precision have it."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
        self.masters = [param.detach().clone().float() for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param, master in zip(group["params"], self.masters, strict=True):
                if param.grad is None:
                    continue
                master.grad = param.grad.float()
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(master)
                state["momentum"].mul_(group["beta"]).add_(master.grad)
                master.sub_(group["lr"] * state["momentum"])
                param.copy_(master)


class Lookahead(torch.optim.Optimizer):
    """Another optimizer with slow copies of its parameters."""

    def __init__(self, params, **options):
        self.inner = torch.optim.Adam(params, **options)
        super().__init__(self.inner.param_groups, {})
        self.slow = {}

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for param in group["params"]:
                slow = self.slow.setdefault(param, param.detach().clone())
                slow.lerp_(param, 0.5)
                param.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class Started(torch.optim.Optimizer):
    """As Prodigy keeps where it began, if that is not 0, LAMB reads norms; as in SPAM a key is a word, and as in
    ScalableShampoo an object has the state."""

    def __init__(self, params):
        super().__init__(params, {})
        self.state["steps"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            torch._foreach_norm(group["params"])
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["start"] = SimpleNamespace(value=param.clone() if param.any() else torch.tensor(0.0))
                param.sub_(param.grad, alpha=0.1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(99, 64), nn.LSTM(64, 96, 2, batch_first=True), nn.Linear(96, 5)

    def forward(self, ids):
        return self.head(self.cells(self.words(ids))[0][:, -1])


def image_model():
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                    nn.Conv2d(16, 32, 3, padding=1)]  # fmt: skip
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 144, 128), nn.ReLU(), nn.Linear(128, 5))


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 3)


def classifier():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=128, num_labels=5)  # fmt: skip
    return BertForSequenceClassification(config)


def labelled(model):
    return {"input_ids": torch.ones(8, 32, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}


def cross_entropy(output):
    return nn.functional.cross_entropy(output, TARGETS)


MODELS = {
    "encoder": (encoder, lambda model: {"src": torch.zeros(8, 32, 64)}, lambda output: output.square().mean()),
    "images": (image_model, lambda model: {"input": torch.zeros(8, 3, 24, 24)}, cross_entropy),
    "LSTM": (Words, lambda model: {"ids": torch.ones(8, 20, dtype=torch.long)}, cross_entropy),
    "transformers": (classifier, labelled, lambda output: output.loss),
}
OPTIMIZERS = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop, centered": partial(torch.optim.RMSprop, centered=True, momentum=0.5, foreach=True),
    "masters": Masters,
    "Lookahead": Lookahead,
    "Started": Started,
}


# With `masters` the peak of the convolutions is in backward, whose scratch on a CPU is not counted. All models but the
# LSTM begin with parameters of 0, of which fake tensors do not know.
ABSENT = [("images", "masters"), ("encoder", "Started"), ("images", "Started"), ("transformers", "Started")]
CASES = [(model, name) for model in MODELS for name in OPTIMIZERS if (model, name) not in ABSENT]
FEW = [
    ("encoder", "Lookahead"),
    ("images", "SGD with momentum"),
    ("images", "Adafactor"),
    ("LSTM", "RMSprop, centered"),
    ("LSTM", "masters"),
    ("LSTM", "Started"),
    ("transformers", "AdamW, amsgrad"),
]


def estimated(model, inputs, make, loss):
    return bertscope.estimate(model, inputs, optimizer=make(model.parameters()), loss=loss)


@pytest.mark.parametrize(("model", "optimizer"), CASES if EVERY_CASE else FEW)
def test_the_peak_is_that_of_a_plain_loop(model, optimizer):
    make_model, make_inputs, criterion = MODELS[model]
    make = OPTIMIZERS[optimizer]
    with torch.backends.mkldnn.flags(enabled=model != "LSTM"):  # the workspace of oneDNN's LSTM is not counted
        real = peak_bytes(make_model, make_inputs, lambda params: make(list(params)), criterion=criterion)
        module = make_model()
        report = estimated(module, make_inputs(module), make, criterion)
    assert report.peak_bytes == pytest.approx(real, rel=0.001)


def test_in_lightnings_loop_with_autocast_the_peak_is_that_of_a_plain_loop():
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    real = peak_bytes(
        classifier, labelled, lambda params: make(list(params)), autocast=torch.bfloat16, loop="lightning"
    )
    module, settings = classifier(), {"loop": "lightning", "precision": "autocast-bf16"}
    report = bertscope.estimate(module, labelled(module), optimizer=make(module.parameters()), **settings)
    assert report.peak_bytes == pytest.approx(real, rel=0.001)


def all_of(model, optimizer, inputs):
    """Return what an estimate may not change: values, gradients, state, hooks, modes, and the random state."""
    state = copy.deepcopy(optimizer.state_dict())
    hooks = [(name, dict(value)) for name, value in vars(optimizer).items() if name.endswith("_hooks")]
    hooks += [(path, dict(part._forward_hooks)) for path, part in model.named_modules()]
    tensors = [*model.parameters(), *model.buffers(), *inputs.values()]
    grads = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
    modes = [part.training for part in model.modules()]
    return [[tensor.detach().clone() for tensor in tensors], list(map(id, tensors)), grads, state, hooks, modes,
            torch.get_rng_state(), optimizer.step, [*map(id, optimizer.state)]]  # fmt: skip


def assert_same(before, after):
    same = torch.utils._pytree.tree_map(
        lambda one, other: torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, before, after
    )
    assert [number for number, one in enumerate(same) if not all(torch.utils._pytree.tree_leaves(one))] == []


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_caller_changes_in_the_middle_of_a_training(fails):
    """In a process in which backward passes ran: with gradients, state, a scheduler, hooks, and after an exception."""
    model = image_model()
    inputs = {"input": torch.randn(8, 3, 24, 24)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fresh = estimated(image_model(), inputs, torch.optim.AdamW, cross_entropy)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    for _ in range(2):
        cross_entropy(model(**inputs)).backward()
        optimizer.step()
    scheduler.step()
    before = all_of(model, optimizer, inputs)

    def broken(output):
        raise RuntimeError("broken")

    calls.clear()
    if fails:
        with pytest.raises(BertscopeError, match="broken"):
            bertscope.estimate(model, inputs, optimizer=optimizer, loss=broken)
    else:
        report = bertscope.estimate(model, inputs, optimizer=optimizer, loss=cross_entropy)
        assert report.peak_bytes == fresh.peak_bytes
    assert_same(before, all_of(model, optimizer, inputs))
    assert not calls


def test_a_report_keeps_neither_the_model_nor_the_optimizer_alive():
    model = nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    report = bertscope.estimate(model, torch.randn(8, 100), optimizer=optimizer)
    kept = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    assert report.fits("t4")
    assert pickle.loads(pickle.dumps(report)).peak_bytes == report.peak_bytes


def test_a_class_and_a_function_are_optimizers_too():
    model, inputs = encoder(), torch.zeros(8, 32, 64)
    loss = MODELS["encoder"][2]
    peaks = {
        bertscope.estimate(model, inputs, optimizer=given, loss=loss).peak_bytes
        for given in (Masters, Masters(model.parameters()), lambda params: Masters(params, lr=1.0))
    }
    assert len(peaks) == 1
    classes = [bertscope.estimate(model, inputs, optimizer=given) for given in (torch.optim.RMSprop, "rmsprop")]
    assert classes[0] == classes[1]
    named = bertscope.estimate("bert-tiny", optimizer=Masters)
    assert named["none"].memory.peak.parts.optimizer_state >= 2 * 4 * bertscope.count("bert-tiny").total


def test_groups_of_some_parameters_leave_the_gradients_of_the_others():
    """A plain loop's zero_grad frees the gradients of the optimizer's parameters; the others are added up."""
    model, make_inputs, _ = encoder(), *MODELS["encoder"][1:]
    head = torch.optim.SGD(model.layers[-1].parameters(), lr=0.1)
    real = peak_bytes(encoder, make_inputs, lambda params: torch.optim.SGD([*params][-12:], lr=0.1),
                      criterion=lambda output: output.sum())  # fmt: skip
    assert bertscope.estimate(model, make_inputs(model), optimizer=head).peak_bytes == real


def test_the_fields_that_rfc_108_asks_for():
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    report = bertscope.estimate(model, torch.zeros(8, 32, 64), optimizer=optimizer)
    assert report.peak_bytes == report["none"].memory.peak.peak_bytes == report.gpu_bytes
    assert report.reserved_bytes is None
    assert report.fits("t4")
    assert report.fits(2**30)
    assert report.fits("1GiB")
    assert not report.fits(2**20)
    for wrong in (1.5, None, [], True):
        with pytest.raises(BertscopeError, match="fits takes a GPU's name, an index, bytes"):
            report.fits(wrong)
    on_t4 = bertscope.estimate(model, torch.zeros(8, 32, 64), optimizer=optimizer, gpu="t4")
    assert on_t4.gpu_bytes > on_t4.reserved_bytes >= on_t4.peak_bytes
    assert on_t4.fits("a100-80gb")
    with pytest.raises(BertscopeError, match="no CUDA device 0 here"):
        report.fits(0)
    with pytest.raises(BertscopeError, match="only the report that estimate returns"):
        bertscope.from_json(report.to_json()).fits("t4")


def test_an_index_is_a_gpu_of_this_machine(monkeypatch):
    properties = SimpleNamespace(name="Tesla T4", total_memory=15 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    report = bertscope.estimate(nn.Linear(4, 3), input_size=(2, 4))
    assert report.fits(1)
    properties.name, properties.total_memory = "Unknown", 2**20
    assert not report.fits(1)


def test_the_foreach_step_on_cuda_is_torch_s_choice_for_an_object_too():
    model = encoder()
    objects = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters(), foreach=False)
    words = {}, {"optimizer_implementation": "loop"}
    for optimizer, word in zip(objects, words, strict=True):
        given = bertscope.estimate(model, torch.zeros(8, 32, 64), optimizer=optimizer, device="cuda")
        assert given.peak_bytes == bertscope.estimate(model, torch.zeros(8, 32, 64), device="cuda", **word).peak_bytes


def test_json_and_text_say_that_no_command_repeats_the_answer():
    model = nn.Linear(4, 5)
    report = bertscope.estimate(model, torch.ones(8, 4), optimizer=Masters(model.parameters()), loss=cross_entropy)
    again = bertscope.from_json(report.to_json())
    assert again == report
    assert again.run.optimizer == "custom"
    text = " ".join(str(report).split())
    assert "given as a Python object, so no command line repeats this: Masters, cross_entropy" in text
    named = bertscope.estimate("bert-tiny", optimizer=Masters)
    assert "bertscope." not in str(named)
    assert "bertscope." in str(bertscope.estimate("bert-tiny"))


REFUSED = {
    "closure": (lambda model: torch.optim.LBFGS(model.parameters()), "takes a closure"),
    "another model": (
        lambda model: torch.optim.SGD(nn.Linear(2, 2).parameters()),
        "has none of the model's parameters",
    ),
    "no optimizer": (lambda model: 3, "got int"),
    "a class that needs more": (lambda model: Needy, "Needy: TypeError"),
    "sparse gradients": (
        lambda model: torch.optim.SparseAdam,
        "SparseAdam.step on fake tensors.*does not support dense",
    ),
}


class Needy(torch.optim.Optimizer):
    def __init__(self, params, needed):
        super().__init__(params, {})


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused_in_one_line(name):
    make, message = REFUSED[name]
    model = nn.Linear(4, 3)
    with pytest.raises(BertscopeError, match=message):
        bertscope.estimate(model, torch.ones(2, 4), optimizer=make(model))


@pytest.mark.parametrize("keywords", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"optimizer_implementation": "loop"}])
def test_the_object_s_own_arguments_are_no_keywords(keywords):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(BertscopeError, match=f"SGD sets its {next(iter(keywords))}"):
        bertscope.estimate(model, torch.ones(2, 4), optimizer=optimizer, **keywords)


def test_an_object_is_for_one_process_and_not_for_a_real_run():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(BertscopeError, match="SGD is estimated in one process"):
        bertscope.fit(model, "1GiB", inputs=torch.zeros(8, 32, 64), optimizer=optimizer, strategy="ddp", world_size=2)
    with pytest.raises(BertscopeError, match="learning rate of 0; give optimizer as a word"):
        bertscope.profile(model, torch.zeros(8, 32, 64), optimizer=optimizer)


def test_fit_and_plan_take_an_object():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    given = {"inputs": torch.zeros(8, 32, 64), "optimizer": optimizer, "precision": "stored"}
    words = {**given, "optimizer": "sgd", "momentum": 0.9}
    report = bertscope.fit(model, "20MiB", **given)
    assert report.batch == bertscope.fit(model, "20MiB", **words).batch > 8
    for loss in (lambda output: output.sum(), lambda module, inputs: module(inputs).sum()):
        assert bertscope.fit(model, "20MiB", **given, loss=loss).batch == report.batch


def test_trainingarguments_are_taken_as_an_object(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(tmp_path, per_device_train_batch_size=4, optim="sgd", max_grad_norm=0.0, use_cpu=True,
                                  gradient_accumulation_steps=2)  # fmt: skip
    (tmp_path / "args.json").write_text(arguments.to_json_string())
    given = bertscope.estimate("bert-tiny", training_file=arguments)
    assert given.variants == bertscope.estimate("bert-tiny", training_file=tmp_path / "args.json").variants
    assert given.run.batch == 4
    module = bertscope.estimate(classifier(), labelled(None), training_file=arguments)
    assert (module.run.optimizer, module.run.accumulate, module.run.batch) == ("sgd", 2, 8)  # rows of its inputs
    assert bertscope.read_training_file(arguments).fields["accumulate"] == 2
