"""Which step is replayed, of which run, and what is no such step."""

import json
import shlex

import pytest

from components.records import given
from pipelines.cli import app
from pipelines.replay import recorded
from pipelines.runs.kfp_access import Instance
from tests.pipelines.replay.gate_run import RUN, evaluation_at, gated
from trainer import storage
from trainer.errors import USAGE, UserError
from trainer.report import heading


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


@pytest.fixture
def run(root, tmp_path):
    return gated(tmp_path, root, evaluation_at(tmp_path, root), min={"accuracy": 0.95})


@pytest.fixture
def find(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(step="check_gate", *, run=RUN, settings=()):
        return recorded.find(
            run, step, settings=settings, workdir=tmp_path / "runs", instance=Instance()
        )

    return call


def refused(find, *step, **more):
    with pytest.raises(UserError) as caught:
        find(*step, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", ["check_gate", "check-gate"])
def test_a_step_below_a_storage_root(run, root, find, name):
    found = find(name, settings=[f"storage.root={root}"])
    assert (found.run_id, found.step, found.root, found.source) == (RUN, "check_gate", root, root)
    assert found.record == run
    assert found.given.arguments["evaluation"].endswith("/evaluation/step-7")
    assert found.given.artifacts["artifact"]["uri"].startswith("s3://b/v2/flotilla/")
    assert not found.given.on_this_machine


@pytest.mark.usefixtures("run")
def test_what_is_no_step_of_the_run(root, find):
    settings = [f"storage.root={root}"]
    assert "no step 'check_gates'; did you mean 'check_gate'?" in refused(
        find, "check_gates", settings=settings
    )
    assert refused(find, "export_model", settings=settings) == (
        f"export_model never began in the run {RUN}; the steps that did: check_gate (done)"
    )
    assert refused(find, run=f"{RUN}1", settings=settings) == (
        f"no run '{RUN}1' below {root}; did you mean '{RUN}'?"
    )
    assert "no run 'other' below" in refused(find, run="other")
    assert refused(find, settings=["name=digits"]) == (
        "--set: a replay takes storage.root=URI alone"
    )


@pytest.mark.usefixtures("run")
def test_a_run_of_an_older_version_cannot_be_replayed(root, find):
    uri = storage.join(root, RUN, "given", "check_gate.json")
    settings = [f"storage.root={root}"]
    tree = json.loads(storage.read_bytes(uri))
    storage.write_bytes(uri, b"{}")
    assert "given/check_gate.json is damaged" in refused(find, settings=settings)
    storage.delete(uri)
    assert "is not on record" in refused(find, settings=settings)
    assert given.FOLDER == "given"
    assert tree["version"]


@pytest.mark.parametrize("turn", [0, 2, 4])
def test_the_command_in_a_report_is_accepted_with_its_words_in_any_order(turn, capsys):
    failed = {"step": "train_model", "status": "failed", "error": "no width"}
    facts = {"run_id": RUN, "verdict": "failed", "workdir": "/no such", "steps": [failed]}
    command, replay, *words = shlex.split(heading.commands(facts)[0]["command"])
    assert (command, replay) == ("flotilla", "replay")
    assert app.called([replay, *words[turn:], *words[:turn]]) == USAGE
    assert capsys.readouterr().err == f"flotilla: no run '{RUN}' below /no such\n"


def test_a_bucket_that_is_not_there_is_one_line(s3, find):
    assert s3.url
    line = refused(find, settings=["storage.root=s3://no-such-bucket-here/flotilla"])
    assert "no-such-bucket-here" in line
    assert "\n" not in line
