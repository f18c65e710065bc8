"""The metrics of a real cluster on loopback, from which a worker is gone for a while."""

from __future__ import annotations

import threading
import time

import pytest

from tests.cluster.launched import SECONDS, launched
from tests.trainer.monitoring.scraped import scrape
from trainer.events import Restart

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def scrape_until(port, wanted):
    """Return the first scrape that is wanted: what a task does is seen there alone."""
    until, pause = time.monotonic() + SECONDS, threading.Event()
    while not wanted(found := scrape(port)):
        assert time.monotonic() < until, found
        pause.wait(0.2)
    return found


@pytest.mark.parametrize(
    ("strategy", "leader"),
    [
        ("async_parameter_server", "chief"),
        *(
            pytest.param(name, leader, marks=pytest.mark.long)
            for name, leader in [
                ("single", "chief"),
                ("sync_parameter_server", "chief"),
                ("in_graph", "chief"),
                ("multi_worker_mirrored", "worker"),
            ]
        ),
    ],
)
def test_a_run_is_scraped_and_profiled(dataset, tmp_path, port, strategy, leader):
    config = {
        "training": {"strategy": strategy, "steps": 10**6, "profile": [60, 80]},
        "cluster": {"workers": 2, "metrics_port": port},
    }
    with launched(config, dataset, tmp_path) as run:
        run.wait_for_step(100)
        found = scrape_until(port, lambda each: ("flotilla_loss",) in each)
        assert found["flotilla_global_step",] >= 100
        assert found["flotilla_steps_per_second",] > 0
        assert found["flotilla_tasks_alive", leader] >= 1
        assert found["flotilla_checkpoint_age_seconds",] >= 0
        profiles = run.folder / "checkpoints/logs" / run.folder.name / "train/plugins/profile"
        assert list(profiles.glob("*/*.xplane.pb"))
        if strategy == "async_parameter_server":
            run.task("worker-1").kill()
            run.wait_for(lambda event: isinstance(event, Restart))
            back = ("flotilla_restarts_total", "worker")
            alive = ("flotilla_tasks_alive", "worker")
            # It is counted when it is started, before it answers.
            scrape_until(port, lambda each: (each.get(back), each.get(alive)) == (1, 2))
