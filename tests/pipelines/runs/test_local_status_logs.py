import json

import pytest

from flotilla.pipelines.runs import local_status
from flotilla.pipelines.runs.log_view import LogView
from flotilla.trainer import events
from flotilla.trainer.runtime.errors import ConfigError, UserError

TRACE = 'Traceback (most recent call last):\n  File "{file}", line 2, in build\n    return 1 / 0\n'


def write_events(folder, *found):
    text = "".join(f"{json.dumps(events.to_tree(each))}\n" for each in found)
    with (folder / "events.jsonl").open("a") as file:
        file.write(text)


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a run by an older version, whose printed lines have no time."""
    chief = tmp_path / "cluster" / "chief-0"
    chief.mkdir(parents=True)
    (chief / "log.txt").write_text("building\n1970-01-01 00:00:12,000 INFO a note\n")
    (tmp_path / "pipeline.log").write_text(
        "00:00:10.000 - INFO - Executing task 'train-model'\n"
        "00:00:10.000 - INFO - Streamed logs:\n\n    a word\n"
    )
    write_events(
        tmp_path,
        events.RunBegin(run_id="r", number=1, time=9.0),
        events.StepBegin(step="train_model", time=10.5),
        events.AttemptBegin(global_step=0, steps=9, resumed=False, time=13.0),
    )
    return tmp_path


def followed(folder, task="", **options):
    lines = []
    local_status.follow_logs(folder, LogView(task=task), on_line=lines.append, **options)
    return [(each.label, each.text) for each in lines]


def test_events_steps_and_tasks_are_read_as_one_in_time(folder):
    assert followed(folder) == [
        ("", "run r begins"),
        ("", "a word"),
        ("train_model", "..."),
        ("chief-0", "building"),
        ("chief-0", "a note"),
        ("chief-0", "training begins: 9 steps"),
    ]


def test_it_is_followed_to_the_end_and_nothing_is_said_twice(folder, monkeypatch):
    log = folder / "cluster" / "chief-0" / "log.txt"
    texts = iter(["1970-01-01 00:00:14,000 mo", "re\n", "the last"])

    def process_of(_folder):
        text = next(texts, "")
        with log.open("a") as file:
            file.write(text)
        return bool(text)

    monkeypatch.setattr(local_status, "find_process", process_of)
    monkeypatch.setattr(local_status, "LOOK_SECONDS", 0.0)
    found = followed(folder, follow=True)
    assert [text for _, text in found][-2:] == ["more", "the last"]
    assert len(found) == len(set(found))


def test_a_worker_leads_where_there_is_no_chief(folder):
    (folder / "cluster" / "chief-0").rename(folder / "cluster" / "worker-0")
    assert ("worker-0", "training begins: 9 steps") in followed(folder)


def test_a_task_that_is_not_there_and_a_folder_without_logs(folder, tmp_path):
    with pytest.raises(ConfigError, match="no task 'cheif-0'; did you mean 'chief-0'"):
        followed(folder, task="cheif-0")
    with pytest.raises(UserError, match="has written nothing"):
        followed(tmp_path / "cluster")


@pytest.mark.parametrize("step", ["train_model", "check_gate"])
def test_a_failure_names_the_step_the_log_and_the_line_of_the_user(
    folder, tmp_path, monkeypatch, step
):
    monkeypatch.chdir(tmp_path)
    trace = TRACE.format(file=tmp_path / "net.py")
    assert local_status.find_failure(folder) is None
    of_training = step == "train_model"
    write_events(
        folder,
        events.UserCodeFailed(error="x", traceback=trace),
        events.TaskFailed(task="chief-0", cause="exit code 1", log="log of it"),
        events.StepEnd(step=step, status="failed", traceback="" if of_training else trace),
        events.StepEnd(step="finish", status="failed"),
    )
    found = local_status.find_failure(folder)
    assert found.step == ("train_model" if of_training else "evaluate_model")
    assert str(found.log) == ("log of it" if of_training else str(folder / "pipeline.log"))
    assert found.frame == "net.py:2 in build: return 1 / 0"
    write_events(folder, events.RunBegin(run_id="r", number=2))
    assert local_status.find_failure(folder) is None
