"""Which checks a configuration asks for, in the order in which they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from components.image import IMAGE, PodDefaults
from components.tfjob.manifest import document, leading
from pipelines.doctor import (
    configuration,
    kfp_instance,
    kubernetes_api,
    machine,
    named_objects,
    permissions,
    resources,
    storage,
)
from pipelines.doctor.check import Check, Finding
from pipelines.doctor.kfp_instance import Instance
from pipelines.doctor.kubernetes_api import Kubernetes
from pipelines.doctor.permissions import LAUNCHER, TRAINER, Account
from pipelines.runs.kfp_access import found_namespace, is_named
from pipelines.runs.local import root_of
from trainer import user_code
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.storage.probe import SILENT, Probe

CONFIGURATION, API, ACCOUNT = "configuration", "Kubernetes API", "account of the KFP UI"
GPUS = "GPUs of the cluster"
# Connecting, failing and removing each have their seconds.
STORAGE_SECONDS = 16.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the doctor is to look at.

    Attributes:
        config: the configuration, or what is wrong with it.
        workdir: of local runs.
        instance: the KFP instance.
        kubernetes: whether to look at the cluster although the launcher is another one.
        service_account: `[NAMESPACE:]NAME` of runs that are started from the KFP UI, or empty.
        image: that of the steps, where it is not the default.
    """

    config: Config | UserError
    workdir: Path
    instance: Instance
    kubernetes: bool = False
    service_account: str = ""
    image: str = ""

    @property
    def namespace(self) -> str:
        """Return the namespace of the steps, where it is said."""
        return found_namespace(self.instance.namespace)

    def is_of_cluster(self, config: Config) -> bool:
        """Return whether the cluster is to be looked at."""
        return config.cluster.launcher == "tfjob" or self.kubernetes


def checks(asked: Asked) -> list[Check]:
    """Return all checks."""
    instance = Check(
        name="KFP instance",
        look=lambda: kfp_instance.reached(asked.instance),
        seconds=kfp_instance.SECONDS,
        show=kfp_instance.show(asked.instance),
    )
    return [*_of_config(asked), instance]


def _of_config(asked: Asked) -> Iterator[Check]:
    config = asked.config
    if isinstance(config, UserError):
        said = Finding("fail", str(config), "flotilla doctor --help")
        yield Check(name=CONFIGURATION, look=lambda: said)
        for name in ("packages", "storage", API):
            yield Check(name=name, look=_never, needs=(CONFIGURATION,))
        yield Check(name="disk", look=partial(machine.disk, asked.workdir))
        yield Check(name="loopback", look=machine.loopback)
        return
    path = [*sys.path, user_code.folder()]
    elsewhere = asked.is_of_cluster(config) or is_named(asked.instance.endpoint)
    yield Check(
        name=CONFIGURATION,
        look=lambda: configuration.consistent(config, path, elsewhere=elsewhere),
    )
    yield from _of_machine(config, asked.workdir)
    yield _storage(config, asked.workdir)
    if asked.is_of_cluster(config):
        yield from _of_cluster(config, asked)
    else:
        if asked.image:
            yield Check(name="image", look=lambda: named_objects.judge_images([asked.image]))
        said = Finding("skipped", "cluster.launcher is local; --kubernetes looks all the same")
        yield Check(name=API, look=lambda: said)


def _never() -> Finding:
    raise AssertionError("what it needs has failed")


def _of_machine(config: Config, workdir: Path) -> Iterator[Check]:
    yield Check(name="packages", look=lambda: machine.packages(config))
    yield Check(name="disk", look=lambda: machine.disk(workdir))
    yield Check(name="loopback", look=machine.loopback)
    if config.cluster.launcher == "local" and config.cluster.gpus_per_worker:
        yield Check(name="GPUs of this machine", look=lambda: machine.gpus(config))
        if config.cluster.gpus_per_worker * config.cluster.workers > 1:
            yield Check(name="shared memory", look=machine.shared_memory)


def _storage(config: Config, workdir: Path) -> Check:
    if config.cluster.launcher == "tfjob" and not config.storage.root:
        said = Finding("skipped", "storage.root is empty: it is the pipeline root of each KFP run")
        return Check(name="storage", look=lambda: said)
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


def _of_cluster(config: Config, asked: Asked) -> Iterator[Check]:
    settings = config.cluster.kubernetes
    kubernetes = Kubernetes(settings.namespace or asked.namespace)
    defaults = PodDefaults(image=asked.image or IMAGE)
    tree = document(config, defaults)

    def check(name: str, look: Callable[[], Finding]) -> Check:
        return Check(name=name, look=look, needs=(API,), show=kubernetes_api.SHOW)

    def account() -> Account:
        return permissions.account_of(
            asked.service_account, asked.namespace or kubernetes.namespace
        )

    def of_tasks() -> Finding:
        name = settings.of(leading(config).role).service_account
        speaks = Account(kubernetes.namespace, name) if name else account()
        return permissions.of_account(kubernetes, speaks, TRAINER)

    # The steps have it, even where all tasks name another one.
    given = {asked.image} - {""}
    yield Check(
        name="image",
        look=lambda: named_objects.judge_images(named_objects.image_names(tree) | given),
    )
    yield Check(name=API, look=lambda: kubernetes_api.answers(kubernetes), show=kubernetes_api.SHOW)
    yield check("namespace", lambda: kubernetes_api.namespace(kubernetes))
    yield check("TFJob CRD", lambda: kubernetes_api.served(kubernetes))
    yield check("permissions of this user", lambda: permissions.of_this_user(kubernetes))
    yield check(
        ACCOUNT, lambda: permissions.of_the_ui(kubernetes, account(), asked.service_account)
    )
    yield check(
        "permissions of that account",
        lambda: permissions.of_account(kubernetes, account(), LAUNCHER),
    )
    yield check("permissions of the tasks", of_tasks)
    yield check("quota", lambda: resources.room(kubernetes, tree))
    for resource in resources.devices(tree):
        title = GPUS if resource == settings.gpu_resource else resource
        yield check(title, partial(resources.present, kubernetes, tree, resource))
    # The secret of the store may lack any key, or be absent: only what the configuration itself
    # names has to be there.
    own = document(config, PodDefaults(store_secret=""))
    objects = named_objects.named(own)
    if named_objects.named(tree) - objects:
        yield check("secret of the store", partial(storage.opens, kubernetes, config))
    for kind, title in named_objects.KINDS.items():
        some = frozenset(each for each in objects if each.kind == kind)
        if some:
            yield check(title, partial(named_objects.present, kubernetes, kind, some))
