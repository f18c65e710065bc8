"""Tests that each invalid value of `cluster.kubernetes` is reported with its key and a fix."""

from __future__ import annotations

import re

import pytest

from flotilla.trainer.config import cluster as pod_fields
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (pod_fields.quantity,
         ("1", "0", "500m", "0.5", ".5", "5.", "1.5Gi", "100n", "250u", "16Gi", "1Ki", "2E", "2Ei",
          "1e3", "1E3", "12e6", "1e-3", "129M", "128974848"),
         ("", "abc", "1 Gi", "16GB", "16gi", "4g", "-1", "1,5", "1.5.2", ".", "Gi", "1e", "1m1",
          "1Gi ", "٣", "one", "1000K"), "is not a Kubernetes quantity"),
        (pod_fields.memory, ("1Mi", "4Gi", "1048576", "2e9", "4G"),
         ("4", "16", "400m", "512Ki", "0"), "is less than 1Mi; write it with its unit"),
        (pod_fields.count, ("8",), ("", "-1", "1.5", "one", "1000m", "1 "),
         "is not a number of GPUs"),
        (pod_fields.image,
         ("a:5000/b/c:1.2", "python", "Registry.Example.com:5000/team/mine:Tag", "Box:5000/mine",
          "[2001:DB8::1]:5000/a__b-c.d/e", f"a/b:1@sha256:{'0' * 64}"),
         ("Our Image", "a/B:1", "Registry.example.com/Mine", "Team/mine", "a/b..c", "a//b"),
         "is not the name of an image"),
        (pod_fields.name, ("mlpipeline-minio-artifact", "a.b"), ("My_Secret", ""),
         "is not a valid Kubernetes name"),
    ],
)  # fmt: skip
def test_a_text_is_returned_or_refused(check, good, bad, words):
    assert [check(text) for text in good] == list(good)
    for text in bad:
        with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} {words}"):
            check(text)


@pytest.mark.parametrize(
    ("check", "tree"),
    [
        (pod_fields.labels, {"pool": "gpu", "cloud.google.com/gke-spot": "true", "empty": ""}),
        (pod_fields.labels, {}),
        (pod_fields.toleration,
         {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}),
        (pod_fields.toleration, {"operator": "Exists"}),
        (pod_fields.toleration, {"key": "pool", "value": "spot"}),
        (pod_fields.toleration, {"key": "pool", "operator": "Equal", "value": ""}),
        # KFP passes numbers as floats.
        (pod_fields.toleration,
         {"key": "k", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300.0}),
    ],
)  # fmt: skip
def test_labels_and_a_toleration_are_returned(check, tree):
    assert check(tree) == tree


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
