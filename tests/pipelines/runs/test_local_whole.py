"""Tests the complete `flotilla run` with digits on local processes, both blessed and refused."""

import json
import re
import signal
import warnings
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import tensorflow as tf

from flotilla.components.records import gather_report
from flotilla.pipelines.runs import local, local_status
from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.checkpoints import restore_model
from flotilla.trainer.checkpoints.index import list_checkpoints
from flotilla.trainer.config.load import load_config
from flotilla.trainer.events import AttemptBegin, CheckpointPublished, Progress, StepEnd
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.models import registry as models
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.promotion import registry
from tests.conftest import ROOT
from tests.pipelines.called import Called, call, calling, content, processes_of, setting
from tests.trainer.code.referred import referred
from tests.trainer.page import Page
from tests.trainer.telemetry.test_tensorboard import hyperparameters, scalars
from tests.trainer.tracking.test_mlflow_run import MlflowServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

STEPS = 200
FEW = setting(training__steps=STEPS, training__checkpoint_every=100, training__validate_every=100)
ALL = [
    "resolve_config", "prepare_data", "validate_data", "train_model", "evaluate_model",
    "check_gate",
]  # fmt: skip


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("whole run") / "runs"


@pytest.fixture(scope="module")
def blessed(workdir):
    # Use the last checkpoint, because the best one by validation varies with the order of
    # asynchronous updates.
    given = setting(gate__min__accuracy=0.5, training__hand_on="last")
    return call("run", workdir, *FEW, *given, cwd=workdir.parent)


@pytest.fixture(scope="module")
def before(workdir, blessed):
    """Return the files of the first run before the second run starts."""
    assert blessed.code == 0, blessed.err + blessed.log
    return content(workdir)


@pytest.fixture(scope="module")
def refused(workdir, before):
    assert before
    alone = setting(training__strategy="single", evaluation__baseline="none")
    given = (*FEW, *alone, *setting(gate__min__accuracy=0.999))
    return call("run", workdir, *given, cwd=workdir.parent)


class TestBlessed:
    def test_it_is_blessed_and_leaves_nothing_behind(self, blessed, workdir):
        assert blessed.code == 0, blessed.err
        assert (blessed.answer["status"], blessed.answer["message"]) == ("blessed", "")
        assert blessed.statuses() == dict.fromkeys(
            [*ALL, "export_model", "register_model", "finish"], "done"
        )
        assert blessed.answer["global_step"] == STEPS
        kept = load_config(blessed.folder / "config.json")
        assert (kept.training.steps, kept.gate.min) == (STEPS, {"accuracy": 0.5})
        tasks = {path.parent.name for path in blessed.folder.glob("cluster/*/log.txt")}
        assert tasks == {"chief-0", "ps-0", "worker-0", "worker-1"}
        assert [path.name for path in workdir.parent.iterdir()] == ["runs"]
        assert not list(workdir.rglob("*.part"))
        assert not (blessed.folder / "tmp").exists()
        assert not processes_of(blessed.workdir)

    def test_what_it_has_published_is_whole(self, blessed):
        artifacts = dict(blessed.answer["artifacts"])
        assert storage.read_bytes(artifacts.pop("report"))
        kinds = {name: storage.verify(uri).kind for name, uri in artifacts.items()}
        assert kinds == {name: name for name in kinds}
        assert set(kinds) == {
            "dataset", "validation", "checkpoint", "evaluation", "decision", "model",
            "registration",
        }  # fmt: skip

    def test_each_artifact_and_its_descriptor_went_through_kfp(self, blessed):
        files = {path.name: path for path in blessed.folder.glob("kfp/*/*/*") if path.is_file()}
        files["evaluation"] = files["evaluation_metrics"]
        for name, uri in blessed.answer["artifacts"].items():
            if name == "report":
                continue
            described = json.loads(files[name].read_text(encoding="utf-8"))
            assert (described["kind"], described["uri"]) == (name, uri)
            # On a cluster, KFP copies this file into the pod of every step that uses it.
            assert files[name].stat().st_size < 4096
        made = {}
        for output in blessed.folder.glob("kfp/*/*/executor_output.json"):
            listed = json.loads(output.read_text(encoding="utf-8")).get("artifacts", {})
            made |= {name: each["artifacts"][0]["uri"] for name, each in listed.items()}
        assert {"configuration", "dataset", "roc_curve", "model", "registration"} <= set(made)
        assert [name for name, uri in made.items() if not Path(uri).read_bytes()] == []

    def test_it_is_champion_with_the_metrics_of_the_evaluation(self, blessed, workdir):
        measured = blessed.read("evaluation", "metrics.json")
        baselines = {
            f"baseline_{each['name'].replace(' ', '_')}_accuracy": each["metrics"]["accuracy"]
            for each in measured["baselines"]
        }
        assert min(baselines.values()) > 0.9
        assert {**measured["metrics"], **baselines} == blessed.answer["metrics"]
        assert (measured["split"], measured["global_step"]) == ("test", STEPS)
        assert measured["metrics"]["accuracy"] > 0.7
        decision = blessed.read("decision", "decision.json")
        assert decision["decision"] == "blessed"
        rule, constant = decision["rules"]
        assert (rule["metric"], rule["threshold"], rule["passed"]) == ("accuracy", 0.5, True)
        assert (constant["key"], constant["passed"]) == ("gate.constant", True)
        assert rule["value"] == blessed.answer["metrics"]["accuracy"]
        champion = registry.champion(storage.uri_of(workdir), "digits")
        assert champion.manifest.fields["source"]["uri"] == blessed.answer["artifacts"]["model"]
        lineage = champion.manifest.fields["lineage"]
        assert lineage["metrics"].items() < blessed.answer["metrics"].items()

    def test_the_exported_forms_answer_as_the_model_did(self, blessed):
        parity = blessed.read("model", "parity.json")
        assert set(parity["formats"]) == {"saved_model", "keras"}
        for form in parity["formats"].values():
            assert form["max_difference"] <= form["tolerance"]
        assert list(blessed.path_of("model").glob("serving/digits/*/saved_model.pb"))
        assert (blessed.path_of("model") / "model.keras").is_file()

    def test_the_report_is_below_the_run_and_needs_nothing(self, blessed):
        assert blessed.path_of("report") == blessed.folder / "report.html"
        page = Page((blessed.folder / "report.html").read_text(encoding="utf-8"))
        assert page.verdict == "blessed"
        assert page.heads() == [
            "Test metrics", "Rules of the gate", "Training", "Steps and lineage", "Configuration",
        ]  # fmt: skip
        sources = [value for name, value in page.attributes if name == "src"]
        assert len(sources) == 25, "the worst examples"
        assert all(source.startswith("data:image/png;base64,") for source in sources)

    def test_history_checkpoints_and_tensorboard_have_the_course_of_training(self, blessed):
        path = blessed.folder / "checkpoints" / "history.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [row["global_step"] for row in rows]
        assert steps == sorted(steps)
        assert steps[-1] == STEPS
        validated = [row["global_step"] for row in rows if "validation_accuracy" in row]
        assert validated == [100, 200]
        checkpoints = storage.uri_of(blessed.folder / "checkpoints")
        assert [step for _, step in list_checkpoints(checkpoints)] == [0, 100, 200]
        reader = tf.train.load_checkpoint(str(blessed.path_of("checkpoint") / "variables"))
        names = {name for name in reader.get_variable_to_shape_map() if "global_step" in name}
        assert {int(reader.get_tensor(name)) for name in names} == {STEPS}
        logs = blessed.folder / "checkpoints" / "logs"
        tags = {(name, tag) for name, _, tag, _ in scalars(logs)}
        train, validation = (f"{blessed.folder.name}/{part}" for part in ("train", "validation"))
        assert {(train, name) for name in ("loss", "learning_rate", "steps_per_second")} <= tags
        assert {(validation, name) for name in ("loss", "accuracy")} <= tags
        _, values = hyperparameters(logs, blessed.folder.name)
        assert values["training.steps"] == STEPS

    def test_the_checkpoint_restores_into_a_model_of_one_process(self, blessed, tmp_path):
        dataset, uri = (blessed.answer["artifacts"][name] for name in ("dataset", "checkpoint"))
        spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
        inputs = InputSpec.of(spec.features, spec.inputs, (10,))
        model = models.build(load_config(None).model, inputs, seed=1)
        before = [variable.numpy() for variable in model.variables]
        manifest = restore_model(uri, model, tmp_path)
        assert manifest.fields["strategy"] == "async_parameter_server"
        for variable, old in zip(model.trainable_variables, before, strict=True):
            assert (variable.numpy() != old).any()

    def test_its_progress_and_a_table_of_every_step_went_to_standard_error(self, blessed):
        assert re.search(rf"/{STEPS} \(epoch [\d.]+ of [\d.]+\)  loss ", blessed.err)
        assert "train_model done in " in blessed.err
        assert f"/{STEPS} (epoch " not in blessed.out
        # Only the first row of a step with several stages contains the step's name.
        rows = [line.partition(" done ")[0].split() for line in blessed.err.splitlines()
                if "  done  " in line]  # fmt: skip
        assert [each[-1] for each in rows] == [*ALL, "export_model", "register_model", "finish"]
        assert rows[0] == ["prepare_data", "resolve_config"]

    def test_no_worker_had_the_shards_of_another(self, blessed):
        shards = [
            {path.name for path in blessed.folder.glob(f"cluster/worker-{index}/shards/*.tfrecord")}
            for index in range(2)
        ]
        assert not shards[0] & shards[1]
        assert len(shards[0] | shards[1]) == 8


@pytest.mark.slow
class TestRefused:
    def test_it_is_refused_with_a_reason_and_a_report_and_without_an_export(self, refused):
        assert refused.code == 3, refused.err
        assert refused.answer["status"] == "refused"
        assert refused.statuses() == dict.fromkeys([*ALL, "finish"], "done")
        decision = refused.read("decision", "decision.json")
        assert decision["decision"] == "refused"
        # The model may also have been worse than the champion.
        assert decision["reasons"][0].startswith("Accuracy is 0.")
        assert "; it must be at least 0.999 (gate.min)" in refused.answer["message"]
        assert refused.answer["headline"] == decision["headline"]
        said = [decision["headline"], *(f"- {each}" for each in decision["reasons"])]
        lines = refused.err.splitlines()
        assert lines[lines.index(said[0]) :][: len(said)] == said
        assert lines[-1].endswith("/report.html")
        assert "model" not in refused.answer["artifacts"]
        assert not (refused.folder / "model").exists()
        assert not list(refused.folder.rglob("*.keras"))
        page = Page((refused.folder / "report.html").read_text(encoding="utf-8"))
        assert page.verdict == "refused"
        assert "it must be at least 0.999" in page.text

    def test_it_reuses_the_dataset_and_touched_no_file_that_was_there(
        self, blessed, before, refused
    ):
        assert refused.answer["run_id"] != blessed.answer["run_id"]
        ours, theirs = (each.answer["artifacts"] for each in (refused, blessed))
        assert {name for name in ours if ours[name] == theirs.get(name)} == {"dataset"}
        metrics = {each.step: each.metrics for each in refused.events(StepEnd)}
        assert metrics["prepare_data"]["reused"] is True
        after = content(refused.workdir)
        # Ignore the mark of a dataset's last use, which `flotilla gc` reads.
        kept = {name: each for name, each in before.items() if "/in_use/" not in str(name)}
        assert {name: after.get(name) for name in kept} == kept
        new = [name for name in after if name not in before]
        assert all(name.startswith(f"{refused.folder}/") for name in new)


# The interrupt comes before this step on any machine.
ENDLESS = 10_000_000
LONG = setting(training__steps=ENDLESS, training__checkpoint_every=ENDLESS)
MORE = 40


@pytest.fixture(scope="module")
def interrupted_workdir(tmp_path_factory):
    return tmp_path_factory.mktemp("interrupted") / "my runs"


def until_it_trains(process):
    answer = []
    for line in process.stderr:
        answer.append(line)
        if line.startswith("global step"):
            break
    return answer


@pytest.fixture(scope="module")
def interrupted(interrupted_workdir):
    with calling("run", interrupted_workdir, *LONG, cwd=interrupted_workdir.parent) as process:
        answer = until_it_trains(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    return Called(
        code=process.returncode, out=out, err="".join(answer) + err, workdir=interrupted_workdir
    )


@pytest.fixture(scope="module")
def interrupted_before(interrupted):
    """Return the events of the first start, before the run was resumed."""
    return [*interrupted.events(CheckpointPublished), *interrupted.events(StepEnd)]


@pytest.fixture(scope="module")
def reached(interrupted_before):
    return max(
        event.global_step for event in interrupted_before if isinstance(event, CheckpointPublished)
    )


@pytest.fixture(scope="module")
def resumed(interrupted, interrupted_workdir, reached):
    run_id, dataset = interrupted.answer["run_id"], interrupted.answer["artifacts"]["dataset"]
    steps = setting(training__steps=reached + MORE)
    given = ["--resume", run_id, "--dataset", dataset, *steps]
    return call("train", interrupted_workdir, *given, cwd=interrupted_workdir.parent)


@pytest.mark.slow
def test_an_interrupt_publishes_a_last_checkpoint_and_says_what_to_do_next(interrupted, reached):
    assert interrupted.code == 130, interrupted.err
    answer = interrupted.answer
    assert answer["status"] == "interrupted"
    assert answer["message"].startswith(f"interrupted at global step {reached}; ")
    words, remedy, report = interrupted.err.splitlines()[-3:]
    assert words == f"flotilla: {answer['message']}"
    assert remedy == (
        f"flotilla: resume with: flotilla run --workdir '{interrupted.workdir}' "
        f"--resume {answer['run_id']}"
    )
    assert report.endswith("/report.html")
    assert "Traceback" not in interrupted.err + interrupted.out
    assert reached > 0
    uri = storage.uri_of(interrupted.folder / "checkpoints" / f"step-{reached:08d}")
    assert storage.verify(uri).fields["global_step"] == reached
    assert uri in answer["message"]
    page = Page((interrupted.folder / "report.html").read_text(encoding="utf-8"))
    assert page.verdict == "interrupted"
    assert f"interrupted at global step {reached}" in page.text


@pytest.mark.slow
def test_the_steps_after_it_were_left_out(interrupted, interrupted_before):
    statuses = {each.step: each.status for each in interrupted_before if isinstance(each, StepEnd)}
    done = dict.fromkeys(("resolve_config", "prepare_data", "validate_data", "finish"), "done")
    assert statuses == {**done, "train_model": "interrupted"}
    assert storage.verify(interrupted.answer["artifacts"]["dataset"]).kind == "dataset"


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_there(resumed, interrupted, reached):
    assert resumed.code == 0, resumed.err + resumed.log
    assert resumed.answer["status"] == "done"
    assert resumed.answer["run_id"] == interrupted.answer["run_id"]
    assert resumed.answer["global_step"] == reached + MORE
    assert f"training resumes from global step {reached}" in resumed.err.splitlines()
    first, second = resumed.events(AttemptBegin)
    assert (first.resumed, first.global_step) == (False, 0)
    assert (second.resumed, second.global_step) == (True, reached)
    # The resumed run was given no configuration file, so only the values that were set again
    # differ.
    kept = (resumed.folder / "config.json").read_text(encoding="utf-8")
    assert f'"checkpoint_every": {ENDLESS}' in kept
    # On a given dataset, it prepares none.
    assert resumed.statuses() == {"resolve_config": "done", "train_model": "done"}
    assert set(resumed.answer["artifacts"]) == {"checkpoint"}


@pytest.mark.slow
def test_report_and_cost_count_both_starts_and_the_status_is_that_of_the_last(resumed):
    run_id, root = resumed.answer["run_id"], storage.uri_of(resumed.workdir)
    facts = gather_report.gather_facts("", root, run_id, resumed.folder)
    tries = [each for each in facts["tries"] if each["step"] == "train_model"]
    assert [each["status"] for each in tries] == ["interrupted", "done"]
    assert tries[0]["began"] + tries[0]["seconds"] <= tries[1]["began"]
    trained = next(each for each in facts["steps"] if each["step"] == "train_model")
    assert (trained["status"], trained["tries"]) == ("done", 2)
    assert trained["earlier_seconds"] == tries[0]["seconds"]
    spent = sum(each["seconds"] for each in facts["tries"])
    assert facts["cost"]["seconds_of_all_steps"] == pytest.approx(spent, abs=0.1)
    found = local_status.read_status(resumed.workdir, run_id)
    assert (found.status, found.exit_code) == ("done", 0)


@pytest.mark.slow
def test_no_process_outlives_a_run_that_is_killed(interrupted, interrupted_workdir):
    given = ["--dataset", interrupted.answer["artifacts"]["dataset"], *LONG]
    with calling("train", interrupted_workdir, *given, cwd=interrupted_workdir.parent) as process:
        until_it_trains(process)
        others = [each for each in processes_of(interrupted_workdir) if each.pid != process.pid]
        # There are at least the runner, a step and the cluster's four tasks.
        assert len(others) >= 6
        stopped = next(each for each in others if "/worker-0/" in " ".join(each.cmdline()))
        stopped.send_signal(signal.SIGSTOP)
        process.kill()
        _, alive = psutil.wait_procs(others, timeout=120)
    assert not alive
    assert not processes_of(interrupted_workdir)


MODULE = """
def example(row):
    return {{"x": float(row["x"]) * {factor}, "label": row["label"]}}
"""


@pytest.fixture
def here(tmp_path):
    """Create a folder with rows, and a folder of modules outside the working folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.py").write_text(MODULE.format(factor=2))
    lines = ["x,label", *(f"{number},{'ab'[number % 2]}" for number in range(200))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_edits_during_a_run_do_not_change_it(here):
    source = setting(data__source=here / "rows.csv", data__map="rows:example", data__label="label")
    words = (*source, "--code", str(here / "mine"))
    with calling("prepare", here / "runs", *words, cwd=here) as process:
        # The line that names the bundle is printed before the steps.
        bundle = next(line for line in iter(process.stderr.readline, "") if "/code/" in line)
        (here / "mine" / "rows.py").write_text(MODULE.format(factor="1 / 0"))
        _, err = process.communicate()
    assert process.returncode == 0, err
    uri = bundle.split()[-1]
    root = storage.uri_of(here / "runs")
    assert referred(root) == {storage.name_of(uri)}
    failed = call("prepare", here / "runs", *words, cwd=here)
    assert (failed.code, failed.answer["status"]) == (2, "failed")
    assert failed.statuses()["prepare_data"] == "failed"
    assert failed.answer["message"].startswith("prepare_data: ")
    assert f"flotilla: failed: {failed.answer['message']}" in failed.err.splitlines()
    assert "Traceback" not in failed.err + failed.out
    assert "ZeroDivisionError" in failed.answer["message"]
    assert "(rows.py:3)" in failed.answer["message"]
    first, *_ = failed.events(StepEnd)
    assert first.metrics["code"] != uri


CONFIG = ROOT / "configs" / "digits.yaml"
TRACKED_FEW = [
    f"training.steps={STEPS}", "training.checkpoint_every=100", "training.validate_every=100",
    "training.strategy=single", "evaluation.baseline=none", "gate.min.accuracy=0.5",
]  # fmt: skip


@pytest.fixture
def server(tmp_path, monkeypatch, port):
    made = MlflowServer(tmp_path / "mlflow server", port)
    made.folder.mkdir()
    made.start()
    made.name_in(monkeypatch)
    monkeypatch.delenv(events.VARIABLE, raising=False)
    yield made
    made.kill()


def found(server):
    client = server.client()
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, client.get_run(run.info.run_id)


def steps_of(client, run, name):
    return [each.step for each in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
def test_a_real_run_has_its_parameters_curves_metrics_and_model_in_mlflow(server, tmp_path):
    result = local.run(CONFIG, settings=TRACKED_FEW, workdir=tmp_path / "runs")
    assert result.status == "blessed", result.message
    client, run = found(server)
    assert (run.info.status, run.info.run_name) == ("FINISHED", result.run_id)
    assert run.data.params["training.steps"] == str(STEPS)
    curve = steps_of(client, run, "loss")
    assert curve == sorted(set(curve))
    assert curve[-1] == STEPS
    assert steps_of(client, run, "validation_accuracy") == [100, 200]
    assert run.data.metrics["test_accuracy"] == pytest.approx(result.metrics["accuracy"])
    assert run.data.tags["flotilla.verdict"] == "blessed"
    for step in result.steps:
        assert run.data.tags.get(f"flotilla.{step.step}.uri", "") == step.uri
    version = client.get_model_version_by_alias("digits", "champion")
    assert (version.version, version.run_id) == ("1", run.info.run_id)
    listed = [each.path for each in client.list_artifacts(run.info.run_id, "models/1")]
    assert "models/1/MANIFEST.json" in listed
    assert {each.path for each in client.list_artifacts(run.info.run_id)} >= {
        "data_page.html", "report.html",
    }  # fmt: skip
    (given,) = run.inputs.dataset_inputs
    assert given.dataset.name == "digits"
    with warnings.catch_warnings():
        # The dependencies of MLflow trigger warnings in each other.
        warnings.simplefilter("ignore")
        model = import_module("mlflow.pyfunc").load_model("models:/digits@champion")
        answers = model.predict(model.input_example)
    assert len(answers) == len(model.input_example["image"])
    assert set(answers["prediction"]) <= {str(digit) for digit in range(10)}


@pytest.mark.long
def test_a_server_that_is_killed_in_mid_run_costs_no_run_and_learns_of_it_later(server, tmp_path):
    killed = []

    def kill(event):
        if isinstance(event, Progress) and not killed:
            killed.append(event)
            server.kill()

    workdir = tmp_path / "runs"
    result = local.train(CONFIG, settings=TRACKED_FEW, workdir=workdir, on_event=kill)
    assert (result.status, result.exit_code, result.global_step) == ("done", 0, STEPS)
    assert killed
    server.start()
    resumed = local.train(workdir=workdir, resume=result.run_id)
    assert resumed.status == "done"
    client, run = found(server)
    curve = steps_of(client, run, "loss")
    assert curve == sorted(set(curve))
    assert curve[-1] == STEPS
    assert run.info.status == "FINISHED"
