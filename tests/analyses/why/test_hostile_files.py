"""Files of `why` that are none, damaged or hostile: one line each, no code runs, and the bounds hold."""

import gzip
import os
import pickle
import struct
from io import BytesIO

import pytest

import bertscope
from bertscope.analyses.why.reading import MAX_SNAPSHOT_BYTES, PlainUnpickler, answer_of, read_why
from bertscope.errors import SourceError
from tests.analyses.why.recording import Loop, Recording


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


class HasAnId(pickle.Pickler):
    def persistent_id(self, obj):
        return "id" if obj == 1.5 else None


def with_id() -> bytes:
    out = BytesIO()
    HasAnId(out, 4).dump({"segments": [1.5]})
    return out.getvalue()


def event(**changed) -> dict:
    return {"action": "alloc", "addr": 512, "size": 512, "stream": 0, "frames": [], "time_us": 0} | changed


def trace(*events) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [list(events)]})


def laughs() -> bytes:
    """One list of a thousand events a million times."""
    events = [event()] * 1000
    return pickle.dumps({"segments": [], "device_traces": [events] * 1_000_000})


def nested_laughs() -> bytes:
    value: list = [event()]
    for _ in range(40):
        value = [value] * 10
    return pickle.dumps({"segments": value})


GOOD = trace(event())
FILES = {
    "code": pickle.dumps({"segments": [RunsCode()]}),
    "a name of code only": b"\x80\x04cos\nsystem\n.",
    "an instance": b"\x80\x02(Vecho\nios\nsystem\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": with_id(),
    "a build of a dict": b"\x80\x04}}b.",
    "many references": laughs(),
    "nested references": nested_laughs(),
    "deep nesting": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "deep keys": b"\x80\x04}" + b")" + b"\x85" * 300_000 + b"K\x01s.",
    "a large number as a size": trace(event(size=1 << 80_000)),
    "a large number as an address": trace(event(addr=1 << 80_000)),
    "a huge memo": b"\x80\x04Nr" + struct.pack("<I", 2**32 - 2) + b".",
    "a huge text": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "a huge array": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b"x.",
    "nothing but a protocol": b"\x80\x04",
    "half a snapshot": GOOD[: len(GOOD) // 2],
    "no segments": pickle.dumps({"segments": [], "device_traces": []}),
    "segments that are text": pickle.dumps({"segments": "x" * 10, "device_traces": [[]]}),
    "a trace of numbers": pickle.dumps({"segments": [], "device_traces": [[1]]}),
    "an address that is a list": trace(event(addr=[])),
    "an action that is a list": trace(event(action=[], size=-1), event(action={}, addr=None), event(size="1")),
    "a negative size": trace(event(size=-1)),
    "a size that is true": trace(event(size=True)),
    "a block without a size": pickle.dumps([{"address": 0, "total_size": 1, "blocks": [{"state": "inactive"}]}]),
    "a device that is text": pickle.dumps([{"device": "a", "address": 0, "total_size": 1, "blocks": []}]),
    "zeros": b"\0" * 1000,
    "empty": b"",
    "a text": b"no message",
    "JSON of a timeline": b"[[1, 2], [[0, 0, 0, 0, 0, 0, 0, 0, 0]]]",
    "deep JSON": b"[" * 200_000,
    "a gzip bomb": gzip.compress(b"[" + b" " * (MAX_SNAPSHOT_BYTES + 1), 1),
}  # fmt: skip


# Those that are read in a child with limits, as a user has it read: they exhaust memory, time or the stack.
IN_A_CHILD = {
    "code",
    "many references",
    "nested references",
    "deep nesting",
    "deep keys",
    "a huge memo",
    "a huge text",
    "a huge array",
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_line_and_runs_no_code(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "given"
    path.write_bytes(FILES[name])
    if name in IN_A_CHILD:
        with pytest.raises(SourceError) as error:
            read_why(str(path))
        assert error.value.exit_code == 2
        words = str(error.value)
    else:
        kind, words = answer_of(str(path), "given")
        assert kind == "refused"
    assert "\n" not in words
    assert len(words) < 400
    assert os.listdir(tmp_path) == ["given"]


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero", tmp_path / "missing", "a\0b"):
        with pytest.raises(SourceError):
            read_why(str(path))


def test_a_larger_snapshot_is_refused_with_a_remedy_before_it_is_read(tmp_path):
    path = tmp_path / "large.pickle"
    path.write_bytes(GOOD)
    os.truncate(path, MAX_SNAPSHOT_BYTES + 1)
    with pytest.raises(SourceError, match="max_entries"):
        read_why(str(path))


def test_plain_values_are_read():
    assert PlainUnpickler(BytesIO(pickle.dumps({"a": [1, 2.5, (None, "b")]}))).load() == {"a": [1, 2.5, (None, "b")]}


def test_a_file_is_read_in_a_child_with_the_report_of_this_process(tmp_path):
    card = Recording()
    Loop(card).train(2)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(card.pickled())
    report = read_why(str(path))
    assert (report.source, report.passes) == ("snapshot", 2)
    # In backward: the parameters, Adam's two moments, and what is saved and computed for them.
    (state,) = (part for part in report.parts if part.part == "optimizer_state")
    (parameters,) = (part for part in report.parts if part.part == "parameters")
    assert state.held_bytes == 2 * parameters.held_bytes
    assert report.allocated_bytes == sum(part.held_bytes for part in report.parts)


def test_characters_of_control_in_a_frame_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(trace(event(frames=[{"filename": "/a/\x1b[31mtrain.py", "line": 3, "name": "main\n\x07"}])))
    assert not set("\x1b\x07") & set(str(bertscope.why(path)))
