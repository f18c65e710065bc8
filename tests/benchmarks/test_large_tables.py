"""The benchmark of large tables covers every lazy optimizer and stays within memory."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import large_tables


def test_a_table_that_memory_does_not_hold_is_refused_before_it_is_made(monkeypatch):
    free = SimpleNamespace(available=1 << 30)
    monkeypatch.setattr(large_tables.psutil, "virtual_memory", lambda: free)
    with pytest.raises(RuntimeError, match=r"adam needs 3,879 MB of memory; 1,024 are free"):
        large_tables.large_tables()


def test_steps_and_updates_of_each_optimizer_are_ratios_of_large_over_small(monkeypatch):
    free = SimpleNamespace(available=1 << 40)
    monkeypatch.setattr(large_tables.psutil, "virtual_memory", lambda: free)
    found = json.dumps({"step": [[3.0, 2.0]], "update": [[4.0, 1.0]]})
    monkeypatch.setattr(
        subprocess, "run", lambda *_args, **_kwargs: SimpleNamespace(stdout=f"words\n{found}\n")
    )
    compared = large_tables.large_tables()
    expected = len(large_tables.OPTIMIZERS) * len(large_tables.DIMENSIONS) * 2
    assert len({each.name for each in compared}) == len(compared) == expected
    assert {each.ratio for each in compared} == {1.5, 4.0}
    assert {each.at_most for each in compared} == {1.3}
