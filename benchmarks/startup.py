"""Measures how long the processes of steps and training tasks take to start.

Most of this time is spent on imports. The unit is CPU time, which depends little on other programs
on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.comparisons import Comparison
from flotilla.components.table import STEPS
from flotilla.trainer.cluster.process import MODULES

ROUNDS = 3
_STEP = ("kfp.dsl.executor_main", "flotilla.trainer.runtime.tensorflow_import")
# Modules that the body of a step imports in a complete run of `configs/digits.yaml`, even if the
# dataset is already prepared.
_BODIES = {
    "prepare_data": (
        "flotilla.trainer.data.prepare",
        "flotilla.trainer.data.builders.embedded",
        "flotilla.trainer.data_gate.validate",
    ),
    "evaluate_model": ("flotilla.trainer.evaluation.evaluate",),
    "export_model": ("flotilla.trainer.export.export",),
}  # fmt: skip
#: Modules that each process loads, by the name of the step or task.
PROCESSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{
            step.name: (*_STEP, f"flotilla.components.{step.name}", *_BODIES.get(step.name, ()))
            for step in STEPS
        },
        **{
            f"task: {role}": ("flotilla.trainer.__main__", module)
            for role, module in MODULES.items()
        },
    }
)
#: Maximum total of all processes, in units of one import of TensorFlow.
AT_MOST = 6.5
_PROGRAM = """
import importlib, os, sys
from flotilla.trainer.runtime import tensorflow_import
tensorflow_import.prepare()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.modules))
"""


def startup() -> Comparison:
    """Compare the CPU seconds to import all steps and tasks with the time to import TensorFlow."""
    rounds: list[float] = []
    table: dict[str, list[float]] = {name: [] for name in PROCESSES}
    modules = {name: loaded(name)[1] for name in PROCESSES}
    for _ in range(ROUNDS):
        total = 0.0
        for name in PROCESSES:
            ratio = loaded(name)[0] / tensorflow()
            table[name].append(ratio)
            total += ratio
        rounds.append(total)
    return Comparison(
        name="imports of all steps and tasks: CPU seconds, compared with one import of TensorFlow",
        rounds=tuple(rounds),
        at_most=AT_MOST,
        more={
            name: {"imports of TensorFlow": round(sorted(each)[ROUNDS // 2], 2),
                   "modules": modules[name]}
            for name, each in table.items()
        },
    )  # fmt: skip


def loaded(name: str) -> tuple[float, int]:
    """Return the CPU seconds and the number of loaded modules of a process in `PROCESSES`."""
    own = {"TF_USE_LEGACY_KERAS": "1"} if name == "task: server" else {}
    return _seconds([sys.executable, "-c", _PROGRAM, *PROCESSES[name]], own)


def tensorflow() -> float:
    """Return the CPU seconds of `import tensorflow`."""
    return _seconds([sys.executable, "-c", "import tensorflow; print(0)"], {})[0]


def _seconds(command: list[str], own: Mapping[str, str]) -> tuple[float, int]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "_KFP_RUNTIME": "true", **own}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[3:])}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime, int(said.split()[-1])
