"""The error that a user reads, and the exit code of the process."""

import pytest

from flotilla.trainer.runtime import errors
from flotilla.trainer.runtime.errors import nearest


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UserError, 1),
        (errors.ConfigError, 2),
        (errors.RunInterruptedError, 130),
        (errors.ClusterLostError, 138),
    ],
)
def test_each_error_has_its_exit_code(kind, code):
    assert issubclass(kind, errors.UserError)
    assert kind("one line").exit_code == code
    assert str(kind("one line")) == "one line"


def test_the_exit_codes_are_what_scripts_rely_on():
    named = (errors.DONE, errors.FAILED, errors.USAGE, errors.REFUSED)
    assert named == (0, 1, 2, 3)
    assert (errors.INTERRUPTED, errors.BEGIN_AGAIN) == (130, 138)


@pytest.mark.parametrize(
    ("word", "expected"),
    [("stepss", "; did you mean 'steps'?"), ("workrs", "; did you mean 'workers'?"), ("xyz", "")],
)
def test_the_nearest_word(word, expected):
    assert nearest(word, iter(["steps", "workers"])) == expected


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028"])
def test_a_message_is_one_line_whatever_is_quoted_in_it(end):
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
    words = "has no memory for a/rows of type float and shape [9, 16]: make tables smaller"
    assert line.startswith(f"{where} (CPU) {words}")
    assert not errors.describe_out_of_memory(ValueError("Received message larger than max"))


def test_nothing_is_near_where_nothing_is_allowed():
    assert nearest("steps", []) == ""
