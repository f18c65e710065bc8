from types import SimpleNamespace

import pytest

from flotilla.pipelines.runs import kfp_watch
from flotilla.pipelines.runs.kfp_client import InstanceError
from flotilla.pipelines.runs.log_view import LogView
from flotilla.trainer.runtime.errors import ConfigError, UserError

POD = """\
[KFP Executor 2026-01-02 03:04:06,000 INFO]: Got executor_input:
{
    "inputs": {}
}
2026-01-02 03:04:06,500 a word
2026-01-02 03:04:07,300 [chief-0] 2026-01-02 03:04:07,250 loss 0.5
"""


def step(name, state="SUCCEEDED", pod=""):
    return SimpleNamespace(name=name, state=state, pod=pod or f"pod-{name}")


@pytest.fixture
def logs(monkeypatch):
    """Return the logs that the instance serves, by pod."""
    served = {"pod-train_model": POD}

    def log_of(_client, _run, _created, pod):
        if pod not in served:
            raise InstanceError(f"{pod} not found", 404)
        return served[pod]

    monkeypatch.setattr(kfp_watch, "read_log", log_of)
    return served


def followed(*steps, has_ended=True, only="", task=""):
    lines, notes = [], []
    run = SimpleNamespace(
        run_id="r", created=None, steps=steps, has_ended=has_ended, impasse="", at=""
    )
    client = SimpleNamespace(access=SimpleNamespace(endpoint="http://kfp", namespace=""))
    view = LogView(task=task)
    kfp_watch.follow_logs(client, run, only, view, on_line=lines.append, on_note=notes.append)
    return [(each.label, each.text) for each in lines], notes


@pytest.mark.usefixtures("logs")
def test_the_words_of_a_step_and_of_its_tasks():
    lines = [("train_model", "a word"), ("chief-0", "loss 0.5")]
    assert followed(step("train_model")) == (lines, [])
    assert followed(step("train_model"), task="chief-0")[0] == lines[1:]
    with pytest.raises(ConfigError, match="no task 'chief-1'; did you mean 'chief-0'"):
        followed(step("train_model"), task="chief-1")
    with pytest.raises(UserError, match="the run r has no step 'finish'"):
        followed(step("train_model"), only="finish")


def test_a_line_that_is_being_written_waits(logs):
    logs["pod-train_model"] = "one\ntw"
    assert followed(step("train_model", "RUNNING"), has_ended=False)[0] == [("train_model", "one")]


@pytest.mark.usefixtures("logs")
def test_a_log_that_is_gone():
    lines, notes = followed(step("train_model"), step("finish"))
    assert [label for label, _ in lines] == ["train_model", "chief-0"]
    assert notes[0].startswith("cannot read the log of finish: pod-finish not found")
    with pytest.raises(UserError, match="returns no log of the run r"):
        followed(step("finish"))


@pytest.fixture
def look(logs):  # noqa: ARG001
    """Return a function that reads the log of a pod of the run's step and returns the new lines."""
    lines = []
    client = SimpleNamespace(access=SimpleNamespace(endpoint="http://kfp", namespace=""))
    view = LogView(verbose=True)
    follower = kfp_watch.LogFollower(client, "", view, lambda line: lines.append(line.text))

    def look(pod):
        lines.clear()
        steps = (step("train_model", "RUNNING", pod),)
        follower.look(SimpleNamespace(run_id="r", created=None, steps=steps, has_ended=False))
        return list(lines)

    return look


def test_a_look_that_finds_nothing_new_shows_nothing(logs, look):
    logs["first"] = "one\n"
    assert (look("first"), look("first")) == (["one"], [])


def test_the_pod_of_a_retry_is_read_from_its_beginning(logs, look):
    logs.update(first="lost\n", second="begins, and has said more by now\n")
    assert (look("first"), look("second")) == (["lost"], ["begins, and has said more by now"])
