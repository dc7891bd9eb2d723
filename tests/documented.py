"""Run every command of the help and of the pages that has no output there; `.ci/versions newest` does so.

The tests run one for each option: `test_a_documented_command_of_each_option_runs`.
"""

from __future__ import annotations

import pytest

from tests.test_docs import one_for_each_option, runs, without_output


@pytest.mark.parametrize("command", sorted({*without_output()} - {*one_for_each_option()}))
def test_a_documented_command_runs(printed, command):
    runs(printed, command)
