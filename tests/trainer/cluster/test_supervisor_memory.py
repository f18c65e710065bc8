"""Servers that have grown over attempts of a chief are restarted, and others are not."""

from __future__ import annotations

from unittest.mock import create_autospec

import pytest

from trainer.cluster.process import TaskProcess
from trainer.cluster.supervisor import ServerMemory, _outlive_the_chief
from trainer.config.load import parse_config
from trainer.topology import Task

MB = 1 << 20


def process(role, started_at=1.0, index=0):
    made = create_autospec(TaskProcess, instance=True)
    made.task = Task(role=role, index=index)
    made.started_at = started_at
    return made


def restarted_after(sizes, *, started_at=1.0, role="worker", keep_values=False):
    """Return after which attempts of a chief a server is restarted, by its size after each."""
    memory = ServerMemory(keep_values=keep_values)
    chief, server = process("chief", 2.0), process(role, started_at)
    restarted = []
    for attempt, size in enumerate(sizes, start=1):
        server.resident_bytes.return_value = size * MB
        server.kill_grown.reset_mock()
        memory.restart_grown(chief, [server])
        if server.kill_grown.called:
            assert server.kill_grown.call_args.args == (sizes[0] * MB, size * MB)
            restarted.append(attempt)
    return restarted


@pytest.mark.parametrize(
    ("sizes", "restarted"),
    [
        ([400], []),
        ([400, 400, 401, 399], []),
        # Another attempt like the second one would exceed a quarter.
        ([400, 460], [2]),
        ([400, 600], [2]),
        ([400, 440, 480], [3]),
        ([400, 520, 410, 520], [2, 4]),
        ([0, 0], []),
    ],
)
def test_a_server_that_another_attempt_would_make_too_large_is_restarted(sizes, restarted):
    assert restarted_after(sizes) == restarted


@pytest.mark.parametrize(
    ("sizes", "role", "restarted"),
    [
        ([400, 500, 600], "ps", []),
        # The next attempt would begin with a checkpoint, and not with what is there.
        ([400, 500, 600, 710], "ps", [4]),
        ([400, 500, 600], "worker", []),
        ([400, 500, 600, 710], "worker", [4]),
    ],
)
def test_a_server_with_values_may_grow_more(sizes, role, restarted):
    assert restarted_after(sizes, role=role, keep_values=True) == restarted


@pytest.mark.parametrize(
    ("sizes", "killed"),
    [
        ([500, 500, 400], []),
        # What is left is of no use.
        ([900, 500, 400], ["ps-0", "ps-1"]),
        ([900, 420, 900], ["ps-0", "worker-0"]),
        ([400, 400, 550], []),
        ([900, 400, 550], ["ps-0", "worker-0"]),
        ([400, 550, 900], ["worker-0"]),
    ],
)
def test_servers_with_values_are_restarted_together(sizes, killed):
    memory, chief = ServerMemory(keep_values=True), process("chief", 2.0)
    servers = [process("ps"), process("ps", index=1), process("worker")]
    for each in servers:
        each.resident_bytes.return_value = 400 * MB
    memory.restart_grown(chief, servers)
    for each, size in zip(servers, sizes, strict=True):
        each.resident_bytes.return_value = size * MB
    memory.restart_grown(chief, servers)
    assert [str(each.task) for each in servers if each.kill_grown.called] == killed


def test_a_server_without_a_whole_attempt_is_not_judged():
    assert restarted_after([100, 400, 900], started_at=3.0) == []


@pytest.mark.parametrize(
    ("tree", "outlive"),
    [
        ({}, True),
        ({"training": {"strategy": "my.module:Strategy"}}, True),
        ({"training": {"strategy": "sync_parameter_server"}}, False),
        ({"cluster": {"recovery": "partial"}}, True),
        ({"cluster": {"recovery": "full"}}, False),
        ({"data": {"partition": "dynamic"}}, False),
    ],
)
def test_values_outlive_a_chief_where_the_next_one_goes_on_with_them(tree, outlive):
    assert _outlive_the_chief(parse_config(tree)) is outlive
