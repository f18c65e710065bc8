"""The interface of an engine, which creates one kind of Kubernetes job and reads its status."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.api.client import Api
from flotilla.components.kubernetes.names import JobKind, Tree
from flotilla.components.kubernetes.pods.pod_state import TaskEnd
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.stop import Stop
from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.config.schema import Config
from flotilla.trainer.tracking import addresses

# Placeholders in a manifest for values that are known only in a run.
_RUN_ID, _DATASET, _ROOT = "RUN-ID", "DATASET", "gs://BUCKET"


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended. `roles` are the roles with a failed task, according to the controller."""

    is_done: bool
    message: str = ""
    is_past_deadline: bool = False
    roles: frozenset[str] = frozenset()


class Engine(ABC):
    """Interface to one kind of Kubernetes job.

    Attributes:
        name: the value of `cluster.launcher` for the engine.
        kind: the kind of job that the engine creates.
        is_strict: whether the API should refuse unknown fields of a job.
        fails_with_a_pod: whether the loss of a pod fails the whole job. If not, the controller
            replaces the pod. A call of `bring_back` makes it do so immediately.
    """

    name: ClassVar[Launcher]
    kind: ClassVar[JobKind]
    is_strict: ClassVar[bool]
    fails_with_a_pod: ClassVar[bool]

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise a `ConfigError` for a setting that this kind of job does not support."""

    @abstractmethod
    def manifest(self, job: Job, place: Place) -> Tree:
        """Return the manifest for training `job`. Equal arguments give equal manifests."""

    @abstractmethod
    def templates(self, tree: Tree) -> Sequence[Tree]:
        """Return a job's pod templates, one for each role."""

    @abstractmethod
    def owns(self, uid: str, pod: Tree) -> bool:
        """Return whether a pod belongs to the job with this uid, and not to an earlier one."""

    @abstractmethod
    def is_taken_up(self, tree: Tree) -> bool:
        """Return whether the controller has reacted to a job."""

    @abstractmethod
    def is_suspended(self, tree: Tree) -> bool:
        """Return whether a job is suspended, for example until Kueue admits it."""

    @abstractmethod
    def end(self, tree: Tree) -> JobEnd | None:
        """Return how the job ended, or None if it has not ended."""

    @abstractmethod
    def is_failing(self, api: Api, tree: Tree, /) -> bool:
        """Return whether an unfinished job is about to fail and its pods are being deleted."""

    @abstractmethod
    def failure(self, api: Api, tree: Tree, /) -> JobEnd:
        """Return the reason for a failure, with all details from the API."""

    @abstractmethod
    def is_final(self, config: Config, end: TaskEnd, /) -> bool:
        """Return whether this exit of a task fails the job instead of restarting the task."""

    @abstractmethod
    def stop(self, tree: Tree) -> Stop:
        """Return the operation that stops a job after a last checkpoint."""

    @abstractmethod
    def bring_back(self, api: Api, pod: Tree, /) -> set[str]:
        """Make the controller replace a lost pod immediately. Return the uids of deleted Jobs."""

    @abstractmethod
    def reporters(self, api: Api, tree: Tree, /) -> Sequence[str]:
        """Return the uids of the objects whose events explain missing pods."""


def document(engine: Engine, config: Config, defaults: PodDefaults = DEFAULTS) -> Tree:
    """Return the manifest of `config`, with placeholders for values that only a run has."""
    root = config.storage.root or _ROOT
    job = Job(
        config=config,
        dataset=storage.join(root, "datasets", _DATASET),
        checkpoints=storage.join(root, _RUN_ID, "checkpoints"),
        workdir=Path(),
    )
    return engine.manifest(job, Place(namespace="", defaults=defaults))


def add_digest(tree: Tree) -> Tree:
    """Add the digest of a job as an annotation. A retry adopts a job with the same digest.

    The digest excludes the label of isolated pods and the tracker's variables, which may differ
    between two attempts of the same step.
    """
    digest = hashlib.sha256(json.dumps(_drop_tracker(tree), sort_keys=True).encode()).hexdigest()
    metadata = tree["metadata"]
    annotations = {**metadata["annotations"], names.MANIFEST: digest}
    return {**tree, "metadata": {**metadata, "annotations": annotations}}


def _drop_tracker(value: Any) -> Any:
    """Return a copy of a part of a manifest, without the tracker's variables."""
    if isinstance(value, list):
        return [_drop_tracker(each) for each in value if not _is_of_tracker(each)]
    if isinstance(value, dict):
        return {name: _drop_tracker(each) for name, each in value.items()}
    return value


def _is_of_tracker(value: Any) -> bool:
    return isinstance(value, dict) and value.get("name") in addresses.VARIABLES


def condition(tree: Tree, kind: str) -> Tree | None:
    """Return the job's condition with the type `kind`, such as `Failed`; None if not true."""
    every = tree.get("status", {}).get("conditions") or []
    true = (each for each in every if each["type"] == kind and each["status"] == "True")
    found: Tree | None = next(true, None)
    return found
