"""The table of all pipeline steps, used to compile and run pipelines and to write reports.

A step is a KFP component: it consists of its file `components/NAME.py`, its row in this table, and
its wiring in `pipelines/training.py`. A step runs its stages in sequence, and each stage has its
own record. Steps and stages are listed in execution order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Output = Literal[
    "dataset", "validation", "checkpoint", "evaluation", "decision", "model", "registration",
    "report",
]  # fmt: skip
#: Results of the first step, which decide whether the run trains. `unchanged` means that an earlier
#: run has already done the same work.
READY, UNCHANGED, REFUSED = "ready", "unchanged", "refused"
#: Result of training with the user's own program if the run ends after training.
TRAINED = "trained"
_HOUR, _DAY = 3600, 24 * 3600


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage of a step.

    Attributes:
        output: kind of directory that the stage publishes, and its name among the artifacts of a
            run; None if it publishes nothing.
        accepts: result with which the run continues; any other result ends the run as refused.
            Empty for a stage that does not judge the data or the model.
        completes: result that ends the run successfully before the next stages; empty if there is
            none.
    """

    name: str
    output: Output | None = None
    accepts: str = ""
    completes: str = ""


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step of a pipeline.

    Attributes:
        name: name of the step's file and function.
        deadline_seconds: time limit of one pod, including the image pull and all attempts.
        retries: how often each stage is retried in its pod after a transient failure, and how
            often a lost pod is replaced.
        is_light: whether the step needs little CPU and memory, regardless of the settings.
        may_use_gpus: whether the step runs the model and may use GPUs for it.
        loads: module that does the computation and imports TensorFlow; empty if there is none.
        is_exit_step: whether the step runs at the end of every complete run, even after a failure.
    """

    name: str
    stages: tuple[StageSpec, ...]
    deadline_seconds: int
    retries: int = 2
    is_light: bool = False
    may_use_gpus: bool = False
    loads: str = ""
    is_exit_step: bool = False

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
    # This deadline is a last resort, because the training job has a shorter one by default.
    StepSpec(
        name="train_model",
        stages=(StageSpec(name="train_model", output="checkpoint", completes=TRAINED),),
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
    # The stage `register_model` may need GPUs to compare the model with a newer champion.
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
#: Steps that replace training and the exit step in a sweep; see `pipelines/sweeps/pipeline.py`.
SWEEP_STEPS = tuple(
    StepSpec(name=name, stages=(stage,), deadline_seconds=seconds, is_light=light)
    for name, stage, seconds, light in (
        ("run_trial", StageSpec(name="run_trial"), 28 * _DAY, False),
        ("choose_trial", StageSpec(name="choose_trial"), _HOUR, True),
        # The exit step of a sweep writes the record and the report of the usual exit step.
        ("finish_sweep", StageSpec(name="finish", output="report"), _HOUR, True),
    )
)
STAGES = tuple(stage for step in STEPS for stage in step.stages)
#: The stage that checks the configuration and reports its errors.
FIRST_STAGE = STAGES[0].name
#: The last step of the whole pipeline, which runs even after a failure.
EXIT_STEP = next(step for step in STEPS if step.is_exit_step)
WORKING = tuple(stage for step in STEPS if not step.is_exit_step for stage in step.stages)
PREPARE, TRAIN, EVALUATE, EXPORT = (step.name for step in STEPS if not step.is_exit_step)


def find_step(name: str) -> StepSpec:
    """Return the row of a step, given its name or its KFP name. Raises `LookupError`."""
    for step in (*STEPS, *SWEEP_STEPS):
        if name in (step.name, step.kfp_name):
            return step
    raise LookupError(f"components/table.py has no row for the step {name!r}: add a row")


def find_step_of_stage(stage: str) -> StepSpec:
    """Return the step that runs the stage with this name. Raises `LookupError`."""
    for step in (*STEPS, *SWEEP_STEPS):
        if any(each.name == stage for each in step.stages):
            return step
    raise LookupError(f"components/table.py has no stage {stage!r}: add one")


def list_stages_after(stage: str, step: str) -> list[str]:
    """Return the names of a step's stages after `stage`, or of all if the step lacks `stage`."""
    names = [each.name for each in find_step(step).stages]
    return names[names.index(stage) + 1 :] if stage in names else names


def name_step_of(stage: str) -> str:
    """Return the name of the step that runs a stage, or an unknown name unchanged.

    A record of another version or of another pipeline may name an unknown stage.
    """
    try:
        return find_step_of_stage(stage).name
    except LookupError:
        return stage


def ends_run(name: str, word: object) -> bool:
    """Return whether this result of a stage ends the run. An unknown stage never ends it."""
    row = _find_stage(name)
    is_refused = bool(row and row.accepts and word != row.accepts)
    return row is WORKING[-1] or ends_well(name, word) or is_refused


def ends_well(name: str, word: object) -> bool:
    """Return whether this result of a stage ends the run early but successfully."""
    row = _find_stage(name)
    return bool(row and row.completes and word == row.completes)


def _find_stage(name: str) -> StageSpec | None:
    every = (stage for step in (*STEPS, *SWEEP_STEPS) for stage in step.stages)
    return next((stage for stage in every if stage.name == name), None)


def output_kind(name: str) -> Output | None:
    """Return the kind of a stage's output, or None if it publishes nothing or is unknown."""
    return next((stage.output for stage in STAGES if stage.name == name), None)


def find_maker(output: Output) -> StageSpec:
    """Return the stage that publishes outputs of this kind."""
    return next(stage for stage in STAGES if stage.output == output)
