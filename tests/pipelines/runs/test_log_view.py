import json
from datetime import datetime

import pytest

from flotilla.pipelines.runs.log_view import Line, LogText, LogView, RunnerText, split_times
from flotilla.trainer import events

TRACE = """\
Traceback (most recent call last):
  File "/home/ann/net.py", line 7, in call
    return x @ kernel
ValueError: shapes
"""


def of_event(event):
    return Line(time=event.time, label="", text="", event=event)


def of_text(text, label="", time=1.0, **more):
    return Line(time=time, label=label, text=text, **more)


def written(*lines, **options):
    leader = options.pop("leader", "")
    view = LogView(**options)
    view.leader = leader
    found = [each for line in lines for each in view.take(line)]
    return [(each.label, each.text) for each in [*found, *view.end()]]


def ended(step, status="done", **more):
    return of_event(events.StepEnd(step=step, status=status, seconds=2.0, **more))


def progress(second, step):
    numbers = {"steps": 9999, "loss": 0.5, "steps_per_second": 1, "seconds_left": 2}
    return of_event(events.Progress(time=second, global_step=step, **numbers))


def test_a_step_with_what_it_measured_or_why_it_refused():
    step = of_event(events.StepBegin(step="prepare_data"))
    metrics = {"train": 90, "headline": "x", "notes": [1], "share": 0.123456}
    assert written(step, ended("prepare_data", metrics=metrics)) == [
        ("prepare_data", "done in 2.0 s: train 90, share 0.1235")
    ]
    # Its begin is written if it says something or goes on.
    lines = [("prepare_data", "..."), ("prepare_data", "a word")]
    assert written(step, of_text("a word")) == lines
    assert written(step) == lines[:1]
    end = ended("check_gate", metrics={"decision": "refused", "reasons": ["too low", "too slow"]})
    assert [text for _, text in written(end)] == [
        "done in 2.0 s: decision refused", "- too low", "- too slow",
    ]  # fmt: skip


def test_progress_becomes_rarer_and_its_last_line_is_there():
    events_of = [progress(second, second) for second in range(1, 3601)]
    over = of_event(events.HandedOn(uri="u", global_step=9, trained=9, why="last", time=3601))
    lines = [text for _, text in written(*events_of, over)]
    assert 30 < len(lines) < 70
    assert lines[0].startswith("global step 1/9999  loss 0.5")
    assert lines[-2].startswith("global step 3600/9999")
    assert lines[-1].startswith("global step 9 of 9 is selected")
    every = written(*events_of, over, verbose=True)
    assert len(every) == 3601


def test_a_validation_comes_after_the_progress_before_it():
    lines = [
        progress(1, 1),
        progress(2, 2),
        of_event(events.Validation(time=3, global_step=2, metrics={"accuracy": 0.5})),
        of_event(events.CheckpointPublished(time=4, global_step=2, uri="file:///x")),
    ]
    assert [text for _, text in written(*lines)][1:] == [
        "global step 2/9999  loss 0.5  1 steps/s  2.0 s left",
        "validation of global step 2: accuracy 0.5",
        "checkpoint of global step 2",
    ]


def test_events_of_training_are_those_of_its_leading_task():
    begin = of_event(events.AttemptBegin(global_step=0, steps=9, resumed=False))
    own = of_event(events.Validation(global_step=2, metrics={}, created="now"))
    found = written(begin, own, leader="chief-0")
    assert [label for label, _ in found] == ["chief-0", "evaluator-0"]


def test_a_line_of_noise_with_credentials_or_with_a_level():
    line = of_text("oneDNN", is_noise=True)
    assert written(line) == []
    assert written(line, verbose=True) == [("", "oneDNN")]
    secret = of_text("reading minio://ann:secret@bucket/x")
    assert written(secret) == [("", "reading minio://***@bucket/x")]
    assert written(of_text("low", level="WARNING"), of_text("bad", level="ERROR")) == [
        ("", "warning: low"), ("", "error: bad"),
    ]  # fmt: skip
    # A warning that two handlers write comes once.
    own = of_text("retracing", level="WARNING")
    handed_on = of_text("retracing", level="WARNING", begins=True)
    assert written(own, handed_on) == [("", "warning: retracing")]
    assert len(written(handed_on, handed_on)) == 2


def test_a_traceback_is_written_once_and_that_of_the_runner_never():
    by_task = [of_text(each, "chief-0") for each in TRACE.splitlines()]
    of_step = [of_text(each) for each in TRACE.splitlines()]
    last = "RuntimeError: Pipeline 'x' finished with status FAILURE. Inner task failed: 'y'"
    of_runner = [of_text(each) for each in [*TRACE.splitlines()[:3], last]]
    found = written(*by_task, *of_step, of_event(events.StepBegin(step="finish")), *of_runner)
    assert found[:4] == [("chief-0", each) for each in TRACE.splitlines()]
    assert found[4:] == [("finish", "...")]


def test_of_a_traceback_the_frames_of_others_are_counted():
    library = ['  File "/usr/lib/python3/site-packages/keras/layer.py", line 9, in f', "    g()"]
    head, *own, last = TRACE.splitlines()
    trace = [head, *library, *library, *own, *library, last]
    lines = [of_text(each, "chief-0") for each in trace]
    assert [text for _, text in written(*lines)] == [
        head, "  ... 2 frames outside your code (--verbose shows them)", *own,
        "  ... 1 frame outside your code (--verbose shows them)", last,
    ]  # fmt: skip
    assert [text for _, text in written(*lines, verbose=True)] == trace
    # The traceback of a bug in Flotilla has no user frames, so it is shown in full.
    lines = [of_text(each) for each in (head, *library, last)]
    assert len(written(*lines)) == 4


def test_why_training_failed_is_said_once():
    lines = [
        of_event(events.StepBegin(step="train_model")),
        of_text("flotilla: model net: ValueError (net.py:7)", "chief-0"),
        of_event(events.TaskFailed(task="chief-0", cause="exit code 2")),
        ended("train_model", "failed", error="model net: ValueError (net.py:7) (chief-0, log x)"),
    ]
    assert written(*lines)[1:] == [
        ("chief-0", "model net: ValueError (net.py:7)"),
        ("chief-0", "ended with exit code 2"),
        ("train_model", "failed in 2.0 s"),
    ]
    assert written(lines[-1])[0][1].startswith("failed in 2.0 s: model net: ValueError")


def test_what_a_launcher_relays_again_is_left_out_and_what_two_tasks_say_is_not():
    lines = [of_text("words", label, begins=True) for label in ("chief-0", "worker-0")]
    again = of_text("words", "train_model", begins=True)
    assert written(*lines, again) == [("chief-0", "words"), ("worker-0", "words")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stages": ("check_gate",)}, ["c"]),
        ({"stages": ("train_model",)}, ["a", "b"]),
        ({"stages": ("evaluate_model", "check_gate")}, ["c"]),
        ({"task": "chief-0"}, ["b"]),
        ({}, ["a", "b", "c"]),
    ],
)
def test_a_step_a_stage_or_a_task_alone(options, expected):
    lines = [of_text("a", "train_model"), of_text("b", "chief-0"), of_text("c", "check_gate")]
    assert [text for _, text in written(*lines, **options)] == expected


def test_the_logs_of_two_pods_in_turn_keep_their_stages():
    view, texts = LogView(), {name: LogText() for name in ("evaluate_model", "finish")}
    found = []

    def take(pod, line):
        view.enter(pod)
        found.extend((each.label, each.text) for each in view.take(line))

    take("evaluate_model", of_event(events.StepBegin(step="check_gate")))
    take("finish", texts["finish"].take("one"))
    take("evaluate_model", texts["evaluate_model"].take("two"))
    said = [each for each in found if each[1] != "..."]
    assert said == [("finish", "one"), ("check_gate", "two")]


def test_a_run_that_begins_again_and_one_that_is_asked_to_end():
    lines = [of_event(events.RunBegin(run_id="r", number=2)), of_event(events.Interrupted())]
    assert [text for _, text in written(*lines)] == [
        "run r begins again (start 2)", "the run is being cancelled",
    ]  # fmt: skip


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
    event = events.NewestVersion(dataset="digits", version="1")
    written = json.dumps(events.to_tree(event))
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


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("default session config: device_count {\n  key: 1\n}\nx {\n}\n\nmine\n{\nof mine\n",
         ["mine", "{", "of mine"]),
        # A document that was cut off hides nothing after it.
        ("[KFP Executor 2026-01-02 03:04:05,000 INFO]: Got executor_input:\n{\n"
         "2026-01-02 03:04:06,000 a word\nanother\n", ["a word", "another"]),
    ],
)  # fmt: skip
def test_a_document_that_is_noise_ends(text, left):
    assert [each.text for each in read(LogText(), text) if not each.is_noise] == left


def test_a_logger_that_nobody_has_set_up_has_a_level():
    [line] = read(LogText(), "WARNING:mine.module:a column is empty")
    assert (line.level, line.text) == ("WARNING", "a column is empty")


def test_what_comes_before_the_first_time_has_that_time():
    lines = read(LogText(), "one\n2026-01-02 03:04:05,000 two\nthree\n")
    moment = datetime(2026, 1, 2, 3, 4, 5).timestamp()
    assert [each.time for each in split_times(lines, 7.0)] == [moment] * 3
    assert [each.time for each in split_times(read(LogText(), "one\n"), 7.0)] == [7.0]
