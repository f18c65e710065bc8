"""Tests that each invalid value of `cluster.kubernetes` is reported with its key and a fix."""

from __future__ import annotations

import re

import pytest

from flotilla.trainer.config import cluster as pod_fields
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError


def test_a_quantity_of_kubernetes():
    for text in (
        "1", "0", "500m", "0.5", ".5", "5.", "1.5Gi", "100n", "250u", "16Gi", "1Ki", "2E", "2Ei",
        "1e3", "1E3", "12e6", "1e-3", "129M", "128974848",
    ):  # fmt: skip
        assert pod_fields.quantity(text) == text


def test_what_is_none():
    for text in (
        "", "abc", "1 Gi", "16GB", "16gi", "4g", "-1", "1,5", "1.5.2", ".", "Gi", "1e", "1m1",
        "1Gi ", "٣", "one", "1000K",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not a Kubernetes"):
            pod_fields.quantity(text)


def test_memory_has_its_unit():
    for text in ("1Mi", "4Gi", "1048576", "2e9", "4G"):
        assert pod_fields.memory(text) == text
    for text in ("4", "16", "400m", "512Ki", "0"):
        with pytest.raises(ValueError, match="is less than 1Mi; write it with its unit"):
            pod_fields.memory(text)


def test_a_part_of_a_gpu():
    assert pod_fields.count("8") == "8"
    for text in ("", "-1", "1.5", "one", "1000m", "1 "):
        with pytest.raises(ValueError, match="is not a number of GPUs"):
            pod_fields.count(text)


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (pod_fields.image, "a:5000/b/c:1.2", "Our Image"),
        (pod_fields.image, "python", "a/B:1"),
        (pod_fields.image, "Registry.Example.com:5000/team/mine:Tag", "Registry.example.com/Mine"),
        (pod_fields.image, "Box:5000/mine", "Team/mine"),
        (pod_fields.image, "[2001:DB8::1]:5000/a__b-c.d/e", "a/b..c"),
        (pod_fields.image, f"a/b:1@sha256:{'0' * 64}", "a//b"),
        (pod_fields.name, "mlpipeline-minio-artifact", "My_Secret"),
        (pod_fields.name, "a.b", ""),
    ],
)
def test_a_name(check, good, bad):
    assert check(good) == good
    with pytest.raises(ValueError, match=f"^{re.escape(repr(bad))} is not "):
        check(bad)


def test_labels_of_a_node():
    tree = {"pool": "gpu", "cloud.google.com/gke-spot": "true", "empty": ""}
    assert pod_fields.labels(tree) == tree
    assert pod_fields.labels({}) == {}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"pool": 1}, 'pool: 1 is not a string; write it in quotes: "1"'),
        ({"pool": True}, "pool: True is not a string"),
        ({"pool": "a b"}, "pool: 'a b' is not a valid label value"),
        ({"a b": "x"}, "'a b' is not a valid label key"),
        ({"": "x"}, "'' is not a valid label key"),
        ({"/pool": "x"}, "'/pool' is not a valid label key"),
        ({"pool": "x" * 64}, "is not a valid label value"),
    ],
)
def test_labels_that_no_node_can_have(tree, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        pod_fields.labels(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"operator": "Exists"},
        {"key": "pool", "value": "spot"},
        {"key": "pool", "operator": "Equal", "value": ""},
        # KFP passes numbers as floats.
        {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300.0},
    ],
)
def test_a_toleration(tree):
    assert pod_fields.toleration(tree) == tree


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("spot", "'spot' is not a toleration"),
        ({"keys": "a"}, "'keys' is not a field of a toleration; did you mean 'key'?"),
        ({"key": "a", "operator": "exists"}, "operator: 'exists' is unknown to Kubernetes; did"),
        ({"key": "a", "effect": "Never"}, "effect: 'Never' is unknown to Kubernetes"),
        ({"key": "a", "operator": "Exists", "value": "b"}, "has no value; leave value out"),
        ({"value": "b"}, "without a key needs the operator Exists"),
        ({"key": "a", "value": True}, "value: True is not a string"),
        ({"key": "a b", "operator": "Exists"}, "key: 'a b' is not a valid taint key"),
        ({"key": "a", "value": "b c"}, "value: 'b c' is not a valid taint value"),
        ({"key": "a", "effect": "NoExecute", "tolerationSeconds": 1.5}, "is not a whole number"),
        ({"key": "a", "effect": "NoExecute", "tolerationSeconds": True}, "is not a whole number"),
        ({"key": "a", "tolerationSeconds": 30}, "needs the effect NoExecute"),
    ],
)
def test_what_is_no_toleration(tree, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        pod_fields.toleration(tree)


@pytest.mark.parametrize(
    ("kubernetes", "said"),
    [
        ({"pod": {"env": {"TF_CONFIG": "{}"}}},
         "TF_CONFIG is set by Flotilla or by the job's operator; leave it out"),
        ({"pod": {"labels": {"flotilla/run": "x"}}}, "flotilla/run is set by Flotilla"),
        ({"pod": {"labels": {"app.kubernetes.io/part-of": "x"}}},
         "app.kubernetes.io/part-of is set by Flotilla"),
        ({"job": {"annotations": {"flotilla/heartbeat": "x"}}}, "flotilla/heartbeat is set by"),
        ({"namespace": "A"}, "kubernetes.namespace: 'A' is not allowed"),
        ({"pod": {"secret_env": {"A": "no-key"}}}, "secret_env.A: 'no-key' is not allowed"),
        ({"pod": {"env": {"A": "1"}}, "ps": {"secret_env": {"A": "s/k"}}}, "A is in both env and"),
        ({"ps": {"resources": {"limits": {"cpu": -1}}}}, "limits.cpu: -1 is not allowed"),
        ({"ps": {"resources": {"limits": {"cpu": True}}}}, "limits.cpu: True is not allowed"),
        ({"ps": {"resources": {"limits": {"cpu": "4g"}}}}, "limits.cpu: '4g' is not a Kubernetes"),
        ({"pod": {"shared_memory": "2"}}, "pod.shared_memory: '2' is less than 1Mi"),
        ({"pod": {"image": "Not_An_Image"}}, "pod.image: 'Not_An_Image' is not the name of an"),
        ({"pod": {"tolerations": [{"keys": "a"}]}},
         "'keys' is not a field of a toleration; did you"),
        ({"pod": {"security": "none"}}, "pod.security: 'none' is not allowed"),
        ({"pod": {"security_context": {"fsgroup": 1}}},
         "fsgroup is not a field of a pod's securityContext; did you mean 'fsGroup'?"),
        ({"ps": {"security_context": {"readOnlyRootFilesystem": False}}},
         "readOnlyRootFilesystem is not a field of a pod's securityContext; for fields of a"),
        ({"pod": {"imag": "x"}}, "pod.imag: no such key; did you mean 'image'?"),
        ({"pod": {"volumes": [{"name": "a", "mount_path": "/flotilla", "source": {"x": 1}}]}},
         "the mount_path '/flotilla' is already used"),
        ({"pod": {"volumes": [{"name": "scratch", "mount_path": "/a", "source": {"x": 1}}]}},
         "the name 'scratch' is already used"),
        ({"pod": {"volumes": [{"nme": "a", "name": "b", "mount_path": "/", "source": {}}]}},
         "volumes.0.nme: no such key; did you mean 'name'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(kubernetes, said):
    with pytest.raises(ConfigError) as caught:
        parse_config({"cluster": {"kubernetes": kubernetes}})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
