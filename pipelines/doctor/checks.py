"""Which checks a configuration needs, in the order in which they are reported."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from components.image import IMAGE, PodDefaults
from components.kubernetes.api.kinds import JobKind
from components.kubernetes.api.rbac import LAUNCHER, TRAINER
from components.kubernetes.pods.template import leading
from components.launchers import ENGINES
from pipelines.doctor import (
    admission,
    configuration,
    controllers,
    engines,
    fit,
    isolation,
    kubernetes_api,
    machine,
    named_objects,
    permissions,
    resources,
    storage,
    versions,
)
from pipelines.doctor.engines import EXAMINED, ExaminedEngine, PlannedJob
from pipelines.doctor.examination import ENDING_SECONDS, Check, Finding
from pipelines.doctor.kubernetes_api import Kubernetes
from pipelines.doctor.permissions import Account
from pipelines.runs.kfp_access import ENDPOINT, NAMESPACE, Instance, found_namespace, is_named
from pipelines.runs.kfp_client import health
from pipelines.runs.local import root_of
from pipelines.step_pods import NO_SETTINGS, StepPods
from trainer import user_code
from trainer.cluster import fitting
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.signing import signing
from trainer.storage.probe import SILENT, Probe
from trainer.tracking import addresses, mlflow_run
from trainer.tracking.hub import Hub

CONFIGURATION, API, ACCOUNT = "configuration", "Kubernetes API", "account of the KFP UI"
GPUS, ENGINE = "GPUs of the cluster", "engine"
# Webhooks may take up to 10 s each.
ADMISSION_SECONDS = 30.0
KFP_SECONDS = 20.0
_HEALTH = "/apis/v2beta1/healthz"
# Connecting, failing and removing take seconds each.
STORAGE_SECONDS = 16.0
# The champion is fetched.
SIGNATURE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What the doctor examines.

    Attributes:
        config: the configuration, or what is wrong with it.
        workdir: of local runs.
        instance: the KFP instance.
        kubernetes: whether to examine the cluster whatever the launcher is.
        service_account: `[NAMESPACE:]NAME` of runs that are started from the KFP UI, or empty.
        image: that of the steps, where it is not the default.
        pods: what is compiled into the pods of the steps.
    """

    config: Config | UserError
    workdir: Path
    instance: Instance
    kubernetes: bool = False
    service_account: str = ""
    image: str = ""
    pods: StepPods = NO_SETTINGS

    @property
    def namespace(self) -> str:
        """The namespace of the steps, where one is named."""
        return found_namespace(self.instance.namespace)

    def covers_cluster(self, config: Config) -> bool:
        """Return whether the cluster is examined."""
        return engines.is_on_kubernetes(config) or self.kubernetes


def checks(options: DoctorOptions) -> list[Check]:
    """Return all checks."""
    instance = Check(
        name="KFP instance",
        look=lambda: instance_answers(options.instance),
        seconds=KFP_SECONDS,
        show=show_instance(options.instance),
    )
    return [*_of_config(options), instance]


def _of_config(options: DoctorOptions) -> Iterator[Check]:
    config = options.config
    if isinstance(config, UserError):
        message = Finding("fail", str(config), "flotilla doctor --help")
        yield Check(name=CONFIGURATION, look=lambda: message)
        for name in ("packages", "storage", API):
            yield Check(name=name, look=_never, needs=(CONFIGURATION,))
        yield Check(name="disk", look=partial(machine.disk, options.workdir))
        yield Check(name="loopback", look=machine.loopback)
        return
    path = [*sys.path, user_code.folder()]
    elsewhere = options.covers_cluster(config) or is_named(options.instance.endpoint)
    yield Check(
        name=CONFIGURATION,
        look=lambda: configuration.consistent(config, path, elsewhere=elsewhere),
    )
    yield Check(
        name="model and dataset",
        look=lambda: fit.fits(config),
        needs=(CONFIGURATION,),
        seconds=fitting.SECONDS + ENDING_SECONDS,
    )
    yield from _of_machine(config, options.workdir)
    yield _storage(config, options.workdir)
    yield from _of_trackers(config)
    if options.covers_cluster(config):
        yield from _of_cluster(config, options)
    else:
        if options.image:
            yield Check(name="image", look=lambda: named_objects.judge_images([options.image]))
        why = "cluster.launcher is local"
        if config.cluster.launcher == "auto":
            yield Check(name=ENGINE, look=lambda: engines.IS_HERE)
            why = "auto is local here"
        message = Finding("skipped", f"{why}; --kubernetes checks it anyway")
        yield Check(name=API, look=lambda: message)


def _never() -> Finding:
    raise AssertionError("what it needs has failed")


def _of_machine(config: Config, workdir: Path) -> Iterator[Check]:
    yield Check(name="packages", look=lambda: machine.packages(config))
    yield Check(name="disk", look=lambda: machine.disk(workdir))
    yield Check(name="loopback", look=machine.loopback)
    if any(map(os.environ.get, (signing.PRIVATE_KEY, signing.PUBLIC_KEY))):
        root = root_of(config, workdir)
        yield Check(
            name="signatures",
            look=lambda: storage.signatures(root, config.name),
            seconds=SIGNATURE_SECONDS,
        )
    if not engines.is_on_kubernetes(config) and config.cluster.gpus_per_worker:
        yield Check(name="GPUs of this machine", look=lambda: machine.gpus(config))
        if config.cluster.gpus_per_worker * config.cluster.workers > 1:
            yield Check(name="shared memory", look=machine.shared_memory)


def _of_trackers(config: Config) -> Iterator[Check]:
    """Check that the trackers answer, where there are any: without them a run goes on."""
    found: dict[str, Callable[[], str]] = {}
    if addresses.is_tracked():
        found["MLflow"] = mlflow_run.health
    if hub := addresses.hub_of(config.registry.hub):
        found["model registry"] = lambda: Hub(hub).check()
    for name, ask in found.items():
        yield Check(name=name, look=partial(_answers, ask), show="less docs/how-to/tracking.md")


def _answers(ask: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", ask())
    except UserError as error:
        message = f"{error}; a run goes on without it"
        return Finding("warn", message, "less docs/how-to/tracking.md")


def _storage(config: Config, workdir: Path) -> Check:
    if engines.is_on_kubernetes(config) and not config.storage.root:
        message = Finding(
            "skipped", "storage.root is empty: it is the pipeline root of each KFP run"
        )
        return Check(name="storage", look=lambda: message)
    root = root_of(config, workdir)
    try:
        probe, show = Probe(root), storage.remedy_for(root, SILENT)
    except UserError as error:
        wrong = Finding("fail", str(error), "flotilla doctor --set storage.root=URI")
        return Check(name="storage", look=lambda: wrong)
    return Check(
        name="storage",
        look=lambda: storage.usable(root, probe),
        seconds=STORAGE_SECONDS,
        trace=probe,
        show=show,
    )


def _of_cluster(config: Config, options: DoctorOptions) -> Iterator[Check]:
    kubernetes = Kubernetes(config.cluster.kubernetes.namespace or options.namespace)
    examined = EXAMINED.get(config.cluster.launcher)
    # Which checks there are depends on the engine, so that it is asked for before them.
    choice = None if examined else engines.chosen(kubernetes, config)
    if choice:
        examined = choice.examined
    unnamed = (examined or EXAMINED[ENGINES[0]]).plan(config, PodDefaults(image=options.image))
    # The steps have that of the option, even where all tasks name another one.
    images = named_objects.image_names(unnamed) | ({options.image} - {""})
    yield Check(name="image", look=lambda: named_objects.judge_images(images))
    yield Check(name=API, look=lambda: kubernetes_api.answers(kubernetes), show=kubernetes_api.SHOW)
    yield _in_cluster("namespace", lambda: kubernetes_api.namespace(kubernetes))
    if choice:
        found = choice.finding
        yield _in_cluster(ENGINE, lambda: found)
    if examined:
        yield from _of_engine(config, options, kubernetes, examined)


def _of_engine(
    config: Config, options: DoctorOptions, kubernetes: Kubernetes, examined: ExaminedEngine
) -> Iterator[Check]:
    kind = examined.kind
    job = examined.plan(config, PodDefaults(image=options.image or IMAGE))
    served = f"{kind.kind} CRD"
    yield _in_cluster(served, lambda: controllers.served(kubernetes, examined))
    yield Check(
        name=kind.controller,
        look=lambda: controllers.controller(kubernetes, job),
        needs=(API, served),
        show=kubernetes_api.SHOW,
    )
    yield from _of_permissions(config, options, kubernetes, kind)
    settings = config.cluster.kubernetes.job
    if settings.queue_name or settings.suspend:
        yield _in_cluster("Kueue", lambda: controllers.queue(kubernetes, settings, job))
    yield from _of_places(config, kubernetes, job)
    # The secret of the store may lack any key, or be absent: only what the configuration itself
    # names has to be there.
    objects = named_objects.named(examined.plan(config, PodDefaults(store_secret="")))
    if named_objects.named(job) - objects:
        yield _in_cluster("secret of the store", partial(storage.opens, kubernetes, config))
    titles = []
    for each, title in named_objects.KINDS.items():
        some = frozenset(one for one in objects if one.kind == each)
        if some:
            titles.append(title)
            yield _in_cluster(title, partial(named_objects.present, kubernetes, each, some))
    yield from _of_steps(options)
    # What is absent is said by its own check.
    yield Check(
        name="admission",
        look=lambda: admission.admits(kubernetes, job),
        needs=(API, "namespace", served, *titles),
        seconds=ADMISSION_SECONDS,
        show=kubernetes_api.SHOW,
    )


def _of_places(config: Config, kubernetes: Kubernetes, job: PlannedJob) -> Iterator[Check]:
    """Check what the pods need of nodes, quotas and the network."""
    if any(each.pod.get("nodeSelector") for each in resources.roles(job)):
        yield _in_cluster("nodes", lambda: resources.selected(kubernetes, job))
    yield _in_cluster("network policy", lambda: isolation.isolated(kubernetes, job))
    yield _in_cluster("quota", lambda: resources.room(kubernetes, job))
    for resource in resources.devices(job):
        title = GPUS if resource == config.cluster.kubernetes.gpu_resource else resource
        yield _in_cluster(title, partial(resources.present, kubernetes, job, resource))


def _of_steps(options: DoctorOptions) -> Iterator[Check]:
    """Check what the pods of the steps name: their namespace may not be that of the job."""
    kubernetes = Kubernetes(options.namespace)
    for kind, given in (
        (named_objects.LOGINS, options.pods.pull_secrets),
        (named_objects.CLAIMS, options.pods.mounts),
    ):
        if given:
            some = frozenset(named_objects.Named(kind, name) for name in given)
            title = f"{named_objects.KINDS[kind]} of the steps"
            yield _in_cluster(title, partial(named_objects.present, kubernetes, kind, some))


def _in_cluster(name: str, look: Callable[[], Finding]) -> Check:
    return Check(name=name, look=look, needs=(API,), show=kubernetes_api.SHOW)


def _of_permissions(
    config: Config, options: DoctorOptions, kubernetes: Kubernetes, kind: JobKind
) -> Iterator[Check]:
    named = options.service_account

    def account() -> Account:
        return permissions.account_of(named, options.namespace or kubernetes.namespace)

    def of_tasks() -> Finding:
        own = config.cluster.kubernetes.of(leading(config).role).service_account
        speaks = Account(kubernetes.namespace, own) if own else account()
        return permissions.of_account(kubernetes, speaks, TRAINER, kind)

    yield _in_cluster(
        "permissions of this user", lambda: permissions.of_this_user(kubernetes, kind)
    )
    yield _in_cluster(ACCOUNT, lambda: permissions.of_the_ui(kubernetes, account(), named))
    yield _in_cluster(
        "permissions of that account",
        lambda: permissions.of_account(kubernetes, account(), LAUNCHER, kind),
    )
    yield _in_cluster("permissions of the tasks", of_tasks)


def show_instance(instance: Instance) -> str:
    """Return the command that shows what the instance answers."""
    given = shlex.quote(instance.endpoint.rstrip("/")) if instance.endpoint else f'"${ENDPOINT[0]}"'
    return "" if "@" in given else f"curl --include {given}{_HEALTH}"


def instance_answers(instance: Instance) -> Finding:
    """Check the instance that options or the environment name; raises `UserError`."""
    if not is_named(instance.endpoint):
        message = f"no instance is named: give --endpoint, or set {ENDPOINT[0]}"
        return Finding("skipped", message)
    access = instance.access()
    found = health(access)
    if found.is_shared and not access.namespace:
        message = f"{access.endpoint} has several users: give --namespace, or set {NAMESPACE[0]}"
        return Finding("fail", message, "flotilla doctor --namespace NAMESPACE")
    if not found.version:
        message = f"{access.endpoint} answers, but does not give its version"
        return Finding("warn", message, show_instance(instance))
    where = f", in {access.namespace}" if found.is_shared else ""
    message = f"{access.endpoint} is KFP {found.version}{where}"
    return versions.judged(versions.KFP, found.version, message, show_instance(instance))
