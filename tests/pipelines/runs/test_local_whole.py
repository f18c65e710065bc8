"""`flotilla run`, whole and real: digits through a cluster of processes, blessed and refused."""

import json
from pathlib import Path

import pytest

from tests.pipelines.called import call, content, processes_of, setting
from tests.trainer.page import Page
from trainer import storage
from trainer.config.load import load_config
from trainer.events import StepEnd
from trainer.promotion import registry

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
    return call("run", workdir, *FEW, *setting(gate__min__accuracy=0.5), cwd=workdir.parent)


@pytest.fixture(scope="module")
def before(workdir, blessed):
    """What the first run has left, before the second one."""
    assert blessed.code == 0, blessed.err + blessed.log
    return content(workdir)


@pytest.fixture(scope="module")
def refused(workdir, before):
    assert before
    return call("run", workdir, *FEW, *setting(gate__min__accuracy=0.999), cwd=workdir.parent)


class TestBlessed:
    def test_it_is_blessed(self, blessed):
        assert blessed.code == 0, blessed.err
        assert (blessed.answer["status"], blessed.answer["message"]) == ("blessed", "")
        assert blessed.statuses() == dict.fromkeys(
            [*ALL, "export_model", "register_model", "finish"], "done"
        )

    def test_every_update_was_applied(self, blessed):
        assert blessed.answer["global_step"] == STEPS

    def test_what_it_has_published_is_whole(self, blessed):
        artifacts = dict(blessed.answer["artifacts"])
        assert storage.read_bytes(artifacts.pop("report"))
        kinds = {name: storage.verify(uri).kind for name, uri in artifacts.items()}
        assert kinds == {name: name for name in kinds}
        assert set(kinds) == {
            "dataset", "validation", "checkpoint", "evaluation", "decision", "model",
            "registration",
        }  # fmt: skip

    def test_a_descriptor_of_each_went_through_kfp(self, blessed):
        files = {path.name: path for path in blessed.folder.glob("kfp/*/*/*") if path.is_file()}
        files["evaluation"] = files["evaluation_metrics"]
        for name, uri in blessed.answer["artifacts"].items():
            if name == "report":
                continue
            described = json.loads(files[name].read_text(encoding="utf-8"))
            assert (described["kind"], described["uri"]) == (name, uri)
            # On a cluster, KFP copies it into the pod of every step that takes it.
            assert files[name].stat().st_size < 4096

    def test_each_artifact_of_kfp_has_something_at_its_uri(self, blessed):
        made = {}
        for output in blessed.folder.glob("kfp/*/*/executor_output.json"):
            listed = json.loads(output.read_text(encoding="utf-8")).get("artifacts", {})
            made |= {name: each["artifacts"][0]["uri"] for name, each in listed.items()}
        assert {"configuration", "dataset", "roc_curve", "model", "registration"} <= set(made)
        assert [name for name, uri in made.items() if not Path(uri).read_bytes()] == []

    def test_it_is_champion(self, blessed, workdir):
        champion = registry.champion(storage.uri_of(workdir), "digits")
        assert champion.manifest.fields["source"]["uri"] == blessed.answer["artifacts"]["model"]
        assert champion.manifest.fields["lineage"]["metrics"] == blessed.answer["metrics"]

    def test_the_metrics_are_those_of_the_evaluation(self, blessed):
        measured = blessed.read("evaluation", "metrics.json")
        assert measured["metrics"] == blessed.answer["metrics"]
        assert measured["split"] == "test"
        assert measured["global_step"] == STEPS
        # Far above chance, after a few seconds of training.
        assert measured["metrics"]["accuracy"] > 0.7

    def test_the_decision_says_why(self, blessed):
        decision = blessed.read("decision", "decision.json")
        assert decision["decision"] == "blessed"
        (rule,) = decision["rules"]
        assert (rule["metric"], rule["threshold"], rule["passed"]) == ("accuracy", 0.5, True)
        assert rule["value"] == blessed.answer["metrics"]["accuracy"]

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
        assert page.words[1] == "blessed"
        assert page.heads() == [
            "Test metrics", "Rules of the gate", "Training", "Steps", "Configuration",
        ]  # fmt: skip
        sources = [value for name, value in page.attributes if name == "src"]
        assert len(sources) == 25, "the worst examples"
        assert all(source.startswith("data:image/png;base64,") for source in sources)

    def test_the_history_has_the_course_of_training(self, blessed):
        path = blessed.folder / "checkpoints" / "history.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [row["global_step"] for row in rows]
        assert steps == sorted(steps)
        assert steps[-1] == STEPS
        validated = [row["global_step"] for row in rows if "validation_accuracy" in row]
        assert validated == [100, 200]

    def test_its_progress_went_to_standard_error(self, blessed):
        assert f"/{STEPS}  loss " in blessed.err
        assert "train_model done in " in blessed.err
        assert "loss" not in blessed.out.splitlines()[0]

    def test_the_table_has_every_step(self, blessed):
        rows = [line.split()[:2] for line in blessed.out.splitlines() if " done " in line]
        assert rows == [
            [step, "done"] for step in [*ALL, "export_model", "register_model", "finish"]
        ]

    def test_every_task_had_a_folder_and_a_log(self, blessed):
        tasks = {path.parent.name for path in blessed.folder.glob("cluster/*/log.txt")}
        assert tasks == {"chief-0", "ps-0", "worker-0", "worker-1"}

    def test_no_worker_had_the_shards_of_another(self, blessed):
        shards = [
            {path.name for path in blessed.folder.glob(f"cluster/worker-{index}/shards/*.tfrecord")}
            for index in range(2)
        ]
        assert not shards[0] & shards[1]
        assert len(shards[0] | shards[1]) == 8

    def test_the_configuration_is_kept(self, blessed):
        kept = load_config(blessed.folder / "config.json")
        assert (kept.training.steps, kept.gate.min) == (STEPS, {"accuracy": 0.5})

    def test_nothing_is_next_to_the_workdir(self, blessed, workdir):
        assert [path.name for path in workdir.parent.iterdir()] == ["runs"]
        assert not list(workdir.rglob("*.part"))
        assert not (blessed.folder / "tmp").exists()

    def test_no_process_is_left(self, blessed):
        assert not processes_of(blessed.workdir)


@pytest.mark.slow
class TestRefused:
    def test_it_is_refused(self, refused):
        assert refused.code == 3, refused.err
        assert refused.answer["status"] == "refused"
        assert refused.statuses() == dict.fromkeys([*ALL, "finish"], "done")

    def test_the_decision_says_why(self, refused):
        decision = refused.read("decision", "decision.json")
        assert decision["decision"] == "refused"
        # It may have been worse than the champion too.
        reason = decision["reasons"][0]
        accuracy = refused.answer["metrics"]["accuracy"]
        assert reason == f"accuracy {accuracy!r} is below gate.min 0.999"
        assert refused.answer["message"] == "; ".join(decision["reasons"])
        assert f"flotilla: refused: {refused.answer['message']}" in refused.err.splitlines()

    def test_nothing_is_exported(self, refused):
        assert "model" not in refused.answer["artifacts"]
        assert not (refused.folder / "model").exists()
        assert not list(refused.folder.rglob("*.keras"))

    def test_there_is_a_report_all_the_same(self, refused):
        page = Page((refused.folder / "report.html").read_text(encoding="utf-8"))
        assert page.words[1] == "refused"
        assert "it has to be at least 0.999" in page.text

    def test_it_has_an_id_of_its_own(self, blessed, refused):
        assert refused.answer["run_id"] != blessed.answer["run_id"]
        others = {key for key in blessed.answer["artifacts"] if key in refused.answer["artifacts"]}
        others.remove("dataset")
        for name in others:
            assert refused.answer["artifacts"][name] != blessed.answer["artifacts"][name]

    def test_it_reuses_the_dataset(self, blessed, refused):
        assert refused.answer["artifacts"]["dataset"] == blessed.answer["artifacts"]["dataset"]
        metrics = {each.step: each.metrics for each in refused.events(StepEnd)}
        assert metrics["prepare_data"]["reused"] is True

    def test_it_touched_no_file_that_was_there(self, before, refused):
        after = content(refused.workdir)
        # All but the mark of when a dataset was used last, by which `flotilla gc` goes.
        kept = {name: each for name, each in before.items() if "/in_use/" not in str(name)}
        assert {name: after.get(name) for name in kept} == kept
        new = [name for name in after if name not in before]
        assert all(name.startswith(f"{refused.folder}/") for name in new)
