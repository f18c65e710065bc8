"""The time to an accuracy: from a history and from kept weights to the seconds that count."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import accuracy, launched
from benchmarks.accuracy import first_reach, seconds_at
from benchmarks.baselines import mnist
from trainer.config.schema import Config
from trainer.events import Progress

COURSE = [(1.0, 0.5), (2.0, 0.97), (3.0, 0.96), (4.0, 0.98)]


@pytest.mark.parametrize(
    ("goal", "found"), [(0.4, (1.0, True)), (0.97, (2.0, True)), (0.975, (4.0, True))]
)
def test_the_first_time_counts(goal, found):
    assert first_reach(COURSE, goal) == found


def test_a_course_that_never_comes_there_lasts_to_its_end():
    assert first_reach(COURSE, 0.99) == (4.0, False)
    assert first_reach([], 0.5) == (0.0, False)


def test_no_more_is_evaluated_than_needed():
    seen = []

    def course():
        for each in COURSE:
            seen.append(each)
            yield each

    first_reach(course(), 0.97)
    assert seen == COURSE[:2]


def progress(step, seconds):
    return Progress(
        global_step=step,
        steps=100,
        loss=1.0,
        steps_per_second=10.0,
        seconds=seconds,
        seconds_left=0.0,
    )


def test_set_up_is_left_out():
    # 10 updates a second, and 5 s before the first of them.
    rows = [progress(step, 5 + step / 10) for step in (20, 40, 100)]
    assert seconds_at(rows) == pytest.approx({20: 2.0, 40: 4.0, 100: 10.0})


def test_the_first_stretch_is_not_for_nothing():
    rows = [progress(step, step / 10) for step in (20, 40, 100)]
    assert seconds_at(rows) == pytest.approx({20: 2.0, 40: 4.0, 100: 10.0})


def test_settings_are_those_of_a_valid_run():
    settings = {key.replace("__", "."): value for key, value in accuracy.OURS.items()}
    config = launched.configuration(settings)
    assert isinstance(config, Config)
    assert config.cluster.workers == 2
    assert config.training.steps // config.training.checkpoint_every < config.training.keep


@pytest.fixture
def few_examples(monkeypatch):
    generator = np.random.default_rng(0)
    images = generator.random((20, 784)).astype(np.float32)
    labels = generator.integers(0, 10, 20).astype(np.uint8)
    monkeypatch.setattr(accuracy, "held_out_examples", lambda: (images, labels))
    return images, labels


def test_kept_weights_answer_as_the_program_would(tmp_path, few_examples):
    images, labels = few_examples
    # The first hidden unit passes the mean of an image on; the last layer knows one class.
    kernel = np.full((784, 1), 1 / 784, np.float32)
    last = np.zeros((1, 10), np.float32)
    bias = np.zeros(10, np.float32)
    bias[3] = 1
    np.savez(tmp_path / "w.npz", kernel, np.zeros(1, np.float32), last, bias)
    assert accuracy._share_right(tmp_path / "w.npz") == pytest.approx((labels == 3).mean())
    # A hidden unit below zero has no effect, whatever its weights are.
    last[0, 5] = -100
    np.savez(tmp_path / "w.npz", -kernel, np.zeros(1, np.float32), last, bias)
    assert accuracy._share_right(tmp_path / "w.npz") == pytest.approx((labels == 3).mean())
    np.savez(tmp_path / "w.npz", kernel, np.zeros(1, np.float32), -last, bias)
    assert images.mean() > 0.1
    assert accuracy._share_right(tmp_path / "w.npz") == pytest.approx((labels == 5).mean())


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
