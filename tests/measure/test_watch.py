"""A running training next to its estimate: any loop, transformers' Trainer, Lightning, and torch's counters on CUDA."""

import contextlib
import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import bertscope
from bertscope.api import watch as watching
from bertscope.calibrations import read_calibration
from bertscope.errors import BertscopeWarning


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2)


def mean_square(output):
    return output.square().mean()


def train(model, optimizer, steps=8, accumulate=1, fails_at=None):
    data, losses = torch.zeros(4, 16, 64), []
    for step in range(steps):
        for _ in range(accumulate):
            output = model(data)
            loss = mean_square(output)
            loss.backward()
            if step == fails_at:
                raise KeyError("of the loop")
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hooks_of(model, optimizer):
    return [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()] + [
        len(optimizer._optimizer_step_post_hooks)
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_is_measured_next_to_its_estimate_and_trains_as_without(accumulate):
    losses = []
    for is_watched in (False, True):
        torch.manual_seed(3)
        model = encoder()
        optimizer, said = torch.optim.AdamW(model.parameters()), []
        if not is_watched:
            losses.append(train(model, optimizer, accumulate=accumulate))
            continue
        with bertscope.watch(model, optimizer, show=said.append, loss=mean_square) as watched:
            losses.append(train(model, optimizer, accumulate=accumulate))
    assert losses[0] == losses[1]
    row = watched.report["none"]
    assert row.error == 0.0
    assert watched.report.run.accumulate == accumulate
    assert len(row.timing.step_seconds) == 3
    flops = bertscope.flops(model, torch.zeros(4, 16, 64), mode="training").total
    assert row.timing.flops == accumulate * flops
    assert said == [str(watched.report)]
    assert "estimated peak" in said[0]
    assert not any(hooks_of(model, optimizer))


@pytest.mark.parametrize("name", ["_begin", "_record", "calls", "_memory", "_predict", "_finish", "_save", "show",
                                  "_entered", "_left", "_writes_in_place", "_allocated", "_stepping"])  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_inside_ends_no_training(name, strict, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    if name != "show":
        owner = watching.watch if hasattr(watching.watch, name) else watching.Recorder
        monkeypatch.setattr(owner, name, broken)
    with warnings.catch_warnings(record=not strict) as noted:
        warnings.simplefilter("error" if strict else "always", BertscopeWarning)
        with bertscope.watch(model, optimizer, show=broken if name == "show" else None):
            assert len(train(model, optimizer)) == 8
    said = {"_save": "no calibration is written: RuntimeError: broken",
            "show": "the report is not shown: RuntimeError('broken')"}  # fmt: skip
    said = said.get(name, "no longer watched: RuntimeError: broken")
    assert strict or any(said in str(item.message) for item in noted)
    assert not any(hooks_of(model, optimizer))
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(("keyword", "value", "said"), [
    ("bacth", 3, "no setting 'bacth'; did you mean 'batch'"), ("batch", 3, "batch is determined by the module"),
    ("momentum", 0.9, "no effect"), ("steps", "x", "steps takes"), ("name", "x", "no setting"),
])  # fmt: skip
def test_a_keyword_without_effect_is_refused_at_once(keyword, value, said):
    """Else the measurement would come without its estimate, and without a word."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(bertscope.BertscopeError, match=said):
        bertscope.watch(model, torch.optim.AdamW(model.parameters()), **{keyword: value})


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5])
def test_an_exception_of_the_loop_passes_unchanged(fails_at):
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyError, match="of the loop"), bertscope.watch(model, optimizer, show=None):
        train(model, optimizer, fails_at=fails_at)
    assert not any(hooks_of(model, optimizer))
    assert _get_current_dispatch_mode() is None


def test_a_step_that_calls_the_step_of_its_base_class_is_one_step():
    """torch gives hooks to both."""

    class Called(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.AdamW(encoder().parameters())  # from here on its step has hooks
    model = encoder()
    optimizer = Called(model.parameters())
    with bertscope.watch(model, optimizer, show=None, loss=mean_square) as watched:
        train(model, optimizer)
    row = watched.report["none"]
    assert row.error == 0.0
    assert min(row.timing.step_seconds) > 0.1 * max(row.timing.step_seconds)


def test_the_watched_model_may_be_copied_and_pickled_and_its_optimizer_have_other_hooks():
    model = encoder()
    optimizer, steps, copies = torch.optim.AdamW(model.parameters()), [], []
    with (
        bertscope.watch(model, optimizer, show=None) as watched,
        bertscope.watch(model, optimizer, show=None) as next_one,
    ):
        optimizer.register_step_post_hook(lambda *_: steps.append(copies.append(copy.deepcopy(model))))
        optimizer.register_step_post_hook(lambda *_: pickle.dumps(model))
        train(model, optimizer, steps=12)
    assert watched.report["none"].timing
    assert next_one.report["none"].timing  # recorded after the other
    assert len(steps) == 12
    copies[1](torch.zeros(4, 16, 64)).sum().backward()
    pickle.dumps(copies[1])
    assert not any(hooks_of(model, optimizer)[:-1])
    assert torch.autograd.backward.__module__ == "torch.autograd"


@pytest.mark.parametrize("in_thread", [False, True])
def test_another_training_in_the_process_is_no_part_of_the_measurement(in_thread):
    model, other = encoder(), encoder()
    optimizer, optimizer_of_other = (torch.optim.AdamW(one.parameters()) for one in (model, other))
    data = torch.zeros(4, 16, 64)
    trains = threading.Thread(target=train, args=(other, optimizer_of_other, 40)) if in_thread else None
    with bertscope.watch(model, optimizer, show=None, loss=mean_square) as watched:
        if trains:
            trains.start()
            train(model, optimizer)
            trains.join()
        for _ in range(0 if trains else 6):
            loss = mean_square(output := model(data))  # noqa: F841
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            train(other, optimizer_of_other, steps=1)
    assert watched.report["none"].error == 0.0


def test_a_step_that_runs_another_model_too_has_no_estimate_that_is_too_low():
    model, critic = encoder(), nn.Linear(64, 1)
    watched = bertscope.watch(model, torch.optim.AdamW(model.parameters()), show=None, loss=mean_square)
    with pytest.warns(BertscopeWarning, match="also runs a Linear"):
        watch_with(watched, critic)
    assert watched.report["none"].estimated is None


def watch_with(watched, critic):
    with watched:
        for _ in range(6):
            critic(watched.model(torch.zeros(4, 16, 64))).mean().backward()
            watched.optimizer.step()
            watched.optimizer.zero_grad()


def test_what_the_recorder_cannot_read_ends_no_training():
    class Sparse(nn.Linear):
        def forward(self, data):
            return torch.sparse.mm(torch.eye(4).to_sparse(), super().forward(data))

    losses = []
    for context in (lambda *_: contextlib.nullcontext(), lambda *parts: bertscope.watch(*parts, show=None)):
        torch.manual_seed(3)
        model = Sparse(64, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings(record=True), context(model, optimizer):
            for _ in range(6):
                losses.append(model(torch.ones(4, 64)).sum())
                losses[-1].backward()
                optimizer.step()
    assert losses[:6] == losses[6:]
    assert _get_current_dispatch_mode() is None


def test_steps_after_the_watched_ones_have_no_hook_and_take_no_longer():
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with bertscope.watch(model, optimizer, show=None):
        train(model, optimizer, steps=6)
        assert not any(hooks_of(model, optimizer))
        assert _get_current_dispatch_mode() is None


@pytest.fixture
def on_cuda(monkeypatch):
    """A CPU on which torch's counters, the card and its rates are replaced."""
    numbers = {"max_memory_allocated": 10 * 2**20, "max_memory_reserved": 12 * 2**20, "memory_reserved": 12 * 2**20,
               "mem_get_info": (2**33, 2**33 + 512 * 2**20), "synchronize": None,
               "reset_peak_memory_stats": None}  # fmt: skip
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, number=number: number)
    monkeypatch.setattr(watching, "this_gpu", lambda: ("Tesla T4", 15 * 2**30))
    monkeypatch.setattr(watching, "machine_name", lambda device: "Tesla T4")
    monkeypatch.setattr(watching, "gpu_rates", lambda names: {**dict.fromkeys(names, 1e12), "copy": 1e11})
    monkeypatch.setattr("bertscope.measure.profile_worker.this_gpu", lambda: ("Tesla T4", 15 * 2**30))
    begin = watching.watch._begin
    monkeypatch.setattr(watching.watch, "_begin", lambda self: (begin(self), setattr(self, "device", "cuda")))


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(("file", "reason"), [
    ("/dev/full", "No space left"), ("{tmp}", "is a folder"), ("{tmp}/missing/t4.json", "No such file")
])  # fmt: skip
def test_a_calibration_that_cannot_be_written_leaves_the_training_and_its_report(file, reason, tmp_path):
    model = encoder()
    optimizer, said = torch.optim.AdamW(model.parameters()), []
    path = file.format(tmp=tmp_path)
    with (
        pytest.warns(BertscopeWarning, match=f"no calibration is written: .*{reason}"),
        bertscope.watch(model, optimizer, show=said.append, loss=mean_square, save=path) as watched,
    ):
        assert len(train(model, optimizer)) == 8
    assert said == [str(watched.report)]


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_torch_s_counters_are_the_measurement_and_the_calibration(tmp_path):
    model = encoder()
    optimizer, file, said = torch.optim.AdamW(model.parameters()), tmp_path / "t4.json", []

    def show(text):
        said.append(text)
        raise OSError("No space left on device")

    with (
        pytest.warns(BertscopeWarning, match="the report is not shown: OSError"),
        bertscope.watch(model, optimizer, show=show, loss=mean_square, save=file) as watched,
    ):
        train(model, optimizer)
    row = watched.report["none"]
    assert said == [str(watched.report)]  # of which the failure leaves the calibration
    assert row.measured.cost.reserved_bytes == 12 * 2**20
    assert row.measured.cost.max_allocated_bytes == row.measured.cost.peak_bytes == 10 * 2**20
    assert row.estimated.cost.reserved_bytes > row.estimated.cost.peak_bytes
    assert row.measured.cost.time.mfu == pytest.approx(row.timing.flops_per_second / row.measured.cost.time.peak_flops)
    (step,) = read_calibration(file).steps
    assert (step.batch, step.precision, step.allocated_bytes) == (4, "fp32", 10 * 2**20)
    assert step.work.calls > 0
    assert bertscope.estimate("bert-tiny", device="cuda", calibration=str(file), time=True)["none"].cost.time.step
    assert "MFU" in watched.report.to_markdown()


@pytest.mark.usefixtures("on_cuda")
def test_the_counters_are_those_of_the_gpu_with_the_model(monkeypatch):
    """A loop may train on cuda:1 and leave cuda:0 the current device."""
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    for name in ("max_memory_allocated", "max_memory_reserved", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**20 * (1 + current[-1]))
    monkeypatch.setattr(torch.cuda, "device", device)
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with bertscope.watch(model, optimizer, show=None, loss=mean_square) as watched:
        watched.index = 1
        train(model, optimizer)
    assert watched.report["none"].measured.cost.peak_bytes == 2 * 2**20


def test_on_a_cpu_no_calibration_is_written(tmp_path):
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.warns(BertscopeWarning, match="a calibration is for a GPU"),
        bertscope.watch(model, optimizer, show=None, save=tmp_path / "cpu.json") as watched,
    ):
        train(model, optimizer)
    assert not (tmp_path / "cpu.json").exists()
    assert watched.report["none"].error is not None


def test_the_trainer_of_transformers_is_watched(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=128)  # fmt: skip
    data = [{"input_ids": [1] * 32, "attention_mask": [1] * 32, "labels": 1} for _ in range(128)]
    for options in ({"bf16": True}, {"gradient_accumulation_steps": 2}):
        callback = bertscope.TrainerCallback(show=None)
        arguments = TrainingArguments(tmp_path, per_device_train_batch_size=8, max_steps=8, use_cpu=True, report_to=[],
                                      save_strategy="no", disable_tqdm=True, **options)  # fmt: skip
        model = BertForSequenceClassification(config)
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
        row = callback.watched.report["none"]
        assert abs(row.error) < 0.001, options
        assert row.timing.flops > 0
        assert _get_current_dispatch_mode() is None


def test_a_training_that_an_exception_has_ended_is_watched_no_longer(tmp_path):
    """transformers' Trainer does not tell its callbacks."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    from transformers import Trainer, TrainingArguments

    class Stop(Trainer):
        def training_step(self, model, inputs, *rest):
            if self.state.global_step == 2:
                raise KeyboardInterrupt
            return super().training_step(model, inputs, *rest)

        def compute_loss(self, model, inputs, **_):
            return model(inputs["x"]).square().mean()

    arguments = TrainingArguments(tmp_path, max_steps=4, use_cpu=True, report_to=[], save_strategy="no",
                                  disable_tqdm=True, remove_unused_columns=False)  # fmt: skip
    model, data = encoder(), [{"x": torch.zeros(16, 64)}] * 64
    with pytest.raises(KeyboardInterrupt):
        Stop(model, arguments, train_dataset=data, callbacks=[bertscope.TrainerCallback(show=None)]).train()
    with pytest.warns(BertscopeWarning, match="the loop has ended"):
        model(torch.zeros(1, 16, 64) + 1)
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed"}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
                {"precision": "bf16-true"}, {"gradient_clip_val": 1.0}], ids=str,
)  # fmt: skip
def test_lightning_is_watched(options, tmp_path):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = encoder()

        def training_step(self, batch, number):
            loss = mean_square(self.model(batch))
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    callback = bertscope.LightningCallback(show=None)
    trainer = lightning.Trainer(max_steps=8, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, callbacks=[callback], default_root_dir=tmp_path,
                                **options)  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(64, 16, 64), batch_size=4))
    row = callback.watched.report["none"]
    assert abs(row.error) < 0.001
    assert row.timing.flops > 0


@pytest.mark.parametrize(("name", "package"), [("TrainerCallback", "transformers"), ("LightningCallback", "lightning")])
def test_a_missing_framework_is_named(name, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setitem(__import__("sys").modules, f"{package}.pytorch", None)
    with pytest.raises(bertscope.BertscopeError, match=f"{name} needs the package {package}"):
        getattr(bertscope, name)()
