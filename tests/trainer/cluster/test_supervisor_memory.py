"""Servers that chiefs leave grown are renewed, and others are left alone."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from trainer.cluster.process import TaskProcess
from trainer.cluster.supervisor import ServerMemory
from trainer.topology import Task

MB = 1 << 20


def process(role, started_at=1.0):
    made = create_autospec(TaskProcess, instance=True)
    made.task = Task(role=role, index=0)
    made.started_at = started_at
    return made


def course(sizes, *, started_at=1.0):
    """Return after which lives of a chief a server is renewed, by its size at the end of each."""
    memory, chief, server = ServerMemory(), process("chief", 2.0), process("worker", started_at)
    renewed = []
    for life, size in enumerate(sizes, start=1):
        server.resident_bytes.return_value = size * MB
        server.kill_grown.reset_mock()
        memory.renew_grown(chief, [server])
        if server.kill_grown.called:
            assert server.kill_grown.call_args.args == (sizes[0] * MB, size * MB)
            renewed.append(life)
    return renewed


@pytest.mark.parametrize(
    ("sizes", "renewed"),
    [
        ([400], []),
        ([400, 400, 401, 399], []),
        # Another life like the second one would be a quarter too much.
        ([400, 460], [2]),
        ([400, 600], [2]),
        ([400, 440, 480], [3]),
        ([400, 520, 410, 520], [2, 4]),
        ([0, 0], []),
    ],
)
def test_one_that_another_life_would_make_too_big_is_renewed(sizes, renewed):
    assert course(sizes) == renewed


def test_one_that_has_not_served_a_whole_life_is_not_judged():
    assert course([100, 400, 900], started_at=3.0) == []
