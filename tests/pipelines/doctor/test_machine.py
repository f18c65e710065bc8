"""Tests the checks of the configuration and the local machine, and the doctor's output."""

import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from flotilla.pipelines.cli import app
from flotilla.pipelines.doctor import machine
from flotilla.pipelines.doctor.machine import consistent
from flotilla.trainer.config.load import parse_config
from tests.conftest import ROOT
from tests.pipelines.doctor.conftest import content

Usage = namedtuple("Usage", "total used free")
JOB = "cluster.launcher=tfjob"


@pytest.fixture
def free(monkeypatch):
    def give(count, total=1 << 40):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(total, 0, count))

    return give


def test_a_default_run_is_fit_and_nothing_is_left(doctor, tmp_path):
    before = content(tmp_path)
    report = doctor()
    assert (report.code, report.answer["message"]) == (0, "")
    names = ["configuration", "packages", "disk", "loopback", "storage"]
    assert [report.states()[name] for name in names] == ["ok"] * 5
    said = "async_parameter_server with 1 ps, 2 worker, 1 chief"
    assert said in report["configuration"]["message"]
    assert content(tmp_path) == before


def test_every_check_is_one_line_with_and_without_json(doctor, capsys):
    report = doctor("storage.root=s3://B!/k")
    for line, each in zip(report.err.splitlines(), report.answer["checks"], strict=True):
        remedy = f"; fix or inspect it with: {each['remedy']}" if each["remedy"] else ""
        assert line == f"{each['state']:7}  {each['name']}: {each['message']}{remedy}"
    assert report.answer["message"] == "failed: storage"
    assert (report.answer["status"], report.answer["run_id"]) == ("failed", "")
    assert doctor().code == 0
    assert app.call(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert {line[:7].strip() for line in out.splitlines()} == {"ok", "skipped"}
    assert err == ""


def test_a_wrong_configuration_file_or_folder_is_wrong_usage(doctor, tmp_path):
    report = doctor("cluster.workers=99")
    assert (report.code, report.failed()) == (2, ["configuration"])
    assert "99 workers cannot share 8 shards" in report["configuration"]["message"]
    assert report.states()["loopback"] == "ok"
    report = doctor(options=("none.yaml",))
    assert report.code == 2
    assert "cannot read the configuration none.yaml" in report["configuration"]["message"]
    (tmp_path / "home").rmdir()
    report = doctor()
    assert (report.code, report.answer.get("checks")) == (2, None)
    assert "the current folder was removed" in report.err


@pytest.mark.parametrize(
    ("setting", "said", "remedy"),
    [
        ("cluster.in_process=true", "cluster.in_process: not supported",
         "cluster.in_process=false"),
        ("cluster.existing_servers=true", "cluster.existing_servers: not supported",
         "cluster.existing_servers=false"),
        ("storage.root=file:///data", "chief do not share", "storage.root=gs://BUCKET"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("kube")
def test_keys_that_do_not_go_together(of_job, setting, said, remedy):
    # What is wrong is said before what may be wrong.
    report = of_job(setting, "data.manual_dir=/no/such")
    assert report.failed()[0] == "configuration"
    assert said in report["configuration"]["message"]
    assert remedy in report["configuration"]["remedy"]
    assert report.code == 1


def test_a_folder_that_all_pods_share_may_be_the_root():
    volume = {"name": "v", "mount_path": "/data", "source": {"nfs": {}}}
    tree = {
        "cluster": {"launcher": "tfjob", "kubernetes": {"pod": {"volumes": [volume]}}},
        "storage": {"root": "file:///data/flotilla"},
    }
    assert consistent(parse_config(tree)).state == "ok"
    tree["storage"] = {"root": "file:///database"}
    assert consistent(parse_config(tree)).state == "fail"


@pytest.mark.parametrize(
    ("settings", "options", "variables"),
    [
        ((JOB,), (), {}),
        ((), ("--kubernetes",), {}),
        ((), ("--endpoint", "http://127.0.0.1:1"), {}),
        ((), (), {"KFP_ENDPOINT": "http://127.0.0.1:1"}),
    ],
)
@pytest.mark.usefixtures("kube")
def test_files_that_are_not_here_may_be_where_the_steps_run(
    doctor, monkeypatch, settings, options, variables
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # Do not wait between the attempts to reach the instance, because its port stays closed.
    monkeypatch.setattr("urllib3.util.retry.Retry.get_backoff_time", lambda _: 0)
    report = doctor("data.manual_dir=/no/such folder", *settings, options=options)
    assert report["configuration"] == {
        "name": "configuration", "state": "warn",
        "message": "data.manual_dir: /no/such folder is not on this machine; on a KFP instance, "
        "the folder must be in the image or in a volume",
        "remedy": "docker run --rm HOST/NAME:TAG ls '/no/such folder'",
    }  # fmt: skip


def test_files_that_are_not_here_fail_where_the_steps_run_here(doctor, tmp_path):
    found = doctor("data.manual_dir=/no/such")["configuration"]
    said = "data.manual_dir: there is no folder /no/such"
    assert (found["state"], found["message"]) == ("fail", said)
    assert "data.manual_dir=FOLDER" in found["remedy"]
    assert doctor(f"data.manual_dir={tmp_path}")["configuration"]["state"] == "ok"


@pytest.mark.parametrize(
    ("bytes_", "state"), [(1 << 20, "fail"), (1 << 30, "warn"), (1 << 35, "ok")]
)
def test_room_on_the_disk(doctor, free, bytes_, state):
    free(bytes_)
    report = doctor(options=("--workdir", "not/made/yet"))
    assert (report["disk"]["state"], report.code) == (state, int(state == "fail"))
    assert str(Path.cwd()) in report["disk"]["message"]


def test_packages_that_are_missing():
    config = parse_config({"storage": {"root": "s3://bucket"}})
    found = machine.packages(config, ("json", "no_such_package", "no_such.part"))
    assert (found.state, found.message) == ("fail", "not installed: no_such_package, no_such.part")
    assert found.remedy == "pip install '.'"
    assert "boto3" in machine.packages(config, ()).message
    lite = parse_config({"export": {"formats": ["saved_model", "tflite"]}})
    assert machine.packages(lite, ()).message == "ai_edge_litert"


def test_no_package_is_loaded_to_find_it():
    program = (
        "import sys; from flotilla.pipelines.cli import housekeeping; "
        "from flotilla.pipelines.doctor import machine; "
        "from flotilla.trainer.config.schema import Config; "
        "assert machine.packages(Config()).state == 'ok'; "
        "sys.exit(bool({'tensorflow', 'keras', 'tensorflow_datasets', 'sklearn'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_ports_of_this_machine(doctor, monkeypatch):
    assert machine.loopback().state == ("ok" if sys.platform == "linux" else "warn")
    found = machine.loopback(closes=lambda: False)
    assert (found.state, "any graph" in found.message) == ("warn", True)

    def refuse(*_):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)
    report = doctor()
    assert report.failed() == ["loopback"]
    assert "Cannot assign requested address" in report["loopback"]["message"]


@pytest.mark.parametrize(("asked", "has", "state"), [(1, 0, "fail"), (4, 2, "fail"), (2, 2, "ok")])
def test_gpus_of_this_machine(doctor, monkeypatch, asked, has, state):
    monkeypatch.setattr(machine, "glob", lambda _: [f"/dev/nvidia{n}" for n in range(has)])
    report = doctor(f"cluster.gpus_per_worker={asked}")
    assert report["GPUs of this machine"]["state"] == state
    assert report["shared memory"]["state"] in ("ok", "warn")


def test_memory_for_nccl(tmp_path, free):
    assert machine.check_shared_memory(tmp_path / "none").state == "fail"
    free(0, total=64 << 20)
    assert machine.check_shared_memory(tmp_path).message.endswith("has 64 MiB, too little for NCCL")
    free(0, total=1 << 30)
    assert machine.check_shared_memory(tmp_path).state == "ok"
    assert shutil.disk_usage(tmp_path).total == 1 << 30


@pytest.mark.usefixtures("doctor")
def test_a_full_output_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert app.call(["doctor"]) == 1
    said = "flotilla: cannot write to standard output: No space left on device\n"
    assert capsys.readouterr().err == said
