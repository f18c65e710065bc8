"""What each step of the pipeline is: the one table that compiling, running and reporting read.

A new step is three edits: its file `components/NAME.py`, its row here, and its wiring in
`pipelines/training.py`. The rows are in the order in which the steps run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Output = Literal[
    "dataset",
    "validation",
    "checkpoint",
    "evaluation",
    "decision",
    "model",
    "registration",
    "report",
]
#: What the first step says: `unchanged` where an earlier run has done what this one would do.
NEW, UNCHANGED = "new", "unchanged"
_HOUR, _DAY = 3600, 24 * 3600
_EVALUATION = "trainer.evaluation.evaluate"


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One row.

    Attributes:
        name: of the step's file and of its function.
        output: kind of what the step publishes, which names its URI among the artifacts of a run;
            None for nothing. On a KFP instance only a step with an output has a log that is read.
        accepts: for a step that judges the data or the model, the word in its record with which the
            run goes on; with any other the run ends as refused. Empty for a step that judges none.
        completes: the word in the record of the step with which the run ends well, without any of
            the next steps; empty for none.
        deadline_seconds: limit of one pod: waiting for the image, and all tries in it.
        retries: further tries in a pod after a failure that may pass, and further pods after one
            that was lost; 0 where a second one would find what the first one found.
        is_light: needs little CPU and memory, whatever the run parameters say.
        may_use_gpus: computes with the model.
        loads: the module that it computes with, which brings TensorFlow; empty for none.
        is_cached: KFP may take its output from the cache.
        is_exit_step: runs at the end of every whole run, also of one that failed.
    """

    name: str
    output: Output | None = None
    accepts: str = ""
    completes: str = ""
    deadline_seconds: int
    retries: int = 2
    is_light: bool = False
    may_use_gpus: bool = False
    loads: str = ""
    is_cached: bool = False
    is_exit_step: bool = False

    def __post_init__(self) -> None:
        """Refuse a limit that is none."""
        if self.deadline_seconds < 1:
            raise ValueError(f"{self.name}: deadline_seconds {self.deadline_seconds} is below 1")
        if self.retries < 0:
            raise ValueError(f"{self.name}: retries {self.retries} is below 0")

    @property
    def kfp_name(self) -> str:
        """The name that KFP gives the component and its task."""
        return self.name.replace("_", "-")


STEPS = (
    StepSpec(
        name="resolve_config", completes=UNCHANGED, deadline_seconds=_HOUR, retries=0, is_light=True
    ),
    StepSpec(
        name="prepare_data", output="dataset", deadline_seconds=_DAY, retries=3, is_cached=True
    ),
    StepSpec(name="validate_data", output="validation", accepts="accepted", deadline_seconds=_HOUR),
    # The training job has a deadline of its own, which is shorter by default.
    StepSpec(name="train_model", output="checkpoint", deadline_seconds=28 * _DAY),
    StepSpec(
        name="evaluate_model",
        output="evaluation",
        deadline_seconds=_DAY,
        may_use_gpus=True,
        loads=_EVALUATION,
    ),
    StepSpec(name="check_gate", output="decision", accepts="blessed", deadline_seconds=_HOUR),
    StepSpec(
        name="export_model",
        output="model",
        deadline_seconds=_DAY,
        may_use_gpus=True,
        loads="trainer.export.export",
    ),
    # It compares the model with a champion that the gate has not seen.
    StepSpec(
        name="register_model",
        output="registration",
        accepts="promoted",
        deadline_seconds=6 * _HOUR,
        loads=_EVALUATION,
    ),
    StepSpec(
        name="finish", output="report", deadline_seconds=_HOUR, is_light=True, is_exit_step=True
    ),
)


#: What a sweep has in place of training and of the exit step; see `pipelines/sweeps/pipeline.py`.
SWEEP_STEPS = (
    StepSpec(name="run_trial", deadline_seconds=28 * _DAY),
    StepSpec(name="choose_trial", deadline_seconds=_HOUR, is_light=True),
    StepSpec(name="finish_sweep", deadline_seconds=_HOUR, is_light=True),
)


#: The step that runs at the end of every whole run.
EXIT_STEP = next(step for step in STEPS if step.is_exit_step)
RESOLVE, TRAIN, EVALUATE, REGISTER = (
    next(step.name for step in STEPS if step.name == name)
    for name in ("resolve_config", "train_model", "evaluate_model", "register_model")
)


def step_of(name: str) -> StepSpec:
    """Return the row of a step, by its own name or KFP's; raises `LookupError`."""
    for step in (*STEPS, *SWEEP_STEPS):
        if name in (step.name, step.kfp_name):
            return step
    raise LookupError(f"components/table.py has no row for the step {name!r}: add one")


def ends_run(name: str, word: object) -> bool:
    """Say whether only the exit step follows this one, given its word; raises `LookupError`."""
    row = step_of(name)
    is_last = row is [step for step in STEPS if not step.is_exit_step][-1]
    return is_last or ends_well(name, word) or bool(row.accepts and word != row.accepts)


def ends_well(name: str, word: object) -> bool:
    """Say whether the run is done with this step, given its word; raises `LookupError`."""
    completes = step_of(name).completes
    return bool(completes) and word == completes


def published_by(name: str) -> Output | None:
    """Return the kind of what a step publishes; None for nothing, and for a step without a row."""
    return next((step.output for step in STEPS if step.name == name), None)


def maker_of(output: Output) -> StepSpec:
    """Return the step that publishes outputs of this kind."""
    return next(step for step in STEPS if step.output == output)
