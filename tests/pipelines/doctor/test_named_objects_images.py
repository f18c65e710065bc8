"""The image of the steps and tasks: given, named by the configuration, or that of the upload."""

from __future__ import annotations

import pytest

from components.image import IMAGE
from pipelines.doctor.engines import EXAMINED
from pipelines.doctor.named_objects import image_names, judge_images
from trainer.config.load import parse_config

JOB = "cluster.launcher=tfjob"
OURS = "registry.example.com/flotilla:1"


@pytest.mark.parametrize(
    ("image", "state"),
    [
        ("flotilla:1", "warn"),
        ("team/flotilla:1", "warn"),
        ("localhost:5000/flotilla:1", "ok"),
        ("registry.example.com/flotilla@sha256:" + "a" * 64, "ok"),
    ],
)
def test_images(image, state):
    tree = EXAMINED["tfjob"].plan(
        parse_config({"cluster": {"kubernetes": {"pod": {"image": image}}}})
    )
    found = judge_images(image_names(tree))
    assert found.state == state
    assert found.remedy or state == "ok"


@pytest.mark.usefixtures("kube")
def test_where_none_is_named_it_is_said_what_to_give(doctor):
    report = doctor(JOB)
    found = report["image"]
    assert (report.failed(), found["state"]) == ([], "warn")
    assert found["message"] == (
        "none is named, and that of the upload is not known here: give it by --image; without an "
        f"upload it is {IMAGE}, of no registry, unless cluster.kubernetes.pod.image says so"
    )
    assert found["remedy"] == "flotilla doctor --image HOST/NAME:TAG"


@pytest.mark.usefixtures("kube")
def test_the_default_is_named_where_it_is_given(doctor):
    report = doctor(JOB, options=("--image", IMAGE))
    said = f"{IMAGE} names no registry: every node has to have it already"
    assert (report["image"]["state"], report["image"]["message"]) == ("warn", said)
    assert doctor(JOB, f"cluster.kubernetes.pod.image={IMAGE}")["image"]["message"] == said
    assert doctor(options=("--image", IMAGE))["image"]["message"] == said


@pytest.mark.usefixtures("kube")
def test_one_role_without_a_name_of_its_own_is_enough(doctor):
    report = doctor(JOB, f"cluster.kubernetes.worker.image={OURS}")
    assert report["image"]["message"].startswith("none is named")
    roles = [f"cluster.kubernetes.{role}.image={OURS}" for role in ("chief", "ps", "worker")]
    assert (report["image"]["state"], doctor(JOB, *roles)["image"]["message"]) == ("warn", OURS)


@pytest.mark.usefixtures("kube")
def test_the_given_one_is_that_of_all_that_name_none(doctor):
    report = doctor(JOB, options=("--image", OURS))
    assert (report["image"]["state"], report["image"]["message"]) == ("ok", OURS)
    worker = "registry.example.com/workers:2"
    report = doctor(JOB, f"cluster.kubernetes.worker.image={worker}", options=("--image", OURS))
    assert report["image"]["message"] == f"{OURS}, {worker}"


@pytest.mark.usefixtures("kube")
def test_the_given_one_is_judged_where_all_tasks_name_another(of_job):
    report = of_job(options=("--image", "flotilla:1"))
    found = report["image"]
    assert found["state"] == "warn"
    assert found["message"] == "flotilla:1 names no registry: every node has to have it already"
    assert found["remedy"].endswith("&& flotilla doctor --image HOST/NAME:TAG")


@pytest.mark.parametrize(("image", "state"), [(OURS, "ok"), ("flotilla:1", "warn")])
def test_steps_have_it_whatever_the_launcher_is(doctor, image, state):
    assert doctor(options=("--image", image))["image"]["state"] == state
    assert "image" not in doctor().states()


def test_what_is_no_image_is_wrong_usage_as_for_compile(doctor):
    report = doctor(options=("--image", "No Image"))
    assert (report.code, report.lines) == (2, [])
    said = "--image 'No Image' is not the name of an image: write it as host/name:tag"
    assert said in report.err
