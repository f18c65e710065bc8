"""The step that exports: only what was blessed, in the formats that were asked for."""

import json

import pytest
from kfp import dsl

from components import export_model
from tests.components.called_steps import (
    RUN,
    artifact_in,
    gated,
    no_larger_files_than,
    refused,
    text_of,
)
from tests.trainer.small_run import GLOBAL_STEP
from trainer import storage
from trainer.events import StepBegin

pytestmark = pytest.mark.usefixtures("emitted")


def test_a_blessed_model_is_exported(run, root, tmp_path, emitted):
    _, decision = gated(run, root, tmp_path, 0.1)
    artifact = artifact_in(tmp_path, dsl.Model)
    config = text_of(run, accuracy=0.1)
    uri = export_model.export_model.python_func(
        config, root, RUN, run.dataset, run.checkpoint, decision, artifact
    )
    assert uri.startswith(storage.join(root, RUN, "model", f"step-{GLOBAL_STEP:08d}-"))
    storage.verify(uri)
    begins = [each for each in emitted() if isinstance(each, StepBegin)]
    assert begins[-1].inputs == {"dataset": run.dataset}
    differences = emitted()[-1].metrics
    assert set(differences) == {"saved_model", "keras"}
    assert artifact.metadata == {"uri": uri, **differences}


@pytest.mark.parametrize("size", [0, 3000, 30_000])
def test_a_full_disk_is_one_line(run, root, tmp_path, capsys, size):
    _, decision = gated(run, root, tmp_path, accuracy=0.1)
    given = (text_of(run, accuracy=0.1), root, "full", run.dataset, run.checkpoint, decision)
    with no_larger_files_than(size):
        code, line = refused(
            export_model.export_model.python_func,
            *given,
            artifact_in(tmp_path, dsl.Model),
            capsys=capsys,
        )
    assert (code, "File too large" in line) == (1, True)
    assert not storage.names(storage.join(root, "full"))


@pytest.mark.slow
def test_other_formats_are_published_next_to_the_first(run, root, tmp_path):
    _, decision = gated(run, root, tmp_path, 0.1)
    found = []
    for formats in (["saved_model"], ["saved_model", "keras"], ["saved_model"]):
        tree = {**json.loads(text_of(run)), "export": {"formats": formats}}
        given = (json.dumps(tree), root, RUN, run.dataset, run.checkpoint, decision)
        found.append(
            export_model.export_model.python_func(*given, artifact_in(tmp_path, dsl.Model))
        )
    assert found[0] == found[2] != found[1]
    assert storage.read_manifest(found[1]).fields["formats"] == ["saved_model", "keras"]


def test_a_refused_model_is_not_exported(run, root, tmp_path, capsys):
    _, decision = gated(run, root, tmp_path, 1.0)
    given = (text_of(run), root, RUN, run.dataset, run.checkpoint, decision, artifact_in(tmp_path))
    code, line = refused(export_model.export_model.python_func, *given, capsys=capsys)
    assert code == 1
    assert line.startswith("nothing is exported: the gate refused the model")
    assert not storage.published(storage.join(root, RUN, "model"))
