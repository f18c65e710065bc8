"""Tests `flotilla submit`: the request to an instance, and the outcome with `--wait`."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from flotilla.trainer import storage
from flotilla.trainer.config.form import to_form
from flotilla.trainer.config.schema import Config
from tests.kfp_instance.plays import begin, done, over
from tests.stores.fixtures import bucket_name
from tests.trainer.code.referred import referred as noted_below

pytestmark = pytest.mark.usefixtures("uploaded")


def the_run(instance):
    [run] = instance.store.runs.values()
    return run


def test_the_newest_version_runs_with_typed_parameters(instance, remote):
    given = ("--set", "training.steps=7", "--set", "gate.min.accuracy=0.5")
    answer = remote("submit", *given, "--json")
    assert answer.code == 0
    run = the_run(instance)
    assert (answer.json["run_id"], answer.json["status"]) == (run["run_id"], "submitted")
    assert answer.json["artifacts"] == {}
    sent = run["runtime_config"]["parameters"]
    expected = to_form(Config())
    assert sent == {**expected, "steps": 7, "settings": {"gate": {"min": {"accuracy": 0.5}}}}
    assert all(type(sent[name]) is type(value) for name, value in expected.items())
    assert [run["pipeline_version_reference"]["pipeline_version_id"]] == [*instance.store.versions]
    [experiment] = instance.store.experiments.values()
    assert experiment["display_name"] == "flotilla"
    assert run["experiment_id"] == experiment["experiment_id"]


def test_names_and_places_are_passed_on(instance, remote):
    words = ["--name", "mine", "--experiment", "tests", "--pipeline-root", "gs://b/r"]
    assert remote("submit", *words, "--service-account", "trainer").code == 0
    assert remote("submit", *words).code == 0
    first, second = instance.store.runs.values()
    assert first["display_name"] == "mine"
    assert first["runtime_config"]["pipeline_root"] == "gs://b/r"
    assert (first["service_account"], second["service_account"]) == ("trainer", "pipeline-runner")
    assert len(instance.store.experiments) == 1


def test_a_file_runs_without_being_uploaded(instance, remote, tmp_path):
    file = tmp_path / "p.yaml"
    assert remote("compile", "-o", file).code == 0
    assert remote("submit", "--file", file).code == 0
    spec, platform = yaml.load_all(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
    sent = the_run(instance)["pipeline_spec"]
    assert sent["pipeline_spec"]["pipelineInfo"] == spec["pipelineInfo"]
    assert sent["platform_spec"] == platform
    assert "pipeline_version_reference" not in the_run(instance)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--version", "nope"), "has no version 'nope'; the newest is "),
        (("--pipeline", "flotilla-trainin"), "did you mean 'flotilla-training'?"),
        ((), "has no pipeline 'flotilla-training'; upload it with `flotilla upload`"),
    ],
)
def test_what_is_wrong_is_one_line(instance, remote, words, message):
    if not words:
        instance.store.pipelines.clear()
    answer = remote("submit", *words)
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert message in answer.err
    assert not instance.store.runs


PROMOTED = [
    *done("train_model", global_step=1500),
    *done("evaluate_model", accuracy=0.97),
    *done("check_gate", decision="blessed", reasons=[]),
    *done("export_model"),
    *done("register_model", decision="promoted", version=3),
    over(),
]


def test_a_blessed_run_is_0_with_its_metrics(instance, remote):
    instance.store.play = [*PROMOTED]
    answer = remote("submit", "--wait", "--json")
    assert answer.code == 0
    assert answer.json["status"] == "blessed"
    assert answer.json["metrics"] == {"accuracy": 0.97}
    assert answer.json["global_step"] == 1500
    assert answer.json["version"]["id"] in instance.store.versions
    words = re.findall(r"^(\w+) (\.\.\.|done in \d+\.\d s)$", answer.err, re.MULTILINE)
    steps = [step for step, said in words if said == "..."]
    assert steps == ["train_model", "evaluate_model", "export_model"]
    assert [step for step, said in words if said != "..."] == steps
    assert words[0][0] == words[1][0] == "train_model"
    assert any("register_model" in line and "version=3" in line for line in answer.err.splitlines())


def test_on_a_terminal_a_table_is_updated(instance, remote, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    instance.store.play = [*PROMOTED]
    answer = remote("submit", "--wait")
    assert answer.code == 0
    # To redraw the table, the cursor moves up over the old lines.
    assert "\x1b[1A" in answer.err
    assert answer.err.count("train_model") > 2
    assert "running" in answer.err


def test_an_instance_that_is_away_for_a_while_is_waited_for(instance, remote):
    instance.store.play = [*PROMOTED]

    def away(workflow, run):
        begin("prepare_data")(workflow, run)
        instance.faults.add("GET .*/runs/[^/]+$", 503, times=7)

    instance.store.play.insert(0, away)
    answer = remote("submit", "--wait")
    assert answer.code == 0
    assert answer.err.count("the state of the run cannot be read") == 1
    assert answer.err.count("the state of the run can be read again") == 1


@pytest.mark.parametrize(("status", "said"), [(500, "answered 500"), (401, "renew the token")])
def test_an_instance_that_stays_away_ends_the_waiting_not_the_run(
    instance, remote, monkeypatch, status, said
):
    if status == 500:
        monkeypatch.setattr("flotilla.pipelines.runs.kfp_watch.RETRY_SECONDS", 0.0)
    instance.faults.add("GET .*/runs/[^/]+$", status)
    answer = remote("submit", "--wait")
    run_id = the_run(instance)["run_id"]
    assert (answer.code, said in answer.err) == (1, True)
    assert f"the run continues; follow it with: flotilla status {run_id} --endpoint" in answer.err


def test_an_answer_that_is_lost_leaves_the_start_open(instance, remote):
    instance.faults.add("POST .*/runs$", 0, late=True)
    answer = remote("submit")
    assert answer.code == 1
    assert "the run may have started; check with `flotilla runs`" in answer.err
    # Only GET requests are retried.
    assert len(instance.asked("POST .*/runs$")) == 1
    assert len(instance.store.runs) == 1


def test_words_of_the_instance_are_printed_unchanged(instance, remote):
    body = b'{"message": "[/red] is no [bold]step\\u001b[31m"}'
    instance.faults.add("GET .*/runs/[^/]+$", 503, times=3, body=body)
    instance.store.play = [*PROMOTED]
    answer = remote("submit", "--wait", "--name", "[/x]")
    assert answer.code == 0
    assert "([/red] is no [bold]step\\u001b[31m)" in answer.err
    assert "[/x]" in remote("runs").out


# A script that begins like the process of a step on another machine.
STEP = """
import json, sys
from flotilla.trainer.code import load_bundle
from flotilla.trainer.config.form import from_form
from flotilla.trainer.runtime import user_code
config = load_bundle(from_form(json.loads(sys.stdin.read())).model_dump_json())
print(user_code.import_module(config.model.name.partition(":")[0]).NAME)
"""


@pytest.fixture
def root(s3):
    bucket = bucket_name()
    s3.create_bucket(bucket)
    return f"s3://{bucket}/r"


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "mine"
    home.mkdir()
    (home / "blocks.py").write_text("NAME = 'first'\n")
    return home


@pytest.fixture
def submitted(instance, remote, folder, root):
    """Return a function that submits with `--code` and returns the parameters that were sent."""

    def call(*words):
        own = ("--set", "model.name=blocks:residual", "--code", folder)
        answer = remote("submit", *own, "--set", f"storage.root={root}", *words)
        assert answer.code == 0, answer.err
        *_, run = instance.store.runs.values()
        assert f"kept at {run['runtime_config']['parameters']['settings']['code']}" in answer.err
        return run["runtime_config"]["parameters"]

    return call


def in_a_step(parameters, cwd):
    path = dict(os.environ, TMPDIR=str(cwd), PYTHONSAFEPATH="1")
    return subprocess.run(
        [sys.executable, "-c", STEP], cwd=cwd, env=path, input=json.dumps(parameters),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_step_runs_what_was_edited_before_the_submission(submitted, folder, tmp_path):
    cwd = tmp_path / "pod"
    cwd.mkdir()
    first = submitted()
    (folder / "blocks.py").write_text("NAME = 'second'\n")
    second = submitted()
    (folder / "blocks.py").write_text("NAME = 'third'\n")
    assert [in_a_step(each, cwd).stdout for each in (first, second)] == ["first\n", "second\n"]
    storage.write_bytes(storage.join(second["settings"]["code"], "blocks.py"), b"NAME = 'forged'\n")
    (cwd / "again").mkdir()
    refused = in_a_step(second, cwd / "again")
    assert refused.returncode
    assert "is damaged: blocks.py has crc32c" in refused.stderr


def test_without_a_root_it_is_below_the_pipeline_root(instance, remote, folder, root):
    assert remote("submit", "--code", folder, "--pipeline-root", root).code == 0
    [run] = instance.store.runs.values()
    uri = run["runtime_config"]["parameters"]["settings"]["code"]
    assert storage.parent_of(uri) == f"{root}/flotilla/code"
    storage.verify(uri)


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("''", "set storage.root or --pipeline-root to a URI that this machine and the steps"),
        ("file:///r", "file:///r is a folder on this machine"),
    ],
)
def test_without_a_place_that_the_steps_can_read_it_is_refused(
    instance, remote, folder, root, words
):
    answer = remote("submit", "--code", folder, "--set", f"storage.root={root}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err
    assert not instance.store.runs


def test_a_schedule_refers_to_its_bundle_until_it_is_removed(instance, remote, folder, root):
    every = ("schedule", "--every", "6h", "--set", f"storage.root={root}", "--code", folder)

    def referred():
        assert remote(*every).code == 0
        [found] = instance.store.recurring.values()
        uri = found["runtime_config"]["parameters"]["settings"]["code"]
        assert noted_below(root) == {storage.name_of(uri)}
        return uri

    first = referred()
    assert referred() == first
    (folder / "blocks.py").write_text("NAME = 'second'\n")
    assert referred() != first
    assert remote("unschedule", "digits").code == 0
    assert noted_below(root) == set()
