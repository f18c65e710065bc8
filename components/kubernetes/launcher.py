"""The launcher of an engine: creates or adopts the job of a run, watches it, and deletes it.

A job must not outlive its launcher, however the launcher ends:

- The signal handler requests a stop (`Stop`), or deletes the job if no guard would respond.
- `launch` deletes the job whenever it returns or raises.
- The exit step ends all jobs with the run's label.
- The guard of the leading task ends the job on request, and when the lease expires.
- The job has an active deadline and, in the step's namespace, an owner reference to the step's pod.

The launcher renews the lease once before training begins, to detect missing permissions early.

Some engines fail the whole job when one of its pods is deleted, evicted or preempted. The launcher
then deletes the job, waits until its pods are gone, and recreates it from the same manifest.
Training resumes from the newest checkpoint, which the chief publishes in its grace period.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.components.kubernetes import names, requirements
from flotilla.components.kubernetes.adoption import Adoption, isolate, network_policy, step_pod
from flotilla.components.kubernetes.client import (
    Api,
    Connection,
    RefusedError,
    UnreachableError,
    Watch,
    call_with_retry,
    connect,
    describe_refusal,
)
from flotilla.components.kubernetes.engine import Engine, Stop, is_stop_requested
from flotilla.components.kubernetes.heartbeat import Heartbeat
from flotilla.components.kubernetes.limits import Deadlines, Restarts
from flotilla.components.kubernetes.logs import EventRelay, Logs
from flotilla.components.kubernetes.names import NETWORK_POLICIES, PODS, Resource, Tree
from flotilla.components.kubernetes.pods import program
from flotilla.components.kubernetes.pods.pod_state import Loss
from flotilla.components.kubernetes.pods.template import (
    Place,
    grace_seconds,
    label_job,
    leading,
    replicas,
)
from flotilla.components.kubernetes.requirements import require_sidecars
from flotilla.components.kubernetes.supervisor import DRAIN_SECONDS, JobEvents, Supervisor
from flotilla.trainer import events
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import KubernetesConfig
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime import streams
from flotilla.trainer.runtime.errors import ConfigError, RunInterruptedError, UserError
from flotilla.trainer.runtime.signals import handle_interrupts
from flotilla.trainer.tracking import addresses

log = logging.getLogger(__name__)
# Variables for the object store that the step passes to the tasks. Credentials come from secrets.
ENDPOINTS = (
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION",
    "GOOGLE_CLOUD_PROJECT", "STORAGE_EMULATOR_HOST", "FLOTILLA_STORAGE_DEADLINE",
)  # fmt: skip
# Seconds that the removal of a pod from its node may take after the grace period.
REMOVAL_SECONDS = 60
# The user's code writes to the same log, so accept only lists of valid host names.
_UNRESOLVED = re.compile(re.escape(names.UNRESOLVED) + r"[a-z0-9., -]{1,300}")
# How long the exit step retries while the API is unreachable, in seconds.
DELETE_SECONDS = 120.0


def launch(engine: Engine, job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` on Kubernetes with `engine`; see `flotilla.trainer.cluster.local.launch`.

    On SIGINT or SIGTERM, the chief publishes a last checkpoint within its grace period, and then
    the job is deleted. A second signal deletes the job without a checkpoint. `defaults` apply to
    unset settings.

    Raises:
        ConfigError: the engine does not support a setting, such as servers outside the job.
    """
    for key in ("in_process", "existing_servers"):
        if getattr(job.config.cluster, key):
            raise ConfigError(
                f"cluster.{key}: not supported with cluster.launcher {engine.name}; remove this key"
            )
    engine.check(job.config)
    if job.config.program.command and not job.config.program.python:
        log.warning(program.WITHOUT_AGENT)
    _Launch(engine, job, connect(), defaults).run()


def delete_jobs(engine: Engine, settings: KubernetesConfig, run_id: str) -> list[str]:
    """End the remaining jobs of a run, and return their names. Raises `UserError`.

    If the leading task of a job runs, it is first asked to stop with a last checkpoint. Then its
    guard ends the job, even if this process is killed within seconds.
    """
    api = Api(connect(), settings.namespace)
    label = f"{names.RUN}={names.label_value(run_id)}"
    resource = engine.kind.resource
    try:
        orphans = call_with_retry(
            partial(api.list_labelled, resource, label), DELETE_SECONDS, time.sleep
        )
    except RefusedError as error:
        # If the cluster does not serve this kind, there are no jobs.
        if error.is_unserved or (error.is_forbidden and not api.serves(resource)):
            return []
        raise UserError(f"cannot delete the jobs with the label {label}: {error}") from None
    left = list(filter(None, [_end_orphan(engine, api, orphan) for orphan in orphans]))
    if left:
        raise UserError(f"cannot delete the jobs with the label {label}: {'; '.join(left)}")
    return [orphan["metadata"]["name"] for orphan in orphans]


def _end_orphan(engine: Engine, api: Api, orphan: Tree) -> str:
    """End a job, and return why it could not be deleted, or an empty string."""
    name, uid = orphan["metadata"]["name"], orphan["metadata"]["uid"]
    log.warning("stopping the job %s, because its launcher has ended", name)
    if not engine.end(orphan) and not orphan["metadata"].get("deletionTimestamp"):
        _stop(engine, api, orphan)
    delete = partial(api.delete, engine.kind.resource, name, uid)
    try:
        call_with_retry(delete, DELETE_SECONDS, time.sleep)
    except (RefusedError, UserError) as error:
        return str(error)
    return ""


def _stop(engine: Engine, api: Api, job: Tree) -> None:
    ending = engine.stop(job)
    with suppress(RefusedError, UnreachableError):
        if is_stop_requested(api, job):
            ending.wait(api, time.sleep)
        elif ending.leader_runs(api):
            ending.request(api)
            ending.wait(api, time.sleep)


class _Launch:
    def __init__(
        self, engine: Engine, job: Job, connection: Connection, defaults: PodDefaults
    ) -> None:
        namespace = job.config.cluster.kubernetes.namespace or connection.namespace
        settings = job.config.cluster.kubernetes
        self._engine, self._kind = engine, engine.kind
        self._job, self._settings = job, settings
        self._manifest = engine.manifest(job, _place(connection, namespace, defaults))
        self._name = self._manifest["metadata"]["name"]
        self._namespace = namespace
        self._api = Api(connection, namespace)
        # The interrupted code may hold a lock of `_api`, so the signal handler uses another client.
        self._handler_api = Api(connection, namespace)
        self._is_own_namespace = namespace == connection.namespace
        grace = max(grace_seconds(job.config, role) for role in replicas(job.config))
        self._deletion_seconds = grace + REMOVAL_SECONDS
        self._uid = ""
        self._is_interrupted = self._is_stopping = False
        self._is_interrupted_again = threading.Event()
        self._stop: Stop | None = None
        self._is_adopted = False
        self._leader_runs: Callable[[], bool] = lambda: False
        # The leading task's last message, reported if an interrupt arrives between two jobs.
        self._message = ""
        self._job_events: JobEvents = queue.SimpleQueue()
        self._heartbeat = self._new_heartbeat()
        limits = settings.deadlines
        if job.config.program.command:
            # A program may report no steps, so `program.stall_timeout` replaces this deadline.
            limits = limits.model_copy(update={"stalling": 0})
        self._deadlines = Deadlines(engine, limits, replicas(job.config))
        self._restarts = Restarts(job.config, engine)

    def run(self) -> None:
        with handle_interrupts(self._handle_interrupt):
            try:
                requirements.require_permissions(self._api, self._namespace, self._kind)
                require_sidecars(self._api, self._job.config)
                self._isolate()
                while self._supervise(self._adopt_or_create()):
                    self._deadlines.begin_again()
            finally:
                self._heartbeat.stop()
                self._await_stop()
                self._delete()

    def _new_heartbeat(self) -> Heartbeat:
        limit = self._settings.deadlines.heartbeat
        return Heartbeat(self._api, self._kind, limit, self._job_events.put)

    def _adopt_or_create(self) -> Tree:
        if self._is_interrupted:
            raise self._interruption()
        self._uid = ""
        self._stop = None
        self._heartbeat = self._new_heartbeat()
        owner = step_pod() if self._is_own_namespace else None
        own: Tree = {"ownerReferences": [owner]} if owner else {}
        limits = self._settings.deadlines
        adoption = Adoption(self._engine, self._api, limits, self._wait)
        # A pod on a lost node remains until Kubernetes detects the loss. Wait for this as long as
        # the deadline `queueing` allows.
        patience = max(self._deletion_seconds, limits.queueing or math.inf)
        created = adoption.adopt_or_create(self._manifest, own, patience)
        self._uid, self._is_adopted = created["metadata"]["uid"], adoption.is_adopted
        self._stop = self._engine.stop(created)
        self._heartbeat.hold(created, limits, self._wait)
        self._make_policy(created)
        return created

    def _isolate(self) -> None:
        if requirements.may_isolate(self._api, self._namespace):
            self._manifest = copy.deepcopy(self._manifest)
            isolate(self._engine.templates(self._manifest).values())
            return
        log.warning(
            "the launcher has no permission to %s in the namespace %s, so other Flotilla jobs "
            "there can reach the tasks of this job; the roles in deploy/ grant the permission",
            requirements.ISOLATION, self._namespace,
        )  # fmt: skip

    def _make_policy(self, job: Tree) -> None:
        """Create the network policy of an isolated job. Raises `UserError` if it is refused."""
        templates = self._engine.templates(job).values()
        policy = network_policy(self._kind, job, templates)
        if policy is None:
            return
        try:
            limit = self._settings.deadlines.unreachable
            call_with_retry(partial(self._api.create, NETWORK_POLICIES, policy), limit, self._wait)
        except RefusedError as error:
            # Accept an existing policy, because an earlier response may have been lost.
            if error.code == HTTPStatus.CONFLICT:
                return
            raise UserError(
                f"cannot create the network policy of the job {self._name}: "
                f"{describe_refusal(error, self._kind)}"
            ) from None

    def _supervise(self, created: Tree) -> Loss | None:
        relay = EventRelay(self._deadlines.restart_progress, self._restarts.record_progress)
        logs = Logs(self._api, partial(self._write, relay))
        by_name = {"fieldSelector": f"metadata.name={self._name}"}
        watches = [
            # Pass the job, so that the watch reports its deletion even if it never lists the job.
            self._watch(self._kind.kind, self._kind.resource, by_name, created),
            self._watch("Pod", PODS, {"labelSelector": self._kind.selector(self._name)}),
        ]
        supervisor = Supervisor(
            self._engine, self._job, created, self._api, logs, self._deadlines, self._restarts,
            self._job_events,
        )  # fmt: skip
        self._leader_runs = supervisor.leader_runs
        self._heartbeat.start()
        for watch in watches:
            watch.start()
        try:
            lost = supervisor.run()
            if lost:
                log.warning(
                    "%s lost its pod %s (%s), and the %s marked the job %s as failed; recreating "
                    "the job",
                    lost.task, lost.pod, lost.how, self._kind.controller, self._name,
                )  # fmt: skip
            self._heartbeat.stop()
            self._end(supervisor)
            logs.drain(DRAIN_SECONDS)
            self._message = supervisor.termination_message() or self._message
            if lost:
                # Count the loss only now, because a last checkpoint that was published during the
                # grace period counts as progress.
                self._restarts.count_loss(lost)
            return lost
        except UserError as error:
            # An interrupt deletes the job, so its failure is not an error of the run.
            if self._is_interrupted:
                raise self._finish_interrupted(supervisor, logs) from None
            error.traceback = relay.traceback
            self._end(supervisor)
            raise
        finally:
            logs.stop()
            for watch in watches:
                watch.stopped.set()

    def _write(self, relay: EventRelay, task: Task, text: str) -> None:
        """Write a line of a task's log to the log of the step. Relay it if it is an event."""
        streams.relay(str(task), text)
        event = events.parse(text, job=label_job(self._kind, self._name, self._namespace))
        if isinstance(event, events.Restart):
            self._job_events.put(replace(event, task=str(task)))
        elif task == leading(self._job.config) and not event:
            self._note_names(text)
        elif event and task == leading(self._job.config):
            relay.take(event)

    def _note_names(self, text: str) -> None:
        """Store the guard's message about unresolved names, or clear it when all names resolve."""
        if found := _UNRESOLVED.search(text):
            self._deadlines.unresolved = found[0]
        elif names.RESOLVED in text:
            self._deadlines.unresolved = ""

    def _end(self, supervisor: Supervisor) -> None:
        log.info("deleting the job %s and waiting until its pods have ended", self._name)
        if self._delete() and not supervisor.wait_until_deleted(self._deletion_seconds):
            log.warning(
                "the job %s and its pods were not deleted within %s s",
                self._name, self._deletion_seconds,
            )  # fmt: skip

    def _finish_interrupted(self, supervisor: Supervisor, logs: Logs) -> RunInterruptedError:
        """Wait for the last checkpoint, and return the error that names it."""
        self._await_stop()
        self._delete()
        try:
            deleted = supervisor.wait_until_deleted(self._deletion_seconds)
        except RunInterruptedError as error:
            return error
        if not deleted:
            return RunInterruptedError(
                f"interrupted; the job {self._name} was not deleted within "
                f"{self._deletion_seconds} s; the last published checkpoint is intact"
            )
        logs.drain(DRAIN_SECONDS, leading(self._job.config))
        self._message = supervisor.termination_message() or self._message
        return self._interruption()

    def _await_stop(self) -> None:
        if self._is_stopping and self._stop:
            log.info("stopping: saving the last checkpoint")
            self._stop.wait(self._api, self._is_interrupted_again.wait)
            self._is_stopping = False

    def _interruption(self) -> RunInterruptedError:
        return RunInterruptedError(self._message or "interrupted before training began")

    def _handle_interrupt(self) -> None:
        """End the job before anything else, because this process may be killed within a second."""
        again, self._is_interrupted = self._is_interrupted, True
        if again:
            self._is_interrupted_again.set()
            self._is_stopping = False
        elif not self._heartbeat.is_taken_over:
            self._is_stopping = self._is_stop_requested()
        if not self._is_stopping and not self._heartbeat.is_taken_over and self._uid:
            with suppress(RefusedError, UnreachableError):
                self._handler_api.delete(self._kind.resource, self._name, self._uid, quick=True)
        self._job_events.put(None)

    def _is_stop_requested(self) -> bool:
        """Ask the leading task's guard to end the job, and return whether it can respond."""
        try:
            if self._stop is None:
                self._find_earlier()
            if self._stop is None:
                return False
            # For an adopted job, ask the API. This launcher may not have listed its pods yet.
            if not self._leader_runs() and not (
                self._is_adopted and self._stop.leader_runs(self._handler_api)
            ):
                return False
            self._stop.request(self._handler_api)
        except (RefusedError, UnreachableError):
            return False
        return True

    def _find_earlier(self) -> None:
        """Find the job of an earlier attempt. Its chief may still be saving a checkpoint."""
        found = self._handler_api.get(self._kind.resource, self._name)
        if names.MANAGED in (found["metadata"].get("labels") or {}):
            self._uid, self._is_adopted = found["metadata"]["uid"], True
            self._stop = self._engine.stop(found)

    def _delete(self) -> bool:
        """Delete the job unless another launcher has taken it over. Return whether it succeeded."""
        if self._heartbeat.is_taken_over:
            return False
        call = partial(self._api.delete, self._kind.resource, self._name)
        try:
            uid = self._uid or call_with_retry(self._uid_of_own, REMOVAL_SECONDS, time.sleep)
            if uid:
                call_with_retry(partial(call, uid), REMOVAL_SECONDS, time.sleep)
        except (RefusedError, UserError) as error:
            log.warning("the job %s could not be deleted: %s", self._name, error)
            return False
        return True

    def _uid_of_own(self) -> str:
        """Return the uid of a job whose creation got no response, or an empty string."""
        found = self._api.find(self._kind.resource, self._name)
        own = self._manifest["metadata"]["annotations"][names.MANIFEST]
        annotations = (found and found["metadata"].get("annotations")) or {}
        is_own = annotations.get(names.MANIFEST) == own
        return str(found["metadata"]["uid"]) if found and is_own else ""

    def _wait(self, seconds: float) -> None:
        """Sleep. Raises `RunInterruptedError` if a signal arrives."""
        with suppress(queue.Empty):
            if self._job_events.get(timeout=seconds) is None:
                raise self._interruption()

    def _watch(
        self, kind: str, resource: Resource, query: Mapping[str, str], *known: Tree
    ) -> Watch:
        def put(item: Tree, deleted: bool) -> None:
            # Add the kind, because the objects in an API list do not contain it.
            self._job_events.put(({**item, "kind": kind}, deleted))

        return Watch(self._api, resource, query, put, self._job_events.put, known)


def _place(connection: Connection, namespace: str, defaults: PodDefaults) -> Place:
    own = namespace == connection.namespace
    tracker, secrets = addresses.list_pod_variables()
    endpoints = {name: os.environ[name] for name in ENDPOINTS if os.environ.get(name)}
    return Place(
        namespace=namespace,
        service_account=connection.service_account if own else "",
        variables={**endpoints, **tracker},
        secrets=secrets,
        defaults=defaults,
    )
