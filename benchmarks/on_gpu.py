"""Compares training a CNN on one GPU with `model.fit`, both in bfloat16 and compiled by XLA."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import launched
from benchmarks.comparisons import Comparison, alternating

ROUNDS = 3
BATCH = 100
STEPS = 10_000
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "training__strategy": "single",
        "training__mixed_precision": True,
        "training__jit_compile": True,
        "training__batch_size": BATCH,
        "model__name": "cnn",
        "cluster__gpus_per_worker": 1,
    }
)


def present() -> bool:
    """Whether this machine has a GPU."""
    return bool(glob("/dev/nvidia[0-9]*"))


def on_gpu(steps: int = STEPS) -> Comparison:
    """Compare examples per second of `single` and `model.fit`. The report names the device."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        count = iter(range(ROUNDS))
        devices: list[str] = []

        def own() -> float:
            settings = {**SETTINGS, "training__steps": steps}
            trained = launched.train(folder / f"{next(count)}", launched.mnist(), **settings)
            return BATCH * trained.steps_per_second

        def fit() -> float:
            words = ["-m", "benchmarks.baselines.fit", "--network", "cnn", "--steps", f"{steps}"]
            done = subprocess.run(
                [sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True
            )
            result = json.loads(done.stdout.splitlines()[-1])
            devices.append(result["device"])
            return BATCH * float(result["steps_per_second"])

        pairs = alternating(ROUNDS, own, fit)
    return Comparison(
        name=f"CNN on MNIST with bfloat16 and XLA, single on {devices[-1]}: examples/s, compared "
        "with Keras's fit",
        rounds=tuple(mine / theirs for mine, theirs in pairs),
        at_least=1.2,
        more={"examples_per_second": [[round(each) for each in pair] for pair in pairs]},
    )
