"""Defaults of the pods that come from the run: its image, and the secret of its store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from components.image import IMAGE, SECRET_KEYS, PodDefaults
from components.tfjob.manifest import manifest
from tests.components.tfjob.test_manifest import PLACE, container, made
from trainer.cluster.launcher import Job
from trainer.config.load import parse_config


def secrets_of(root, place=PLACE, **pod):
    config = parse_config({"cluster": {"kubernetes": {"pod": pod}}})
    job = Job(config=config, dataset="d", checkpoints=f"{root}/r/c", workdir=Path())
    env = container(manifest(job, place), "PS")["env"]
    references = [each["valueFrom"]["secretKeyRef"] for each in env if "valueFrom" in each]
    return {(each["name"], each["key"]) for each in references}


@pytest.mark.parametrize("root", ["minio://b", "s3://bucket"])
def test_a_store_with_credentials_uses_the_secret_of_the_run_unless_another_is_named(root):
    assert secrets_of(root) == {("mlpipeline-minio-artifact", key) for key in SECRET_KEYS}
    place = replace(PLACE, defaults=PodDefaults(store_secret="ours"))
    assert secrets_of(root, place) == {("ours", key) for key in SECRET_KEYS}
    assert secrets_of(root, place, secret_env={"AWS_ACCESS_KEY_ID": "own/k"}) == {("own", "k")}
    assert secrets_of(root, place, env_from_secrets=["own"]) == set()
    ours = {("ours", key) for key in SECRET_KEYS}
    assert secrets_of(root, place, secret_env={"TRACKER_KEY": "other/k"}) == {*ours, ("other", "k")}
    assert secrets_of(root, place, env={"AWS_ACCESS_KEY_ID": "public"}) == set()
    nothing = replace(PLACE, defaults=PodDefaults(store_secret=""))
    assert secrets_of(root, nothing) == set()


@pytest.mark.parametrize("root", ["gs://bucket", "file:///r"])
def test_another_store_uses_no_secret(root):
    assert secrets_of(root) == set()


def test_the_image_is_that_of_the_run_unless_another_is_named():
    place = replace(PLACE, defaults=PodDefaults(image="ours/flotilla:2"))
    tree = {"cluster": {"kubernetes": {"worker": {"image": "ours/gpu:2"}}}}
    job = made(tree, place)
    assert container(job, "PS")["image"] == container(job, "Chief")["image"] == "ours/flotilla:2"
    assert container(job, "Worker")["image"] == "ours/gpu:2"
    assert container(made(), "PS")["image"] == IMAGE
