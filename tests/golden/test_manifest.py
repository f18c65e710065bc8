"""Three typical TFJobs as files: a change of one is seen before it is kept."""

import pytest
import yaml

from components.tfjob.manifest import document
from trainer.config.load import parse_config

SPOT = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
CASES = {
    "cpu": {
        "training": {"steps": 100},
        "cluster": {"workers": 1, "kubernetes": {"pod": {"resources": {"limits": {"cpu": 1}}}}},
    },
    "gpu-gang": {
        "cluster": {
            "parameter_servers": 2,
            "workers": 4,
            "gpus_per_worker": 1,
            "kubernetes": {
                "job": {"scheduling": {"gang": True, "queue": "gpus"}},
                "pod": {"image": "flotilla-python:gpu", "resources": {"requests": {"cpu": 2}}},
                "worker": {
                    "shared_memory": "2Gi",
                    "resources": {"requests": {"cpu": 8, "memory": "32Gi"}},
                },
            },
        }
    },
    "spot": {
        "cluster": {
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
                    "tolerations": [{**SPOT, "effect": "NoSchedule"}],
                    "grace_seconds": 25,
                },
            },
        }
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_the_golden_file(golden, name):
    text = yaml.safe_dump(document(parse_config(CASES[name])), sort_keys=False, allow_unicode=True)
    golden(f"manifest-{name}.yaml", text)
