"""Tests the live view of a run on standard error."""

import re
from dataclasses import replace

import pytest

from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines.cli import live
from flotilla.pipelines.cli.live import Display, Steps, SweepDisplay
from flotilla.pipelines.runs.kfp_run import Nodes, RemoteRun, Step
from flotilla.trainer import events
from flotilla.trainer.sweeps.sweep import Objective, Result, Sweep, Trial
from tests.pipelines.step_events import begun, done, ended


def progress(step, time, **fields):
    known = {"loss": 0.25, "steps_per_second": 99.6, "seconds_left": 12.4, "steps": 300}
    return events.Progress(**{"time": time, "global_step": step, **known, **fields})


@pytest.fixture
def lines_of(capsys):
    """Return a function that shows events and returns the lines on standard error."""

    def show(*given):
        with Display() as display:
            for event in given:
                display(event)
        out, err = capsys.readouterr()
        assert not out
        return err.splitlines()

    return show


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


NOISE = ("experimental {", "}")
LONG, DAMAGE = "file:///" + "long/" * 40, "[bold]variables.index[/bold] is missing"
HELD = {"uri": "file:///c", "holder": "run a (process 7 on h)"}
EVENTS = {
    "steps": [
        (done("prepare_data"), ["prepare_data ...", "prepare_data done in 1.5 s"]),
        ([begun("train_model"), ended("train_model", "failed", 1)],
         ["train_model ...", "train_model failed in 1.5 s"]),
        ([ended("train_model", "interrupted", 130)], ["train_model interrupted in 1.5 s"]),
    ],
    "an error that the check finds is no second end of the first stage": [
        (done("resolve_config"), ["resolve_config ...", "resolve_config done in 1.5 s"]),
        ([begun("prepare_data"), ended("resolve_config", "failed", 2)],
         ["prepare_data ...", "the check of the configuration failed in 1.5 s"]),
    ],
    "progress now and then": [
        ([progress(20, 1000.0)], ["global step 20/300  loss 0.25  100 steps/s"]),
        ([progress(40, 1004.9), progress(60, 1005.0)],
         ["global step 60/300  loss 0.25  100 steps/s  12 s left"]),
    ],
    "an error in the output of a task is shown at the end of the run": [
        ([events.TaskFailed(task="chief-0", cause="exit code 2",
                     last_lines=(*NOISE, "flotilla: model a:b: cannot import a"))],
         ["chief-0 ended with exit code 2"]),
        ([events.TaskFailed(task="chief-0", cause="exit code 1", last_lines=NOISE)],
         ["chief-0 ended with exit code 1:", *NOISE]),
        ([events.TaskFailed(task="ps-0", cause="signal SIGKILL", log="log.txt",
                     last_lines=("[one]", "two"))],
         ["ps-0 ended with signal SIGKILL:", "[one]", "two"]),
    ],
    "incidents": [
        ([events.AttemptBegin(global_step=0, steps=9, resumed=False)], []),
        ([events.Restart(task="worker-0", cause="signal SIGKILL", restarts=1)],
         ["worker-0 ended with signal SIGKILL and is restarted"]),
        ([events.AttemptBegin(global_step=500, steps=900, resumed=True)],
         ["training resumes from global step 500"]),
        ([events.Stalled(tasks=("ps-0", "worker-1"), seconds=120.0)],
         ["no progress for 2 min 00 s: no response from ps-0, worker-1"]),
        ([events.EvaluatorLeft(reason="no [room]")],
         ["training continues without the evaluator: no [room]"]),
        ([events.CheckpointPassedOver(uri=LONG, reason=DAMAGE)],
         [f"skipped {LONG}: {DAMAGE}"]),
        ([events.RunBegin(run_id="digits-1", number=1)], []),
        ([events.ServersLost(servers=("ps-1",), recovery="partial", global_step=510, back_to=400)],
         ["ps-1 lost at global step 510; partial recovery: only its variables go 110 steps back "
          "to 400; the others are kept"]),
    ],
    "the begin of a run": [
        ([events.NewestVersion(dataset="digits", version="1.0.0")],
         ["the newest version of digits is 1.0.0"]),
        ([events.DataNote(text="'a' is text; set data.types: {a: class}")],
         ["note: 'a' is text; set data.types: {a: class}"]),
        ([events.DataNote(text="constant: 'b' has one value", is_warning=True)],
         ["warning: constant: 'b' has one value"]),
        ([events.FromScratch(reason="digits has no champion yet below file:///r")],
         ["training begins from scratch: digits has no champion yet below file:///r"]),
        ([events.WarmStart(uri="gs://b/step-00000005")],
         ["training begins with the weights of gs://b/step-00000005"]),
        ([events.WarmStart(uri="gs://a.keras", taken=6, what="6 variables taken, 2 excluded (a)")],
         ["training begins with the weights of gs://a.keras: 6 variables taken, 2 excluded (a)"]),
        ([events.HandedOn(uri="gs://b/s", global_step=9, trained=12, why="best by val. loss")],
         ["global step 9 of 12 is selected: best by val. loss"]),
        ([events.TableEmpty(table="user_embedding", why="it was frozen")],
         ["warning: the table user_embedding has no rows, so its ids share one row per shard: it "
          "was frozen"]),
        ([events.LeaseAwaited(**HELD, until="2027-01-15 08:00:00 UTC")],
         ["waiting for the lease of file:///c: run a (process 7 on h) may be dead, but holds it "
          "until 2027-01-15 08:00:00 UTC"]),
        ([events.LeaseTakenOver(**HELD, reason="has ended")],
         ["took over the lease of file:///c from run a (process 7 on h), which has ended"]),
    ],
    "a request to end": [
        ([begun("train_model"), events.Interrupted()],
         ["train_model ...", "stopping: saving the last checkpoint"]),
        ([begun("prepare_data"), events.Interrupted()], ["prepare_data ...", "stopping"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("rows", EVENTS.values(), ids=EVENTS)
def test_the_lines_of_events(lines_of, rows):
    expected = [line for _, lines in rows for line in lines]
    assert lines_of(*(event for given, _ in rows for event in given)) == expected


def test_only_a_terminal_that_can_draw_again_has_more_than_lines(lines_of, monkeypatch):
    text = "".join(lines_of(progress(20, 1000.0), *done("train_model")))
    assert "\x1b" not in text
    assert "━" not in text
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    lines = lines_of(begun("train_model"), progress(20, 1000.0), *done("train_model"))
    assert lines[:2] == ["train_model ...", "global step 20/300  loss 0.25  100 steps/s"]


@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_what_goes_on(lines_of):
    assert "starting" in "".join(lines_of())
    assert "starting the next step" in "".join(lines_of(*done("prepare_data")))
    assert "ending" in "".join(lines_of(*done("prepare_data"), *done("finish")))
    assert "export_model" in "".join(lines_of(begun("export_model")))
    found = events.Validation(global_step=150, metrics={"accuracy": 0.98765})
    text = "".join(lines_of(begun("train_model"), progress(150, 1.0), found))
    assert "accuracy 0.9877" in text
    assert "at 150" in text
    text = "".join(lines_of(begun("train_model"), progress(20, 1.0), events.Interrupted()))
    assert "train_model  stopping: saving the last checkpoint" in text
    assert "\x1b[31mfailed\x1b[0m" in "".join(lines_of(ended("train_model", "failed", 1)))


@pytest.mark.usefixtures("terminal")
def test_a_note_goes_on_between_words_on_a_terminal(lines_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = "\n".join(
        lines_of(events.DataNote(text="the column 'a' has one value, which says nothing"))
    )
    assert "note: the column 'a' has one value,\nwhich says nothing\n" in text


@pytest.mark.usefixtures("terminal")
def test_with_a_terminal_progress_is_a_bar(lines_of):
    text = "".join(lines_of(begun("train_model"), progress(20, 1.0), progress(150, 1.1)))
    assert all(each in text for each in ("150/300", "loss 0.25 ", "━"))
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    given = [progress(20, 1.0), *done("train_model"), progress(40, 2.0, steps=50)]
    assert "40/50" in "".join(lines_of(*given))


@pytest.mark.usefixtures("terminal")
def test_the_terminal_is_left_as_it_was_after_an_error(capsys):
    def draw():
        with Display() as display:
            display(progress(20, 1.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw()
    assert capsys.readouterr().err.count("\x1b[?25h") == 1


def in_sight(lines):
    """Return the lines without their colours, as they are when drawn for the last time."""
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1] for line in lines]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", ["20", "60", "80", "120"])
def test_the_view_fits_the_width_of_the_terminal(lines_of, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    metrics = {f"metric_{n}": 0.5 for n in range(12)}
    found = events.Validation(global_step=150, metrics=metrics)
    plain = in_sight(lines_of(begun("train_model"), progress(150, 1.0), found))
    assert any("150/300" in line for line in plain) or columns == "20"
    assert max(map(len, plain)) <= int(columns)
    assert columns == "20" or not any("…" in line for line in plain)


def work(share=0.43, time=1000.0, **fields):
    known = {"what": "reading the files", "unit": "rows", "done": 1_290_000, "seconds": 40.0}
    known |= {"rate": 410_000.0, "seconds_left": 72.0, "share": share}
    return events.WorkProgress(**{"time": time, **known, **fields})


class TestWork:
    """Progress of work: below its step on a terminal, otherwise as a line every 30 seconds."""

    def test_without_a_terminal_it_is_a_line_every_half_minute(self, lines_of):
        assert not lines_of(work(seconds=3.0), work(seconds=4.0, is_over=True))
        assert lines_of(
            work(seconds=3.0, done=10, time=1000.0),
            work(seconds=29.0, time=1026.0),
            work(seconds=30.0, time=1027.0),
            work(seconds=45.0, time=1042.0),
            work(seconds=60.0, time=1057.0, share=-1.0, seconds_left=-1.0),
            work(seconds=99.0, time=1096.0, done=3_000_000, is_over=True),
        ) == [
            "reading the files: 43 %  1,290,000 rows  410,000 rows/s  1 min 12 s left",
            "reading the files: 1,290,000 rows  410,000 rows/s",
            "reading the files: done, 3,000,000 rows in 1 min 39 s",
        ]  # fmt: skip

    @pytest.mark.usefixtures("terminal")
    @pytest.mark.parametrize(
        ("columns", "parts"),
        [
            ("140", ["43 %", "1,290,000/3,000,000 rows", "410,000 rows/s", "1 min 12 s left"]),
            ("80", ["43 %", "1,290,000/3,000,000 rows", "1 min 12 s left"]),
            ("60", ["43 %", "1 min 12 s left"]),
        ],
    )
    def test_on_a_terminal_it_has_a_bar_and_what_has_room(
        self, lines_of, monkeypatch, columns, parts
    ):
        monkeypatch.setenv("COLUMNS", columns)
        plain = in_sight(lines_of(begun("prepare_data"), work(total=3_000_000)))
        line = next(each for each in plain if "reading the files" in each)
        assert re.sub(r"[━╸╺ ]+", " ", line).split("files ")[1].strip() == " ".join(parts)
        assert "━" in line
        assert max(map(len, plain)) <= int(columns)

    @pytest.mark.usefixtures("terminal")
    def test_a_share_that_is_not_known_has_no_bar_and_what_is_over_is_not_drawn(self, lines_of):
        text = "".join(lines_of(begun("prepare_data"), work(share=-1.0, seconds_left=-1.0)))
        assert "1,290,000 rows  410,000 rows/s" in text
        assert "━" not in text
        text = "".join(lines_of(begun("prepare_data"), work(), work(is_over=True)))
        assert "reading the files" not in text


def trial(number, status, *values):
    results = tuple(
        Result(rung=rung, steps=100, value=value, by=Objective(metric="auc", better="higher"))
        for rung, value in enumerate(values)
    )
    return Trial(number=number, settings={}, status=status, results=results)


def sweep_of(*trials, rungs=(0,)):
    return Sweep(
        sweep_id="s", config={}, source="", fixed=(), keys=(), rungs=rungs, trials=trials,
        objective=Objective(metric="auc", better="higher"),
    )  # fmt: skip


class TestSweep:
    """The view of a sweep: trials by state, the best trial so far, and the remaining time."""

    @pytest.fixture
    def display(self, monkeypatch):
        monkeypatch.setattr(live.time, "time", lambda: 1000.0)
        waiting = [trial(number, "waiting") for number in range(1, 5)]
        found = SweepDisplay(sweep_of(*waiting))
        monkeypatch.setattr(live.time, "time", lambda: 1060.0)
        return found

    def test_without_a_terminal_it_is_a_line_every_half_minute(self, display, capsys):
        display.trial(trial(1, "done", 0.8), "trial 1 done")
        display.trial(trial(2, "failed"), "trial 2 failed")
        running = trial(3, "running")
        display.trial(running, "trial 3 ...")
        for step in (10, 50):
            display(running, progress(step, 1.0, steps=100))
        assert capsys.readouterr().err.splitlines() == [
            "trial 1 done",
            "trial 2 failed",
            "trial 3 ...",
            "sweep: 52 %  2/4 trials  54 s left  1 running  1 failed  best AUC 0.8 (trial 1)",
        ]

    @pytest.mark.usefixtures("terminal")
    @pytest.mark.parametrize("columns", ["60", "80", "140"])
    def test_on_a_terminal_it_fits(self, display, capsys, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", columns)
        view = SweepDisplay(display._sweep)
        with view:
            view.trial(trial(1, "done", 0.8), "trial 1 done")
            view(trial(2, "running"), work())
        lines = in_sight(capsys.readouterr().err.splitlines())
        assert max(map(len, lines)) <= int(columns)
        assert any("  trials" in line and "25 %" in line for line in lines)
        assert any("trial 2: reading the files: 43 %" in line for line in lines)

    def test_of_each_rung_a_third_goes_on_and_a_request_to_end_is_said(self, display):
        trials = [trial(1, "running", 0.8), *(trial(each, "done", 0.7) for each in range(2, 10))]
        found = sweep_of(*trials, rungs=(100, 300, 900))
        # Nine trials train 100 steps, three another 200 and one another 600: 2100 steps in total.
        assert found.share({}) == pytest.approx(900 / 2100)
        found = sweep_of(replace(trials[0], rung=1), *trials[1:], rungs=found.rungs)
        assert found.share({1: 0.5}) == pytest.approx(1000 / 2100)
        display(trial(1, "running"), events.Interrupted())
        assert display._work().what == "sweep: stopping: saving the last checkpoints"


def test_a_remote_step_that_starts_says_every_half_minute_for_what(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    steps = (Step(name="train_model", state="RUNNING", began=None, ended=None),)
    words = "starting the job: 1/3 tasks  worker 0/2: 2 without a node (Insufficient cpu.)"
    at = StepRecord(step="train_model", status="running", began=1.0, metrics={"progress": words})
    known = RemoteRun(
        run_id="1", name="mine", state="RUNNING", created=None, finished=None, error="",
        nodes=Nodes(steps=steps), doing={"train_model": at},
    )  # fmt: skip
    said = []
    with Steps() as live_steps:
        for seconds in (0, 29, 1, 29, 1):
            now[0] += seconds
            live_steps.show(known)
            said.append(len(capsys.readouterr().err.splitlines()))
        assert said == [1, 0, 1, 0, 1]
        now[0] += 30
        trained = replace(at, metrics={"global_step": 20, "steps": 300, "loss": 0.25})
        live_steps.show(replace(known, doing={"train_model": trained}))
    assert "train_model: global_step 20, steps 300, loss 0.25" in capsys.readouterr().err
