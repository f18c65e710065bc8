"""Tests that the public API is cheap to import and works in any thread or event loop."""

import asyncio
import inspect
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError

import pytest

import flotilla
from flotilla import Instance, follow, logs, prepare, run, status, submit, train
from flotilla.pipelines.runs.local import RunOptions, configuration
from flotilla.trainer import events
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import RunBegin
from flotilla.trainer.runtime.errors import ConfigError
from tests.conftest import ROOT
from tests.docs.markdown import read

HEAVY = ("kfp", "numpy", "tensorflow", "rich", "typer", "flotilla.pipelines.cli")
BLOCKS = read(ROOT / "docs" / "how-to" / "python-api.md", ROOT).of("python")
WHOLE_RUN, STAGES, EVENTS, THREAD, REMOTE = (block.text for block in BLOCKS)
COMMANDS = (
    "run", "train", "prepare", "evaluate", "predict", "sweep", "compare", "models", "submit",
    "schedule", "status", "cancel", "Config",
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a new folder that contains the default configuration."""
    (tmp_path / "configs").mkdir()
    default = ROOT / "configs" / "digits.yaml"
    (tmp_path / "configs" / "digits.yaml").write_bytes(default.read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def broken(here, monkeypatch):
    """Let local runs fail within a second, because their runner cannot start."""
    (here / "kfp.py").write_text("raise ImportError('no KFP here')")
    monkeypatch.setenv("PYTHONPATH", str(here))
    return here


def test_every_public_name_is_what_it_says_and_every_function_has_an_example():
    assert set(COMMANDS) <= set(flotilla.__all__) <= set(dir(flotilla))
    assert "os" not in dir(flotilla)
    for name in flotilla.__all__:
        assert getattr(flotilla, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        flotilla.runn  # noqa: B018
    every = [getattr(flotilla, name) for name in flotilla.__all__]
    every += [getattr(flotilla.models, name) for name in flotilla.models.__all__]
    functions = [each for each in every if inspect.isfunction(each)]
    assert len(functions) == 17
    assert [each.__name__ for each in functions if "Example:\n" not in (each.__doc__ or "")] == []


def test_nothing_heavy_is_loaded():
    heavy = {*HEAVY, "pydantic", "yaml", "flotilla.trainer", "flotilla.pipelines"}
    code = (
        f"import sys, flotilla; print({heavy!r} & sys.modules.keys())\n"
        "for name in flotilla.__all__: getattr(flotilla, name)\n"
        "print('tensorflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["set()", "False"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run("no/such.yaml"), "cannot read the configuration no/such.yaml"),
        (lambda: run(settings="training.steps=5"), "'training.steps=5' is neither a mapping"),
        (lambda: run(settings={"training.steps": "many"}), "training.steps: 'many' is not allowed"),
        (lambda: run(training={"step": 5}), "training.step: no such key; did you mean 'steps'"),
        (lambda: run(steps=5), "steps: no such key; did you mean 'training.steps'"),
        (lambda: flotilla.sweep(search={"training.steps": 5}), "5 is neither a list of values"),
        (lambda: flotilla.predict("m", []), "INPUT is missing: give files"),
        (lambda: flotilla.compare(["one"]), "at least two different runs"),
        (lambda: flotilla.models.show("absent"), "no model 'absent'"),
        (lambda: flotilla.evaluate("absent"), "no run 'absent' below runs"),
        (lambda: train(settings=["training.step=5"]), "training.step: no such key"),
        (lambda: prepare(workdir="configs/digits.yaml"), "choose another --workdir"),
        (lambda: run(resume=""), "no run '' below runs"),
        (lambda: run(resume="digits-1"), "no run 'digits-1' below runs"),
        (lambda: RunOptions(pipeline="tune"), "pipeline 'tune' is not one of run, prepare, train"),
        (lambda: RunOptions(dataset="file:///d"), "dataset 'file:///d': only the pipeline `train`"),
        (lambda: submit(file="p.yaml", version="v"), "leave one out"),
        (lambda: follow("x", instance=Instance(endpoint="ftp://x")), "endpoint 'ftp://x' is not"),
    ],
)
def test_a_bad_value_is_named_before_anything_starts(here, call, message):
    with pytest.raises(ConfigError, match=message):
        call()
    assert not (here / "runs").exists()


def test_settings_are_laid_over_a_configuration(here):
    given = Config(name="mine")
    found = configuration(given, ["training.steps=7"])
    assert (found.name, found.training.steps) == ("mine", 7)
    assert configuration(given, []) == given
    assert configuration({"name": "mine", "training": {"steps": 7}}, []) == found
    assert configuration(here / "configs" / "digits.yaml", []) == configuration(None, [])


def test_a_run_works_in_a_thread_and_is_resumed(broken):
    found, seen, workdir = [], [], broken / "work"
    given = {"workdir": workdir, "training": {"steps": 7}, "on_event": seen.append}
    thread = threading.Thread(target=lambda: found.append(train(**given)))
    thread.start()
    thread.join()
    [result] = found
    assert (result.status, result.exit_code, result.steps) == ("failed", 1, ())
    assert "no KFP here" in (result.folder / "pipeline.log").read_text()
    assert seen == [RunBegin(run_id=result.run_id, number=1)]
    assert status(result.run_id, workdir=workdir).status == "failed"
    assert (result.metrics, result.artifacts, result.global_step) == ({}, {}, None)
    assert run(workdir=workdir, resume=result.run_id).run_id == result.run_id
    begun = list(events.read(result.folder / "events.jsonl"))
    assert begun == [RunBegin(run_id=result.run_id, number=number) for number in (1, 2)]
    assert configuration(result.folder / "config.json", []).training.steps == 7


def test_a_run_works_in_a_running_event_loop(broken, capsys):
    async def cell():
        return run(workdir=broken / "work")

    result = asyncio.run(cell())
    assert result.status == "failed"
    assert result.folder == broken / "work" / result.run_id
    assert tuple(capsys.readouterr()) == ("", "")
    assert repr(result) == f"RunResult({result.run_id} failed)"
    with pytest.raises(FrozenInstanceError):
        result.status = "done"


@pytest.mark.usefixtures("uploaded")
def test_the_code_for_an_instance_runs(instance, here, monkeypatch, capsys):
    assert here.is_dir()
    done = {"metrics": {"global_step": 200}}

    def begin(workflow, run):
        run["state"] = "RUNNING"
        workflow.begin("train_model")
        workflow.write("train_model", "a line of training\n")

    def end(workflow, run):
        workflow.end("train_model", **done)
        run["state"] = "SUCCEEDED"

    # The first request looks up the run by its ID.
    instance.store.play = [lambda _workflow, _run: None, begin, end]
    names = {}
    exec(compile(REMOTE.replace("http://localhost:8888", instance.url), "guide", "exec"), names)
    assert names["result"].run_id == names["submitted"].run_id
    assert names["result"].global_step == 200
    assert names["submitted"].page in names["result"].page
    assert names["submitted"].page in names["submitted"]._repr_html_()
    out, err = capsys.readouterr()
    assert "{'train_model': 'RUNNING'}" in out
    assert "a line of training" in out
    assert err == ""
    found = status(names["submitted"].run_id, instance=Instance(endpoint=instance.url))
    assert found.status == names["result"].status
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", instance.url)
    lines = []
    logs(found.run_id, on_line=lines.append)
    assert (lines[0].label, lines[0].text) == ("train_model", "a line of training")


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_code_that_cancels_a_run_in_a_thread_runs(here, capsys):
    names = {}
    exec(compile(THREAD, "guide", "exec"), names)
    found = status(names["run_ids"][0], workdir=here / "runs")
    assert (found.status, found.exit_code) == ("interrupted", 130)
    assert "interrupted at global step" in found.message
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("here")
def test_the_code_that_runs_and_trains_runs(capsys):
    names = {}
    exec(compile(WHOLE_RUN, "guide", "exec"), names)
    assert (names["result"].status, names["result"].exit_code) == ("blessed", 0)
    assert names["result"].metrics["accuracy"] > 0.9
    assert names["result"].artifacts["model"].startswith("file://")
    exec(compile(STAGES, "guide", "exec"), names)
    assert names["result"].global_step == 200
    exec(compile(EVENTS, "guide", "exec"), names)
    out, err = capsys.readouterr()
    assert "step 200 of 200, loss " in out
    assert err == ""
