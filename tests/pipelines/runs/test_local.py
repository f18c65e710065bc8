"""Tests a local run: its folder, process, events and interrupts."""

import json
import os
import signal
import subprocess
import sys
from functools import reduce
from pathlib import Path

import psutil
import pytest

from flotilla.components.records.record import STOPPING
from flotilla.components.records.run_store import RUN_ID
from flotilla.pipelines.runs import local, local_status
from flotilla.pipelines.settings import keys
from flotilla.trainer import events, storage
from flotilla.trainer.config.form import from_form, to_local_form
from flotilla.trainer.config.load import load_config, parse_config
from flotilla.trainer.config.schema import Config, StorageConfig
from flotilla.trainer.events import AttemptBegin, FromScratch, RunBegin
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT
from tests.pipelines.step_events import done

CONFIG = Config()
# A runner that reports its start and each request to stop, but does not stop.
DEAF = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
    "print('there', flush=True)\n"
    "while True: pass"
)


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "it's a wörk dir"


@pytest.fixture
def deaf():
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.communicate()


class TestLayingOut:
    @pytest.mark.parametrize("launcher", ["jobset", "tfjob"])
    def test_pods_share_its_root(self, workdir, launcher):
        cluster = {"launcher": launcher}
        options = {"pipeline": "run", "config": {"cluster": cluster}, "workdir": workdir}
        with pytest.raises(ConfigError, match=r"that the pods of .*chief do not share; use a"):
            local.start(local.RunOptions(**options))
        assert not workdir.exists()
        local.start(local.RunOptions(**{**options, "pipeline": "prepare"}))
        volume = {"name": "all", "mount_path": str(workdir.parent), "source": {"emptyDir": {}}}
        cluster["kubernetes"] = {"pod": {"volumes": [volume]}}
        local.start(local.RunOptions(**options))

    def test_each_run_has_a_folder_and_publishes_below_the_workdir(self, workdir, monkeypatch):
        config = load_config(None, ["training.steps=7"])
        runs = [local.new_run(config, workdir) for _ in range(3)]
        assert len({run.run_id for run in runs}) == 3
        for run in runs:
            assert run.run_id.startswith("digits-")
            assert (run.folder, run.folder.is_dir()) == (workdir / run.run_id, True)
            assert storage.local_path(run.config.storage.root) == workdir
            assert run.config.model_copy(update={"storage": config.storage}) == config
            # The root is not saved, so that a workdir can be moved.
            assert load_config(local.config_file(workdir, run.run_id)) == config
        monkeypatch.chdir(workdir)
        run = local.new_run(CONFIG, Path("runs"))
        assert run.folder == workdir / "runs" / run.run_id
        assert storage.local_path(run.config.storage.root) == workdir / "runs"

    def test_it_publishes_where_the_configuration_says(self, workdir):
        config = CONFIG.model_copy(update={"storage": StorageConfig(root="file:///elsewhere")})
        assert local.new_run(config, workdir).config == config

    def test_taking_a_run_up_again_keeps_what_it_has(self, workdir):
        run = local.new_run(CONFIG, workdir)
        (run.folder / "checkpoints").mkdir()
        (run.folder / "checkpoints" / "kept").write_text("x", encoding="utf-8")
        events.append(run.folder / local.EVENTS, FromScratch(reason="first"))
        os.close(run.lock)
        again = local.new_run(load_config(None, ["training.steps=9"]), workdir, run.run_id)
        assert (again.run_id, again.folder) == (run.run_id, run.folder)
        assert (run.folder / "checkpoints" / "kept").is_file()
        # Earlier events belong to the run, but not to the outcome of this start.
        assert list(events.read(run.folder / local.EVENTS)) == [
            RunBegin(run_id=run.run_id, number=1),
            FromScratch(reason="first"),
            RunBegin(run_id=run.run_id, number=2),
        ]
        with events.Follower(run.folder / local.EVENTS, again.begin) as follower:
            assert list(follower.new()) == [RunBegin(run_id=run.run_id, number=2)]
        # The configuration is not written before training begins.
        assert load_config(local.config_file(workdir, run.run_id)) == CONFIG
        again.save_config()
        assert load_config(local.config_file(workdir, run.run_id)).training.steps == 9

    @pytest.mark.parametrize("take", [local.config_file, local.check_run_id])
    def test_a_run_that_is_not_there(self, workdir, take):
        with pytest.raises(ConfigError, match=r"^no run 'x' below .*wörk dir$"):
            take(workdir, "x")

    def test_a_file_in_the_place_of_a_folder(self, workdir):
        run = local.new_run(CONFIG, workdir)
        (run.folder / "tmp").rmdir()
        (run.folder / "tmp").write_text("", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"^cannot write to .*; choose another --workdir$"):
            local.new_run(CONFIG, workdir, run.run_id)


class TestExecuting:
    def test_a_runner_that_dies_is_reported_and_leaves_its_output(self, workdir):
        run = local.new_run(CONFIG, workdir)
        seen = []
        outcome = local.execute(run, "no_such_pipeline", {"dataset": "file:///d"}, seen.append)
        assert (outcome.status, outcome.exit_code) == ("failed", 1)
        assert outcome.message == "the local runner ended with exit code 1; see pipeline.log"
        assert (outcome.steps, seen) == ((), [RunBegin(run_id=run.run_id, number=1)])
        log = (run.folder / "pipeline.log").read_text(encoding="utf-8")
        assert "KeyError: 'no_such_pipeline'" in log
        assert not (run.folder / "tmp").exists()
        # The pipeline got the whole configuration.
        given = json.loads((run.folder / "arguments.json").read_text(encoding="utf-8"))
        assert given.pop("dataset") == "file:///d"
        assert from_form(given) == run.config

    @pytest.mark.slow
    @pytest.mark.parametrize("begins", [False, True])
    def test_a_resume_that_is_refused_leaves_the_configuration_of_the_run(self, workdir, begins):
        run = local.new_run(CONFIG, workdir)
        os.close(run.lock)
        other = load_config(None, ["training.steps=9"])
        again = local.new_run(other, workdir, run.run_id)
        if begins:
            attempt = AttemptBegin(global_step=0, steps=9, resumed=False)
            events.append(run.folder / local.EVENTS, attempt)
        assert local.execute(again, "no_such_pipeline", {}).status == "failed"
        kept = load_config(local.config_file(workdir, run.run_id))
        assert kept == (other if begins else CONFIG)

    def test_a_resume_whose_data_is_refused_leaves_it_too(self, workdir, monkeypatch):
        run = local.new_run(CONFIG, workdir)
        os.close(run.lock)
        again = local.new_run(load_config(None, ["data.seed=9"]), workdir, run.run_id)
        for event in done("validate_data", metrics={"decision": "refused", "reasons": ["no"]}):
            events.append(run.folder / local.EVENTS, event)
        ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
        monkeypatch.setattr(local, "_start", lambda *_: ended)
        assert local.execute(again, "run", {}).status == "refused"
        assert load_config(local.config_file(workdir, run.run_id)) == CONFIG

    def test_a_cancel_before_the_runner_can_handle_it(self, workdir, monkeypatch):
        run = local.new_run(CONFIG, workdir)
        ended = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
        started = subprocess.Popen([sys.executable, "-c", ended], start_new_session=True)
        monkeypatch.setattr(local, "_start", lambda *_: started)
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        result = local.execute(run, "run", {})
        assert (result.status, result.exit_code) == ("interrupted", 130)
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert local_status.read_status(workdir, run.run_id).status == "interrupted"

    def test_an_error_of_the_follower_leaves_no_process(self, workdir):
        run = local.new_run(CONFIG, workdir)
        # The first event is written before the runner starts.
        events.append(run.folder / local.EVENTS, FromScratch(reason="first"))

        before = set(psutil.Process().children(recursive=True))

        def fail(_event):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            local.execute(run, "prepare", {}, fail)
        # A process of an earlier test may end at the same time.
        assert before.issuperset(psutil.Process().children(recursive=True))


class TestInterrupting:
    def test_the_first_asks_and_the_second_ends(self, deaf):
        with local._interrupts(deaf) as seen:
            os.kill(os.getpid(), signal.SIGINT)
            assert deaf.stdout.readline() == "asked\n"
            assert deaf.poll() is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert deaf.wait() == -signal.SIGKILL
        assert seen == [signal.SIGTERM, signal.SIGKILL]

    def test_a_runner_that_is_gone_is_no_error(self, deaf):
        with local._interrupts(deaf) as seen:
            deaf.kill()
            deaf.wait()
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]


class TestEnvironment:
    def test_a_run_reports_its_steps_who_they_are(self, workdir, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/own/modules")
        # An earlier run of this process was interrupted.
        monkeypatch.setenv(STOPPING, "1")
        run = local.new_run(CONFIG, workdir)
        environment = local._environment(run)
        assert STOPPING not in environment
        assert environment.items() >= {
            "FLOTILLA_RUN_ID": run.run_id,
            "FLOTILLA_RUN_FOLDER": str(run.folder),
            events.VARIABLE: str(run.folder / "events.jsonl"),
            "TMPDIR": str(run.folder / "tmp"),
            "PYTHONPATH": "/own/modules",
            "PYTHONSAFEPATH": "1",
            "FLOTILLA_USER_FOLDER": os.getcwd(),
            "PATH": os.environ["PATH"],
        }.items()  # fmt: skip


def test_a_run_that_goes_on_cannot_be_taken_up(tmp_path):
    going = local.new_run(parse_config({}), tmp_path)
    (going.folder / "events.jsonl").write_text("what it has said\n")
    with pytest.raises(ConfigError, match=f"run {going.run_id} is still running"):
        local.new_run(parse_config({}), tmp_path, going.run_id)
    assert (going.folder / "events.jsonl").read_text() == "what it has said\n"
    os.close(going.lock)
    os.close(local.new_run(parse_config({}), tmp_path, going.run_id).lock)


# These values contain shell, template, YAML, JSON and KFP syntax. KFP reserves `{{`.
AWKWARD = 'it\'s "quoted" $HOME `id` %s \\n \\ {x} #é 漢字 🚢 python3 <&> -- ;\tend\n'
# No value here is a default, except for keys that exclude each other.
TREE = {
    "name": "every-key.1",
    "data": {
        "dataset": f"my.sets:{AWKWARD}", "version": "1.0", "manual_dir": f"/data/{AWKWARD}",
        "inputs": ["a", AWKWARD], "label": [AWKWARD], "weight": AWKWARD, "group": "query",
        "format": "jsonl", "builder_args": {"root_dir": AWKWARD}, "drop": [f"no {AWKWARD}"],
        "types": {AWKWARD: "text"}, "map": "my.möbel.rows:example", "shapes": {AWKWARD: [3, 4]},
        "buckets": [5, 10], "image": {"size": [32, 48], "channels": 1}, "bad_rows": 0.125,
        "splits": {"test": 0.25, "time": AWKWARD}, "disk": "300MB", "vocabulary": 123,
        "runner": {"processes": 3}, "shards": 16, "validation": 0.25, "partition": "reshuffle",
        "spans": "all", "schema_file": f"gs://bucket/{AWKWARD}.yaml",
        "gate": {"rules": {"drift": "off"}, "limits": {"drift": 0.25}}, "seed": 2**31 - 1,
    },
    "task": {
        "name": "my.tasks:Own", "loss": "huber", "metrics": ["poisson", "my.metrics:own"],
        "outputs": {AWKWARD: {"weight": 0.5, "positive": "1.0"}}, "positive": "yes",
        "main_metric": "macro_f1", "args": {"text": AWKWARD},
    },
    "model": {
        "name": "my.möbel.models:büild",
        "args": {"text": AWKWARD, "units": [3, 4.5, True, None], "deep": {"a": {"b": []}}},
    },
    "training": {
        "strategy": "my.strategies:own", "steps": 123_456_789, "batch_size": 7,
        "optimizer": {
            "name": "sgd", "learning_rate": 1e-7, "args": {"nesterov": True}, "dense_updates": True,
        },
        "schedule": {
            "name": "piecewise", "warmup_steps": 3,
            "args": {"boundaries": [10, 20], "factors": [1, 0.5, 0.1]},
        },
        "pull_every": 5, "replicas_to_aggregate": 2, "checkpoint_every": 11,
        "checkpoint_seconds": 12.5, "keep_every_hours": 1.5, "checkpoint_parts_mb": 7, "keep": 4,
        "validate_every": 13, "patience": 2, "stall_timeout": 60.5, "mixed_precision": "float16",
        "ema": 0.5, "when_unchanged": "train", "jit_compile": True,
        "warm_start": {
            "from": "gs://bucket/a run/checkpoints/step-00000005", "exclude": [f"möbel/*{AWKWARD}"],
        },
        "freeze": [AWKWARD, "b/*"], "hand_on": "last", "class_weights": {AWKWARD: 2.5}, "seed": 5,
    },
    "cluster": {
        "launcher": "tfjob", "parameter_servers": 2, "workers": 3, "evaluator": True,
        "gpus_per_worker": 1, "gpu_memory_fraction": 0.3, "communication": "nccl",
        "placement": {f"möbel/*{AWKWARD}": "ps:1"}, "in_process": True, "max_restarts": 0,
        "recovery": "partial",
        "kubernetes": {
            "namespace": "models",
            "pod": {
                "env": {"A": AWKWARD}, "resources": {"limits": {"cpu": "500m"}},
                "tolerations": [{"key": "spot", "operator": "Exists"}],
            },
            "job": {"backoff_limit": 7},
            "worker": {"volumes": [{"name": "a", "mount_path": "/a", "source": {"emptyDir": {}}}]},
        },
    },
    "evaluation": {"batch_size": 17, "slices": [AWKWARD, "b"], "baseline": "none"},
    "gate": {
        "min": {"macro_f1": 0.1, f"accuracy@{AWKWARD}={AWKWARD}": 0.5},
        "max": {"loss": 2.5, "accuracy": 1.0}, "constant": "reported",
        "champion": {
            "metric": "macro_f1", "margin": "2.5%", "confidence": 0.875, "class_margin": "25%",
            "better": "higher",
        },
    },
    "export": {"formats": ["saved_model", "tflite_int8"]},
    "registry": {"max_megabytes": 12.5, "max_milliseconds": 3.0},
    "storage": {"root": "file:///nowhere/a path/ü's"},
}  # fmt: skip


def run(folder, config, **environment):
    arguments = {**to_local_form(config), "path": str(folder / "kept.json")}
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
    # The command line sets this variable. Without it, the step would try the model and dataset as
    # on a cluster, but neither exists here.
    ended = run(folder, config, **{RUN_ID: "run-1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "kept.json").read_text(encoding="utf-8"))


def test_no_value_of_these_is_the_default(config):
    default = Config()
    same = {
        name
        for name, (key, _) in keys().items()
        if reduce(getattr, key, config) == reduce(getattr, key, default)
    }
    # Each of these keys excludes another key that is set, or names an object that does not exist.
    assert same == {
        "cluster_existing_servers", "cluster_gpu_memory_mb", "cluster_metrics_port", "code",
        "data_source", "program", "registry_hub", "training_accumulate", "training_epochs",
        "training_callbacks", "training_profile",
    }  # fmt: skip


def test_every_key_arrives_with_its_type_and_the_root_and_the_id_are_passed_on(kept, config):
    arrived = Config.model_validate_json(kept["config"])
    assert arrived == config
    for name, (key, _) in keys().items():
        before = reduce(getattr, key, config)
        assert type(reduce(getattr, key, arrived)) is type(before), name
    assert [type(each) for each in arrived.model.args["units"]] == [int, float, bool, type(None)]
    assert (kept["root"], kept["run_id"]) == (TREE["storage"]["root"], "run-1")


def test_a_wrong_parameter_ends_the_pipeline_with_one_line(tmp_path, config):
    wrong = config.model_copy(update={"storage": config.storage.model_copy(update={"root": ""})})
    path = tmp_path / "events.jsonl"
    ended = run(tmp_path, wrong, **{events.VARIABLE: str(path), RUN_ID: "run-1"})
    assert ended.returncode == 1
    assert not (tmp_path / "kept.json").exists()
    step = list(events.read(path))[-1]
    assert (step.step, step.status, step.exit_code) == ("resolve_config", "failed", 1)
    assert step.error.startswith("storage.root is empty: set it to a URI")
    answer = [line for line in ended.stdout.splitlines() if "flotilla: " in line]
    assert [line.strip() for line in answer] == [f"flotilla: resolve_config: {step.error}"]
