"""Tests that an invalid value of `cluster.kubernetes` is rejected with the name of its key."""

from __future__ import annotations

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("kubernetes", "said"),
    [
        (
            {"pod": {"env": {"TF_CONFIG": "{}"}}},
            "TF_CONFIG is set by Flotilla or by the job's operator; leave it out",
        ),
        ({"pod": {"labels": {"flotilla/run": "x"}}}, "flotilla/run is set by Flotilla"),
        (
            {"pod": {"labels": {"app.kubernetes.io/part-of": "x"}}},
            "app.kubernetes.io/part-of is set by Flotilla",
        ),
        ({"job": {"annotations": {"flotilla/heartbeat": "x"}}}, "flotilla/heartbeat is set by"),
        ({"namespace": "A"}, "kubernetes.namespace: 'A' is not allowed"),
        ({"pod": {"secret_env": {"A": "no-key"}}}, "secret_env.A: 'no-key' is not allowed"),
        ({"pod": {"env": {"A": "1"}}, "ps": {"secret_env": {"A": "s/k"}}}, "A is in both env and"),
        ({"ps": {"resources": {"limits": {"cpu": -1}}}}, "limits.cpu: -1 is not allowed"),
        ({"ps": {"resources": {"limits": {"cpu": True}}}}, "limits.cpu: True is not allowed"),
        ({"ps": {"resources": {"limits": {"cpu": "4g"}}}}, "limits.cpu: '4g' is not a Kubernetes"),
        ({"pod": {"shared_memory": "2"}}, "pod.shared_memory: '2' is less than 1Mi"),
        ({"pod": {"image": "Not_An_Image"}}, "pod.image: 'Not_An_Image' is not the name of an"),
        (
            {"pod": {"tolerations": [{"keys": "a"}]}},
            "'keys' is not a field of a toleration; did you",
        ),
        ({"pod": {"security": "none"}}, "pod.security: 'none' is not allowed"),
        (
            {"pod": {"security_context": {"fsgroup": 1}}},
            "fsgroup is not a field of a pod's securityContext; did you mean 'fsGroup'?",
        ),
        (
            {"ps": {"security_context": {"readOnlyRootFilesystem": False}}},
            "readOnlyRootFilesystem is not a field of a pod's securityContext; for fields of a",
        ),
        ({"pod": {"imag": "x"}}, "pod.imag: no such key; did you mean 'image'?"),
        (
            {"pod": {"volumes": [{"name": "a", "mount_path": "/flotilla", "source": {"x": 1}}]}},
            "the mount_path '/flotilla' is already used",
        ),
        (
            {"pod": {"volumes": [{"name": "scratch", "mount_path": "/a", "source": {"x": 1}}]}},
            "the name 'scratch' is already used",
        ),
        (
            {"pod": {"volumes": [{"nme": "a", "name": "b", "mount_path": "/", "source": {}}]}},
            "volumes.0.nme: no such key; did you mean 'name'?",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(kubernetes, said):
    with pytest.raises(ConfigError) as caught:
        parse_config({"cluster": {"kubernetes": kubernetes}})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
