"""Tests that each component's metadata follows the rules of Kubeflow's component collection."""

import re
from datetime import UTC, datetime

import pytest
import yaml

from flotilla.components.table import STEPS
from flotilla.pipelines.doctor import cluster
from tests.conftest import ROOT

FOLDER = ROOT / "components" / "metadata"
# The keys that `validate_metadata` of KFP's component collection requires, in this order, and the
# keys that it permits.
REQUIRED = ["name", "stability", "dependencies", "lastVerified"]
OPTIONAL = {"tags", "ci", "links"}
STABILITY = {"experimental", "alpha", "beta", "stable"}
VERSION = re.compile(r"(>=|<=|==)?(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
DEPENDENCIES = ({"kubeflow"}, {"kubeflow", "external_services"})


def faults(metadata):
    """Yield the broken rules; only the collection itself checks the age of `lastVerified`."""
    if [key for key in metadata if key not in OPTIONAL] != REQUIRED:
        yield "keys"
    if not isinstance(metadata.get("name"), str):
        yield "name"
    if metadata.get("stability") not in STABILITY:
        yield "stability"
    yield from faults_of_dependencies(metadata.get("dependencies"))
    verified = metadata.get("lastVerified")
    if not isinstance(verified, datetime) or verified.tzinfo != UTC:
        yield "lastVerified"
    tags = metadata.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(each, str) for each in tags):
        yield "tags"
    ci = metadata.get("ci", {"skip_dependency_probe": False})
    if not isinstance(ci, dict) or set(ci) != {"skip_dependency_probe"}:
        yield "ci"
    if not isinstance(metadata.get("links", {}), dict):
        yield "links"


def faults_of_dependencies(found):
    if not isinstance(found, dict) or set(found) not in DEPENDENCIES:
        yield "dependencies"
        return
    if not all(isinstance(each, list) for each in found.values()):
        yield "dependencies"
        return
    if "Pipelines" not in [each.get("name") for each in found["kubeflow"]]:
        yield "Pipelines"
    for each in (one for some in found.values() for one in some):
        version = each.get("version")
        if not isinstance(version, str) or not VERSION.fullmatch(version):
            yield f"version of {each.get('name')}"


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def test_every_component_has_metadata():
    assert {path.stem for path in FOLDER.iterdir()} == {step.name for step in STEPS}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_metadata_obeys_the_rules(step):
    found = read(step.name)
    assert list(faults(found)) == []
    assert found["name"] == step.name


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_versions_are_those_of_the_doctor(step):
    oldest = {"Pipelines": cluster.KFP.oldest, "Training Operator": cluster.OPERATOR.oldest}
    found = {each["name"]: each["version"] for each in read(step.name)["dependencies"]["kubeflow"]}
    assert found == {name: f">={oldest[name]}.0" for name in found}
    assert ("Training Operator" in found) is (step.name in ("train_model", "finish"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stability": "new"}, "stability"),
        ({"owner": "a"}, "keys"),
        ({"dependencies": {"kubeflow": [{"name": "Trainer", "version": "2.0.0"}]}}, "Pipelines"),
        (
            {"dependencies": {"kubeflow": [{"name": "Pipelines", "version": ">=2.17"}]}},
            "version of Pipelines",
        ),
        ({"dependencies": {"kubeflow": {}}}, "dependencies"),
        ({"dependencies": {}}, "dependencies"),
        ({"lastVerified": "2026-11-29"}, "lastVerified"),
        ({"tags": [1]}, "tags"),
        ({"ci": {}}, "ci"),
        ({"links": []}, "links"),
    ],
)
def test_what_the_rules_refuse(change, fault):
    assert list(faults({**read("train_model"), **change})) == [fault]
