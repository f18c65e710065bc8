"""Helpers that call pipeline steps as plain functions, without Kubeflow Pipelines."""

import json
import os
import re
import resource
from contextlib import contextmanager
from unittest import mock
from uuid import uuid4

import pytest
from kfp import dsl

from flotilla.components import evaluate_model
from flotilla.components.records import run_store
from flotilla.components.records.record import Step
from flotilla.trainer import events

RUN = "digits-1"


def text_of(run, **gate):
    tree = {**run.config.model_dump(mode="json"), "gate": {"min": gate, "max": {}}}
    return json.dumps(tree)


def ended(state, words=None):
    return dsl.PipelineTaskFinalStatus(
        state=state,
        pipeline_job_resource_name="run",
        pipeline_task_name="run",
        error_code=None,
        error_message=words,
    )


def refused(step, *given, capsys):
    """Call a step that must exit with a one-line error; return its exit code and that line."""
    with pytest.raises(SystemExit) as ended:
        step(*given)
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return ended.value.code, re.sub(r"^flotilla: \w+: ", "", err).strip()


def artifact_in(folder, kind=dsl.Artifact):
    return kind(uri=str(folder / "kfp" / uuid4().hex))


def stage(name, work, config, root, run_id=RUN, **given):
    """Return the result of a stage that is called directly, without its KFP component."""
    step = Step(
        at=run_store.find_run(root, run_id), config=config, root=root, run_id=run_id, **given
    )
    return step.stage(name, work)


def to_evaluate(run, folder):
    kinds = (dsl.Metrics, dsl.ClassificationMetrics, dsl.ClassificationMetrics)
    names = ("evaluation_metrics", "confusion_matrix", "roc_curve")
    artifacts = {name: artifact_in(folder, kind) for name, kind in zip(names, kinds, strict=True)}
    inputs = {"dataset": run.dataset, "checkpoint": run.checkpoint}
    return {**inputs, **artifacts, "dataset_descriptor": None, "checkpoint_descriptor": None}


def evaluated(run, root, folder):
    given = to_evaluate(run, folder)
    uri = stage("evaluate_model", evaluate_model.evaluate, text_of(run), root, **given)
    return uri, given["evaluation_metrics"], given["confusion_matrix"], given["roc_curve"]


def gated(run, root, folder, accuracy):
    """Evaluate a run with this minimum accuracy; return the gate's output and its decision."""
    path = folder / "decision.txt"
    own = {"decision_uri": str(path), "decision": artifact_in(folder)}
    word = evaluate_model.evaluate_model.python_func(
        text_of(run, accuracy=accuracy), root, RUN, **to_evaluate(run, folder), **own
    )
    return word, path.read_text(encoding="utf-8")


@contextmanager
def no_larger_files_than(size):
    """Limit the size of every file to `size` bytes, as on a full disk, and discard events."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.dict(os.environ, {events.VARIABLE: os.devnull}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
