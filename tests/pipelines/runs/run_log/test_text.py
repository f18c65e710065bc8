import json
from datetime import datetime

import pytest

from flotilla.pipelines.runs.run_log.text import LogText, RunnerText, split_times
from flotilla.trainer.events import NewestVersion, to_tree

BEGIN = datetime(2026, 1, 2, 23, 59, 50).timestamp()
# Output of KFP 2.17's local runner; a step's own lines are indented.
RUNNER = """\
23:59:51.422 - INFO - Running pipeline: 'flotilla-training'
--------------------------------------------------------------------------------
23:59:52.427 - INFO - Executing task 'prepare-data'
23:59:52.427 - INFO - Streamed logs:

    [KFP Executor 2026-01-02 23:59:53,442 INFO]: Looking for component `prepare_data` in --x
    [KFP Executor 2026-01-02 23:59:53,444 INFO]: Got executor_input:
    {
        "inputs": {
            "parameterValues": {}
        }
    }
    2026-01-02 23:59:54,500 a row of mine
    a word without a time
I0000 00:00:1767398394.459360   27264 port.cc:153] oneDNN custom operations are on.
    [KFP Executor 2026-01-02 23:59:55,000 WARNING]: a column is empty
    flotilla: prepare_data: no such file
    [KFP Executor 2026-01-02 23:59:55,476 INFO]: Wrote executor output file to /x.json.


00:00:01.502 - INFO - Task 'prepare-data' finished with status SUCCESS
00:00:01.503 - INFO - Task 'prepare-data' outputs:
    Output: 'ready'
    dataset: Dataset( name='dataset',
                      uri='/x' )
--------------------------------------------------------------------------------
a crash of the runner
"""
# The log of a step's pod, written by Argo, KFP's Go launcher, and the step.
POD = """\
time="2026-01-02T03:04:04.100Z" level=info msg="capturing logs" argo=true
I0102 03:04:05.123456      17 launcher_v2.go:90] input ComponentSpec:{
  "inputDefinitions": {}
}
[KFP Executor 2026-01-02 03:04:05,500 INFO]: Loading KFP component "train_model" from x
[KFP Executor 2026-01-02 03:04:06,000 INFO]: jobset made
2026-01-02 03:04:07,300 [chief-0] 2026-01-02 03:04:07,250 ERROR Traceback (most recent call last):
2026-01-02 03:04:07,301 [chief-0]   File "x.py", line 3, in build
[worker-1] 1/10: 50%\r2/10: 60%
"""


def read(text, lines):
    return [text.take(line) for line in lines.rstrip("\n").split("\n")]


def test_of_the_runner_what_the_steps_say_is_left_with_its_time():
    lines = [each for each in read(RunnerText(BEGIN), RUNNER) if each.text and not each.is_noise]
    assert [(each.text, each.level, round(each.time - BEGIN, 1)) for each in lines] == [
        ("a row of mine", "", 4.5),
        ("a word without a time", "", 4.5),
        ("a column is empty", "WARNING", 5.0),
        # This line was written after midnight.
        ("a crash of the runner", "", 11.5),
    ]


def test_of_a_pod_what_the_step_and_its_tasks_say_is_left():
    lines = [each for each in read(LogText("train_model", utc=True), POD) if not each.is_noise]
    assert [(each.label, each.level, each.text) for each in lines] == [
        ("train_model", "INFO", "jobset made"),
        ("chief-0", "ERROR", "Traceback (most recent call last):"),
        ("chief-0", "", '  File "x.py", line 3, in build'),
        ("worker-1", "", "2/10: 60%"),
    ]
    assert [round(each.time % 60, 2) for each in lines] == [6.0, 7.25, 7.25, 7.25]


def test_an_event_is_read_where_a_line_is_one():
    event = NewestVersion(dataset="digits", version="1")
    written = json.dumps(to_tree(event))
    [line] = read(LogText(utc=True), f"[chief-0] 2026-01-02 03:04:07,250 INFO {written}")
    assert (line.label, line.event) == ("chief-0", event)
    [line] = read(LogText(), f"got {written}")
    assert line.event is None


@pytest.mark.parametrize(
    "line", ["", "\x1b[31mred", "a\x1b]0;title\x07b", "[chief-0]", "2026-99-99 00:00:00,000 x"]
)
def test_any_line_is_taken_and_commands_for_a_terminal_are_none(line):
    [found] = read(LogText(), line or "\n")
    assert "\x1b" not in found.text


def test_a_document_that_follows_noise_ends():
    text = "default session config: device_count {\n  key: 1\n}\nx {\n}\n\nmine\n{\nof mine\n"
    assert [each.text for each in read(LogText(), text) if not each.is_noise] == [
        "mine", "{", "of mine",
    ]  # fmt: skip


def test_a_document_that_was_cut_off_hides_nothing_after_it():
    text = "[KFP Executor 2026-01-02 03:04:05,000 INFO]: Got executor_input:\n{\n"
    text += "2026-01-02 03:04:06,000 a word\nanother\n"
    assert [each.text for each in read(LogText(), text) if not each.is_noise] == [
        "a word", "another",
    ]  # fmt: skip


def test_a_logger_that_nobody_has_set_up_has_a_level():
    [line] = read(LogText(), "WARNING:mine.module:a column is empty")
    assert (line.level, line.text) == ("WARNING", "a column is empty")


def test_what_comes_before_the_first_time_has_that_time():
    lines = read(LogText(), "one\n2026-01-02 03:04:05,000 two\nthree\n")
    moment = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    assert [each.time for each in split_times(lines, 7.0)] == [moment] * 3
    assert [each.time for each in split_times(read(LogText(), "one\n"), 7.0)] == [7.0]
