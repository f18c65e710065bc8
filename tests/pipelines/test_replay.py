"""Tests that a replayed step fails in the same way and writes nothing to the run."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from flotilla.components.records.record import record_stage as in_step
from flotilla.components.records.run_store import Given, digests, record_call
from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines import replay as replays
from flotilla.pipelines.replay import RecordedStep, find, replay
from flotilla.pipelines.runs.kfp_access import Instance
from flotilla.trainer import storage
from flotilla.trainer.config.form import FIELDS, from_form, to_form, to_local_form
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.promotion import lineage, registry
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import FAILED, INTERRUPTED, RunInterruptedError, UserError
from tests.pipelines.called import call, setting
from tests.pipelines.cluster_run import PLANTS, ClusterRun, write_code
from tests.pipelines.gate_run import RUN, prepared, published
from tests.trainer.small_run import small_run

FLOTILLA = Path(sys.executable).with_name("flotilla")


def step_of(arguments, step="train_model", root="s3://b/r", source="", **given):
    said = Given(step=step, began=1.0, arguments=arguments, **given)
    record = StepRecord(step=step, status="failed", began=1.0)
    return RecordedStep(run_id=RUN, stages=(record,), given=said, root=root, source=source or root)


def arguments_of(recorded, *, debug=False):
    return replays.adapt_arguments(recorded, "file:///own", debug=debug)


def trained(*, debug=False, **sections):
    text = parse_config(sections).model_dump_json()
    arguments, remarks = arguments_of(step_of({"config": text, "root": "s3://b/r"}), debug=debug)
    assert arguments["root"] == "file:///own"
    return parse_config(json.loads(arguments["config"])), remarks


class TestArguments:
    def test_a_job_of_a_cluster_runs_as_processes_with_fewer_tasks(self, monkeypatch):
        monkeypatch.setattr(replays.threads, "usable", lambda: 4)
        monkeypatch.setattr(replays, "has_gpus", lambda: False)
        gpus = {"parameter_servers": 5, "gpus_per_worker": 2}
        config, remarks = trained(
            cluster={"launcher": "jobset", "workers": 8, **gpus},
            training={"strategy": "sync_parameter_server", "replicas_to_aggregate": 6},
            data={"shards": 16},
        )
        assert config.cluster.launcher == "local"
        assert (config.cluster.workers, config.cluster.parameter_servers) == (4, 2)
        assert config.training.replicas_to_aggregate == 4
        assert config.cluster.gpus_per_worker == 0
        assert remarks == [
            "training runs as processes on this machine, not as a Kubernetes job",
            "this machine has no GPU, but the run used 2 for each worker",
            "only 4 of 8 workers run here",
            "only 2 of 5 parameter servers run here",
        ]

    def test_a_small_local_cluster_is_as_it_was_but_tells_no_hub(self):
        sections = {"cluster": {"workers": 2}, "registry": {"hub": "http://hub:8080"}}
        config, remarks = trained(**sections)
        assert (config, remarks) == (parse_config({"cluster": {"workers": 2}}), [])

    def test_a_debugger_needs_a_single_process(self):
        config, remarks = trained(debug=True)
        assert config.training.strategy == "single"
        assert remarks == [
            "the debugger needs a single process, so the replay uses the strategy 'single' instead "
            "of 'async_parameter_server'"
        ]

    def test_the_first_step_publishes_below_its_own_root(self):
        settings = {"registry": {"hub": "http://hub:8080"}, "data": {"seed": 5}}
        given = {"storage_root": "s3://b/r", "settings": settings, "name": "digits"}
        found = step_of(given, "prepare_data")
        expected = {**given, "storage_root": "file:///own"}
        expected["settings"] = {**settings, "registry": {"hub": ""}}
        assert arguments_of(found) == (expected, [])
        taken = replace(found.stages[0], metrics={"data_version": "0" * 32})
        arguments, _ = arguments_of(replace(found, stages=(taken,)))
        assert arguments["settings"]["data"] == {"seed": 5, "version": "0" * 32}

    def test_of_a_run_on_this_machine_the_whole_configuration_is_changed(self):
        config = parse_config({"registry": {"hub": "http://hub:8080"}})
        arguments, _ = arguments_of(step_of(to_local_form(config), "prepare_data"))
        assert from_form(arguments) == parse_config({"storage": {"root": "file:///own"}})

    @pytest.mark.parametrize(
        "config", ["{", "[]", 3, None, '{"cluster": 3, "training": {}}', '{"registry": []}']
    )
    def test_a_damaged_configuration_is_one_line(self, config):
        with pytest.raises(UserError, match=r"the configuration of train_model .* is damaged"):
            arguments_of(step_of({"config": config, "root": "s3://b/r"}))

    @pytest.mark.parametrize("query", ["", "?endpoint=http://seaweedfs:9000"])
    def test_a_store_with_another_address_here_is_read_by_it(self, query):
        given = {"dataset": f"minio://bucket/v2/r/datasets/1{query}", "evaluation": "gs://other/e"}
        here = "minio://bucket/v2/r?endpoint=http://localhost:9000"
        root = f"minio://bucket/v2/r{query}"
        found = step_of({**given, "config": "{}"}, "check_gate", root, here)
        arguments, _ = arguments_of(found)
        assert arguments["evaluation"] == "gs://other/e"
        if query:
            own = "minio://bucket/v2/r/datasets/1?endpoint=http://localhost:9000"
            assert arguments["dataset"] == own
        environment = replays._environment(found, Path("/own"), debug=False)
        assert environment["AWS_ENDPOINT_URL"] == "http://localhost:9000"

    def test_what_a_run_of_another_version_was_not_given(self):
        values = {each.name: each.default for each in FIELDS} | {"kfp_run_id": "1"}
        outputs = ("configuration", "dataset", "validation", "page")
        artifacts = {name: {"uri": "s3://b/r", "tree": None} for name in outputs}
        whole = step_of(values, "prepare_data", artifacts=artifacts, version="0.9").given
        replays.require_arguments(whole)
        del values["steps"]
        line = r"needs steps, which Flotilla 0\.9 did not record; replay the run with that version"
        with pytest.raises(UserError, match=line):
            replays.require_arguments(whole)


@pytest.mark.parametrize("is_other", [True, False])
def test_code_that_differs_is_said(tmp_path, monkeypatch, is_other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replayed_code.py").write_text("def model(): ...\n", encoding="utf-8")
    monkeypatch.setattr(lineage, "commit", lambda: "b" * 40)
    config = parse_config({"model": {"name": "replayed_code:model"}}).model_dump_json()
    given = step_of(
        {"config": config},
        version="0.0.1" if is_other else replays.version("kfp-flotilla"),
        commit=("a" if is_other else "b") * 40,
        code={"replayed_code": "other"} if is_other else digests(parse_config(json.loads(config))),
    ).given
    said = replays.code_remark(given)
    assert bool(said) is is_other
    if is_other:
        assert said.startswith("the code differs: version ")
        assert "commit bbbbbbbbbbbb instead of aaaaaaaaaaaa" in said
        assert said.endswith("module replayed_code has changed")
        (tmp_path / "replayed_code.py").unlink()
        assert replays.code_remark(given).endswith("module replayed_code is not found here")


def test_the_first_step_is_given_the_code_that_its_form_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replayed_code.py").write_text("def model(): ...\n", encoding="utf-8")
    config = parse_config({"model": {"name": "replayed_code:model"}})
    for form in (to_form(config), to_local_form(config)):
        assert list(record_call("prepare_data", form).code) == ["replayed_code"]
    assert not record_call("finish", {"settings": {}, "root": ""}).code
    # Modules of a bundle are not looked for here.
    bundled = {"model": {"name": "no_such_module:model"}, "code": f"s3://bucket/r/code/{'a' * 64}"}
    assert digests(parse_config(bundled)) == {}


class TestLookedUp:
    @pytest.fixture
    def root(self, tmp_path):
        return storage.uri_of(tmp_path / "root")

    def looked_up(self, root, folder, **data):
        text = parse_config({"name": "model", "data": data}).model_dump_json()
        found = step_of({"config": text}, "evaluate_model", root)
        return replays._copy_lookups(found, found.given.arguments, folder)

    def test_the_champion_of_now_is_copied(self, root, tmp_path):
        assert self.looked_up(root, tmp_path / "own") == []
        at = storage.join(registry.home(root, "model"), "versions", "000003")
        files = {"a.json": 3, "serving/model/3/saved_model.pb": 0}
        published(tmp_path, at, "model", files, version=3, saved_model="serving/model/3")
        registry.promote(root, "model", 3, after=0, by="me")
        (said,) = self.looked_up(root, tmp_path / "own")
        assert said == "the replay uses the current champion, version 3; the run may use another"
        found = registry.champion(storage.uri_of(tmp_path / "own"), "model")
        assert storage.read_file(found.uri, "a.json") == b"3"
        storage.write_bytes(storage.join(at, "a.json"), b"4")
        (said,) = self.looked_up(root, tmp_path / "another")
        assert said.startswith("the model cannot be compared with the champion: ")

    def test_the_listing_of_the_files_is_copied(self, root, tmp_path):
        uri = storage.join(root, "listings", "0" * 32)
        published(tmp_path, uri, "listing", {"listing.json": 1})
        data = {"source": "s3://b/*.csv", "version": "0" * 32, "label": "y", "dataset": ""}
        assert self.looked_up(root, tmp_path / "own", **data) == []
        own = storage.uri_of(tmp_path / "own")
        assert storage.is_published(storage.join(own, "listings", "0" * 32))


CODE = """
import json


def outer(text):
    width = 3
    return json.loads(text)
"""


class TestDebugger:
    @pytest.fixture
    def failed(self, tmp_path, monkeypatch):
        """Return the error of a step that called user code."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "debugged_code.py").write_text(CODE, encoding="utf-8")
        outer = user_code.find_function("model.name", "debugged_code:outer")
        with pytest.raises(ValueError, match="Expecting") as caught:
            outer("{")
        return caught.value

    @pytest.fixture
    def terminal(self, monkeypatch, capsys):
        """Send debugger commands as standard input; yield a function that reads the output."""
        tracing = sys.gettrace()
        monkeypatch.setattr(sys, "stdin", io.StringIO("p width + 4\nw\nq\n"))
        yield lambda: capsys.readouterr().err
        sys.settrace(tracing)

    def test_it_stops_at_the_line_of_the_user_that_failed(self, failed, terminal):
        replays.post_mortem(ValueError("never raised"))
        assert not terminal()
        replays.post_mortem(failed)
        said = terminal()
        assert "(Pdb) 7" in said
        assert "return json.loads(text)" in said
        assert "decoder.py" not in said

    @pytest.mark.parametrize(
        ("error", "code", "opened"),
        [(UserError("no width"), FAILED, True), (RunInterruptedError("asked"), INTERRUPTED, False)],
    )
    def test_it_opens_for_a_failure_and_not_for_a_request_to_end(  # noqa: PLR0913, PLR0917
        self, tmp_path, monkeypatch, terminal, error, code, opened
    ):
        def called(*_given):
            with in_step("check_gate"):
                raise error

        tree = {"step": "check_gate", "arguments": {}, "artifacts": {}, "debug": True}
        (tmp_path / replays.CALL).write_text(json.dumps(tree), encoding="utf-8")
        monkeypatch.setattr(replays, "_call", called)
        monkeypatch.setattr(sys, "argv", ["replay", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            replays.main()
        assert ended.value.code == code
        assert ("(Pdb)" in terminal()) is opened


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(s3, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    write_code(tmp_path)
    return ClusterRun(s3=s3, folder=tmp_path, small=small)


def replayed(run, step):
    before, lines = run.content(), []
    root = (f"storage.root={run.root}",)
    recorded = find(run.run_id, step, settings=root, workdir=Path("runs"), instance=Instance())
    result = replay(recorded, Path("runs"), on_line=lines.append)
    assert run.content() == before
    return result, lines


def bare(error):
    """Return an error message without its task and its file system path."""
    return re.sub(r"[^\s(]*/", "", error.partition(" (chief-0, log ")[0])


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("name", PLANTS)
def test_each_planted_failure_is_seen_again(run, name):
    record = PLANTS[name](run)
    assert record.status == "failed" or record.metrics["decision"] == "refused", record
    result, _ = replayed(run, record.step)
    assert result.replayed.status == record.status
    if record.error:
        assert bare(result.replayed.error) in bare(record.error)
    else:
        assert result.replayed.metrics == record.metrics


@pytest.mark.slow
@pytest.mark.cluster
def test_training_that_has_succeeded_runs_with_a_cluster_of_its_own(run):
    run.run_id = str(uuid4())
    training = {"steps": 20, "batch_size": 8, "checkpoint_every": 10, "validate_every": 0}
    record = run.trained(training=training, cluster={"workers": 1}, data={"shards": 2})
    assert (record.status, record.metrics["global_step"]) == ("done", 20), record.error
    result, lines = replayed(run, "train_model")
    assert lines[0].startswith(f"replaying train_model of {run.run_id} in ")
    assert result.replayed.metrics["global_step"] == 20
    # With one worker, updates have a fixed order.
    assert result.replayed.metrics["loss"] == pytest.approx(record.metrics["loss"], rel=1e-5)
    written = (result.folder / "storage" / run.run_id / "checkpoints").glob("step-*")
    assert {each.name for each in written} >= {"step-00000010", "step-00000020"} or list(written)


@pytest.mark.slow
@pytest.mark.cluster
def test_the_command_says_how_it_ended_and_how_it_had(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = storage.uri_of(tmp_path / "root")
    prepared(tmp_path, root)
    # Files added later do not belong to the run.
    (tmp_path / "in" / "b.csv").write_text("x,c,y\n1,2,a\n")
    before = {str(each): each.read_bytes() for each in Path("root").rglob("*") if each.is_file()}
    words = [FLOTILLA, "replay", RUN, "validate_data", "--set", f"storage.root={root}", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert (answer["step"], answer["status"]) == ("prepare_data", "done")
    assert list(answer["stages"]) == ["resolve_config", "prepare_data", "validate_data"]
    for each in answer["stages"].values():
        assert each["recorded"] == each["here"]
    assert answer["stages"]["validate_data"]["here"]["metrics"]["decision"] == "refused"
    assert "validate_data is a stage of prepare_data, which is replayed as a whole" in ended.stderr
    for where in ("in the run", "in the replay"):
        assert re.search(rf"validate_data {where}: done: .*'c'", ended.stderr), ended.stderr
    assert any((tmp_path / answer["folder"] / "storage" / RUN / "validation").iterdir())
    now = {str(each): each.read_bytes() for each in Path("root").rglob("*") if each.is_file()}
    assert now == before


BROKEN = """
def example(row):
    width = 3
    return {"x": float(row["x"]) / (width - 3), "label": row["label"]}
"""
FIXED = BROKEN.replace("(width - 3)", "width")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_a_run_with_a_bundle_is_debugged_with_its_modules_and_not_those_of_the_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rows.py").write_text(BROKEN)
    lines = ["x,label", *(f"{number},{'ab'[number % 2]}" for number in range(60))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    data = {"data__map": "rows:example", "data__label": "label"}
    source = setting(data__source=tmp_path / "rows.csv", **data)
    failed = call("prepare", tmp_path / "runs", *source, "--code", "mine", cwd=tmp_path)
    assert "(rows.py:4)" in failed.answer["message"]
    # One copy is in the command's folder, and one in the bundle's source folder.
    for folder in (tmp_path, tmp_path / "mine"):
        (folder / "rows.py").write_text(FIXED)
    words = [FLOTILLA, "replay", failed.answer["run_id"], "prepare_data", "--pdb", "--json"]
    ended = subprocess.run(
        words, cwd=tmp_path, input="p width + 40\nw\nq\n", capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["status"] == "failed"
    assert "ZeroDivisionError: float division by zero (rows.py:4)" in answer["message"]
    assert not [line for line in answer["remarks"] if "rows" in line]
    assert "(Pdb) 43" in ended.stderr
    assert '-> return {"x": float(row["x"]) / (width - 3)' in ended.stderr
