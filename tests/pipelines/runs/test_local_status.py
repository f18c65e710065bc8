"""Tests `flotilla runs`, `status`, `logs` and `cancel` for local runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from flotilla.pipelines.cli import runs as commands
from flotilla.pipelines.runs import control, local, local_status
from flotilla.pipelines.runs.local import LocalRun
from flotilla.trainer import events
from flotilla.trainer.config.schema import Config
from tests.pipelines.called import calling, setting

# A program that starts another process with a run's arguments, and prints its exit code.
STARTER = """
import json, os, signal, subprocess, sys
words = json.loads(os.environ["WORDS"])
code = "import signal; print(flush=True); signal.pause()"
child = subprocess.Popen(
    [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, start_new_session=True
)
# The kernel shows no command line yet while it replaces the process: wait until the child speaks.
child.stdout.readline()
print(child.pid, flush=True)
def end(number, _frame):
    child.kill()
    print("ended by", number, flush=True)
    os._exit(130)
signal.signal(signal.SIGINT, end)
print("started", flush=True)
print("child", child.wait(), flush=True)
"""


def line(event):
    return json.dumps(events.to_tree(event)) + "\n"


def ended(step, status="done", **more):
    end = events.StepEnd(step=step, status=status, **{"seconds": 2.0, **more})
    return line(events.StepBegin(step=step)) + line(end)


# The last events of a run that was not killed.
FINISHED = ended("finish") + line(events.RunEnd())
FIRST = line(events.RunBegin(run_id="digits-1", number=1)) + ended("train_model", "interrupted")
AGAIN = line(events.RunBegin(run_id="digits-1", number=2))


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run whose model was trained and refused."""
    made = tmp_path / "here" / "runs" / "digits-1"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "pipeline.log").write_text("one\ntwo\n")
    gate = {"decision": "refused", "reasons": ["too low"]}
    (made / "events.jsonl").write_text(ended("check_gate", metrics=gate) + FINISHED)
    return made


@pytest.fixture
def flotilla(folder, remote, monkeypatch):
    """Return a function that calls the command line without an instance."""
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT")
    assert folder.is_dir()
    return remote


@pytest.fixture
def going(folder):
    """Return the process that follows the active run."""
    train = events.StepBegin(step="train_model")
    progress = events.Progress(
        global_step=20, steps=100, loss=0.5, steps_per_second=9.0, seconds_left=9.0
    )
    (folder / "events.jsonl").write_text(ended("prepare_data") + line(train) + line(progress))
    with starting(folder, "flotilla") as process:
        yield process


@contextmanager
def starting(folder, name):
    """Start a process with this name, which starts the child process of a run."""
    words = json.dumps(["-m", "flotilla.pipelines.runs.local_child", "run", str(folder)])
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, name], env={**os.environ, "WORDS": words},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "started\n"
    process.child = child
    try:
        yield process
    finally:
        for pid in (process.pid, child):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        process.communicate()


def test_a_run_that_has_ended(flotilla, folder):
    answer = flotilla("status", "digits-1", "--json")
    assert (answer.code, answer.json["status"], answer.json["message"]) == (0, "refused", "too low")
    assert "run digits-1: refused" in answer.err
    answer = flotilla("cancel", "digits-1", "--json")
    assert (answer.code, answer.json["status"]) == (0, "ended")
    assert "has already ended: refused" in answer.err
    answer = flotilla("open", folder.name, "--workdir", folder.parent)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"flotilla: run {folder.name} is ")
    assert answer.err.endswith(f"; read its log with: flotilla logs {folder.name}\n")
    # A status that a newer version has recorded is printed as it is.
    with (folder / "events.jsonl").open("a") as file:
        file.write(ended("teleport_model", status="[sent]") + line(events.RunEnd()))
    answer = flotilla("status", "digits-1")
    assert (answer.code, "teleport_model  [sent]" in answer.out) == (0, True)


@pytest.mark.parametrize(
    ("is_over", "message"),
    [(False, "the job is suspended and waits in the queue for capacity"), (True, "")],
)
@pytest.mark.usefixtures("going")
def test_a_run_whose_job_is_suspended_is_queueing(flotilla, folder, is_over, message):
    with (folder / "events.jsonl").open("a") as file:
        file.write(line(events.Suspension(is_over=is_over, was_running=True)))
    answer = flotilla("status", "digits-1", "--json")
    assert (answer.json["status"], answer.json["message"]) == ("running", message)


def test_a_run_that_goes_on(flotilla, going):
    answer = flotilla("status", "digits-1", "--json")
    assert (answer.code, answer.json["status"]) == (0, "running")
    assert answer.json["global_step"] == 20
    lines = [" ".join(each.split()) for each in answer.err.splitlines()]
    assert any(each.startswith("prepare_data prepare_data done") for each in lines)
    [row] = [each for each in lines if each.startswith("train_model train_model running")]
    assert "global_step=20 steps=100" in row
    answer = flotilla("logs", "digits-1")
    assert "  two\n" in answer.out
    assert "the run continues; follow it with -f" in answer.err
    assert going.poll() is None


@pytest.mark.parametrize(
    ("said", "status", "message"),
    [
        (ended("prepare_data") + line(events.StepBegin(step="train_model")), "failed", ""),
        (ended("prepare_data") + ended("train_model"), "failed", ""),
        (ended("train_model") + ended("evaluate_model"), "failed", "did not finish"),
        # `flotilla train` has no exit step.
        (ended("prepare_data") + ended("train_model") + line(events.RunEnd()), "done", ""),
        # Of a resumed run, the newest start counts.
        (FIRST + FINISHED + AGAIN + ended("train_model") + FINISHED, "done", ""),
        # A start that was killed before its first step has only its first event.
        (FIRST + FINISHED + AGAIN, "failed", "did not finish"),
    ],
)
def test_a_run_that_was_killed_or_resumed(flotilla, folder, said, status, message):
    (folder / "events.jsonl").write_text(said)
    answer = flotilla("status", "digits-1", "--json").json
    assert (answer["status"], message in answer["message"]) == (status, True)


def test_the_log(flotilla, folder):
    answer = flotilla("logs", "digits-1", "--json")
    assert (answer.code, "  one\n" in answer.err, "  two\n" in answer.err) == (0, True, True)
    assert answer.json["status"] == "refused"
    (folder / "pipeline.log").unlink()
    assert flotilla("logs", "digits-1").code == 0
    (folder / "events.jsonl").unlink()
    answer = flotilla("logs", "digits-1")
    assert (answer.code, answer.err.count("\n"), "cannot read" in answer.err) == (1, 1, True)


def test_the_log_is_followed_to_the_end_of_the_run(flotilla, folder, going, monkeypatch):
    looks = iter([going.pid, going.pid, 0])

    def child(asked):
        assert asked == folder
        with (folder / "pipeline.log").open("a") as log:
            log.write("more\n")
        return next(looks, 0)

    monkeypatch.setattr(local_status, "find_process", child)
    monkeypatch.setattr(local_status, "LOOK_SECONDS", 0.0)
    said = [line.split()[-1] for line in flotilla("logs", "digits-1", "-f").out.splitlines()]
    said = [each for each in said if each in ("one", "two", "more")]
    assert said == ["one", "two", "more", "more", "more"]


@pytest.mark.parametrize(
    ("option", "name", "remedy"),
    [("--step", "chek_gate", "check_gate"), ("--task", "chief-1", "chief-0")],
)
def test_of_a_step_or_task_that_is_not_there_the_nearest_is_named(
    flotilla, folder, option, name, remedy
):
    (folder / "cluster" / "chief-0").mkdir(parents=True)
    (folder / "cluster" / "chief-0" / "log.txt").write_text("")
    answer = flotilla("logs", "digits-1", option, name)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert f"{name!r}; did you mean {remedy!r}?" in answer.err


@pytest.mark.parametrize("is_opened", [True, False])
@pytest.mark.parametrize("name", ["report.html", "sweep.html"])
def test_open_shows_the_report_of_a_run_or_the_page_of_a_sweep(
    flotilla, tmp_path, monkeypatch, is_opened, name
):
    page, opened = tmp_path / "some-1" / name, []
    page.parent.mkdir()
    page.write_text("<p>")
    monkeypatch.setattr(commands, "open_page", lambda uri: opened.append(uri) or is_opened)
    answer = flotilla("open", "some-1", "--workdir", tmp_path)
    assert (answer.code, answer.out, opened) == (0, f"{page}\n", [page.as_uri()])
    assert ("no browser was found on this machine; the page is at:" in answer.err) != is_opened


def test_cancel_signals_the_process_of_the_run_and_not_its_starter(flotilla, going):
    answer = flotilla("cancel", "digits-1", "--json")
    assert (answer.code, answer.json["status"]) == (0, "canceling")
    assert going.stdout.readline() == f"child {-signal.SIGTERM}\n"
    assert going.wait(120) == 0


def test_cancel_again_or_a_run_of_a_longer_name_ends_no_process(flotilla, folder, going):
    other = folder.parent / "digits-12"
    other.mkdir()
    for name in ("config.json", "events.jsonl", "pipeline.log"):
        (other / name).write_bytes((folder / name).read_bytes())
    assert flotilla("cancel", "digits-12", "--json").json["status"] == "ended"
    # The last checkpoint is still to be published.
    with (folder / "events.jsonl").open("a") as file:
        file.write(line(events.Interrupted()))
    answer = flotilla("cancel", "digits-1", "--json")
    assert (answer.code, answer.json["status"]) == (0, "canceling")
    assert "run digits-1 is already being cancelled" in answer.err
    assert going.poll() is None


def test_processes_without_proc_are_found_by_ps(folder, going, monkeypatch):
    monkeypatch.setattr(local_status, "_PROCESSES", folder / "no-proc")
    assert local_status.find_process(folder) == going.child


@pytest.mark.parametrize("begin", [0, 9])
def test_the_command_line_of_a_started_or_resumed_run_is_found(folder, monkeypatch, begin):
    started = []
    monkeypatch.setattr(local.child_process, "start", lambda *words, **_: started.extend(words))
    run = LocalRun(
        run_id=folder.name, folder=folder, config=Config(), lock=0, begin=begin, saved=""
    )
    local._start(run, "run", {})
    line = " ".join(["python", "-m", *started])
    monkeypatch.setattr(local_status, "_processes", lambda: [(7, "cron"), (8, line)])
    assert local_status.find_process(folder) == 8
    assert ("resumed" in started) == (begin > 0)


def test_runs_newest_first_and_those_that_cannot_be_read(flotilla, folder):
    (folder.parent / "red\x1b[31m\n2").mkdir()
    (folder.parent / "red\x1b[31m\n2" / "config.json").write_text("{}", encoding="utf-8")
    assert local_status.run_ids(folder.parent) == [folder.name]
    for number in (2, 3):
        made = folder.with_name(f"digits-{number}")
        shutil.copytree(folder, made)
        os.utime(made / "config.json", (2e9 + number, 2e9 + number))
    (made / "events.jsonl").unlink()
    (made / "events.jsonl").mkdir()
    rows = flotilla("runs", "--json").json["runs"]
    states = [("digits-3", "unknown"), ("digits-2", "refused"), ("digits-1", "refused")]
    assert [(row["run_id"], row["state"]) for row in rows] == states
    assert "digits-3/events.jsonl: Is a directory" in flotilla("status", "digits-3").err
    assert len(flotilla("runs", "--limit", "1", "--json").json["runs"]) == 1
    assert flotilla("runs", "--workdir", "none").out == "no runs below none\n"


@pytest.mark.parametrize("run", ["../runs/digits-1", "", ".", "/etc", "digits-1/"])
def test_only_a_name_is_a_run(flotilla, run):
    assert flotilla("status", run).code == 2


@pytest.mark.slow
@pytest.mark.cluster
def test_a_real_run_is_seen_and_cancelled(flotilla, tmp_path):
    workdir = tmp_path / "work"
    words = setting(training__strategy="single", training__steps=10**7)
    with calling("train", workdir, *words, cwd=tmp_path) as process:
        while not (found := local_status.run_ids(workdir)):
            assert process.poll() is None
        run_id, place = found[0], ("--workdir", workdir)
        while "global_step" not in flotilla("status", run_id, *place, "--json").json:
            assert process.poll() is None
        answer = flotilla("logs", run_id, *place)
        assert "training begins: 10000000 steps" in answer.out
        assert flotilla("cancel", run_id, *place).code == 0
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert json.loads(out.splitlines()[-1])["status"] == "interrupted"
    assert "resume with: flotilla train" in err
    assert flotilla("status", run_id, *place, "--json").json["status"] == "interrupted"


def test_the_processes_of_the_machine_are_read_once_for_all_runs(folder, monkeypatch):
    for number in range(2, 40):
        shutil.copytree(folder, folder.with_name(f"digits-{number}"))
    read = local_status._processes
    looks = []
    monkeypatch.setattr(local_status, "_processes", lambda: (looks.append(1), read())[1])
    found = control.list_local(folder.parent, limit=2000)
    assert [each.status for each in found] == ["refused"] * 39
    assert len(looks) == 1


def test_runs_of_this_machine_load_no_client_of_kfp():
    code = (
        "import sys; from flotilla.pipelines.runs import control; assert 'kfp' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
