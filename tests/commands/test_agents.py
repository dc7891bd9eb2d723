"""`bertscope mcp`: the tools for agents; what they refuse needs no client, and a real client is a test where mcp is."""

import json
import sys

import pytest

from bertscope.commands import agents
from bertscope.commands.table import COMMANDS
from tests.conftest import OOM, ROOT

CONFIG = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory of a server, with a configuration, code, and a configuration outside."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "net.py").write_text("open('ran', 'w')\n\n\ndef build():\n    pass\n")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (folder / "link.json").symlink_to(tmp_path / "config.json")
    monkeypatch.chdir(folder)
    return folder


ANSWERS = {
    "count": ({"model": "bert-tiny"}, "4,385,920 parameters"),
    "flops": ({"model": "bert-tiny", "batch": 1, "seq": 8}, "6"),
    "estimate": ({"model": "config.json", "gpu": "t4", "batch": 2, "seq": "8"}, "Fits on t4"),
    "fit": ({"model": "bert-tiny", "gpu": "t4", "seq": 64, "precision": "fp32", "checkpointing": "none"}, "Largest"),
    "plan": ({"model": "bert-tiny", "gpu": "t4", "batch": 8, "seq": 64}, "Fits on t4"),
    "why": ({"file": OOM}, "Fragmentation: 4.84 GiB"),
    "check": ({"files": ["bert-tiny"]}, "preset bert-tiny: "),
    "presets": ({"name": "bert-tiny"}, "1 preset"),
}


@pytest.mark.parametrize("tool", ANSWERS)
def test_each_tool_answers_as_text_and_as_json(project, tool):
    arguments, said = ANSWERS[tool]
    text, is_error = agents.answer(tool, arguments)
    assert (is_error, said in text.partition("\n")[0]) == (False, True), text
    assert json.loads(agents.answer(tool, {**arguments, "json": True})[0])["kind"]


REFUSED = (
    ("count", {"model": "net.py:build"}, "is code"),
    ("count", {"model": "net:build"}, "is code"),
    ("estimate", {"model": "bert-tiny", "loss": "distil:./net.py:build"}, "is code"),
    ("count", {"model": "../config.json"}, "is outside"),
    ("count", {"model": "link.json"}, "is outside"),
    ("count", {"model": "~/../.."}, "is outside"),
    ("count", {"model": "./~"}, "is outside"),
    ("estimate", {"model": "bert-tiny", "gpu": "t4", "price": " /etc/passwd ", "sequences": 1}, "is outside"),
    ("estimate", {"model": "bert-tiny", "loss": "distil:../config.json"}, "is outside"),
    ("estimate", {"model": "bert-tiny", "gpu": "t4", "price": "/etc/passwd", "sequences": 1}, "is outside"),
    ("check", {"files": ["bert-tiny", "/etc"]}, "is outside"),
    ("why", {"file": "/etc/passwd"}, "is outside"),
    ("why", {"file": "-"}, "No such file"),
    ("count", {}, "model is missing"),
    ("count", {"model": "bert-tony"}, "did you mean 'bert-tiny'? 'presets' lists the presets"),
    ("fit", {"model": "bert-tiny", "gpu": "rtx 3080 12GB"}, "did you mean 'rtx-3080-10gb'"),
    ("count", {"model": "x" * 100_000}, "no preset or file named"),
    ("count", {"model": "a\0b"}, ""),
    ("count", {"model": "bert-tiny", "output": "x"}, "count has no parameter 'output'"),
    (
        "estimate",
        {"model": "bert-tiny", "budget": "16GiB"},
        "estimate has no parameter 'budget'; fit, plan take it",
    ),
    ("estimate", {"model": "bert-tiny", "batch": 10**30}, "batch takes"),
    ("estimate", {"model": "bert-tiny", "batch": [[1]]}, "batch takes"),
    ("fit", {"model": "bert-tiny", "gpu": "t4", "batch": "8"}, "batch takes a whole number"),
    ("count", {"model": 3}, "model takes a text"),
    ("why", {"file": "\udcff out of memory"}, "no out-of-memory message"),
    ("profile", {"model": "bert-tiny"}, "there is no tool 'profile'"),
)


@pytest.mark.parametrize(("tool", "arguments", "said"), REFUSED)
def test_code_other_files_and_wrong_values_are_the_text_of_an_error(project, tool, arguments, said):
    text, is_error = agents.answer(tool, arguments)
    assert (is_error, said in text, "Traceback" in text) == (True, True, False), text
    assert not (project / "ran").exists()


def test_a_file_that_is_named_like_standard_input_is_read_and_not_the_client(project, monkeypatch):
    (project / "-").write_text(OOM)
    monkeypatch.setattr(sys, "stdin", None)
    assert "Fragmentation: 4.84 GiB" in agents.answer("why", {"file": "-"})[0]


def test_a_time_that_is_not_known_has_its_reason(project):
    text, _ = agents.answer("estimate", {"model": "bert-tiny", "gpu": "t4", "time": True})
    assert "note: no time" in text


def test_what_to_do_next_is_a_call_that_a_tool_takes(project):
    tool, arguments = "estimate", {"model": "bert-tiny", "gpu": "t4", "seq": 64, "batch": 2}
    for _ in range(2):  # estimate, then fit
        text, is_error = agents.answer(tool, arguments)
        assert not is_error
        assert "--" not in text
        tool, _, words = text.partition("Next: ")[2].partition("\n")[2].strip().rstrip(")").partition("(")
        arguments = eval(f"dict({words})")
    assert (tool, agents.answer(tool, arguments)[1]) == ("estimate", False)
    text, _ = agents.answer("plan", {"model": "bert-tiny", "budget": "200MiB", "batch": 16, "emit": "torch"})
    assert text.startswith("# -*- coding: utf-8 -*-")


def test_what_only_the_agent_knows_is_a_type_in_the_next_call_and_its_message_stays(project):
    full = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 14.56 GiB of which 15.00 " \
        "MiB is free. Process 1 has 14.50 GiB memory in use. Of the allocated memory 14.20 GiB is allocated by " \
        "PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."  # fmt: skip
    (project / "oom.log").write_text(full)
    for file in (full, "oom.log"):
        text, is_error = agents.answer("why", {"file": file})
        assert not is_error
        call = text.rpartition("\n  ")[2].strip()
        assert call.endswith("model=<str>, batch=<int>, seq=<int>)"), call
        assert call.startswith(f"why(file='{file[:40]}"), call


def test_fit_compares_gpus_and_a_message_is_no_file(project):
    arguments = {"model": "bert-tiny", "gpu": "t4,a10", "seq": 64, "batch": 4, "precision": "fp32"}
    assert agents.answer("fit", arguments)[0].startswith("Batch 4 fits on t4 and a10.")
    text, _ = agents.answer("why", {"file": OOM})
    assert "the message: 3.00 GiB failed" in text
    assert "architecture" not in agents.TOOLS["check"].schema["properties"]


def test_a_parameter_that_is_null_has_its_default(project):
    texts = [agents.answer("estimate", {"model": "config.json", **more})[0] for more in ({}, {"batch": None})]
    assert "batch 8" in texts[0]
    assert texts[0] == texts[1]


def test_each_schema_is_an_object_whose_parameters_are_described_with_their_defaults_and_words():
    for tool in ANSWERS:
        schema = agents.TOOLS[tool].schema
        assert set(schema["required"]) <= set(schema["properties"])
        assert json.loads(json.dumps(schema)) == schema
        described = agents.TOOLS["estimate"].schema["properties"] | {
            k: v for k, v in schema["properties"].items() if len(v) > 1
        }
        assert all(described[name]["description"] for name in schema["properties"])
        assert "--" not in str(schema)
    assert sum(len(json.dumps(agents.TOOLS[tool].schema)) for tool in ANSWERS) < 33_000
    given = agents.TOOLS["estimate"].schema["properties"]
    assert [given[name]["default"] for name in ("batch", "device", "precision")] == [8, "cpu", "fp32"]
    assert given["device"]["enum"] == ["cpu", "cuda"]


def test_the_file_that_the_tool_check_describes_passes(project):
    text = COMMANDS["check"].text
    (project / "tiny.bertscope.yaml").write_text(text[text.index("{") : text.rindex("}") + 1])
    answer, is_error = agents.answer("check", {})
    assert (is_error, answer.partition("\n")[0]) == (False, "1 file: 3 expectations passed, 0 failed"), answer


def test_the_json_of_an_estimate_is_short_enough_for_a_model_to_read(project):
    text, _ = agents.answer("estimate", {"model": "bert-tiny", "gpu": "t4", "json": True})
    assert len(text) < 20_000
    assert "timeline" not in text


def test_without_the_package_one_line_names_the_extra(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    done = cli("mcp")
    assert (done.code, done.err) == (2, "error: bertscope mcp needs the extra 'mcp': pip install 'bertscope[mcp]'\n")


def test_a_client_over_stdio_lists_and_calls_tools_at_once(project):
    anyio, stdio = pytest.importorskip("anyio"), pytest.importorskip("mcp.client.stdio", reason="the extra 'mcp'")
    from mcp.client.session import ClientSession

    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from bertscope.__main__ import main; main()"
    server = stdio.StdioServerParameters(command=sys.executable, args=["-c", code, "mcp"], cwd=str(project))

    async def talk() -> list[object]:
        async with stdio.stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            names = [tool.name for tool in (await session.list_tools()).tools]
            results: list[object] = [names]

            async def call(model: str) -> None:
                result = await session.call_tool("count", {"model": model})
                results.append((result.is_error, result.content[0].text.partition("\n")[0]))

            async with anyio.create_task_group() as group:
                for model in ("bert-tiny", "net.py:build", "bert-tiny"):
                    group.start_soon(call, model)
            return results

    names, *answers = anyio.run(talk)
    assert sorted(names) == sorted(ANSWERS)
    assert sorted(answers)[:2] == [(False, "4,385,920 parameters")] * 2
    assert "is code" in sorted(answers)[2][1]
