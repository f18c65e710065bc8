"""Tests the metrics port of a job's pods and which clients can reach it."""

import json

import pytest

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.adoption import isolate, network_policy
from flotilla.components.kubernetes.names import NETWORK_POLICIES
from flotilla.components.kubernetes.pods.shutdown import PORT as GUARD_PORT
from flotilla.components.kubernetes.pods.template import CONFIG_VARIABLE, PORT, Place
from flotilla.trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from flotilla.trainer.config.cluster import TASK_PORTS
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError
from tests.components.kubernetes.attempts import EACH_ENGINE, job_of


def made(engine, port, strategy="async_parameter_server", **kubernetes):
    cluster = {"metrics_port": port, "evaluator": True, "kubernetes": kubernetes}
    job = job_of({"training": {"strategy": strategy}, "cluster": cluster})
    tree = engine.manifest(job, Place(namespace="team"))
    tree["metadata"]["uid"] = "0123456789"
    return tree, engine.templates(tree)


def container(template):
    [only] = template["spec"]["containers"]
    return only


def served(template):
    ports = container(template)["ports"]
    return [each["containerPort"] for each in ports if each["name"] == names.METRICS_PORT]


def variable(template, name):
    return [each.get("value") for each in container(template)["env"] if each["name"] == name]


@EACH_ENGINE
@pytest.mark.parametrize(
    ("strategy", "kubernetes", "leader"),
    [
        ("single", {}, "chief"),
        ("async_parameter_server", {}, "chief"),
        ("async_parameter_server", {"chiefless": True}, "worker"),
        ("multi_worker_mirrored", {}, "worker"),
    ],
)
def test_the_role_that_leads_has_the_port_and_listens_outside_of_its_pod(
    engine, strategy, kubernetes, leader
):
    _, templates = made(engine, 9464, strategy, **kubernetes)
    for role, template in templates.items():
        leads = role == leader
        assert served(template) == ([9464] if leads else [])
        assert variable(template, METRICS_HOST) == ([EVERY_HOST] if leads else [])
        [config] = variable(template, CONFIG_VARIABLE)
        assert json.loads(config)["cluster"]["metrics_port"] == 9464


@EACH_ENGINE
def test_without_a_port_nothing_is_served_or_admitted(engine):
    tree, templates = made(engine, 0)
    assert not any(map(served, templates.values()))
    assert not any(variable(each, METRICS_HOST) for each in templates.values())
    isolate([*templates.values()])
    policy = network_policy(engine.kind, tree, [*templates.values()])
    assert policy["apiVersion"] == NETWORK_POLICIES.api_version
    assert len(policy["spec"]["ingress"]) == 1


@EACH_ENGINE
def test_the_policy_of_the_job_admits_pods_of_any_namespace_to_this_port_alone(engine):
    tree, templates = made(engine, 9464)
    isolate([*templates.values()])
    among_tasks, scraped = network_policy(engine.kind, tree, [*templates.values()])["spec"][
        "ingress"
    ]
    assert "ports" not in among_tasks
    assert scraped["ports"] == [{"port": names.METRICS_PORT, "protocol": "TCP"}]
    assert scraped["from"] == [{"namespaceSelector": {}}]


@pytest.mark.parametrize("port", [-1, 80, 1023, PORT, GUARD_PORT, 65536])
def test_a_port_that_is_taken_in_a_pod_is_refused(port):
    with pytest.raises(ConfigError, match=r"cluster\.metrics_port"):
        parse_config({"cluster": {"metrics_port": port}})
    for free in (0, 1024, 65535):
        assert parse_config({"cluster": {"metrics_port": free}}).cluster.metrics_port == free
    assert {PORT, 2223} == set(TASK_PORTS)
