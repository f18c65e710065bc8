"""What the tests of steps share: a run to be judged, and the one line of a refusal."""

import json
import os
import re
import resource
from contextlib import contextmanager
from unittest import mock
from uuid import uuid4

import pytest
from kfp import dsl

from components import check_gate, evaluate_model
from trainer import events

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
    return ended.value.code, re.sub(r"^flotilla: \w+: ", "", err).strip()


def artifact_in(folder, kind=dsl.Artifact):
    """Return a new output artifact of a step, whose file is below the folder."""
    return kind(uri=str(folder / "kfp" / uuid4().hex))


def evaluated(run, root, folder):
    """Evaluate a run's checkpoint; return the URI and the three artifacts of the UI."""
    kinds = (dsl.Metrics, dsl.ClassificationMetrics, dsl.ClassificationMetrics)
    displayed = [artifact_in(folder, kind) for kind in kinds]
    uri = evaluate_model.evaluate_model.python_func(
        text_of(run), root, RUN, run.dataset, run.checkpoint, *displayed
    )
    return uri, *displayed


def gated(run, root, folder, accuracy):
    """Evaluate a run and hold it against this accuracy; return the word and the decision."""
    evaluation, *_ = evaluated(run, root, folder)
    path = folder / "decision.txt"
    given = (text_of(run, accuracy=accuracy), root, RUN, evaluation, str(path))
    word = check_gate.check_gate.python_func(*given, artifact_in(folder))
    return word, path.read_text(encoding="utf-8")


@contextmanager
def no_larger_files_than(size):
    """Let no file grow beyond `size` bytes, as on a disk that is full; events go nowhere."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.dict(os.environ, {events.VARIABLE: os.devnull}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
