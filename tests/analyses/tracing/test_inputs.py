"""Inputs that the user describes: what a model cannot run is one line with what its forward takes, and exit code 2."""

from __future__ import annotations

import pytest

import bertscope
from bertscope.analyses.tracing.inputs import known_shapes

COMMANDS = ("estimate", "flops", "fit --budget 1GiB", "profile", "count --shapes", "tree --shapes", "report -o x.html")
TAKES = "BertModel.forward takes input_ids=BxS:int64, attention_mask=BxS:int64, token_type_ids=BxS:int64, "


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", ["x=B:float32", "input_ids=Bx3x4:int64", "input_ids=BxS:float32"])
def test_an_input_that_a_bert_cannot_run_is_one_line_with_what_it_takes(cli, tmp_path, monkeypatch, command, given):
    monkeypatch.chdir(tmp_path)
    result = cli(*command.split(), "bert-tiny", "--seq", "8", "--input", given)
    last = result.err.splitlines()[-1]
    assert (result.code, result.out) == (2, "")
    assert last.startswith("error: ")
    assert TAKES in last
    assert "--input" in last
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("input_ids=1:int64", "its shape is (1,)"),
        ("input_ids=BxS:bool", "got torch.bool"),
        ("attention_mask=Bx9:int64", "attention_mask has shape (2, 9)"),
        ("position_ids=3:int64", "position_ids has shape (3,)"),
        ("labels=B:int64", "and no labels"),
        ("self=B:int64", "and no self"),
        ("inputs_embeds=BxSx128:float32", "either input_ids or inputs_embeds"),
    ],
)
def test_the_line_says_which_input_is_wrong(cli, given, words):
    result = cli("flops", "bert-tiny", "--batch", "2", "--seq", "8", "--input", given)
    assert result.code == 2
    assert words in result.err.splitlines()[-1]


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
