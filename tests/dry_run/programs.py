"""Training programs as people write them, on a GPU if there is one: the cases of the comparison with real runs.

`python -m tests.dry_run.programs` runs each on the fake GPU with a CPU's kernels, then on the CPU under torch's
profiler, which sees each allocation of the process. It prints, for each program, the peak of each optimizer step and
what lives after it, and the peak of what follows the last one.
"""

import copy
import json
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

CRITERION = nn.CrossEntropyLoss()  # in training mode also during an evaluation
PROGRAMS: dict[str, Callable[[], None]] = {}


def program(function):
    """Add a program."""
    PROGRAMS[function.__name__] = function
    return function


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, words=200, width=64, layers=2, recomputes=None):
        super().__init__()
        self.embed, self.recomputes = nn.Embedding(words, width), recomputes
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.recomputes is None else checkpoint(block, x, use_reentrant=self.recomputes)
        return self.head(x)


def batches(count, batch=4, length=24, words=200):
    """Ids on the CPU, of equal lengths."""
    return [torch.randint(1, words, (batch, length)) for _ in range(count)]


def moved(ids):
    """A new batch on the device: on a CPU that is one tensor, and `to` makes no second one."""
    return ids.clone().to(device())


def loss_of(model, ids):
    return CRITERION(model(ids).flatten(0, 1), ids.flatten())


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(model, optimizer, data, after=lambda: None):
    for ids in data:
        loss = loss_of(model, moved(ids))
        update(optimizer, loss)
        after()


@program
def plain():
    model = Net().to(device())
    train(model, torch.optim.AdamW(model.parameters()), batches(3))


@program
def linear_of_a_transposed_batch():
    model = nn.Linear(64, 1024).to(device())
    optimizer = torch.optim.SGD(model.parameters())
    for x in torch.randn(3, 32, 24, 64):
        update(optimizer, model(moved(x).transpose(0, 1)).sum())


@program
def attention_over_and_recurrence_of_a_transposed_batch():
    attention = nn.MultiheadAttention(64, 4, batch_first=True).to(device())
    memory = nn.LSTM(64, 64, batch_first=True).to(device())
    optimizer = torch.optim.SGD(attention.parameters())
    for x in torch.randn(3, 32, 24, 64):
        given = moved(x)
        update(optimizer, attention(given, given, given, need_weights=False)[0].sum())
    for modes in (torch.no_grad, torch.inference_mode):
        with modes(), torch.backends.mkldnn.flags(enabled=False):
            memory(moved(torch.randn(256, 24, 64)))


@program
def recomputed():
    model = Net(recomputes=False).to(device())
    train(model, torch.optim.AdamW(model.parameters()), batches(3))


@program
def recomputed_reentrant():
    model = Net(recomputes=True).to(device())
    train(model, torch.optim.AdamW(model.parameters()), batches(3))


@program
def accumulated_and_clipped():
    model = Net().to(device())
    optimizer = torch.optim.AdamW(model.parameters())
    for number, ids in enumerate(batches(6)):
        (loss_of(model, moved(ids)) / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


class Lion(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_((state["momentum"] * 0.9 + parameter.grad * 0.1).sign_(), alpha=-group["lr"])
                state["momentum"].mul_(0.99).add_(parameter.grad, alpha=0.01)


@program
def own_optimizer_with_averages():
    model = Net().to(device())
    average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def after():
        for mean, own in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(own, 0.01)

    train(model, Lion(model.parameters()), batches(3), after)


@program
def lengths_that_vary():
    model = Net().to(device())
    data = [torch.randint(1, 200, (4, length)) for length in (24, 40, 8, 32)]
    train(model, torch.optim.AdamW(model.parameters()), data)


@program
def loss_of_valid_labels():
    model = Net().to(device())
    optimizer = torch.optim.AdamW(model.parameters())
    for ids in batches(3):
        labels = moved(torch.where(ids % 7 == 0, ids, -100))
        logits = model(moved(ids))
        keep = labels != -100
        loss = functional.cross_entropy(logits[keep], labels[keep])
        update(optimizer, loss)


def classifies(model, *shape):
    """Train on random images or sequences."""
    model.to(device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        loss = model(torch.randn(shape).to(device())).pow(2).mean()
        update(optimizer, loss)


@program
def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10)
    )
    classifies(model, 8, 3, 16, 16)


class Residual(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        first, second = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.body = nn.Sequential(first, nn.BatchNorm2d(out), nn.ReLU(inplace=True), second, nn.BatchNorm2d(out))
        self.short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.end = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.end(self.body(x) + self.short(x))


@program
def residual_convolutions():
    stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
    blocks = Residual(16, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1)
    classifies(nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), 8, 3, 64, 64)


@program
def depthwise_and_dilated_convolutions():
    first, second = nn.Conv2d(3, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1, groups=32)
    last = nn.Conv2d(32, 64, 3, dilation=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    classifies(nn.Sequential(first, second, nn.BatchNorm2d(32), nn.ReLU6(), *last), 8, 3, 32, 32)


@program
def transposed_convolutions():
    down = nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2)
    up = nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 3, 4, 2, 1)
    classifies(nn.Sequential(*down, *up, nn.Tanh()), 8, 3, 32, 32)


class Sequences(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.layers, self.packs = kind(28, 64, batch_first=True, **settings), not settings
        self.head = nn.Linear(64 * (1 + self.layers.bidirectional), 10)

    def forward(self, x):
        if not self.packs:
            return self.head(self.layers(x)[0][:, -1])
        lengths = torch.arange(len(x)) % (x.shape[1] - 2) + 2
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return self.head(out.mean(1))


def recurrent(name, kind, **settings):
    def run():
        with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's LSTM is one kernel with its own workspace
            classifies(Sequences(kind, **settings), 32, 12, 28)

    PROGRAMS[name] = run


recurrent("rnn", nn.RNN, num_layers=1)
recurrent("gru", nn.GRU, num_layers=2, dropout=0.1)
recurrent("lstm", nn.LSTM, num_layers=2)
recurrent("bidirectional_lstm", nn.LSTM, bidirectional=True)
recurrent("packed_lstm", nn.LSTM)
recurrent("packed_gru", nn.GRU)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        return 2 * gradient * context.saved_tensors[0]


@program
def own_function():
    model = nn.Linear(64, 512).to(device())
    optimizer = torch.optim.RMSprop(model.parameters())
    for _ in range(3):
        loss = Square.apply(model(torch.randn(32, 64).to(device()))).sum()
        update(optimizer, loss)


@program
def formulas_with_kernels():
    model = nn.Sequential(nn.Linear(64, 512), nn.RMSNorm(512), nn.SiLU(), nn.Linear(512, 512), nn.Mish()).to(device())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(torch.randn(256, 64).to(device())).sum()
        update(optimizer, loss)


@program
def losses_whose_mean_keeps_their_elements():
    model = nn.Sequential(nn.Linear(64, 1024), nn.Linear(1024, 512)).to(device())
    optimizer = torch.optim.SGD(model.parameters())
    losses = "mse_loss", "soft_margin_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss"
    losses += ("binary_cross_entropy_with_logits",)
    for name, x in zip(losses, torch.randn(6, 32, 64), strict=True):
        out = model(moved(x)).sigmoid()
        loss = getattr(functional, name)(out, torch.ones_like(out))
        update(optimizer, loss)


# ---- evaluations: three steps, then one evaluation ----


def evaluated(batch, keep, *passes, middle=False):
    """Train for three steps, and evaluate after the last one or the first; `passes` have a number of rows each."""
    model = Net().to(device())
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []

    def evaluate(rows):
        joined, total = [], 0.0
        model.eval()
        with torch.no_grad():
            for (ids,) in DataLoader(TensorDataset(torch.randint(1, 200, (rows, 24))), batch):
                out = model(moved(ids))
                if keep == "joined":
                    joined = torch.cat([joined, out]) if total else out
                elif keep:
                    joined.append(out)
                total += 1 if keep else CRITERION(out.flatten(0, 1), moved(ids).flatten()).item()
        model.train()
        kept.append(joined)

    for step, ids in enumerate(batches(3)):
        loss = loss_of(model, moved(ids))
        update(optimizer, loss)
        for rows in passes if step == (0 if middle else 2) else ():
            evaluate(rows)
    return [torch.cat(one).argmax(-1) if keep == "listed" else one for one in kept]


PROGRAMS |= {
    "evaluation_with_the_same_batch": partial(evaluated, 4, "", 12),
    "evaluation_with_a_larger_batch": partial(evaluated, 16, "", 48),
    "evaluation_that_keeps_ten_logits": partial(evaluated, 4, "listed", 40),
    "evaluation_that_keeps_three_hundred_logits": partial(evaluated, 2, "listed", 600),
    "evaluation_that_joins_sixty_logits": partial(evaluated, 2, "joined", 120),
    "evaluation_whose_last_batch_is_smaller": partial(evaluated, 4, "listed", 239),
    "evaluation_in_the_middle_of_an_epoch": partial(evaluated, 12, "", 36, middle=True),
    "evaluation_whose_logits_live_in_the_next_step": partial(evaluated, 4, "listed", 240, middle=True),
    "two_evaluations_that_keep_logits": partial(evaluated, 2, "listed", 120, 150),
}


@program
def ctc_with_lengths_on_the_cpu():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 30)).to(device())
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=1e-3), nn.CTCLoss(zero_infinity=True)
    for _ in range(3):
        scores = model(torch.randn(40, 6, 16).to(device())).log_softmax(-1)
        labels = torch.randint(1, 30, (6, 12)).to(device())
        update(optimizer, criterion(scores, labels, torch.full((6,), 40), torch.tensor([12, 4, 9, 3, 8, 11])))


@program
def sparse_embeddings_with_values_everywhere():
    model = nn.Linear(16, 500).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        update(optimizer, model(torch.randn(4, 16).to(device())).sum())
    with torch.no_grad():
        kept = [model(torch.randn(50, 16).to(device())).exp().to_sparse().coalesce() for _ in range(3)]
    del kept


# ---- libraries ----


def small_bert(**settings):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(vocab_size=300, **sizes, **settings))


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return {"input_ids": list(range(1, 20 + number * 37 % 60)), "labels": number % 2}


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = [longest - len(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * more for row, more in zip(rows, fill, strict=True)]),
        "attention_mask": torch.tensor([[1] * (longest - more) + [0] * more for more in fill]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def trained(model, **evaluation):
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=100, max_steps=3,
            gradient_accumulation_steps=2, per_device_train_batch_size=4, per_device_eval_batch_size=8,
            eval_strategy="epoch", gradient_checkpointing=False, num_train_epochs=1,
        )  # fmt: skip
        data = {"train_dataset": Rows(24), "eval_dataset": Rows(40), "data_collator": padded}
        Trainer(model=model, args=args, **data, **evaluation).train()


@program
def trainer_that_keeps_logits():
    trained(small_bert(num_labels=2_000), compute_metrics=lambda _: {})


@program
def beam_search_to_the_longest_sequence():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)).to(device())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        ids = torch.randint(1, 300, (2, 10)).to(device())
        update(optimizer, model(ids, labels=ids).loss)
    ids, settings = torch.randint(1, 300, (16, 10)).to(device()), {"do_sample": False, "pad_token_id": 0}
    model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, num_beams=4, **settings)


@program
def lora():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small_bert(), LoraConfig(r=4, target_modules=["query", "value"])).to(device())
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    for batch in DataLoader(Rows(12), 4, collate_fn=padded):
        model(**{name: tensor.to(device()) for name, tensor in batch.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- the two ways to run them ----


def main():
    """Print what each program takes, dry first: the card goes before the first backward pass of a process."""
    from tests import real_run
    from tests.dry_run import like_cpu

    torch.set_num_threads(1)
    found = {}
    for kind, peaks in (("dry", like_cpu.peaks), ("real", real_run.peaks)):
        for name, run in PROGRAMS.items():
            torch.manual_seed(0)
            found.setdefault(kind, {})[name] = peaks(run, steps=6)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
