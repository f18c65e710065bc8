"""The checks of a configuration, in the order of the report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flotilla.components.image import IMAGE, PodDefaults
from flotilla.components.kubernetes.engine import Engine
from flotilla.components.kubernetes.names import JobKind
from flotilla.components.kubernetes.pods.template import leading
from flotilla.components.kubernetes.requirements import LAUNCHER, TRAINER
from flotilla.components.launchers import ENGINES, engine
from flotilla.pipelines.doctor import ENDING_SECONDS, Check, Finding, machine, resources
from flotilla.pipelines.doctor import cluster as clusters
from flotilla.pipelines.doctor.cluster import Account, Cluster
from flotilla.pipelines.runs.kfp_access import (
    ENDPOINT,
    NAMESPACE,
    Instance,
    find_namespace,
    is_named,
)
from flotilla.pipelines.runs.kfp_client import health
from flotilla.pipelines.runs.local import find_root
from flotilla.pipelines.step_settings import NO_SETTINGS, StepPods
from flotilla.trainer import signing
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.probe import SILENT, Probe
from flotilla.trainer.tracking import addresses, mlflow_run
from flotilla.trainer.tracking.promotions import Hub

CONFIGURATION, API, ACCOUNT = "configuration", "Kubernetes API", "account of the KFP UI"
GPUS, ENGINE = "GPUs of the cluster", "engine"
# Several admission webhooks may be called, and each may take up to 10 s.
ADMISSION_SECONDS = 30.0
KFP_SECONDS = 20.0
_HEALTH, _TRACKING = "/apis/v2beta1/healthz", "less docs/how-to/tracking.md"
# Connecting, waiting for an error and removing the test file may each take several seconds.
STORAGE_SECONDS = 16.0
# The check of the champion's signature takes longer, because it downloads the champion.
SIGNATURE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `flotilla doctor`.

    Attributes:
        config: the configuration, or the error in it.
        kubernetes: whether to examine the cluster even if the run would train on this machine.
        service_account: `[NAMESPACE:]NAME` for runs started from the KFP UI, or empty.
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
        """The namespace of the steps, if given."""
        return find_namespace(self.instance.namespace)

    def covers_cluster(self, config: Config) -> bool:
        """Return whether to examine the cluster."""
        return clusters.is_on_kubernetes(config) or self.kubernetes


def checks(options: DoctorOptions) -> list[Check]:
    """Return the checks for these options, in the order of the report."""
    instance = Check(
        name="KFP instance",
        look=lambda: instance_answers(options.instance),
        seconds=KFP_SECONDS,
        show=show_instance(options.instance),
    )
    return [*_config_checks(options), instance]


def _config_checks(options: DoctorOptions) -> Iterator[Check]:
    config = options.config
    if isinstance(config, UserError):
        yield _found(CONFIGURATION, Finding("fail", str(config), "flotilla doctor --help"))
        yield Check(name="disk", look=partial(machine.disk, options.workdir))
        yield Check(name="loopback", look=machine.loopback)
        return
    elsewhere = options.covers_cluster(config) or is_named(options.instance.endpoint)
    yield Check(name=CONFIGURATION, look=lambda: machine.consistent(config, elsewhere=elsewhere))
    yield Check(
        name="model and dataset",
        look=lambda: machine.fits(config, elsewhere=options.covers_cluster(config)),
        needs=(CONFIGURATION,),
        seconds=fitting.SECONDS + ENDING_SECONDS,
    )
    yield from _machine_checks(config, options.workdir)
    yield _storage(config, options.workdir)
    yield from _tracker_checks(config)
    if options.covers_cluster(config):
        yield from _cluster_checks(config, options)
    else:
        if options.image:
            yield Check(name="image", look=lambda: resources.judge_images([options.image]))
        why = "cluster.launcher is local"
        if config.cluster.launcher == "auto":
            yield _found(ENGINE, clusters.IS_HERE)
            why = "cluster.launcher auto selects local here"
        yield _found(API, Finding("skipped", f"{why}; to check the API anyway, add --kubernetes"))


def _found(name: str, finding: Finding) -> Check:
    """Return a check whose finding is already known."""
    return Check(name=name, look=lambda: finding)


def _machine_checks(config: Config, workdir: Path) -> Iterator[Check]:
    yield Check(name="packages", look=lambda: machine.packages(config))
    yield Check(name="disk", look=lambda: machine.disk(workdir))
    yield Check(name="loopback", look=machine.loopback)
    if any(map(os.environ.get, (signing.PRIVATE_KEY, signing.PUBLIC_KEY))):
        root = find_root(config, workdir)
        yield Check(
            name="signatures",
            look=lambda: machine.signatures(root, config.name),
            seconds=SIGNATURE_SECONDS,
        )
    if not clusters.is_on_kubernetes(config) and config.cluster.gpus_per_worker:
        yield Check(name="GPUs of this machine", look=lambda: machine.gpus(config))
        if config.cluster.gpus_per_worker * config.cluster.workers > 1:
            yield Check(name="shared memory", look=machine.check_shared_memory)


def _tracker_checks(config: Config) -> Iterator[Check]:
    """Check that the configured trackers respond. A run continues without them."""
    hub = addresses.find_hub(config.registry.hub)
    if addresses.is_tracked():
        yield Check(name="MLflow", look=partial(_answers, mlflow_run.health), show=_TRACKING)
    if hub:
        look = partial(_answers, lambda: Hub(hub).check())
        yield Check(name="model registry", look=look, show=_TRACKING)


def _answers(ask: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", ask())
    except UserError as error:
        return Finding("warn", f"{error}; a run continues without this server", _TRACKING)


def _storage(config: Config, workdir: Path) -> Check:
    if clusters.is_on_kubernetes(config) and not config.storage.root:
        words = "storage.root is empty: each KFP run uses its pipeline root"
        return _found("storage", Finding("skipped", words))
    root = find_root(config, workdir)
    try:
        probe, show = Probe(root), machine.find_remedy(root, SILENT)
    except UserError as error:
        wrong = Finding("fail", str(error), "flotilla doctor --set storage.root=URI")
        return _found("storage", wrong)
    return Check(
        name="storage",
        look=lambda: machine.usable(root, probe),
        seconds=STORAGE_SECONDS,
        trace=probe,
        show=show,
    )


def _cluster_checks(config: Config, options: DoctorOptions) -> Iterator[Check]:
    try:
        cluster = Cluster.connected(config.cluster.kubernetes.namespace or options.namespace)
    except UserError as error:
        yield _found(API, Finding("fail", str(error), "kubectl config get-contexts"))
        return
    name, choice = config.cluster.launcher, None
    one: Engine | None = engine(name) if name in ENGINES else None
    if one is None:
        # Query the cluster now, because the list of checks depends on its engine.
        one, choice = clusters.chosen(cluster, config)
    unnamed = clusters.plan(one or engine(ENGINES[0]), config, PodDefaults(image=options.image))
    # Check the image from `--image` too. The steps use it even if all tasks use another image.
    images = resources.image_names(unnamed) | ({options.image} - {""})
    yield Check(name="image", look=lambda: resources.judge_images(images))
    yield Check(name=API, look=lambda: clusters.answers(cluster, config), show=clusters.SHOW)
    show = f"kubectl get namespace {cluster.namespace}"
    yield _cluster_check("namespace", lambda: clusters.namespace(cluster), show)
    if choice:
        found = choice
        yield _cluster_check(ENGINE, lambda: found)
    if one:
        yield from _engine_checks(config, options, cluster, one)


def _engine_checks(
    config: Config, options: DoctorOptions, cluster: Cluster, one: Engine
) -> Iterator[Check]:
    kind, where = one.kind, cluster.namespace
    job = clusters.plan(one, config, PodDefaults(image=options.image or IMAGE))
    served = f"{kind.kind} CRD"
    yield _cluster_check(served, lambda: clusters.check_served(cluster, one))
    yield _cluster_check(
        kind.controller, lambda: clusters.controller(cluster, one), kind.show, needs=(served,)
    )
    yield from _permission_checks(config, options, cluster, kind)
    show = f"kubectl describe resourcequotas --namespace {where}"
    if kind.has_child_jobs:
        look = partial(clusters.check_services, cluster, config, one)
        yield _cluster_check("services", look, f"kubectl get services --namespace {where}")
    has_step = options.namespace in ("", where)
    yield _cluster_check("quota", lambda: resources.room(cluster, job, has_step=has_step), show)
    for resource in resources.devices(job):
        title = GPUS if resource == config.cluster.kubernetes.gpu_resource else resource
        look = partial(resources.check_devices, cluster, job, resource)
        yield _cluster_check(title, look, "kubectl get nodes")
    # Leave out the store's secret, because a run does not require it.
    objects = resources.list_named_objects(clusters.plan(one, config, PodDefaults(store_secret="")))
    if resources.list_named_objects(job) - objects:
        yield _cluster_check(
            "secret of the store", partial(resources.check_secret, cluster, config)
        )
    titles = []
    for each, title in resources.KINDS.items():
        if some := frozenset(named for named in objects if named.kind == each):
            titles.append(title)
            yield _present(cluster, each, some, title)
    yield from _step_checks(options)
    # Skip this check if an object is missing, because another check already reports it.
    yield Check(
        name="admission",
        look=lambda: clusters.admits(cluster, job),
        needs=(API, "namespace", served, *titles),
        seconds=ADMISSION_SECONDS,
        show=clusters.SHOW,
    )


def _step_checks(options: DoctorOptions) -> Iterator[Check]:
    """Check the secrets and claims of the steps' pods, which may be in another namespace."""
    cluster = Cluster.connected(options.namespace)
    for kind, given in (
        (resources.LOGINS, options.pods.pull_secrets),
        (resources.CLAIMS, options.pods.mounts),
    ):
        if some := frozenset(resources.Named(kind, name) for name in given):
            yield _present(cluster, kind, some, f"{resources.KINDS[kind]} of the steps")


def _present(cluster: Cluster, kind: str, some: frozenset[resources.Named], title: str) -> Check:
    look = partial(resources.check_objects, cluster, kind, some)
    return _cluster_check(title, look, resources.show(cluster.namespace, kind))


def _cluster_check(
    name: str, look: Callable[[], Finding], show: str = clusters.SHOW, needs: tuple[str, ...] = ()
) -> Check:
    return Check(name=name, look=look, needs=(API, *needs), show=show)


def _permission_checks(
    config: Config, options: DoctorOptions, cluster: Cluster, kind: JobKind
) -> Iterator[Check]:
    where = cluster.namespace
    account = clusters.parse_account(options.service_account, options.namespace or where)
    own = config.cluster.kubernetes.of(leading(config).role).service_account
    tasks = Account(where, own) if own else account
    show = f"kubectl get serviceaccounts --namespace {account.namespace}"
    yield _cluster_check("permissions of this user", lambda: clusters.check_user(cluster, kind))
    yield _cluster_check(ACCOUNT, lambda: clusters.check_ui_account(cluster, account), show)
    for name, who, role in (
        ("permissions of the KFP UI account", account, LAUNCHER),
        ("permissions of the tasks", tasks, TRAINER),
    ):
        yield _cluster_check(name, partial(clusters.check_account, cluster, who, role, kind))


def show_instance(instance: Instance) -> str:
    """Return the command that shows the instance's response, unless its URL contains a user."""
    given = shlex.quote(instance.endpoint.rstrip("/")) if instance.endpoint else f'"${ENDPOINT[0]}"'
    return "" if "@" in given else f"curl --include {given}{_HEALTH}"


def instance_answers(instance: Instance) -> Finding:
    """Check the instance given by options or the environment. Raises `UserError`."""
    if not is_named(instance.endpoint):
        message = f"no KFP instance is given: add --endpoint, or set {ENDPOINT[0]}"
        return Finding("skipped", message)
    access = instance.access()
    found = health(access)
    if found.is_shared and not access.namespace:
        message = (
            f"{access.endpoint} is a multi-user instance: add --namespace, or set {NAMESPACE[0]}"
        )
        return Finding("fail", message, "flotilla doctor --namespace NAMESPACE")
    if not found.version:
        message = f"{access.endpoint} responds, but does not report its version"
        return Finding("warn", message, show_instance(instance))
    where = f", in {access.namespace}" if found.is_shared else ""
    message = f"{access.endpoint} is KFP {found.version}{where}"
    return clusters.judge_version(clusters.KFP, found.version, message, show_instance(instance))
