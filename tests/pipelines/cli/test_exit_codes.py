"""Tests that every command uses the documented exit codes and prints a JSON object."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from docs.build.reference import flat
from flotilla.pipelines.cli import app
from flotilla.pipelines.predict import Prediction
from flotilla.pipelines.replay import ReplayResult
from flotilla.pipelines.runs.control import Page
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.pipelines.runs.submission import Version
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import Contents
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime import errors
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError
from tests.pipelines.conftest import register_models
from tests.pipelines.step_events import ended, judged, write
from tests.trainer.sweeps.test_sweep import a_sweep

DONE, FAILED, USAGE = errors.DONE, errors.FAILED, errors.USAGE
REFUSED, INTERRUPTED = errors.REFUSED, errors.INTERRUPTED
RUNS = ["digits-20260101-000000-aaaa", "digits-20260102-000000-bbbb"]
TYPO = "--set training.stepz=3"
ENDPOINT = "--endpoint http://127.0.0.1:9"


@dataclass(frozen=True, kw_only=True)
class Row:
    """How a command is called, and how a test controls its outcome.

    Attributes:
        words: arguments of a successful call.
        mistake: arguments that contain a user error.
        calls: the function that does the work; a test makes it raise an error.
        returns: what that function returns instead of working, if other tests cover its work.
        also: other names that are replaced.
    """

    words: str = ""
    mistake: str
    calls: str
    returns: Any = ...
    also: tuple[tuple[str, Any], ...] = ()


def result_of(status: str, code: int) -> RunResult:
    return RunResult(run_id=RUNS[0], status=status, exit_code=code, message="", steps=())


def returning(value: object) -> Any:
    return lambda *_given, **_named: value


VERSION = Version(pipeline="digits", pipeline_id="p", name="v1", version_id="v", spec=None)
LOCAL_RUN = SimpleNamespace(
    run_id=RUNS[0], folder=Path("runs"), bundle=None, written=None, config=parse_config({}),
    state=None,
)  # fmt: skip
SWEEP = SimpleNamespace(sweep=a_sweep(), folder=Path("runs"), close=lambda: None)
LOCAL = {
    "mistake": TYPO,
    "calls": "flotilla.pipelines.runs.local.execute",
    "returns": result_of("done", DONE),
    "also": (("flotilla.pipelines.runs.local.start", LOCAL_RUN),),
}
SCHEDULED = SimpleNamespace(
    remarks=(),
    name="n", action="created", timing="daily", version=VERSION, existed=False, removed=0,
    schedule_id="s", next="",
)  # fmt: skip


def replay_of(status: str, code: int) -> ReplayResult:
    stages = (ended("train_model", status, code),)
    return ReplayResult(stages=stages, is_killed=False, folder=Path("runs"), remarks=())


ROWS = {
    "check": Row(mistake=TYPO, calls="flotilla.trainer.preflight.check.check",
        returns=SimpleNamespace(found={}, notes=())),
    "doctor": Row(mistake=TYPO, calls="flotilla.pipelines.doctor.checks.checks", returns=[]),
    "run": Row(**LOCAL),
    "init": Row(words="in.csv --label b", mistake="in.csv --label c",
        calls="flotilla.trainer.preflight.proposal.Proposal.text", returns=""),
    "prepare": Row(**LOCAL),
    "train": Row(**LOCAL),
    "predict": Row(words="digits in.csv -o out.csv", mistake="digits -o out.csv",
        calls="flotilla.pipelines.predict.predict",
        returns=Prediction(model="m", output="out.csv", rows=1)),
    "sweep": Row(mistake="--set training.stepz=1,2",
        calls="flotilla.pipelines.sweeps.local.execute", returns=result_of("done", DONE),
        also=(("flotilla.pipelines.sweeps.local.begin", SWEEP),)),
    "compile": Row(mistake="--image no:such:image", calls="flotilla.pipelines.compile.compile_all",
        returns={}),
    "configs": Row(mistake="digitz", calls="flotilla.pipelines.configs.list_examples"),
    "compare": Row(words=" ".join(RUNS), mistake="absent gone",
        calls="flotilla.pipelines.runs.control.compare"),
    "gc": Row(mistake="--dry-run", calls="flotilla.pipelines.retention.removal.collect"),
    "manifest": Row(mistake=TYPO, calls="flotilla.components.launchers.render_job"),
    "upload": Row(words=ENDPOINT, mistake="", calls="flotilla.pipelines.runs.submission.upload",
        returns=SimpleNamespace(version=VERSION, created=True, page=""),
        also=(("flotilla.pipelines.compile.load_package", SimpleNamespace(image="")),
              ("flotilla.pipelines.runs.submission.find_default", VERSION))),
    "submit": Row(words=ENDPOINT, mistake=f"{ENDPOINT} {TYPO}",
        calls="flotilla.pipelines.runs.submission.start",
        returns=SimpleNamespace(run_id="r", page="", version=VERSION),
        also=(("flotilla.pipelines.runs.kfp_client.connect", None),)),
    "schedule": Row(words=f"{ENDPOINT} --every 6h", mistake=f"{ENDPOINT} --every soon",
        calls="flotilla.pipelines.runs.schedule.put_schedule", returns=SCHEDULED),
    "reschedule": Row(words=f"nightly {ENDPOINT}", mistake=f"nightly {ENDPOINT} --image 'a b'",
        calls="flotilla.pipelines.runs.schedule.reschedule", returns=SCHEDULED),
    "unschedule": Row(words=f"nightly {ENDPOINT}", mistake="nightly",
        calls="flotilla.pipelines.runs.schedule.unschedule", returns=1),
    "runs": Row(mistake="--experiment digits", calls="flotilla.pipelines.runs.control.list_local"),
    "status": Row(words=RUNS[0], mistake="absent", calls="flotilla.pipelines.runs.control.status"),
    "logs": Row(words=RUNS[0], mistake="absent", calls="flotilla.pipelines.runs.control.logs"),
    "cancel": Row(words=RUNS[0], mistake="absent", calls="flotilla.pipelines.runs.control.cancel"),
    "open": Row(words=RUNS[0], mistake="absent", calls="flotilla.pipelines.runs.control.find_page",
        returns=Page(run_id=RUNS[0], url="https://ui.example.com"),
        also=(("flotilla.pipelines.cli.runs.open_page", True),)),
    "replay": Row(words=f"{RUNS[0]} train_model", mistake="absent train_model",
        calls="flotilla.pipelines.replay.replay", returns=replay_of("done", DONE),
        also=(("flotilla.pipelines.replay.find",
               SimpleNamespace(step="train_model", stages=(), run_id=RUNS[0])),)),
    "completion": Row(words="zsh", mistake="tcsh",
        calls="flotilla.pipelines.cli.completion.get_completion_script"),
    "models list": Row(mistake="digitz", calls="flotilla.pipelines.models.list_models"),
    "models show": Row(words="digits", mistake="digitz", calls="flotilla.pipelines.models.show"),
    "models promote": Row(words="digits 1", mistake="digits 9",
        calls="flotilla.pipelines.models.promote"),
    "models rollback": Row(words="digits", mistake="digitz",
        calls="flotilla.pipelines.models.rollback", returns=SimpleNamespace(version=1, number=3)),
    "checkpoint show": Row(words="file:///checkpoints", mistake="absent",
        calls="flotilla.trainer.checkpoints.index.contents",
        returns=Contents(uri="u", global_step=1, created="", bytes=1, parts=(1,), variables={})),
}  # fmt: skip
# Commands that end with `refused` if the data, the model or all trials are refused.
JUDGING = {
    **dict.fromkeys(("run", "prepare", "train", "sweep"), result_of("refused", REFUSED)),
    "replay": replay_of("refused", REFUSED),
}
COMMANDS = [name for name, _ in flat(typer.main.get_command(app.app).commands)]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Return a folder with two runs and two models, which takes long to write."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "in.csv").write_text("a,b\n1,x\n2,y\n")
    runs = folder / "runs"
    for run in RUNS:
        (runs / run).mkdir(parents=True)
        (runs / run / "config.json").write_text(parse_config({}).model_dump_json())
        (runs / run / "pipeline.log").write_text("")
        write(runs / run, judged("blessed"))
    register_models(storage.uri_of(runs), folder, 2, champions=2)
    return folder


@pytest.fixture
def called(known, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("KF_PIPELINES_ENDPOINT", "KFP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    shutil.copy(known / "in.csv", tmp_path)
    shutil.copytree(known / "runs", tmp_path / "runs")

    def call(name, words):
        return (app.call([*name.split(), *words.split()]), *capsys.readouterr())

    return call


@pytest.fixture
def ends(monkeypatch, called):
    """Return a function that calls a command with a given outcome, without and with `--json`."""

    def end(name, words, code, does=None):
        row = ROWS[name]
        replaced = [(where, returning(value)) for where, value in row.also]
        if does is None and row.returns is not ...:
            does = returning(row.returns)
        with monkeypatch.context() as patch:
            for where, value in [*replaced, *([(row.calls, does)] if does else [])]:
                patch.setattr(where, value)
            found, out, err = called(name, words)
            assert found == code, err
            if code in (USAGE, FAILED, INTERRUPTED) and name != "doctor":
                assert (out, err.splitlines()[-1][:10]) == ("", "flotilla: ")
            found, out, err = called(name, f"{words} --json")
        assert (found, out.count("\n")) == (code, 1), err
        answer = json.loads(out, parse_constant=pytest.fail)
        known = {FAILED: "failed", USAGE: "failed", INTERRUPTED: "interrupted", REFUSED: "refused"}
        assert answer["status"] == known.get(code, answer["status"])
        assert code == DONE or answer["status"] not in ("done", "blessed")
        return answer["message"]

    return end


def raising(error):
    def called(*_given, **_named):
        raise error

    return called


def test_every_command_has_a_row():
    assert set(ROWS) == set(COMMANDS)
    assert set(errors.EXIT_CODES) == {DONE, FAILED, USAGE, REFUSED, INTERRUPTED}


@pytest.mark.parametrize("name", ROWS)
def test_each_end_of_a_command_has_its_code(ends, called, name):
    words = ROWS[name].words
    code, out, err = called(name, f"{ROWS[name].mistake} --json")
    assert (code, out.count("\n")) == (USAGE, 1), err
    assert json.loads(out)["status"] == "failed"
    message = ends(name, f"{words} --nonsense", USAGE)
    assert message.startswith("No such option: --nonsense")
    assert message.endswith(f"; see `flotilla {name} --help`")
    full = UserError("the disk is full")
    assert ends(name, words, FAILED, raising(full)).endswith("the disk is full")
    for error in (KeyboardInterrupt(), RunInterruptedError("interrupted")):
        assert ends(name, words, INTERRUPTED, raising(error)).startswith("interrupted")
    if name in JUDGING:
        ends(name, words, REFUSED, returning(JUDGING[name]))
    ends(name, words, DONE)
