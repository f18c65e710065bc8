"""Tests the error that a user reads and the exit code of the process."""

import pytest

from flotilla.trainer.runtime import errors
from flotilla.trainer.runtime.errors import nearest


def test_the_exit_codes_are_what_scripts_rely_on():
    kinds = (errors.ConfigError, errors.RunInterruptedError, errors.ClusterLostError)
    assert [kind("one line").exit_code for kind in kinds] == [2, 130, 138]
    assert (errors.DONE, errors.FAILED, errors.USAGE, errors.REFUSED) == (0, 1, 2, 3)


def test_the_nearest_word():
    assert nearest("stepss", iter(["steps", "workers"])) == "; did you mean 'steps'?"
    assert nearest("xyz", iter(["steps", "workers"])) == nearest("steps", []) == ""


def test_a_message_is_one_line_whatever_is_quoted_in_it():
    for end in ("\n", "\r", "\r\n", "\x0b", "\x85", "\u2028"):
        assert str(errors.UserError(f"run a{end}b is damaged{end}")) == "run a b is damaged"


@pytest.mark.parametrize(
    ("task", "where"),
    [("ps/replica:0/task:1", "ps-1"), ("localhost/replica:0/task:0", "this process")],
)
def test_a_task_without_memory_is_named_with_what_it_lacks_room_for(task, where):
    said = f"OOM when allocating tensor with shape[9,16] and type float on /job:{task}/device:CPU:0"
    line = errors.describe_out_of_memory(
        ValueError(f"{{{{node x}}}} {said} by allocator cpu"), "a/rows"
    )
    words = "has too little memory for a/rows of type float and shape [9, 16]: make tables smaller"
    assert line.startswith(f"{where} (CPU) {words}")
    assert not errors.describe_out_of_memory(ValueError("Received message larger than max"))
