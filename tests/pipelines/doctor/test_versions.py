"""The doctor and the documents have one table of versions."""

from __future__ import annotations

import re
import tomllib

import pytest

from pipelines.doctor import versions
from pipelines.doctor.cluster import CONTROLLERS
from tests.conftest import ROOT
from tests.kubernetes.cluster import NAMESPACE

PAGE = ROOT / "docs/reference/versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_page_has_the_same_table():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+) \| ([\w. ]+) \| ([\d., ]+) \|$", text, re.MULTILINE)
    assert rows == [
        (part.name, part.oldest or "not known", ", ".join(part.seen)) for part in versions.PARTS
    ]


def test_the_packages_are_pinned_to_it():
    pinned = dict(each.split("==") for each in PROJECT["dependencies"] if "==" in each)
    for package, part in (("kfp", versions.KFP), ("tensorflow", versions.TENSORFLOW)):
        assert pinned[package] == f"{part.oldest}.*"
    assert PROJECT["requires-python"] == f">={versions.PYTHON.oldest}"


@pytest.mark.parametrize(
    ("launcher", "part"), [("tfjob", versions.OPERATOR), ("jobset", versions.JOBSET)]
)
def test_the_newest_controller_that_was_run_is_the_one_to_install(launcher, part):
    assert CONTROLLERS[launcher].part is part
    assert re.search(rf"[/=]v{re.escape(part.seen[-1])}['/]", CONTROLLERS[launcher].install)


@pytest.mark.parametrize(
    ("version", "state", "message"),
    [
        ("2.17.0", "ok", "it"),
        ("v2.17.0", "ok", "it"),
        ("2.18.1", "ok", "it; not run with this version, but with 2.17.0"),
        ("2.5.0", "warn", "it; Kubeflow Pipelines has to be 2.17 or later"),
        ("dev", "ok", "it"),
    ],
)
def test_a_version_is_judged(version, state, message):
    found = versions.judged(versions.KFP, version, "it")
    assert (found.state, found.message) == (state, message)


def test_a_patch_of_a_minor_version_that_was_run_is_one():
    assert versions.judged(versions.KUBERNETES, "v1.33.4-gke.1", "it").message == "it"


def test_the_version_of_the_cluster_is_judged(kube, of_job):
    image = {"image": "kubeflow/training-operator:v1.8.1"}
    spec = {"template": {"spec": {"containers": [image]}}}
    kube.store.change(
        "deployments", "kubeflow", "training-operator", lambda tree: tree.update(spec=spec)
    )
    report = of_job(options=("--namespace", NAMESPACE))
    assert report.code == 0
    assert report["training operator"]["state"] == "warn"
    assert "training operator has to be 1.9 or later" in report["training operator"]["message"]
    assert "v1.31.4" in report["Kubernetes API"]["message"]
    assert "but with 1.33" in report["Kubernetes API"]["message"]
