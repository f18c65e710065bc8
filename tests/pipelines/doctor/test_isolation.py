"""The doctor says who reaches the port of TensorFlow's servers."""

from __future__ import annotations

import pytest
import yaml

from components.kubernetes import names
from tests.conftest import ROOT
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.control import USER

NAME = "network policy"
PORT = {"protocol": "TCP", "port": 2222}
TASKS = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "flotilla"}}}


@pytest.fixture
def of_policies(kube, of_job):
    """Call the doctor in a namespace with these policies, and return its finding."""

    def call(*specs):
        kube.store.remove("networkpolicies", NAMESPACE, "flotilla-training")
        for number, spec in enumerate(specs):
            tree = {"metadata": {"name": f"policy-{number}"}, "spec": spec}
            kube.store.create("networkpolicies", NAMESPACE, tree)
        report = of_job()
        assert report.code == 0
        return report[NAME]

    return call


@pytest.mark.usefixtures("kube")
def test_the_policy_of_deploy_covers_every_role(of_job):
    found = of_job("cluster.evaluator=true")[NAME]
    assert found["state"] == "ok"
    assert found["message"].startswith("flotilla-training, ")


def test_it_isolates_what_has_no_policy_of_its_own():
    text = (ROOT / "deploy/base/networkpolicy.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    [among_tasks, scraped] = spec["ingress"]
    assert among_tasks == {"from": [{"podSelector": spec["podSelector"]}]}
    assert scraped["ports"] == [{"port": names.METRICS_PORT, "protocol": "TCP"}]


def test_without_a_policy_any_pod_reaches_the_tasks(of_policies):
    found = of_policies()
    assert found["state"] == "warn"
    assert "any pod may reach port 2222 of the tasks" in found["message"]
    assert found["remedy"] == f"kubectl apply --namespace {NAMESPACE} --kustomize deploy/base"


@pytest.mark.parametrize(
    "spec",
    [
        {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"from": [TASKS]}]},
        {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]},
        {
            "podSelector": {
                "matchExpressions": [
                    {"key": "training.kubeflow.org/replica-type", "operator": "In", "values": ["x"]}
                ]
            }
        },
    ],
)
def test_a_policy_of_other_pods_covers_nothing(of_policies, spec):
    found = of_policies(spec)
    assert (found["state"], "no network policy" in found["message"]) == ("warn", True)


def test_a_policy_of_one_role_leaves_the_others(of_policies):
    worker = {"matchLabels": {"training.kubeflow.org/replica-type": "worker"}}
    message = of_policies({"podSelector": worker})["message"]
    assert "selects Chief, PS: any pod" in message


@pytest.mark.parametrize(
    ("rule", "who"),
    [
        ({}, "everyone"),
        ({"ports": [PORT]}, "everyone"),
        ({"ports": [{"port": 2000, "endPort": 3000}]}, "everyone"),
        ({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}, "everyone"),
        ({"from": [{"namespaceSelector": {}}]}, "everyone"),
        ({"from": [{"podSelector": {}}], "ports": [{}]}, "every pod of the namespace"),
    ],
)
def test_a_policy_that_admits_too_many_is_named(of_policies, rule, who):
    closed = {"podSelector": {}, "ingress": [{"from": [TASKS]}]}
    found = of_policies(closed, {"podSelector": {}, "ingress": [rule]})
    assert found["state"] == "warn"
    assert f"policy-1 lets {who} reach port 2222" in found["message"]
    assert "policy-0" not in found["message"]


@pytest.mark.parametrize(
    "spec",
    [
        {"podSelector": {}, "policyTypes": ["Ingress"]},
        {"podSelector": {}, "ingress": [{"from": [TASKS], "ports": [PORT]}]},
        {
            "podSelector": {},
            "ingress": [{"ports": [{"port": 8080}, {"port": 2222, "protocol": "UDP"}]}],
        },
        {"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "10.1.2.0/24"}}]}]},
    ],
)
def test_a_policy_that_keeps_the_port_is_enough(of_policies, spec):
    assert of_policies(spec)["state"] == "ok"


def test_a_missing_permission_to_list_them_is_reported(kube, of_job):
    kube.server.control.deny(USER, "list networkpolicies")
    found = of_job()[NAME]
    assert found["state"] == "warn"
    assert f"may not read the network policies of {NAMESPACE}" in found["message"]
