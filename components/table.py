"""What each step of the pipeline is: the one table that compiling, running and reporting read.

A step is a KFP component: its file `components/NAME.py`, its row here, and its wiring in
`pipelines/training.py`. It runs stages one after the other, each of which has a record of its own.
Both are in the order in which they run.
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
#: What the first step says: whether the run trains. `unchanged` where an earlier run has done what
#: this one would do.
READY, UNCHANGED, REFUSED = "ready", "unchanged", "refused"
_HOUR, _DAY = 3600, 24 * 3600


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage.

    Attributes:
        output: kind of what the stage publishes, which names its URI among the artifacts of a run;
            None for nothing.
        accepts: for a stage that judges the data or the model, the word in its record with which
            the run goes on; with any other the run ends as refused. Empty for one that judges none.
        completes: the word in the record of the stage with which the run ends well, without any of
            the next stages; empty for none.
    """

    name: str
    output: Output | None = None
    accepts: str = ""
    completes: str = ""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step.

    Attributes:
        name: of the step's file and of its function.
        deadline_seconds: limit of one pod: waiting for the image, and all tries in it.
        retries: further tries of each stage in a pod after a failure that may pass, and further
            pods after one that was lost.
        is_light: needs little CPU and memory, whatever the other steps get.
        may_use_gpus: computes with the model.
        loads: the module that it computes with, which brings TensorFlow; empty for none.
        is_exit_step: runs at the end of every whole run, also of one that failed.
    """

    name: str
    stages: tuple[StageSpec, ...]
    deadline_seconds: int
    retries: int = 2
    is_light: bool = False
    may_use_gpus: bool = False
    loads: str = ""
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
        name="prepare_data",
        stages=(
            StageSpec(name="resolve_config", completes=UNCHANGED),
            StageSpec(name="prepare_data", output="dataset"),
            StageSpec(name="validate_data", output="validation", accepts="accepted"),
        ),
        deadline_seconds=_DAY,
        retries=3,
    ),
    # The training job has a deadline of its own, which is shorter by default.
    StepSpec(
        name="train_model",
        stages=(StageSpec(name="train_model", output="checkpoint"),),
        deadline_seconds=28 * _DAY,
    ),
    StepSpec(
        name="evaluate_model",
        stages=(
            StageSpec(name="evaluate_model", output="evaluation"),
            StageSpec(name="check_gate", output="decision", accepts="blessed"),
        ),
        deadline_seconds=_DAY,
        may_use_gpus=True,
        loads="flotilla.trainer.evaluation.evaluate",
    ),
    # It compares the model with a champion that the gate has not seen.
    StepSpec(
        name="export_model",
        stages=(
            StageSpec(name="export_model", output="model"),
            StageSpec(name="register_model", output="registration", accepts="promoted"),
        ),
        deadline_seconds=_DAY,
        may_use_gpus=True,
        loads="flotilla.trainer.export.export",
    ),
    StepSpec(
        name="finish",
        stages=(StageSpec(name="finish", output="report"),),
        deadline_seconds=_HOUR,
        is_light=True,
        is_exit_step=True,
    ),
)
#: What a sweep has in place of training and of the exit step; see `pipelines/sweeps/pipeline.py`.
SWEEP_STEPS = tuple(
    StepSpec(name=name, stages=(StageSpec(name=name),), deadline_seconds=seconds, is_light=light)
    for name, seconds, light in (
        ("run_trial", 28 * _DAY, False),
        ("choose_trial", _HOUR, True),
        ("finish_sweep", _HOUR, True),
    )
)
STAGES = tuple(stage for step in STEPS for stage in step.stages)
#: The stage that a mistake in the configuration is one of, whenever it is found.
FIRST_STAGE = STAGES[0].name
#: The step that runs at the end of every whole run.
EXIT_STEP = next(step for step in STEPS if step.is_exit_step)
# All stages but those of the exit step.
WORKING = tuple(stage for step in STEPS if not step.is_exit_step for stage in step.stages)
PREPARE, TRAIN, EVALUATE, EXPORT = (step.name for step in STEPS if not step.is_exit_step)


def find_step(name: str) -> StepSpec:
    """Return the row of a step, by its own name or KFP's; raises `LookupError`."""
    for step in (*STEPS, *SWEEP_STEPS):
        if name in (step.name, step.kfp_name):
            return step
    raise LookupError(f"components/table.py has no row for the step {name!r}: add one")


def find_step_of_stage(stage: str) -> StepSpec:
    """Return the step that runs a stage, by the name of the stage; raises `LookupError`."""
    for step in (*STEPS, *SWEEP_STEPS):
        if any(each.name == stage for each in step.stages):
            return step
    raise LookupError(f"components/table.py has no stage {stage!r}: add one")


def list_stages_after(stage: str, step: str) -> list[str]:
    """Return the names of the stages of a step after one of them; all where that is empty."""
    names = [each.name for each in find_step(step).stages]
    return names[names.index(stage) + 1 :] if stage in names else names


def ends_run(name: str, word: object) -> bool:
    """Say whether only the exit step follows this stage, given its word; raises `LookupError`."""
    row = _stage_of(name)
    return row is WORKING[-1] or ends_well(name, word) or bool(row.accepts and word != row.accepts)


def ends_well(name: str, word: object) -> bool:
    """Say whether the run is done with this stage, given its word; raises `LookupError`."""
    completes = _stage_of(name).completes
    return bool(completes) and word == completes


def _stage_of(name: str) -> StageSpec:
    return next(stage for stage in find_step_of_stage(name).stages if stage.name == name)


def published_kind(name: str) -> Output | None:
    """Return the kind of what a stage publishes; None for nothing, and for one without a row."""
    return next((stage.output for stage in STAGES if stage.name == name), None)


def find_maker(output: Output) -> StageSpec:
    """Return the stage that publishes outputs of this kind."""
    return next(stage for stage in STAGES if stage.output == output)
