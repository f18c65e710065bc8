"""The run configuration: the keys of `configs/*.yaml`, with defaults and limits.

The model is strict: it rejects an unknown key, a wrong type or a value out of range. Validators of
`Config` check relations between sections. `flotilla.trainer.config.load` reads files into it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flotilla.trainer.config.base import (
    AS_WRITTEN,
    AUTO,
    AUTOMATIC,
    MOST,
    OR_AUTO,
    Free,
    Section,
    key,
    known_name,
)
from flotilla.trainer.config.cluster import ClusterConfig, server_number
from flotilla.trainer.config.data import DYNAMIC, DataConfig
from flotilla.trainer.config.model import (
    OF_MODEL,
    RECOMMENDERS,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    WarmStart,
)
from flotilla.trainer.config.program import ProgramConfig, refuse_own_keys, refuse_without_command
from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.config.topology import TOPOLOGIES, Topology, find_topology
from flotilla.trainer.runtime.errors import UserError, nearest
from flotilla.trainer.storage.uri import FORMS, check_path, is_uri, name_of

TASKS = {
    "classification": "flotilla.trainer.tasks.classification:Classification",
    "binary_classification": "flotilla.trainer.tasks.classification:BinaryClassification",
    "multilabel_classification": "flotilla.trainer.tasks.classification:MultilabelClassification",
    "multi_output": "flotilla.trainer.tasks.multi_output:MultiOutput",
    "ranking": "flotilla.trainer.tasks.ranking:Ranking",
    "recommendation": "flotilla.trainer.tasks.recommendation:Recommendation",
    "regression": "flotilla.trainer.tasks.regression:Regression",
    "sequence_labelling": "flotilla.trainer.tasks.sequences:SequenceLabelling",
    "sequence_to_label": "flotilla.trainer.tasks.sequences:SequenceToLabel",
}
#: Single-label tasks that have a positive class.
OF_TWO_CLASSES = ("binary_classification", "ranking", "recommendation")
STRATEGIES = tuple(TOPOLOGIES)
# The value of `class_weights` that gives all classes the same total weight.
BALANCED = "balanced"


def _class_weights(value: object) -> object:
    if isinstance(value, str):
        if value not in ("", BALANCED):
            hint = nearest(value, [BALANCED])
            raise ValueError(f"it must be {BALANCED}, or a weight for each class{hint}")
        return value
    if not isinstance(value, dict) or not all(type(w) in (int, float) for w in value.values()):
        raise ValueError(f"it must be {BALANCED}, or a number for each class name")
    for name, weight in value.items():
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {name!r} is {weight}, which is not a finite number")
        if weight < 0:
            raise ValueError(f"the weight of {str(name)!r} is {weight:g}, which is below zero")
    return {str(name): weight for name, weight in value.items()}


ClassWeights = Annotated[str | dict[str, float], BeforeValidator(_class_weights)]
_OF_CLASSES = (
    'weight of each class in the training loss: {"name": weight}, or balanced (same total weight)'
)


def _restore_name(value: object) -> object:
    """Restore a class name that YAML parsed as a boolean or a number."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


Label = Annotated[str, BeforeValidator(_restore_name)]


class _LearningTask(Section):
    name: str = key(AUTO, f"{AUTO}, {', '.join(TASKS)}, or package.module:Task")
    loss: str = key("", "name of a Keras loss, or package.module:name; empty: the task's default")
    metrics: tuple[str, ...] = key((), "names of additional Keras metrics, or package.module:name")

    _known_task = field_validator("name")(known_name("task", (AUTO, *TASKS)))


class OutputConfig(_LearningTask):
    """The learning task of one of several outputs."""

    weight: float = key(1.0, "weight of this output in the total loss", gt=0)
    class_weights: ClassWeights = key("", _OF_CLASSES)
    positive: Label = key("", "positive class of this output; see task.positive")
    args: Free = key({}, "keyword arguments for the task's class")


class TaskConfig(_LearningTask):
    """The learning task: what is predicted, with which loss, and how it is measured."""

    outputs: dict[str, OutputConfig] = key(
        {},
        "learning task of each label, if there are several: {label: {name, loss, metrics, weight, "
        "class_weights, positive, args}}",
    )
    positive: Label = key(
        "",
        "positive class of a label with two classes; empty: the champion's or, without a champion, "
        "the rarer class in the training split (for ranking, the second class)",
    )
    main_metric: str = key(
        "", "metric by which models are compared; empty: chosen according to the task and data"
    )
    args: Free = key({}, "keyword arguments for the task's class")


Steps = Annotated[int, Field(ge=1, le=MOST), OR_AUTO, AS_WRITTEN]
Batch = Annotated[int, Field(ge=1, lt=2**31), OR_AUTO, AS_WRITTEN]
# An interval or a limit, in global steps or validations. 0 disables it.
Count = Annotated[int, Field(ge=0, le=MOST), OR_AUTO, AS_WRITTEN]


class TrainingConfig(Section):
    """Steps, strategy, optimizer, checkpoints and validation."""

    strategy: str = key(
        "async_parameter_server", f"{', '.join(STRATEGIES)}, or package.module:Class"
    )
    steps: Steps = key(
        1500,
        "number of global steps (applied updates); auto: derived from training.epochs if it is "
        "set, otherwise from the number of examples",
    )
    epochs: float = key(
        0.0, "number of passes over the training split; 0: train for training.steps", ge=0, le=MOST
    )
    batch_size: Batch = key(64, "number of examples from which a replica computes one gradient")
    accumulate: int = key(
        1, "number of gradients that each replica averages into one update", ge=1, le=10_000
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig())
    schedule: ScheduleConfig = Field(ScheduleConfig())
    pull_every: int = key(
        1,
        "with async_parameter_server: number of local steps between pulling and pushing variables",
        ge=1,
        lt=2**31,
    )
    replicas_to_aggregate: int = key(
        0, "with sync_parameter_server: number of gradients per update; 0: one per worker", ge=0
    )
    checkpoint_every: Steps = key(500, "number of global steps between checkpoints")
    checkpoint_seconds: float = key(
        0, "maximum seconds between checkpoints, in addition to checkpoint_every; 0: no limit", ge=0
    )
    checkpoint_parts_mb: int = key(
        64,
        "total size of the variables, in megabytes, above which each parameter server writes its "
        "own part of a checkpoint",
        ge=0,
        le=MOST,
    )
    keep: int = key(
        3, "number of newest checkpoints to keep, in addition to the best", ge=1, le=MOST
    )
    keep_every_hours: float = key(
        0, "hours between checkpoints that are kept permanently; 0: none", ge=0, le=100_000
    )
    validate_every: Count = key(500, "number of global steps between validations; 0: none")
    patience: Count = key(
        0, "number of validations without improvement after which training stops; 0: no limit"
    )
    stall_timeout: float = key(
        120, "seconds without progress after which a task is restarted", ge=1, le=MOST
    )
    mixed_precision: Literal["", "bfloat16", "float16"] = key(
        "", "16-bit data type for computation; float16 also scales the loss; true means bfloat16"
    )
    jit_compile: bool = key(False, "compile the training step with XLA")
    warm_start: WarmStart = key(
        "",
        "source of initial weights: URI of a checkpoint or a .keras file, or champion; {from, "
        "include, exclude}: only some of its weights",
    )
    ema: float = key(
        0.0,
        "momentum of a moving average of the weights, which is evaluated and exported; 0: none",
        ge=0,
        lt=1,
    )
    freeze: tuple[str, ...] = key(
        (), "globs for the paths of variables that are not trained, such as hidden_0/*"
    )
    hand_on: Literal["best", "last"] = key(
        "best", "which checkpoint is evaluated and exported: the best by validation, or the last"
    )
    class_weights: ClassWeights = key("", _OF_CLASSES)
    when_unchanged: Literal["stop", "train"] = key(
        "stop",
        "whether to stop or train if an earlier run with the same files of data.source and the "
        "same configuration has finished",
    )
    profile: tuple[int, ...] = key(
        (), "first and last global step that TensorFlow's profiler traces, such as [100, 110]"
    )
    callbacks: tuple[str, ...] = key(
        (), "Keras callbacks, each as package.module:Class; an epoch ends at each validation"
    )
    seed: int = key(0, "seed of the initial weights and the order of examples", ge=0, lt=2**31)

    @property
    def step_examples(self) -> int:
        """The number of examples of one replica in one step."""
        return self.batch_size * self.accumulate

    @field_validator("profile")
    @classmethod
    def _two_steps(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value and (len(value) != 2 or not 1 <= value[0] < value[1]):  # noqa: PLR2004
            raise ValueError(
                f"{list(value)} is not a first step and a later last step, such as [100, 110]"
            )
        return value

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _precision(cls, value: object) -> object:
        """Accept true and false, the values of earlier versions, including as strings."""
        known = {True: "bfloat16", False: "", "true": "bfloat16", "false": ""}
        return known.get(value, value) if isinstance(value, bool | str) else value

    _known_strategy = field_validator("strategy")(known_name("strategy", STRATEGIES))


class EvaluationConfig(Section):
    """The evaluation on the test split."""

    batch_size: int = key(1000, "number of examples per evaluation batch", ge=1, lt=2**31)
    slices: tuple[str, ...] = key((), "features to slice metrics by, in addition to the label")
    baseline: Literal["auto", "none"] = key(
        "auto", "baseline models to evaluate on the same examples; auto: those that suit the task"
    )


class ExportConfig(Section):
    """The formats of an exported model."""

    formats: tuple[Literal["saved_model", "keras", "tflite", "tflite_int8"], ...] = key(
        ("saved_model", "keras"), "formats of the exported model; saved_model is required"
    )

    @field_validator("formats")
    @classmethod
    def _require_served(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        # The SavedModel is needed for serving and for the comparison with the next model.
        if "saved_model" not in formats:
            raise ValueError("saved_model is required")
        return formats


def _require_uri(value: str, check: Callable[[str], object] = check_path) -> None:
    if not is_uri(value):
        raise ValueError(f"it is not a URI; write it as {FORMS}")
    try:
        check(value)
    except UserError as error:
        raise ValueError(str(error)) from None


def _require_bundle(uri: str) -> None:
    check_path(uri)
    if not re.fullmatch(r"[0-9a-f]{64}", name_of(uri)):
        raise ValueError(
            "it is not the URI of a bundle, which ends with a digest; leave it out, and submit "
            "with --code DIR"
        )


class RegistryConfig(Section):
    """Requirements for an exported model to become the champion."""

    max_megabytes: float = key(
        0, "maximum total size of the model's files, in megabytes; 0: no limit", ge=0
    )
    max_milliseconds: float = key(
        0,
        "maximum time to predict one example, measured in a new process, in milliseconds; 0: no "
        "limit",
        ge=0,
    )
    hub: str = key(
        "",
        "URL of a Kubeflow Model Registry that receives the promotions; empty: the URL in the "
        "environment variable FLOTILLA_MODEL_REGISTRY, if it is set",
    )

    @field_validator("hub")
    @classmethod
    def _address(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("it is not an address; write it as http://HOST:PORT or https://HOST")
        return value.rstrip("/")


class StorageConfig(Section):
    """The root of published directories."""

    root: str = key(
        "", "URI below which a run publishes; empty: the workdir or, on KFP, the pipeline root"
    )

    @field_validator("root")
    @classmethod
    def _uri(cls, value: str) -> str:
        if value:
            _require_uri(value)
        return value.rstrip("/")


class Config(Section):
    """The configuration of one run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._-]{0,48}[a-z0-9])?$")] = key(
        "digits", "name of the model in the registry"
    )
    data: DataConfig = Field(DataConfig())
    task: TaskConfig = Field(TaskConfig())
    model: ModelConfig = Field(ModelConfig())
    training: TrainingConfig = Field(TrainingConfig())
    cluster: ClusterConfig = Field(ClusterConfig())
    program: ProgramConfig = key(
        ProgramConfig(), "your own training program, used instead of Flotilla's trainer"
    )
    evaluation: EvaluationConfig = Field(EvaluationConfig())
    gate: GateConfig = Field(GateConfig())
    export: ExportConfig = Field(ExportConfig())
    registry: RegistryConfig = Field(RegistryConfig())
    storage: StorageConfig = Field(StorageConfig())
    code: str = key("", "URI of the bundle of your modules, as published by `--code DIR`")

    @field_validator("code")
    @classmethod
    def _bundle(cls, value: str) -> str:
        if value:
            _require_uri(value, _require_bundle)
        return value

    @property
    def topology(self) -> Topology:
        """The roles of this run, set by the program or the strategy."""
        own = self.program.topology() if self.program.command else None
        return own or find_topology(self.training.strategy)

    @property
    def has_evaluator(self) -> bool:
        """Whether a task evaluates each checkpoint."""
        own = self.program.roles if self.program.command else {}
        return self.cluster.evaluator or "evaluator" in own

    @model_validator(mode="after")
    def _check_program(self) -> Config:
        """`program.command` excludes keys of the built-in trainer. Other `program` keys need it."""
        if self.program.command:
            refuse_own_keys(dict(self))
        else:
            refuse_without_command(self.program)
        return self

    @model_validator(mode="after")
    def _check_length(self) -> Config:
        """`training.epochs` cannot be combined with a number in `training.steps`."""
        training = self.training
        if training.epochs and training.steps != AUTOMATIC:
            raise ValueError(
                f"training.epochs: {training.epochs:g}, but training.steps is also set "
                f"({training.steps}); leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_validation(self) -> Config:
        """`cluster.evaluator` and `training.patience` need `data.validation`.

        `training.patience` also needs `training.validate_every`, unless there is an evaluator.
        """
        if self.cluster.evaluator and not self.data.validation:
            raise ValueError("cluster.evaluator needs validation examples; set data.validation")
        validates = self.cluster.evaluator or (
            self.training.validate_every and self.data.validation
        )
        if self.training.patience > 0 and not validates:
            raise ValueError(
                "training.patience: early stopping needs validations; set training.validate_every "
                "and data.validation, or cluster.evaluator"
            )
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Config:
        """`training.profile` must end within `training.steps`."""
        profile, steps = self.training.profile, self.training.steps
        if profile and profile[-1] > steps != AUTOMATIC:
            raise ValueError(
                f"training.profile: step {profile[-1]} is after the end of training; use steps up "
                f"to training.steps ({steps})"
            )
        return self

    @model_validator(mode="after")
    def _check_existing_servers(self) -> Config:
        """`cluster.existing_servers` needs a strategy with servers, and no `cluster.in_process`."""
        if not self.cluster.existing_servers:
            return self
        strategy = self.training.strategy
        if not find_topology(strategy).servers:
            raise ValueError(
                f"cluster.existing_servers: {strategy} has no servers; leave it out, or choose a "
                "strategy with parameter servers"
            )
        if self.cluster.in_process:
            raise ValueError(
                "cluster.existing_servers: cluster.in_process, which starts servers, is also set; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_recommender(self) -> Config:
        """A recommender model for files needs `data.inputs` or `data.map`.

        The task `recommendation` needs `data.group`.
        """
        towers = self.model.name in RECOMMENDERS and self.data.source and not self.data.map
        if towers and not self.data.inputs:
            raise ValueError(
                f"data.inputs: {self.model.name} needs the ids of users and items; set data.inputs "
                "to their columns, [USER, ITEM], and data.label to the column to predict for a pair"
            )
        if self.task.name == "recommendation" and not self.data.group:
            raise ValueError(
                "data.group: the task recommendation computes metrics by user; set data.group to "
                "the column that names the user"
            )
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Config:
        """`cluster.placement` may only name servers of `cluster.parameter_servers`."""
        # Skip existing servers: their number is known only when the run connects to them.
        if find_topology(self.training.strategy).servers and not self.cluster.existing_servers:
            servers = self.cluster.parameter_servers
            for glob, server in self.cluster.placement.items():
                if server_number(server) >= servers:
                    raise ValueError(
                        f"cluster.placement: {glob!r} is placed on {server!r}; it must be ps:0 to "
                        f"ps:{servers - 1}"
                    )
        return self

    @model_validator(mode="after")
    def _check_gpus(self) -> Config:
        """Set only one limit of GPU memory. `cluster.communication: nccl` needs GPUs."""
        if self.cluster.gpu_memory_mb and self.cluster.gpu_memory_fraction:
            raise ValueError(
                "cluster.gpu_memory_fraction: cluster.gpu_memory_mb is also set; set only one of "
                "them"
            )
        if self.cluster.communication == "nccl" and not self.cluster.gpus_per_worker:
            raise ValueError(
                "cluster.communication: nccl needs GPUs; set cluster.gpus_per_worker, or "
                "choose ring or auto"
            )
        return self

    @model_validator(mode="after")
    def _check_shards(self) -> Config:
        """`cluster.workers` is at most `data.shards` if `data.partition` is `disjoint`."""
        shared = self.topology.workers and self.data.partition == "disjoint"
        if shared and self.cluster.workers > self.data.shards:
            raise ValueError(
                f"cluster.workers: {self.cluster.workers} workers cannot share "
                f"{self.data.shards} shards; set data.shards to {self.cluster.workers} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_dynamic_partition(self) -> Config:
        """`data.partition: dynamic` excludes `data.disk` and your own programs and strategies."""
        if self.data.partition != DYNAMIC:
            return self
        if self.program.command:
            raise ValueError(
                "data.partition: dynamic works only with Flotilla's own trainer, not with a "
                "program; choose disjoint or reshuffle"
            )
        strategy = self.training.strategy
        if strategy not in STRATEGIES:
            raise ValueError(
                f"data.partition: dynamic works only with the strategies {', '.join(STRATEGIES)}; "
                f"with {strategy!r} choose disjoint or reshuffle"
            )
        if self.data.disk:
            raise ValueError(
                "data.disk: with data.partition: dynamic, a worker may be assigned any example "
                "and keeps all shards; leave data.disk empty, or set data.partition to disjoint"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Config:
        """`training.schedule` cannot be set if `training.optimizer.name` is `model`."""
        training = self.training
        if training.optimizer.name == OF_MODEL and training.schedule != ScheduleConfig():
            raise ValueError("training.schedule: the model's own optimizer sets it; leave it out")
        return self

    @model_validator(mode="after")
    def _check_accumulation(self) -> Config:
        """Set only one of `training.accumulate` and `training.pull_every` above 1."""
        training = self.training
        if training.accumulate > 1 < training.pull_every:
            raise ValueError(
                "training.accumulate: training.pull_every already combines "
                f"{training.pull_every} batches into one update; set one of the two to 1"
            )
        return self

    @model_validator(mode="after")
    def _check_aggregation(self) -> Config:
        """`training.replicas_to_aggregate` is at most `cluster.workers`."""
        wanted, workers = self.training.replicas_to_aggregate, self.cluster.workers
        if find_topology(self.training.strategy).capabilities.aggregates and wanted > workers:
            raise ValueError(
                f"training.replicas_to_aggregate: {workers} workers cannot send {wanted} gradients "
                f"for an update; set it to {workers} or less (0: one from each worker)"
            )
        return self
