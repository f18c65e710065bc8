"""Tests that a job's pods get the step's tracker, but never its credentials as plain values."""

import json

import pytest

from flotilla.components.image import PodDefaults
from flotilla.components.kubernetes import client, launcher, names
from flotilla.components.kubernetes.engine import Engine
from flotilla.components.kubernetes.pods.template import Place
from flotilla.trainer.tracking import addresses
from tests.components.kubernetes.attempts import EACH_ENGINE, Attempt, job_of, settings

# Environment variables that KFP's MLflow plugin sets in a step's container.
OF_KFP = {
    "MLFLOW_TRACKING_URI": "https://mlflow.kubeflow:5000",
    "MLFLOW_RUN_ID": "0123abcd",
    "MLFLOW_EXPERIMENT_ID": "7",
    "MLFLOW_WORKSPACE": "team",
    "MLFLOW_TRACKING_AUTH": "kubernetes-namespaced",
}
SECRET = "s3cr3t-t0ken-of-mlflow"


@pytest.fixture(autouse=True)
def step(monkeypatch):
    for name in addresses.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in OF_KFP.items():
        monkeypatch.setenv(name, value)


def manifest_of(engine: Engine, tree=None, **place):
    values, secrets = addresses.list_pod_variables()
    made = Place(namespace="models", variables={**values, **place}, secrets=secrets)
    return engine.manifest(job_of({**settings(), **(tree or {})}), made)


def environments(engine, tree):
    for template in engine.templates(tree).values():
        yield {each["name"]: each for each in template["spec"]["containers"][0]["env"]}


def digest(tree):
    return tree["metadata"]["annotations"][names.MANIFEST]


@EACH_ENGINE
def test_every_pod_has_what_kfp_gave_the_step(engine):
    every = list(environments(engine, manifest_of(engine)))
    assert len(every) == 3
    for environment in every:
        assert {name: environment[name]["value"] for name in OF_KFP} == OF_KFP
        assert not set(addresses.SECRET_KEYS) & set(environment)


@EACH_ENGINE
def test_credentials_are_references_to_the_secret_of_kfp(engine, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    tree = manifest_of(engine)
    for environment in environments(engine, tree):
        reference = {"name": "kfp-mlflow-credentials", "key": "token", "optional": True}
        assert environment["MLFLOW_TRACKING_TOKEN"]["valueFrom"] == {"secretKeyRef": reference}
    assert SECRET not in json.dumps(tree)


@EACH_ENGINE
def test_the_settings_name_another_secret(engine, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    pod = {"secret_env": {"MLFLOW_TRACKING_TOKEN": "ours/key"}, "env": {"MLFLOW_RUN_ID": "mine"}}
    tree = manifest_of(engine, {"cluster": {"workers": 1, "kubernetes": {"pod": pod}}})
    for environment in environments(engine, tree):
        found = environment["MLFLOW_TRACKING_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert (found["name"], found["key"]) == ("ours", "key")
        assert environment["MLFLOW_RUN_ID"]["value"] == "mine"


def test_an_address_with_a_password_is_left_out_and_said(monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"https://me:{SECRET}@mlflow.example.com")
    assert addresses.list_pod_variables() == ({}, {})
    (line,) = caplog.messages
    assert "not passing MLFLOW_TRACKING_URI to the pods" in line
    assert SECRET not in line


def test_without_a_tracker_nothing_is_added(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert addresses.list_pod_variables() == ({}, {})


@EACH_ENGINE
def test_the_digest_is_the_same_for_another_run_of_mlflow_and_without_one(engine, monkeypatch):
    first = digest(manifest_of(engine))
    monkeypatch.setenv("MLFLOW_RUN_ID", "another")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", SECRET)
    assert digest(manifest_of(engine)) == first
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert digest(manifest_of(engine)) == first
    assert digest(manifest_of(engine, AWS_REGION="eu-1")) != first


def test_a_retried_step_with_another_run_of_mlflow_adopts_its_job(kube, monkeypatch):
    place = launcher._place(client.connect(), "models", PodDefaults())
    assert {name: place.variables[name] for name in OF_KFP} == OF_KFP
    first = Attempt(job_of(settings()))
    kube.run_all()
    before = kube.job()["metadata"]["uid"]
    monkeypatch.setenv("MLFLOW_RUN_ID", "of-the-retry")
    second = Attempt(job_of(settings()))
    # A launcher deletes a finished job, so the other launcher must watch the job before it ends.
    kube.wait_watched(times=2)
    assert [each["metadata"]["uid"] for each in kube.jobs()] == [before]
    kube.finish("chief-0", 0)
    for attempt in (first, second):
        attempt.succeed()
    kube.wait_until_deleted()
    creations = [each for each in kube.server.requests if each.startswith("POST /apis/kubeflow")]
    assert len(creations) == 1
