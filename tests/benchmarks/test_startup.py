"""What the process of each step and of each training task does not load before its work."""

import subprocess
import sys

import pytest

from benchmarks.startup import PROCESSES
from tests.house_rules.source import ROOT

NEVER = {
    "apache_beam", "boto3", "google.cloud.storage", "IPython", "kfp.client", "kubernetes",
    "matplotlib", "mlflow", "pandas",
}  # fmt: skip
TENSORFLOW = {"tensorflow", "keras"}
# Those that compute with the model.
COMPUTE = {
    "evaluate_model", "export_model", "task: chief", "task: worker", "task: evaluator",
    "task: server",
}  # fmt: skip
PROGRAM = """
import importlib, sys
from trainer import tensorflow_import
tensorflow_import.prepare()
names, forbidden = (each.split(",") for each in sys.argv[1:])
for name in names:
    importlib.import_module(name)
print(",".join(each for each in forbidden if each in sys.modules))
"""


def loads(name, forbidden):
    command = [sys.executable, "-c", PROGRAM, ",".join(PROCESSES[name]), ",".join(forbidden)]
    environment = {"_KFP_RUNTIME": "true", "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": ""}
    if name == "task: server":
        environment["TF_USE_LEGACY_KERAS"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROCESSES.keys() - COMPUTE))
def test_a_step_that_computes_nothing_loads_nothing_heavy(name):
    others = {"sklearn"} if name == "validate_data" else {"sklearn", "scipy"}
    assert not loads(name, sorted(NEVER | TENSORFLOW | others))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMPUTE))
def test_what_computes_loads_tensorflow_and_nothing_for_pictures(name):
    heavy = NEVER | ({"keras", "sklearn", "kfp"} if name == "task: server" else set())
    assert not loads(name, sorted(heavy))
