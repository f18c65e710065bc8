"""Tests of the comparisons and the published experiments: bounds, measurements and reports."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as bench
from benchmarks import (
    accuracy,
    comparisons,
    evaluation,
    examples,
    launched,
    preparing,
    same_accuracy,
)
from benchmarks.accuracy import first_reach, seconds_at
from benchmarks.baselines import mnist, tfds_input
from benchmarks.baselines.plain import Settings
from benchmarks.comparisons import Comparison, alternating
from benchmarks.examples import shards_of
from benchmarks.experiments.measure import Measured, Run, measured
from benchmarks.experiments.programs import PROGRAMS
from benchmarks.experiments.rows import ROWS, accuracy_of, fallen, same_losses, synchronous
from benchmarks.same_accuracy import PATHS, settings_of
from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.evaluation.evaluate import evaluate
from flotilla.trainer.events import Progress
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError

MOST = Comparison(name="a", rounds=(1.0, 3.0, 2.0), at_most=2.0)
LEAST = Comparison(name="b", rounds=(1.0, 3.0, 2.0), at_least=2.5, more={"seconds": [1, 2]})


def test_a_comparison_holds_when_the_median_of_its_rounds_does():
    good = Comparison(name="x", rounds=(0.5, 2.0, 3.0), at_least=2.0).tree()
    assert (good["ratio"], good["holds"]) == (2.0, True)
    assert not Comparison(name="x", rounds=(1.9, 1.0, 3.0), at_least=2.0).tree()["holds"]


@pytest.mark.parametrize(
    ("rounds", "holds"),
    [((2.0, 1.5, 3.0), True), ((2.0, 1.4, 3.0), False), ((1.9, 1.5, 1.9), False),
     ((2.0, 3.0, float("nan")), False)],
)  # fmt: skip
def test_the_worst_round_may_have_a_bound_of_its_own(rounds, holds):
    found = Comparison(name="x", rounds=rounds, at_least=2.0, worst_at_least=1.5)
    assert found.tree()["holds"] is holds
    assert found.tree()["worst_at_least"] == 1.5
    assert "at least 2, worst at least 1.5" in comparisons.table([found])


def test_what_is_written_is_what_was_measured(tmp_path):
    comparisons.write([MOST, LEAST], tmp_path / "build" / "bench.json")
    tree = json.loads((tmp_path / "build" / "bench.json").read_text())
    assert tree["comparisons"] == [
        {"name": "a", "ratio": 2.0, "at_most": 2.0, "holds": True, "rounds": [1.0, 3.0, 2.0]},
        {"name": "b", "ratio": 2.0, "at_least": 2.5, "holds": False, "rounds": [1.0, 3.0, 2.0],
         "seconds": [1, 2]},
    ]  # fmt: skip
    assert tree["machine"]["cores"] >= 1


def test_both_sides_take_turns_in_being_first():
    order = []

    def side(name, value):
        order.append(name)
        return value

    found = alternating(3, lambda: side("own", 1.0), lambda: side("other", 2.0))
    assert found == [(1.0, 2.0)] * 3
    assert order == ["own", "other", "other", "own", "own", "other"]


def test_single_comparisons_are_measured_by_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(tmp_path))
    for name in mnist.FILES:
        (tmp_path / name).touch()
    monkeypatch.setattr(bench, "MEASURES", {"one": lambda: MOST, "two": lambda: LEAST})
    monkeypatch.setattr(sys, "argv", ["bench", "two"])
    bench.main()
    assert [each["name"] for each in json.loads(bench.OUTPUT.read_text())["comparisons"]] == ["b"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("b ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (RunInterruptedError("interrupted at global step 7"), "interrupted"),
        (UserError("the disk is full"), "two has failed: the disk is full"),
        (subprocess.CalledProcessError(1, ["fit"]), "exit status 1"),
    ],
)
def test_what_can_be_measured_is(tmp_path, monkeypatch, capsys, error, said):
    def fail():
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mnist, "require", lambda: None)
    monkeypatch.setattr(
        bench, "MEASURES", {"one": lambda: MOST, "two": fail, "three": lambda: LEAST}
    )
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    assert said in str(end.value)
    measured = "a" if said == "interrupted" else "ab"
    assert "\n" not in str(end.value)
    written = json.loads(bench.OUTPUT.read_text())["comparisons"]
    assert "".join(each["name"] for each in written) == measured
    printed = capsys.readouterr().out.splitlines()[1:]
    assert "".join(line[0] for line in printed) == measured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memry"], "there is no comparison 'memry'.*memory"),
        (["async", "memory"], "^FLOTILLA_MNIST_DIR=/.+ lacks train-"),
    ],
)
def test_a_comparison_that_is_none_and_missing_files_are_named(monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", ".")
    with pytest.raises(SystemExit, match=said):
        bench.main()


COURSE = [(1.0, 0.5), (2.0, 0.97), (3.0, 0.96), (4.0, 0.98)]


@pytest.mark.parametrize(
    ("course", "goal", "found"),
    [
        (COURSE, 0.4, (1.0, True)),
        (COURSE, 0.97, (2.0, True)),
        (COURSE, 0.975, (4.0, True)),
        # This course never reaches the goal.
        (COURSE, 0.99, (4.0, False)),
        ([], 0.5, (0.0, False)),
    ],
)
def test_the_first_time_counts(course, goal, found):
    assert first_reach(course, goal) == found


def test_set_up_is_left_out():
    known = {"steps": 100, "loss": 1.0, "steps_per_second": 10.0, "seconds_left": 0.0}
    # The first 5 s have no updates; then there are 10 updates per second.
    rows = [Progress(global_step=at, seconds=5 + at / 10, **known) for at in (20, 40, 100)]
    assert seconds_at(rows) == pytest.approx({20: 2.0, 40: 4.0, 100: 10.0})


@pytest.mark.cluster
@pytest.mark.long
def test_a_run_comes_to_an_accuracy_at_some_time(tmp_path, mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    monkeypatch.setitem(launched.SAME_AS_BASELINE, "data.manual_dir", str(mnist_dir))
    dataset = launched.prepared(tmp_path / "data")
    trained = launched.train(tmp_path / "run", dataset, **accuracy.OURS)
    course = list(accuracy._course_of_checkpoints(trained))
    assert len(course) == 14
    assert [at for at, _ in course] == sorted(at for at, _ in course)
    assert first_reach(course, 0.9)[1]
    images, labels = mnist.held_out_examples()
    assert len(images) == len(labels) == 10_000
    assert course[-1][1] > course[0][1]


@pytest.mark.parametrize("name", PATHS)
def test_both_sides_see_as_many_examples(name):
    path = PATHS[name]
    config = launched.configuration(settings_of(path, 2))
    training = config.training
    gradients = training.pull_every
    if training.strategy == "sync_parameter_server":
        gradients = config.cluster.workers
    seen = training.steps * gradients * training.batch_size
    assert seen == path.plain.steps * path.plain.batch
    assert training.optimizer.name == path.plain.optimizer.lower()
    assert training.optimizer.learning_rate == path.plain.rate
    assert training.seed == 2


def test_a_round_is_a_seed_and_the_ratio_that_of_both(monkeypatch):
    monkeypatch.setattr(same_accuracy, "_own", lambda _path, seed, _home: 0.9 + seed / 10)
    monkeypatch.setattr(same_accuracy, "_plain", lambda settings: 1 - settings.seed / 10)
    found = same_accuracy.same_accuracy("single")
    assert found.rounds == pytest.approx((0.9, 1.0 / 0.9, 1.1 / 0.8))
    assert found.more["accuracy"] == [[0.9, 1.0], [1.0, 0.9], [1.1, 0.8]]


@pytest.mark.long
def test_the_plain_way_learns(mnist_dir, monkeypatch):
    monkeypatch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
    settings = Settings(optimizer="Adam", rate=0.003, batch=100, steps=500)

    def accuracy(settings: Settings) -> float:
        command = [sys.executable, "-m", "benchmarks.baselines.plain", settings.words()]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["accuracy"]

    assert accuracy(settings) > 0.9
    assert accuracy(replace(settings, rate=0.0)) < 0.3


def test_both_sides_measure_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "EXAMPLES", 500)
    subject = evaluation.subject_of(tmp_path)
    (tmp_path / "scratch").mkdir()
    output = storage.uri_of(tmp_path / "evaluation")
    evaluate(evaluation.CONFIG, subject.dataset, subject.checkpoint, output, tmp_path / "scratch")
    ours = json.loads(storage.read_file(output, "metrics.json"))
    bare = evaluation.metrics_of(subject)
    assert ours["examples"] == 500
    assert ours["metrics"]["accuracy"] == pytest.approx(bare["accuracy"])
    assert 0.4 < bare["accuracy"] < 0.7
    assert ours["metrics"]["loss"] == pytest.approx(bare["loss"], rel=1e-4)
    assert ours["metrics"]["top_3_accuracy"] == pytest.approx(bare["top_3"])
    assert ours["confusion_matrix"] == bare["confusion"].tolist()
    assert [row["auc"] for row in ours["per_class"]] == pytest.approx(
        [roc for roc, _ in bare["areas"]]
    )
    assert ours["intervals"]["accuracy"] == pytest.approx(bare["interval"], abs=0.02)


ROOT = Path(__file__).parents[2]
GOOD = Measured(
    accuracy=0.97,
    loss=2.28,
    first_loss=2.30,
    training_loss=2.29,
    last_loss=2.28,
    global_step=100,
    local_steps=300,
    steps_per_second=50.0,
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.program}: {row.goal}")
def test_runs_are_valid_and_pass_the_gate_only_where_the_goal_is_reached(row):
    assert row.program in PROGRAMS
    for run in row.runs:
        config = load_config(ROOT / run.config, run.settings)
        if "accuracy" in config.gate.min and not row.goal.startswith("none"):
            assert row.goal.startswith(str(config.gate.min["accuracy"]))


def test_every_configuration_of_an_experiment_is_run_and_described():
    configs = {run.config for row in ROWS for run in row.runs}
    assert configs == {f"configs/{path.name}" for path in ROOT.glob("configs/mnist_*.yaml")}
    written = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    for row in ROWS:
        assert row.goal in written
        assert all(run.command() in written for run in row.runs)
    assert "**no**" not in written


@pytest.mark.parametrize(
    ("judge", "good", "bad"),
    [
        (accuracy_of(0.97), [GOOD], [replace(GOOD, accuracy=0.969)]),
        (synchronous(0.97, workers=3), [GOOD], [replace(GOOD, local_steps=299)]),
        (synchronous(0.97, workers=3), [GOOD], [replace(GOOD, accuracy=0.969)]),
        (fallen, [GOOD, replace(GOOD, loss=2.2999)], [GOOD, replace(GOOD, loss=2.3101)]),
        (same_losses, [GOOD, GOOD], [GOOD, GOOD, GOOD, replace(GOOD, loss=2.2802)]),
        (same_losses, [GOOD, GOOD], [GOOD, replace(GOOD, training_loss=2.2898)]),
    ],
)
def test_a_goal_that_is_missed_is_reported(judge, good, bad):
    assert judge(good).reached
    assert not judge(bad).reached


@pytest.mark.cluster
@pytest.mark.long
def test_results_are_those_of_the_run_and_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ("training.strategy=sync_parameter_server", "training.steps=200", "gate.min={}")
    run = Run(config="configs/digits.yaml", settings=settings)
    found = measured(run, tmp_path)
    assert (found.global_step, found.local_steps) == (200, 400)
    assert 0.8 < found.accuracy <= 1
    assert found.loss < found.training_loss < found.first_loss
    assert measured(run, tmp_path) == found
    assert len(list((tmp_path / "runs").glob("digits-*"))) == 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, mnist_dir):
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
        patch.setitem(launched.SAME_AS_BASELINE, "data.manual_dir", str(mnist_dir))
        for which in (preparing.FLOTILLA, preparing.TFDS):
            assert preparing.prepared_by(which, folder / which) > 0
    return folder


@pytest.mark.long
def test_both_prepare_all_of_it(prepared):
    (ours,) = (prepared / preparing.FLOTILLA / "datasets").iterdir()
    splits = storage.read_manifest(storage.uri_of(ours)).fields["splits"]
    assert {name: split["examples"] for name, split in splits.items()} == {
        "train": 55_000, "validation": 5_000, "test": 10_000,
    }  # fmt: skip
    info = json.loads(next(prepared.glob("tfds/mnist/*/dataset_info.json")).read_text())
    counts = {split["name"]: sum(map(int, split["shardLengths"])) for split in info["splits"]}
    assert counts == {"train": 60_000, "test": 10_000}


# TFDS triggers this warning when it reads its dataset descriptions.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
@pytest.mark.long
def test_both_give_each_example_once_an_epoch_in_another_order(prepared):
    (ours,) = (prepared / preparing.FLOTILLA / "datasets").iterdir()
    sides = [
        shards_of(storage.uri_of(ours), prepared / "shards"),
        tfds_input.batches(
            tfds_input.builder(prepared / preparing.TFDS), batch_size=examples.BATCH
        ),
    ]
    for batches in sides:
        epochs = [_sums(batches, skip) for skip in (0, 550)]
        assert [len(each) for each in epochs] == [55_000, 55_000]
        np.testing.assert_array_equal(*map(np.sort, epochs))
        assert (epochs[0] != epochs[1]).mean() > 0.9


def _sums(batches, skip):
    weights = np.random.default_rng(0).integers(1, 1 << 20, 784)
    taken = batches.skip(skip).take(550).as_numpy_iterator()
    return np.concatenate([images.reshape(len(images), -1) @ weights for images, _ in taken])
