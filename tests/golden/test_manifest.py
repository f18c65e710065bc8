"""Typical jobs of each engine as golden files, so that every change is reviewed."""

import pytest
import yaml

from flotilla.components.launchers import render_job
from flotilla.trainer.config.load import parse_config

TAINT = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}


def with_job(cluster, job):
    return {**cluster, "kubernetes": {**cluster["kubernetes"], "job": job}}


CPU = {
    "training": {"steps": 100},
    "cluster": {"workers": 1, "kubernetes": {"pod": {"resources": {"limits": {"cpu": 1}}}}},
}
GPU = {
    "parameter_servers": 2,
    "workers": 4,
    "gpus_per_worker": 1,
    "kubernetes": {
        "pod": {"image": "flotilla-python:gpu", "resources": {"requests": {"cpu": 2}}},
        "worker": {"shared_memory": "2Gi", "resources": {"requests": {"cpu": 8, "memory": "32Gi"}}},
    },
}
SPOT = {
    "workers": 8,
    "max_restarts": 100,
    "kubernetes": {
        "pod": {
            "service_account": "flotilla-trainer",
            "secret_env": {
                "AWS_ACCESS_KEY_ID": "mlpipeline-minio-artifact/accesskey",
                "AWS_SECRET_ACCESS_KEY": "mlpipeline-minio-artifact/secretkey",
            },
        },
        "worker": {
            "node_selector": {"cloud.google.com/gke-spot": "true"},
            "tolerations": [{**TAINT, "effect": "NoSchedule"}],
            "grace_seconds": 25,
        },
    },
}
# A program with parameter servers in the user's image, like the TFJobs in TensorFlow's examples.
PROGRAM = {
    "program": {
        "command": ["python", "/var/tf_mnist/mnist_test.py", "--job_name={role}"],
        "roles": {"ps": 1, "worker": 2},
    },
    "cluster": {
        "kubernetes": {
            "pod": {
                "image": "registry.example.com/tf-dist-mnist-test:1.0",
                "resources": {"limits": {"nvidia.com/gpu": 2}},
                "node_selector": {"accelerator": "nvidia"},
                "restart_policy": "OnFailure",
            }
        }
    },
}
JOBSET = {"launcher": "jobset"}
CASES = {
    "manifest-cpu": CPU,
    "manifest-gpu-gang": {
        "cluster": with_job(GPU, {"scheduling": {"gang": True, "queue": "gpus"}})
    },
    "manifest-spot": {"cluster": SPOT},
    "manifest-program": PROGRAM,
    "jobset-program": {
        "program": PROGRAM["program"],
        "cluster": {"kubernetes": {"pod": {"image": "own/program:1"}}, **JOBSET},
    },
    "jobset-cpu": {**CPU, "cluster": {**CPU["cluster"], **JOBSET, "evaluator": True}},
    "jobset-gpu-kueue": {
        "cluster": {**with_job(GPU, {"queue_name": "gpus", "suspend": True}), **JOBSET}
    },
    "jobset-spot": {"cluster": {**SPOT, **JOBSET}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_the_golden_file(golden, name):
    text = yaml.safe_dump(
        render_job(parse_config(CASES[name])), sort_keys=False, allow_unicode=True
    )
    golden(f"{name}.yaml", text)
