"""A trial as a step: it trains as a separate run, and a failure is a result."""

import json
from types import SimpleNamespace

import pytest

from flotilla.components import train_model
from flotilla.components.records.step_record import PublishedRecord
from flotilla.components.sweeps import run_trial
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import StepResult
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.json_records import tree_of
from tests.trainer.sweeps.test_sweep import a_sweep

RUN = "digits-1"


@pytest.fixture
def trained(monkeypatch):
    """Replace training by a function that records its calls and ends each as given in `ends`."""
    calls, ends = [], {}

    def train(step):
        root, run_id = step.root, step.run_id
        calls.append((Config.model_validate_json(step.config), run_id))
        record = PublishedRecord("train_model", storage.join(root, run_id))
        record.begin()
        code, error = ends.get(run_id, (0, ""))
        metrics = {} if error else {"validation_loss": 0.5}
        status = "failed" if error else "done"
        record.end(StepResult(step="train_model", status=status, error=error, metrics=metrics))
        if error:
            raise SystemExit(code)
        return "file:///checkpoint"

    monkeypatch.setattr(train_model, "work", train)
    monkeypatch.setattr(run_trial, "run", lambda work, call: work(SimpleNamespace(**call)))
    return calls, ends


def step(root, place="1", rung=0):
    text = json.dumps(tree_of(a_sweep()))
    config = Config().model_dump_json()
    training = ("file:///d", "image", "secret", None, None)
    return run_trial.run_trial.python_func(config, root, RUN, text, place, rung, *training)


def run(root, **named):
    return json.loads(step(root, **named))


def test_it_trains_its_own_settings_to_the_steps_of_the_rung(trained, root):
    calls, _ = trained
    found = run(root)
    ((config, run_id),) = calls
    assert run_id == "digits-1-t02"
    assert config.training.steps == 30
    assert config.training.optimizer.learning_rate == 0.003
    assert found["status"] == "done"
    assert found["checkpoint"] == "file:///checkpoint"
    by = {"metric": "validation_loss", "better": "lower"}
    assert found["results"] == [{"rung": 0, "steps": 30, "value": 0.5, "by": by}]


def test_the_next_rung_continues_the_same_run_and_keeps_what_was_reached(trained, root):
    calls, _ = trained
    run(root)
    run_trial.publish_survivors(root, RUN, 1, [2])
    found = run(root, place="0", rung=1)
    assert {run_id for _, run_id in calls} == {"digits-1-t02"}
    assert [each["steps"] for each in found["results"]] == [30, 90]


def test_a_failure_is_a_result_with_its_cause(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (1, "training diverged")
    found = run(root)
    assert (found["status"], found["error"]) == ("failed", "training diverged")
    assert run_trial.read_trial(root, RUN, a_sweep().trials[1]).error == "training diverged"


def test_a_place_that_no_trial_takes_ends_at_once(trained, root):
    calls, _ = trained
    run_trial.publish_survivors(root, RUN, 1, [2])
    assert step(root, place="1", rung=1) == run_trial.EMPTY
    assert calls == []


def test_an_interrupt_is_none(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (130, "interrupted")
    with pytest.raises(SystemExit) as ended:
        run(root)
    assert ended.value.code == 130


def test_a_parameter_that_is_no_sweep_is_refused():
    for text in ("", "{", "{}"):
        with pytest.raises(ConfigError, match="flotilla sweep --compile"):
            run_trial.parse_sweep(text)
