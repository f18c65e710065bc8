"""Tests a local sweep: the runs that it starts, the files that it keeps, and how it resumes."""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines.models import list_models
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.pipelines.sweeps import SweepOptions, local
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.sweeps import study
from flotilla.trainer.sweeps.sweep import make_table
from tests.pipelines.called import call

ROOT = Path(__file__).parents[3]
NINE = ("training.optimizer.learning_rate=0.01,0.003,0.001", "training.batch_size=16,64,256")


class Machine:
    """Replaces the processes of runs: ends each run as configured, and records each start."""

    def __init__(self):
        self.begun = []
        self.ends = {}
        self.values = {}
        self.main_metric = ""
        self.promotion = RunResult(status="blessed", exit_code=0, message="", steps=())

    def __call__(self, run, pipeline, _extra, _on_event=None):
        os.close(run.lock)
        number = int(run.run_id.split("-")[1].removeprefix("t"))
        self.begun.append((pipeline, number, run.config.training.steps))
        if pipeline == "run":
            return self.promotion
        end = self.ends.get(number)
        if ended := end(run) if callable(end) else end:
            return ended
        value = self.values.get(number, float(number))
        metrics = {"validation_loss": value, f"validation_{self.main_metric or 'loss'}": value}
        step = StepRecord(
            step="train_model",
            status="done",
            began=0.0,
            ended=1.0,
            metrics=metrics,
            main_metric=self.main_metric,
            better="higher" if self.main_metric else "",
            uri="file:///c",
        )
        return RunResult(status="done", exit_code=0, message="", steps=(step,))


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(local.local, "execute", made)
    return made


def planned(workdir):
    return local.begin(SweepOptions(config=Config(), settings=NINE), workdir, None)


def swept(workdir, *, parallel=1, **named):
    options = SweepOptions(config=Config(), **{"settings": NINE, **named})
    begun = local.begin(options, workdir, None)
    return executed(begun, parallel)


def resumed(sweep_id, workdir):
    return executed(local.begin(SweepOptions(), workdir, sweep_id), 1)


def executed(begun, parallel):
    try:
        result = local.execute(begun, parallel)
    finally:
        begun.close()
    return SimpleNamespace(
        status=result.status, exit_code=result.exit_code, message=result.message, sweep=begun.sweep
    )


def failed(message):
    return RunResult(status="failed", exit_code=1, message=message, steps=())


@pytest.mark.parametrize("parallel", [1, 4])
def test_of_nine_trials_the_best_alone_is_promoted_once(machine, tmp_path, parallel):
    machine.values[5] = 0.5
    result = swept(tmp_path, parallel=parallel)
    assert (result.status, result.exit_code) == ("blessed", 0)
    assert sorted(machine.begun[:9]) == [("train", number, 1500) for number in range(1, 10)]
    assert machine.begun[9:] == [("run", 5, 1500)]
    kept = study.read(tmp_path / result.sweep.sweep_id)
    assert (kept.best, kept.verdict) == (5, "blessed")
    assert kept == result.sweep
    html = (tmp_path / result.sweep.sweep_id / "sweep.html").read_text(encoding="utf-8")
    assert "Trial 5 is the best of 9" in html


def test_trials_are_compared_by_the_main_metric_of_their_data(machine, tmp_path):
    machine.main_metric, machine.values = "auc", {5: 0.5, 3: 30.0}
    result = swept(tmp_path, halving=True, settings=("training.steps=900", *NINE))
    steps = [steps for pipeline, number, steps in machine.begun if number == 3]
    assert steps == [100, 300, 900, 900]
    assert (result.sweep.best, result.sweep.compared_by.better) == (3, "higher")
    assert result.sweep.chosen.last.value == 30.0


@pytest.mark.slow
def test_halving_resumes_the_same_runs_with_more_steps(machine, tmp_path):
    swept(tmp_path, halving=True, settings=("training.steps=900", *NINE))
    steps = [(number, steps) for pipeline, number, steps in machine.begun if pipeline == "train"]
    assert steps == [
        (1, 100), (1, 300), (1, 900), *((number, 100) for number in range(2, 10))
    ]  # fmt: skip
    assert machine.begun[-1] == ("run", 1, 900)


@pytest.mark.slow
def test_a_failed_trial_ends_no_sweep_and_where_all_fail_nothing_is_promoted(machine, tmp_path):
    machine.ends[1] = failed("training diverged")
    result = swept(tmp_path)
    assert result.sweep.best == 2
    assert result.sweep.trials[0].error == "training diverged"
    assert machine.begun[-1][:2] == ("run", 2)
    machine.begun.clear()
    machine.ends = {number: failed("no data") for number in range(1, 10)}
    result = swept(tmp_path)
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.message == "all 9 trials failed; trial 1: no data"
    assert len(machine.begun) == 9
    machine.ends.clear()
    assert resumed(result.sweep.sweep_id, tmp_path).status == "blessed"
    assert len(machine.begun) == 19


def test_where_none_that_did_not_fail_went_on_the_best_of_them_is_trained_to_the_end(
    machine, tmp_path
):
    def on_the_second_rung(run):
        return failed("lost") if run.config.training.steps > 100 else None

    machine.ends[1] = on_the_second_rung
    result = swept(tmp_path, halving=True, settings=("training.steps=900", *NINE))
    assert [each.error for each in result.sweep.trials if each.error] == ["lost"]
    assert machine.begun[-1] == ("run", 2, 900)


def test_tpe_learns_from_the_trials_before_and_draws_nothing_twice(machine, tmp_path):
    def best_at_the_bottom(run):
        machine.values[int(run.run_id.split("-")[1][1:])] = (
            run.config.training.optimizer.learning_rate
        )

    machine.ends = dict.fromkeys(range(1, 41), best_at_the_bottom)
    settings = ["training.optimizer.learning_rate=0.001..1.0"]
    result = swept(tmp_path, tpe=24, seed=1, settings=settings)
    rates = [float(*each.settings.values()) for each in result.sweep.trials]
    assert len(set(rates)) == 24
    assert sum(rates[12:]) < sum(rates[:12]) / 2
    assert result.sweep.chosen.settings == {settings[0].split("=")[0]: str(min(rates))}


def test_a_sampled_trial_that_is_not_allowed_has_failed(machine, tmp_path):
    # Each value is allowed by itself, but one combination is not.
    keys = ["training.strategy=single,async_parameter_server", "cluster.workers=2,9"]
    result = swept(tmp_path, tpe=12, settings=keys)
    assert machine.begun
    assert {each.status for each in result.sweep.trials} == {"done", "failed"}


@pytest.mark.slow
def test_an_interrupted_promotion_alone_is_done_again_and_a_refusal_remains(machine, tmp_path):
    machine.promotion = replace(machine.promotion, status="interrupted", exit_code=130)
    result = swept(tmp_path)
    assert result.exit_code == 130
    machine.promotion = replace(machine.promotion, status="refused", exit_code=3, message="low")
    for _again in range(2):
        found = resumed(result.sweep.sweep_id, tmp_path)
        assert (found.status, found.exit_code, found.message) == ("refused", 3, "low")
        assert machine.begun[10:] == [("run", 1, 1500)]


def test_a_metric_that_is_not_measured_ends_the_sweep_at_its_first_trial(machine, tmp_path):
    with pytest.raises(ConfigError, match="did not measure validation_auc: validation has loss"):
        swept(tmp_path, metric="auc")
    assert len(machine.begun) == 1


def test_an_interrupted_sweep_goes_on_where_it_was(machine, tmp_path):
    def interrupt(_run):
        signal.raise_signal(signal.SIGTERM) if in_main() else os.kill(os.getpid(), signal.SIGINT)
        return RunResult(status="interrupted", exit_code=130, message="", steps=())

    def in_main():
        return threading.current_thread() is threading.main_thread()

    machine.ends[3] = interrupt
    result = swept(tmp_path)
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert [number for _, number, _ in machine.begun] == [1, 2, 3]
    machine.ends.clear()
    again = resumed(result.sweep.sweep_id, tmp_path)
    assert again.status == "blessed"
    assert [number for _, number, _ in machine.begun[3:]] == [3, 4, 5, 6, 7, 8, 9, 1]


def test_a_sweep_that_was_killed_goes_on_with_what_was_training(machine, tmp_path):
    def lost(_run):
        raise RuntimeError("the process is gone")

    machine.ends[2] = lost
    with pytest.raises(RuntimeError):
        swept(tmp_path)
    machine.ends.clear()
    (folder,) = tmp_path.glob("*-sweep-*")
    assert resumed(folder.name, tmp_path).status == "blessed"
    assert [number for _, number, _ in machine.begun] == [1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 1]


def test_what_a_killed_process_leaves_in_the_journal_is_repaired(machine, tmp_path):
    begun = planned(tmp_path)
    begun.close()
    journal = begun.folder / study.FILE
    with journal.open("a") as file:
        file.write('{"op_code":')
    journal.with_name(f"{study.FILE}.lock").symlink_to(journal)
    assert resumed(begun.sweep.sweep_id, tmp_path).status == "blessed"
    assert study.read(begun.folder).verdict == "blessed"
    assert len(machine.begun) == 10


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (study.OLD_FILE, "{}", "start a new sweep"),
        (study.FILE, "{", "is damaged"),
        (study.FILE, '{"op_code":0}\n', "is damaged"),
        (study.FILE, "", "is damaged"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_refused(tmp_path, name, text, message):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        local.begin(SweepOptions(), tmp_path, "s")


def changed(path, name, change):
    """Change the records of this name in a journal."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for tree in (line.get("user_attr", {}), line.get("user_attrs", {}), line):
            if name in tree:
                tree[name] = change(tree[name])
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("end", lambda _end: {"best": "²3"}),
        ("end", lambda _end: [1]),
        ("plan", lambda plan: {**plan, "space": {"training.batch_size": "{"}}),
        ("plan", lambda plan: {**plan, "space": {"training.batch_size": "[]"}}),
        ("op_code", lambda _code: 10**6),
        ("op_code", lambda _code: None),
        ("study_id", lambda _id: 10**6),
        ("directions", lambda _directions: 7),
        ("user_attrs", lambda _attributes: 7),
        ("params", lambda _params: [7]),
    ],
)
def test_a_journal_with_odd_records_is_refused_in_one_line(tmp_path, name, change):
    begun = planned(tmp_path)
    begun.end("failed", "", {})
    begun.close()
    changed(begun.folder / study.FILE, name, change)
    with pytest.raises(UserError, match="is damaged"):
        local.begin(SweepOptions(), tmp_path, begun.folder.name).sweep  # noqa: B018


def test_the_record_of_another_trial_is_not_used(tmp_path):
    begun = planned(tmp_path)
    begun.close()
    changed(begun.folder / study.FILE, "trial", lambda trial: {**trial, "number": 10**6})
    again = local.begin(SweepOptions(), tmp_path, begun.folder.name)
    assert again.begin().number == 1
    again.close()


def test_two_at_once_and_a_place_that_cannot_be_written_are_refused(tmp_path):
    begun = planned(tmp_path)
    with pytest.raises(ConfigError, match="is still running"):
        local.begin(SweepOptions(), tmp_path, begun.sweep.sweep_id)
    shutil.rmtree(begun.folder)
    with pytest.raises(UserError, match="cannot write"):
        begun.end("failed", "", {})
    begun.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another --workdir"):
        planned(tmp_path / "file")


@pytest.mark.slow
def test_a_sweep_that_is_not_there_is_named_with_one_that_is(machine, tmp_path):
    sweep_id = swept(tmp_path).sweep.sweep_id
    assert machine.begun
    with pytest.raises(ConfigError, match=f"did you mean '{sweep_id}'"):
        local.begin(SweepOptions(), tmp_path, f"{sweep_id[:-1]}x")
    with pytest.raises(ConfigError, match=r"no sweep '\.\./x'"):
        local.begin(SweepOptions(), tmp_path, "../x")


@pytest.mark.long
@pytest.mark.cluster
def test_nine_real_trials_promote_one_version(tmp_path):
    settings = ["training.strategy=single", "training.steps=200", "gate.min={accuracy: 0.5}", *NINE]
    words = [each for text in settings for each in ("--set", text)]
    done = call("sweep", tmp_path, *words, "--parallel", "2", cwd=ROOT)
    assert done.code == 0, done.err
    assert len(done.answer["trials"]) == 9
    assert done.answer["metrics"]["accuracy"] > 0.5
    (version,) = list_models(root=done.workdir.as_uri())
    assert version.champion


def test_a_space_is_made_and_the_best_by_time_is_promoted(machine, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])

    def later(_run):
        now[0] += 10.0

    machine.ends = dict.fromkeys(range(1, 201), later)
    machine.values = {2: 0.5}
    result = swept(tmp_path, settings=("training.batch_size=32",), auto=True, minutes=3)
    trained = {number for pipeline, number, _ in machine.begun if pipeline == "train"}
    assert len([each for each in machine.begun if each[0] == "train"]) == 18
    assert (result.status, result.sweep.best) == ("blessed", 2)
    assert machine.begun[-1][:2] == ("run", 2)
    assert "training.optimizer.learning_rate" in result.sweep.keys
    assert "training.batch_size" not in result.sweep.keys
    best = load_config(tmp_path / result.sweep.sweep_id / local.BEST)
    assert best == result.sweep.configure(result.sweep.chosen, 0, result.sweep.base).model_copy(
        update={"training": best.training}
    )
    assert best.training.batch_size == 32
    assert len(make_table(result.sweep)[1]) == len(trained)


def test_an_interrupted_search_leaves_its_best_and_goes_on(machine, tmp_path):
    interrupted = RunResult(status="interrupted", exit_code=130, message="", steps=())

    def stop(_run):
        signal.raise_signal(signal.SIGINT)
        return interrupted

    machine.ends = {3: stop}
    result = swept(tmp_path, auto=True, tpe=4, halving=False, settings=("training.steps=20",))
    assert (result.status, result.exit_code) == ("interrupted", 130)
    assert (tmp_path / result.sweep.sweep_id / local.BEST).read_text().startswith("# Trial 1 of ")
    machine.ends = {}
    again = resumed(result.sweep.sweep_id, tmp_path)
    assert (again.status, again.sweep.best) == ("blessed", 1)
    trained = [number for pipeline, number, _ in machine.begun if pipeline == "train"]
    assert trained == [1, 2, 3, 3, 4]
