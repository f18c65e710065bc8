"""GPUs of a worker that its strategy leaves idle."""

from __future__ import annotations

import pytest

from trainer.topology import TOPOLOGIES


@pytest.mark.parametrize("strategy", sorted(TOPOLOGIES))
def test_only_replicas_use_several_gpus_of_one_worker(doctor, strategy):
    settings = (f"training.strategy={strategy}", "cluster.gpus_per_worker=2")
    found = doctor(*settings)["configuration"]
    if strategy in ("single", "multi_worker_mirrored"):
        assert found["state"] == "ok"
        return
    assert found["state"] == "warn"
    assert found["message"] == (
        f"cluster.gpus_per_worker: 2, of which {strategy} uses 1 in each worker: the others would "
        "be idle; more workers use more GPUs"
    )
    assert found["remedy"] == "flotilla doctor --set 'cluster.gpus_per_worker=1'"
    assert doctor(settings[0], "cluster.gpus_per_worker=1")["configuration"]["state"] == "ok"
