"""`flotilla submit --code DIR` and `schedule --code DIR`, up to the process of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.stores.fixtures import bucket_name
from trainer import storage
from trainer.code import references

pytestmark = pytest.mark.usefixtures("uploaded")

# What the process of a step does first, on another machine.
STEP = """
import json, sys
from trainer.code.delivery import configured
from trainer.config.run_parameters import from_parameters
from trainer import user_code
config = configured(from_parameters(json.loads(sys.stdin.read())).model_dump_json())
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
    """Submit with `--code`; return the parameters that the instance got."""

    def call(*words):
        own = ("--set", "model.name=blocks:residual", "--code", folder)
        answer = remote("submit", *own, "--set", f"storage.root={root}", *words)
        assert answer.code == 0, answer.err
        *_, run = instance.store.runs.values()
        assert f"code {run['runtime_config']['parameters']['code']} (" in answer.err
        return run["runtime_config"]["parameters"]

    return call


def in_a_step(parameters, cwd):
    path = dict(os.environ, TMPDIR=str(cwd), PYTHONSAFEPATH="1")
    return subprocess.run(
        [sys.executable, "-c", STEP],
        cwd=cwd,
        env=path,
        input=json.dumps(parameters),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_step_runs_what_was_edited_before_the_submission(submitted, folder, tmp_path):
    cwd = tmp_path / "pod"
    cwd.mkdir()
    first = submitted()
    (folder / "blocks.py").write_text("NAME = 'second'\n")
    second = submitted()
    (folder / "blocks.py").write_text("NAME = 'third'\n")
    assert [in_a_step(each, cwd).stdout for each in (first, second)] == ["first\n", "second\n"]
    storage.write_bytes(storage.join(second["code"], "blocks.py"), b"NAME = 'forged'\n")
    (cwd / "again").mkdir()
    refused = in_a_step(second, cwd / "again")
    assert refused.returncode
    assert "is damaged: blocks.py has crc32c" in refused.stderr


def test_without_a_root_it_is_below_the_pipeline_root(instance, remote, folder, root):
    assert remote("submit", "--code", folder, "--pipeline-root", root).code == 0
    [run] = instance.store.runs.values()
    uri = run["runtime_config"]["parameters"]["code"]
    assert storage.parent_of(uri) == f"{root}/flotilla/code"
    storage.verify(uri)


def test_where_no_place_is_known_it_is_refused(instance, remote, folder):
    answer = remote("submit", "--code", folder)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "set storage.root, or --pipeline-root, to a URI that both sides reach" in answer.err
    assert not instance.store.runs


def test_a_folder_of_this_machine_is_no_place_for_it(instance, remote, folder):
    answer = remote("submit", "--code", folder, "--set", "storage.root=file:///r")
    assert answer.code == 2
    assert "file:///r is a folder of this machine" in answer.err
    assert not instance.store.runs


@pytest.mark.parametrize("given", ["", "s3://bucket/code"])
def test_what_is_no_folder_is_wrong_usage(remote, root, given):
    answer = remote("submit", "--set", f"storage.root={root}", "--code", given)
    assert answer.code == 2
    assert "--code" in answer.err


def test_a_schedule_refers_to_its_bundle_until_it_is_removed(instance, remote, folder, root):
    every = ("schedule", "--every", "6h", "--set", f"storage.root={root}", "--code", folder)

    def referred():
        assert remote(*every).code == 0
        [found] = instance.store.recurring.values()
        uri = found["runtime_config"]["parameters"]["code"]
        assert references.referred(root) == {storage.name_of(uri)}
        return uri

    first = referred()
    assert referred() == first
    (folder / "blocks.py").write_text("NAME = 'second'\n")
    assert referred() != first
    assert remote("unschedule", "digits").code == 0
    assert references.referred(root) == set()
