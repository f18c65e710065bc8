"""Tests that each component's metadata follows the rules of Kubeflow's component collection."""

from datetime import datetime
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints, ValidationError

from flotilla.components.table import STEPS
from flotilla.pipelines.doctor import cluster
from tests.conftest import ROOT

FOLDER = ROOT / "components" / "metadata"
NUMBER = r"(0|[1-9]\d*)"
Version = Annotated[
    str, StringConstraints(pattern=rf"^(>=|<=|==)?{NUMBER}\.{NUMBER}\.{NUMBER}$", strict=True)
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Dependency(Strict):
    name: str
    version: Version


class Dependencies(Strict):
    kubeflow: list[Dependency]
    external_services: list[Dependency] = []


class Ci(Strict):
    skip_dependency_probe: Any


class Metadata(Strict):
    """What `validate_metadata` of KFP's component collection accepts, but for the order of keys.

    Only the collection itself checks the age of `lastVerified`.
    """

    name: str
    stability: Literal["experimental", "alpha", "beta", "stable"]
    dependencies: Dependencies
    lastVerified: AwareDatetime  # noqa: N815
    tags: list[str] = []
    ci: Ci = Ci(skip_dependency_probe=False)
    links: dict[str, Any] = {}


REQUIRED = [name for name, field in Metadata.model_fields.items() if field.is_required()]


def read(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def test_every_component_has_metadata():
    assert {path.stem for path in FOLDER.iterdir()} == {step.name for step in STEPS}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_metadata_obeys_the_rules(step):
    found = Metadata(**read(step.name))
    assert [key for key in read(step.name) if key in REQUIRED] == REQUIRED
    assert found.name == step.name
    assert found.lastVerified.utcoffset() == datetime.min - datetime.min
    assert "Pipelines" in [each.name for each in found.dependencies.kubeflow]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_versions_are_those_of_the_doctor(step):
    oldest = {"Pipelines": cluster.KFP.oldest, "Training Operator": cluster.OPERATOR.oldest}
    found = {each["name"]: each["version"] for each in read(step.name)["dependencies"]["kubeflow"]}
    assert found == {name: f">={oldest[name]}.0" for name in found}
    assert ("Training Operator" in found) is (step.name in ("train_model", "finish"))


@pytest.mark.parametrize(
    "change",
    [
        {"stability": "new"},
        {"owner": "a"},
        {"dependencies": {"kubeflow": [{"name": "Pipelines", "version": ">=2.17"}]}},
        {"dependencies": {"kubeflow": {}}},
        {"lastVerified": "2026-11-29"},
        {"ci": {}},
    ],
    ids=str,
)
def test_what_the_rules_refuse(change):
    with pytest.raises(ValidationError):
        Metadata(**{**read("train_model"), **change})
