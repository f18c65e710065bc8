"""Every run parameter arrives in the configuration through KFP's own local executor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from components.records.run_store import RUN_ID
from trainer import events
from trainer.config.data import DataConfig
from trainer.config.load import parse_config
from trainer.config.run_parameters import run_parameters, to_parameters
from trainer.config.schema import Config

ROOT = Path(__file__).parents[3]
# What a shell, a template, YAML, JSON or KFP could take for its own. KFP keeps `{{` to itself.
AWKWARD = 'it\'s "quoted" $HOME `id` %s \\n \\ {x} #é 漢字 🚢 python3 <&> -- ;\tend\n'
# No value here is the default, but of keys that exclude another.
TREE = {
    "name": "every-key.1",
    "data": {
        "dataset": f"my.sets:{AWKWARD}",
        "version": "1.0",
        "manual_dir": f"/data/{AWKWARD}",
        "inputs": ["a", AWKWARD],
        "label": [AWKWARD],
        "weight": AWKWARD,
        "group": "query",
        "format": "jsonl",
        "builder_args": {"root_dir": AWKWARD},
        "drop": [f"no {AWKWARD}"],
        "types": {AWKWARD: "text"},
        "map": "my.möbel.rows:example",
        "shapes": {AWKWARD: [3, 4]},
        "buckets": [5, 10],
        "image": {"size": [32, 48], "channels": 1},
        "bad_rows": 0.125,
        "splits": {"test": 0.25, "time": AWKWARD},
        "disk": "300MB",
        "vocabulary": 123,
        "runner": {"processes": 3},
        "shards": 16,
        "validation": 0.25,
        "partition": "reshuffle",
        "spans": "all",
        "schema_file": f"gs://bucket/{AWKWARD}.yaml",
        "gate": {"rules": {"drift": "off"}, "limits": {"drift": 0.25}},
        "seed": 2**31 - 1,
    },
    "task": {
        "name": "my.tasks:Own",
        "loss": "huber",
        "metrics": ["poisson", "my.metrics:own"],
        "outputs": {AWKWARD: {"weight": 0.5}},
        "args": {"text": AWKWARD},
    },
    "model": {
        "name": "my.möbel.models:büild",
        "args": {"text": AWKWARD, "units": [3, 4.5, True, None], "deep": {"a": {"b": []}}},
    },
    "training": {
        "strategy": "my.strategies:own",
        "steps": 123_456_789,
        "batch_size": 7,
        "optimizer": {
            "name": "sgd",
            "learning_rate": 1e-7,
            "args": {"nesterov": True},
            "dense_updates": True,
        },
        "schedule": {
            "name": "piecewise",
            "warmup_steps": 3,
            "args": {"boundaries": [10, 20], "factors": [1, 0.5, 0.1]},
        },
        "pull_every": 5,
        "replicas_to_aggregate": 2,
        "checkpoint_every": 11,
        "checkpoint_seconds": 12.5,
        "checkpoint_parts_mb": 7,
        "keep": 4,
        "validate_every": 13,
        "patience": 2,
        "stall_timeout": 60.5,
        "mixed_precision": "float16",
        "ema": 0.5,
        "when_unchanged": "train",
        "jit_compile": True,
        "warm_start": {
            "from": "gs://bucket/a run/checkpoints/step-00000005",
            "exclude": [f"möbel/*{AWKWARD}"],
        },
        "freeze": [AWKWARD, "b/*"],
        "hand_on": "last",
        "class_weights": {AWKWARD: 2.5},
        "seed": 5,
    },
    "cluster": {
        "launcher": "tfjob",
        "parameter_servers": 2,
        "workers": 3,
        "evaluator": True,
        "gpus_per_worker": 1,
        "gpu_memory_mb": 512,
        "communication": "nccl",
        "placement": {f"möbel/*{AWKWARD}": "ps:1"},
        "in_process": True,
        "max_restarts": 0,
        "recovery": "partial",
        "kubernetes": {
            "namespace": "models",
            "pod": {
                "env": {"A": AWKWARD},
                "resources": {"limits": {"cpu": "500m"}},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
            },
            "job": {"backoff_limit": 7},
            "worker": {"volumes": [{"name": "a", "mount_path": "/a", "source": {"emptyDir": {}}}]},
        },
    },
    "evaluation": {"batch_size": 17, "slices": [AWKWARD, "b"]},
    "gate": {
        "min": {"macro_f1": 0.1, f"accuracy@{AWKWARD}={AWKWARD}": 0.5},
        "max": {"loss": 2.5, "accuracy": 1.0},
        "champion": {
            "metric": "macro_f1",
            "margin": "2.5%",
            "confidence": 0.875,
            "better": "higher",
        },
    },
    "export": {"formats": ["saved_model", "tflite_int8"]},
    "registry": {"max_megabytes": 12.5, "max_milliseconds": 3.0},
    "storage": {"root": "file:///nowhere/a path/ü's"},
}


def run(folder, config, **environment):
    arguments = {**to_parameters(config), "path": str(folder / "kept.json")}
    (folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
    command = [sys.executable, "-m", "tests.pipelines.two_steps", "two_steps", str(folder)]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {"PATH": path, "TMPDIR": str(folder), **environment}
    return subprocess.run(
        command, cwd=ROOT, env=env, check=False, text=True, capture_output=True, timeout=600
    )


@pytest.fixture(scope="module")
def config():
    return parse_config(TREE)


@pytest.fixture(scope="module")
def kept(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("it's two steps")
    # As the command line does it: on a cluster the step tries model and dataset, and these are not.
    ended = run(folder, config, **{RUN_ID: "run-1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "kept.json").read_text(encoding="utf-8"))


def test_no_value_of_these_is_the_default(config):
    default = to_parameters(Config())
    same = {name for name, value in to_parameters(config).items() if value == default[name]}
    # Servers are either joined or started in one process; pull_every says how many batches already;
    # data are a dataset by name or files; a bundle and a registry would have to be there, and a
    # port and a profile belong to a cluster that trains.
    assert same == {
        "cluster_existing_servers",
        "cluster_metrics_port",
        "code",
        "data_source",
        "registry_hub",
        "training_accumulate",
        "training_profile",
    }


def test_every_run_parameter_arrives(kept, config):
    arrived = Config.model_validate_json(kept["config"])
    assert to_parameters(arrived) == to_parameters(config)
    assert arrived == config


def test_numbers_keep_their_type(kept):
    arrived = Config.model_validate_json(kept["config"])
    for parameter in run_parameters():
        value = to_parameters(arrived)[parameter.name]
        assert type(value) is parameter.type, parameter.name
    assert [type(each) for each in arrived.model.args["units"]] == [int, float, bool, type(None)]


def test_the_data_section_is_passed_on_alone(kept, config):
    assert DataConfig.model_validate_json(kept["data"]) == config.data


def test_the_root_and_the_id_of_the_run_are_passed_on(kept):
    assert kept["root"] == TREE["storage"]["root"]
    assert kept["run_id"] == "run-1"


def test_a_wrong_parameter_ends_the_pipeline_with_one_line(tmp_path, config):
    wrong = config.model_copy(update={"storage": config.storage.model_copy(update={"root": ""})})
    path = tmp_path / "events.jsonl"
    ended = run(tmp_path, wrong, **{events.VARIABLE: str(path), RUN_ID: "run-1"})
    assert ended.returncode == 1
    assert not (tmp_path / "kept.json").exists()
    step = list(events.read(path))[-1]
    assert (step.step, step.status, step.exit_code) == ("resolve_config", "failed", 1)
    assert step.error.startswith("storage.root is empty: set it to the URI")
    # Of the step, that is; the runner's own end is not for users.
    answer = [line for line in ended.stdout.splitlines() if "flotilla: " in line]
    assert [line.strip() for line in answer] == [f"flotilla: resolve_config: {step.error}"]
