"""The budgets of the rooms and of the structure."""

import pytest

from tests.rooms import BUDGETS, lines_by_room, structure


@pytest.mark.parametrize(("title", "measured"), [("rooms", lines_by_room), ("structure", structure)])
def test_no_measure_of_the_structure_and_the_words_is_above_its_budget(title, measured):
    """The files that a command enters are measured by `python -m tests.rooms`, which `.ci/run` runs."""
    values = measured()
    assert values.keys() == BUDGETS[title].keys()
    assert {name: value for name, value in values.items() if value > BUDGETS[title][name][0]} == {}
