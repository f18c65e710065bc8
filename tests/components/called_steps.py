"""What the tests of steps share: a run to be judged, and the one line of a refusal."""

import json

import pytest
from kfp import dsl

RUN = "digits-1"


def text_of(run, **gate):
    tree = {**run.config.model_dump(mode="json"), "gate": {"min": gate, "max": {}}}
    return json.dumps(tree)


def ended(state, words=None):
    """Return how a run ended, as KFP tells the exit step."""
    return dsl.PipelineTaskFinalStatus(
        state=state,
        pipeline_job_resource_name="run",
        pipeline_task_name="run",
        error_code=None,
        error_message=words,
    )


def refused(step, *given, capsys):
    """Call a step that has to end with one line; return its exit code and the line."""
    with pytest.raises(SystemExit) as ended:
        step(*given)
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return ended.value.code, err.removeprefix(f"flotilla: {step.__name__}: ").strip()
