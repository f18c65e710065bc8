"""What a configuration can be wrong about although each key is right; no TensorFlow is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from components.kubernetes.pods.template import replicas
from components.launchers import ENGINES, engine
from pipelines.doctor.engines import is_on_kubernetes
from pipelines.doctor.examination import Finding
from trainer import storage
from trainer.config.schema import Config
from trainer.errors import ConfigError


def consistent(config: Config, path: list[str], *, elsewhere: bool = False) -> Finding:
    """Check what the keys say together.

    Args:
        config: the configuration, each key of which is right.
        path: where Python looks for the user's own modules.
        elsewhere: whether the steps may run in pods, which have folders of their own.
    """
    for message, remedy in _contradictions(config, path):
        return Finding("fail", message, remedy)
    folder = config.data.manual_dir
    if folder and not Path(folder).is_dir():
        if not elsewhere:
            message = f"data.manual_dir: there is no folder {folder}"
            return Finding("fail", message, _setting("data.manual_dir=FOLDER"))
        message = (
            f"data.manual_dir: {folder} is not on this machine; for the steps of an instance it "
            "has to be in the image or a volume"
        )
        return Finding("warn", message, f"docker run --rm HOST/NAME:TAG ls {shlex.quote(folder)}")
    tasks = ", ".join(f"{count} {role}" for role, count in replicas(config).items())
    return Finding("ok", f"{config.name}: {config.training.strategy} with {tasks}")


def _contradictions(config: Config, path: list[str]) -> Iterator[tuple[str, str]]:
    if is_on_kubernetes(config):
        yield from _of_a_job(config)
    yield from _of_modules(config, path)


def _of_a_job(config: Config) -> Iterator[tuple[str, str]]:
    launcher = config.cluster.launcher
    for key in ("in_process", "existing_servers"):
        if getattr(config.cluster, key):
            message = f"cluster.{key}: not with cluster.launcher {launcher}"
            yield message, _setting(f"cluster.{key}=false")
    if launcher in ENGINES:
        try:
            engine(launcher).check(config)
        except ConfigError as error:
            yield str(error), _setting("cluster.launcher=tfjob")
    root = config.storage.root
    here = storage.local_path(root) if root else None
    if here:
        place = PurePosixPath(here)
        settings = config.cluster.kubernetes
        without = [
            role
            for role in replicas(config)
            if not any(
                place.is_relative_to(volume.mount_path) for volume in settings.of(role).volumes
            )
        ]
        if without:
            message = (
                f"storage.root: {root} is a folder, which the pods of {', '.join(without)} do not "
                "share; name a bucket, or a volume of cluster.kubernetes.pod.volumes above it"
            )
            yield message, _setting("storage.root=gs://BUCKET")


def _of_modules(config: Config, path: list[str]) -> Iterator[tuple[str, str]]:
    named = {
        "data.dataset": config.data.dataset,
        "model.name": config.model.name,
        "training.strategy": config.training.strategy,
    }
    for key, value in named.items():
        module, colon, _ = value.partition(":")
        top = module.partition(".")[0]
        if colon and PathFinder.find_spec(top, path) is None:
            message = f"{key}: {value} names the module {top}, which is nowhere on Python's path"
            yield message, f"PYTHONPATH=FOLDER flotilla doctor --set {key}={value}"


def _setting(assignment: str) -> str:
    return f"flotilla doctor --set '{assignment}'"
