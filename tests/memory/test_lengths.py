"""Lengths of real data: each way to make batches against counts by hand, its steps against plain training loops."""

import json
import sys
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

import bertscope
from bertscope.errors import BertscopeError, MissingExtraError
from bertscope.memory.caching_allocator import Requests, history
from bertscope.memory.lengths import LengthSteps
from bertscope.memory.simulator import Simulator
from bertscope.settings.run_config import RunConfig
from bertscope.sources.lengths import _read, read_lengths
from tests.conftest import EVERY_CASE
from tests.memory.plain_loop import peak_bytes
from tests.memory.steps import small

LENGTHS = [5, 24, 9, 17, 12, 20, 3]
WIDE = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 500, "max_position_embeddings": 512}
OWN = {"optimizer": "sgd"}


def counted(lengths: list[int]) -> dict[int, int]:
    return {length: lengths.count(length) for length in sorted(set(lengths))}


def test_an_epoch_of_four_sequences_by_hand() -> None:
    report = bertscope.lengths("bert-tiny", [64, 16, 32, 32], batch=2, **OWN)
    tokens, every = 64 + 16 + 32 + 32, 4 * 64
    # the six pairs of four sequences: three have 64, and of the others two are padded to 32, like the third
    dynamic = 2 * 2 * (3 * 64 + 3 * 32) / 6
    assert report["fixed"].padding == 1 - tokens / every
    assert report["dynamic"].padding == pytest.approx(1 - tokens / dynamic)
    assert [(row.name, row.batches, row.worst_seq) for row in report.rows] == [("fixed", 2, 64), ("dynamic", 2, 64)]


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_dynamic_padding_is_the_mean_of_all_random_batches(batch: int) -> None:
    lengths = [*LENGTHS[:5], 9]
    longest = [max(chosen) for chosen in combinations(lengths, batch)]
    by_hand = len(lengths) // batch * batch * sum(longest) / len(longest)
    shapes = LengthSteps(Simulator(small()), RunConfig(), counted(lengths)).shapes(batch)["dynamic"]
    assert sum(steps * size * length for (size, length), steps in shapes.items()) == pytest.approx(by_hand)


def test_flops_of_an_epoch_are_the_closed_form_over_the_list() -> None:
    lengths = [*range(1, 60), 100]
    report = bertscope.lengths("bert-tiny", lengths, batch=4, mode="inference", device="cuda")

    def flops(length: int) -> int:
        """A forward pass of bert-tiny: 2 layers, 128 wide, and the pooler."""
        return 2 * (24 * length * 128**2 + 4 * length**2 * 128) + 2 * 128**2

    assert report["fixed"].epoch_flops == len(lengths) * flops(100)
    alone = bertscope.lengths("bert-tiny", lengths, batch=1, mode="inference", device="cuda")["dynamic"]
    assert alone.epoch_flops == sum(map(flops, lengths))


def plain_peak(source: Any, lengths: list[int]) -> int:
    """The measured peak of a loop whose batch has these sequences, padded to the longest."""

    def inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, source.config.vocab_size, (len(lengths), max(lengths)))
        mask = torch.tensor([[int(place < length) for place in range(max(lengths))] for length in lengths])
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}

    return peak_bytes(lambda: bertscope.build(source.config, source.architecture, device="cpu"), inputs,
                      lambda params: torch.optim.SGD(params, lr=0.0))  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", *EVERY_CASE * ("eager",)])
def test_the_worst_step_of_dynamic_padding_is_that_of_a_plain_loop(attention: str) -> None:
    source = small(attention=attention, **WIDE)
    report = bertscope.lengths(source, LENGTHS, batch=3, **OWN)
    worst = sorted(LENGTHS)[-3:]
    assert report["dynamic"].peak_bytes == pytest.approx(plain_peak(source, worst), rel=0.001)
    assert report["fixed"].peak_bytes == report["dynamic"].peak_bytes


def test_the_mean_peak_of_dynamic_padding_is_that_of_all_random_batches() -> None:
    source, lengths = small(**WIDE), LENGTHS[:4]
    report = bertscope.lengths(source, lengths, batch=2, **OWN)
    measured = {length: plain_peak(source, [3, length]) for length in sorted(lengths)[1:]}
    pairs = [measured[max(pair)] for pair in combinations(lengths, 2)]
    assert report["dynamic"].expected_bytes == pytest.approx(sum(pairs) / len(pairs), rel=0.001)


def test_between_two_lengths_the_peak_is_not_below_that_of_the_step() -> None:
    source = small(attention="eager", **WIDE)
    run = RunConfig(optimizer="sgd")
    steps, alone = LengthSteps(Simulator(source), run, counted(list(range(16, 400, 3)))), Simulator(source)
    for seq in (17, 130, 333):
        assert seq not in steps.traced
        for batch in (2, 16):
            exact = alone.trace(replace(steps.run, batch=batch, seq=seq)).peak_bytes
            assert exact - 4096 <= steps.peak((batch, seq)) <= 1.15 * exact


def test_the_mean_peak_is_not_above_the_worst_of_one_sequence() -> None:
    row = bertscope.lengths(small(**WIDE), [5], batch=8, dropout=False, **OWN)["fixed"]
    assert row.expected_bytes == row.peak_bytes


def test_fit_finds_the_largest_batches_whose_worst_step_fits() -> None:
    source, budget = small(**WIDE), 24 * 2**20
    report = bertscope.lengths(source, LENGTHS * 9, search=True, budget=budget, dropout=False, margin=0, exact=True,
                               **OWN)  # fmt: skip
    batch = report["dynamic"].batch
    exact = [bertscope.lengths(source, LENGTHS * 99, batch=size, dropout=False, **OWN)["fixed"].peak_bytes
             for size in (batch, batch + 1)]  # fmt: skip
    assert exact[0] <= budget < exact[1]
    for row in report.table:
        run = {"seq": row.high, "padding": 0.5, "dropout": False, **OWN}
        peaks = [bertscope.estimate(source, batch=size, **run)["none"].memory.peak.peak_bytes
                 for size in (row.batch, row.batch + 1)]  # fmt: skip
        assert peaks[0] <= budget < peaks[1]


FILES = {
    "numbers.txt": "5\r\n7.0\n\n5\n",
    "numbers.csv": "name,length\na,5\nb,7\nc,5\n",
    "ids.jsonl": "".join(f"{json.dumps({'length': [1] * size})}\n" for size in (5, 7, 5)),
    "plain.jsonl": "5\n7\n5\n",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_lengths_of_its_lines(name: str, tmp_path: Any) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert read_lengths(tmp_path / name) == {5: 2, 7: 1}


def test_texts_are_counted_by_a_tokenizer(tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    rows = [{"query": "a", "pos": ["a b b", "a b"]}, {"query": "b a a", "pos": ["a"]}]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_lengths(tmp_path / "pairs.jsonl", field="pos", tokenizer=str(tmp_path)) == {1: 1, 2: 1, 3: 1}


def test_a_package_that_only_some_files_need_is_named_if_it_is_missing(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "texts.jsonl").write_text('{"text": "a b"}\n')
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        MissingExtraError, match=r"needs the extra 'transformers': pip install 'bertscope\[transformers\]'"
    ):
        _read(str(tmp_path / "texts.jsonl"), "text", str(tmp_path))  # as the child does


# What a tokenizer.json makes of the library that reads it: a bug in its Rust code, and a text of 40 x 16**8 letters.
BROKEN = {
    "panics": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "grows": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}] * 8}},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_tokenizer_that_breaks_its_library_is_one_line(cli: Any, tmp_path: Any, name: str) -> None:
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model, **BROKEN[name]}))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a" * 40}))
    texts = ("--lengths", tmp_path / "texts.jsonl", "--tokenizer", tmp_path)
    done = cli("estimate", "bert-tiny", *texts)
    assert (done.code, done.out, done.err.count("error: ")) == (2, "", 1)
    assert "cannot be read: its reader" in done.err


def test_a_normal_distribution_is_cut_to_its_limits() -> None:
    found = read_lengths("normal:100,20,64,128")
    assert (min(found), max(found), sum(found.values())) == (64, 128, 10_000)
    assert found[64] / 10_000 == pytest.approx(0.0367, abs=0.002)  # below 64.5: -1.775 deviations, 0.0379
    assert read_lengths("normal:100,0,64,128") == {100: 10_000}


HOSTILE = {
    "empty.txt": b"", "negative.txt": b"3\n-4\n", "nan.txt": b"nan\n", "long.txt": b"9" * 5000, "zero.txt": b"0\n",
    "share.txt": b"3.5\n", "large.txt": b"99999999999\n", "bytes.txt": bytes(range(256)) * 99, "line.txt": b"1" * 2**21,
    "formula.csv": b"length\n=1+1\n", "columns.csv": b"a,b\n1,2\n", "text.jsonl": b'{"text": "a"}\n',
    "half.jsonl": b'{"a":\n', "deep.jsonl": b"[" * 10**5, "nested.jsonl": b'{"text": [["a"]]}\n',
    "mixed.jsonl": b'{"text": [1, "a"]}\n', "true.jsonl": b"true\n", "none.jsonl": b"null\n",
}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTILE, "folder", "missing", "pipe", "/dev/zero", "normal:1", "normal:a,b,c,d",
                                  "normal:1,1,9,3", "normal:nan,1,1,2"])  # fmt: skip
def test_what_has_no_lengths_is_an_error_of_one_line(name: str, tmp_path: Any) -> None:
    import os

    if name in HOSTILE:
        (tmp_path / name).write_bytes(HOSTILE[name])
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BertscopeError) as error:
        read_lengths(name if ":" in name else str(tmp_path / name))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_there_is_a_limit_to_the_number_of_lengths(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("bertscope.sources.lengths.MAX_LENGTHS", 3)
    (tmp_path / "many.txt").write_text("5\n" * 4)
    with pytest.raises(BertscopeError, match="more than 3 lengths"):
        read_lengths(tmp_path / "many.txt")


def test_code_beside_a_tokenizer_does_not_run(tmp_path: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.py", "Own"]}}')
    (tmp_path / "code.py").write_text("raise SystemExit")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(BertscopeError, match=r"tokenizer\.json"):
        read_lengths(tmp_path / "texts.jsonl", tokenizer=str(tmp_path))


def test_inference_answers_with_the_most_tokens_of_a_batch() -> None:
    settings = {"mode": "inference", "checkpointing": "none", "precision": "fp32,autocast-bf16"}
    report = bertscope.fit(small(**WIDE), "16MiB", seq=16, **settings)
    assert f"{16 * max(own.batch for own in report.rows):,} tokens" in report.shown("printed").replace("\n", " ")
    with pytest.raises(BertscopeError, match="there is no tei of this report"):
        report.shown("tei")


# ---- serving, and what loading leaves ----


def test_a_checkpoint_on_the_card_leaves_as_much_reserved_as_two_models() -> None:
    memory = bertscope.estimate("bert-mini", batch=1, seq=8, mode="inference", device="cuda")["none"].memory
    assert memory.cost.reserved_bytes < 2 * memory.peak.parts.parameters <= memory.cost.reserved_loaded_bytes


def test_of_the_inputs_of_a_module_the_first_size_is_the_batch_and_the_second_the_length():
    module = torch.nn.Linear(8, 4, bias=False)
    report = bertscope.lengths(module, [4, 8, 8], input_size=(2, 5, 8))
    alone = bertscope.lengths(module, [4, 8, 8], input_size=(1, 5, 8))
    forward_and_weights = 2 * 2 * 8 * 4  # FLOPs of a token; nothing below asks for the gradient of the input
    assert report["fixed"].epoch_flops == 3 * 8 * forward_and_weights
    assert alone["dynamic"].epoch_flops == (4 + 8 + 8) * forward_and_weights
    worst = bertscope.estimate(module, input_size=(2, 8, 8))["none"].memory
    assert report["fixed"].peak_bytes == worst.peak.peak_bytes
    with pytest.raises(bertscope.BertscopeError, match="no tensor whose second size is the length"):
        bertscope.lengths(module, [4, 8], input_size=(8,))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_trace_of_any_length_is_that_of_a_step_of_the_length(attention: str, device: str) -> None:
    source, run = small(attention=attention, **WIDE), RunConfig(batch=3, device=device, optimizer="sgd")
    simulator = Simulator(source)
    steps = LengthSteps(simulator, run, dict.fromkeys(range(8, 300), 1))
    steps.run = run  # a mask of some lengths is copied, which adds events
    for seq in (8, 37, 64, 150, 287, 299):
        scaled, direct = steps.trace(3, seq), simulator.trace(replace(run, seq=seq))
        assert scaled.peak_bytes == pytest.approx(direct.peak_bytes, rel=0.001)
        assert len(scaled.changes) == len(direct.changes)
    if device == "cuda":  # fused attention's scratch on a CPU has a limit
        assert steps.trace(3, 192).sizes == simulator.trace(replace(run, seq=192)).sizes
    assert steps._between(3) is not None


def requests_of(*sizes: int) -> Requests:
    """A step that takes blocks of these sizes in MiB, one after another, and leaves nothing."""
    step = [number for index in range(len(sizes)) for number in (index, ~index)]
    return Requests([size * 2**20 for size in sizes], [""] * len(sizes), [], step, step, {})


def test_a_longer_batch_makes_the_reserved_bytes_grow_and_emptying_the_cache_prevents_it() -> None:
    short, long = requests_of(100), requests_of(120)
    steady = history([short] * 4)
    assert (steady.reserved_bytes, steady.grown_step, steady.emptied_bytes) == (100 * 2**20, 1, 100 * 2**20)
    grown = history([short, short, long, short])
    assert (grown.reserved_bytes, grown.grown_step) == (220 * 2**20, 3)  # the segment of 100 MiB stays
    assert (grown.emptied_bytes, grown.runs_in_emptied) == (120 * 2**20, True)


def test_over_seeds_random_batches_reserve_what_a_step_of_one_length_reserves_at_least() -> None:
    report = bertscope.lengths("bert-tiny", LENGTHS * 4, batch=4, device="cuda", seeds=5, **OWN)
    for row in report.rows:
        assert len(row.histories) == 5
        assert all(history.reserved_bytes >= history.emptied_bytes for history in row.histories)
    fixed = report["fixed"]
    assert {history.reserved_bytes for history in fixed.histories} == {fixed.cost.reserved_bytes}
    with pytest.raises(BertscopeError, match="CUDA"):
        bertscope.lengths("bert-tiny", LENGTHS, batch=4, seeds=5)
