"""The model registry: lists and shows versions, promotes a version, and rolls back."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flotilla.pipelines import notebook
from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.promotion import registration, registry
from flotilla.trainer.promotion.registry import Promotion
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.storage.uri import require_uri

__all__ = ["ModelDetails", "ModelVersion", "Promotion", "list", "promote", "rollback", "show"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelVersion:
    """A registered version of a model.

    `verdict` is `promoted` if the version has ever been the champion, and `registered` otherwise.
    If the champion of the model cannot be determined, `verdict` is `unknown` and `problem` tells
    why.
    """

    name: str
    version: int
    champion: bool
    main_metric: str
    better: str
    metrics: Mapping[str, Any]
    measured: Mapping[str, Any]
    global_step: int
    created: str
    run_id: str
    verdict: str
    problem: str = ""

    def __repr__(self) -> str:
        """Return the version and its main metric."""
        value = {self.main_metric: self.metrics.get(self.main_metric)} if self.main_metric else {}
        words = (f"{self.name}@{self.version}", "champion" if self.champion else self.verdict)
        return notebook.short("ModelVersion", *words, **value)


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelDetails:
    """One version with its URI and lineage, and all promotions of its model, oldest first."""

    version: ModelVersion
    uri: str
    lineage: Mapping[str, Any]
    promotions: tuple[Promotion, ...]
    fields: Mapping[str, Any]

    def __repr__(self) -> str:
        """Return the version and its URI."""
        return notebook.short(
            "ModelDetails", f"{self.version.name}@{self.version.version}", self.uri
        )

    def _repr_html_(self) -> str:
        facts = {"metrics": self.version.metrics, "created": self.version.created}
        facts |= {"run": self.version.run_id, "where": self.uri, **self.lineage}
        return notebook.card(f"{self.version.name}, version {self.version.version}", facts)


def choose_root(root: str, workdir: str | Path) -> str:
    """Return the given storage root, or the root of the local runs. Raises `ConfigError`."""
    if root:
        require_uri("--root", root)
    return root or storage.uri_of(workdir)


def list_models(
    name: str = "", *, workdir: str | Path = "runs", root: str = ""
) -> tuple[ModelVersion, ...]:
    """Return all versions of one model or of all models. Raises `UserError`.

    If the champion of one model cannot be determined, the other models are still listed.

    Example:
        for each in flotilla.models.list("digits"):
            print(each.version, each.champion, each.metrics)
    """
    return _versions(choose_root(root, workdir), name)


def _versions(root: str, name: str) -> tuple[ModelVersion, ...]:
    if name:
        made = registry.promotions(root, require_known(root, name))
        return tuple(_version(name, each, made) for each in registry.versions(root, name))
    return tuple(each for other in registry.names(root) for each in _list_versions(root, other))


def _list_versions(root: str, name: str) -> tuple[ModelVersion, ...]:
    try:
        return _versions(root, name)
    except UserError as error:
        return tuple(
            replace(_version(name, each, ()), verdict="unknown", problem=str(error))
            for each in registry.versions(root, name)
        )


def show(
    name: str, version: int = 0, *, workdir: str | Path = "runs", root: str = ""
) -> ModelDetails:
    """Return one version, or the champion if `version` is 0. Raises `ConfigError`.

    Example:
        flotilla.models.show("digits").uri
    """
    place = choose_root(root, workdir)
    require_known(place, name)
    found = registry.version(place, name, version) if version else registry.champion(place, name)
    if found is None:
        raise ConfigError(f"{name} has no champion below {place}; specify a version")
    made = registry.promotions(place, name)
    return ModelDetails(
        version=_version(name, found, made),
        uri=found.uri,
        lineage=found.manifest.fields.get("lineage", {}),
        promotions=tuple(made),
        fields=found.manifest.fields,
    )


def promote(name: str, version: int, *, workdir: str | Path = "runs", root: str = "") -> Promotion:
    """Make a version the champion, and notify the trackers. Raises `UserError`.

    Example:
        flotilla.models.promote("digits", 3)
    """
    place = choose_root(root, workdir)
    require_known(place, name)
    after = registry.newest(place, name)
    made = registry.promote(place, name, version, after=after, by=_user())
    return _announce(place, name, made)


def rollback(name: str, *, workdir: str | Path = "runs", root: str = "") -> Promotion:
    """Make the previous champion the champion again. Raises `UserError`.

    Example:
        flotilla.models.rollback("digits").version
    """
    place = choose_root(root, workdir)
    require_known(place, name)
    return _announce(place, name, registry.rollback(place, name, by=_user()))


def _announce(root: str, name: str, made: Promotion) -> Promotion:
    # Never send a token to an address that was read from a bucket, so ignore `registry.hub`.
    try:
        registration.announce(root, name, made.version, hub="")
    except UserError as error:
        # Only log the error, because the promotion itself has succeeded.
        log.warning("the promotion is not recorded in the tracker: %s", error)
    return made


def require_known(root: str, name: str) -> str:
    """Return `name` if a model of this name is registered. Raises `ConfigError` otherwise."""
    found = registry.names(root)
    if name not in found:
        hint = nearest(name, found) or (f" (registered: {', '.join(found)})" if found else "")
        raise ConfigError(f"no model {name!r} is registered below {root}{hint}")
    return name


def _version(name: str, version: registry.Version, made: Sequence[Promotion]) -> ModelVersion:
    # Do not check types here, because the registry has already checked them.
    fields = version.manifest.fields
    lineage = fields.get("lineage", {})
    metrics = lineage.get("metrics", {})
    main = MainMetric.of({**fields, "metrics": metrics})
    is_promoted = any(each.version == version.number for each in made)
    return ModelVersion(
        name=name,
        version=version.number,
        champion=bool(made) and made[-1].version == version.number,
        main_metric=main.name,
        better=main.better,
        metrics=metrics,
        # An older version lacks this field, so compute the value from its metrics.
        measured=lineage.get("measured")
        or {"metric": main.name, "value": metrics.get(main.name), "better": main.better},
        global_step=fields.get("global_step", 0),
        created=version.manifest.created,
        run_id=lineage.get("run_id", ""),
        verdict="promoted" if is_promoted else "registered",
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        # The user may have no name, for example if a container sets only a numeric user id.
        return "a person"


# The public interface exports this module as `flotilla.models`.
list = list_models
