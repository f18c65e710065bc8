"""One attempt of the chief after another on the same servers, which do not grow."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.launched import launched
from trainer.cluster.supervisor import MAX_GROWTH
from trainer.events import AttemptBegin, Restart

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

ATTEMPTS = 5
SERVERS = ("ps-0", "worker-0", "worker-1")
SETTINGS = {
    "training": {"steps": 10**7, "checkpoint_every": 200, "validate_every": 0},
    # Servers keep no values, as these would allow them to grow more.
    "cluster": {"workers": 2, "max_restarts": ATTEMPTS, "recovery": "full"},
}


def test_after_five_attempts_the_servers_have_not_grown(dataset, tmp_path):
    with launched(SETTINGS, dataset, tmp_path) as run:
        sizes = []
        for attempt in range(1, ATTEMPTS + 1):
            begun = run.wait_for(lambda event: isinstance(event, AttemptBegin))
            run.wait_for_step(begun.global_step + 400)
            sizes.append({name: run.task(name).memory_info().rss for name in SERVERS})
            if attempt < ATTEMPTS:
                run.kill("chief-0")
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
    assert code == 130, said
    restarts = run.events(Restart)
    assert [e.restarts for e in restarts if e.task == "chief-0"] == [1, 2, 3, 4]
    for event in restarts:
        grown = event.cause.startswith("its memory grown from")
        assert grown == (event.task in SERVERS), event
    for name in SERVERS:
        megabytes = [round(size[name] / 2**20) for size in sizes]
        assert megabytes[-1] <= (1 + MAX_GROWTH) * megabytes[0], (name, megabytes)
