"""Uploads pipelines to a KFP instance, and finds their versions.

Pipelines with equal content share one version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from kfp_server_api import V2beta1Pipeline

from flotilla.components import contract
from flotilla.pipelines.compile import Package, read_mark
from flotilla.pipelines.runs.kfp_access import Access
from flotilla.pipelines.runs.kfp_client import (
    ABSENT,
    CONFLICT,
    Client,
    InstanceError,
    ask,
    connect,
    create_or_find,
    is_id,
    pages,
)
from flotilla.trainer.runtime.errors import ConfigError, nearest

NEWEST = "created_at desc"
# Page size of version lists. It is small, because a version includes its spec of about 80 kB.
_VERSIONS = 5
# Maximum number of versions that are searched for a match or for a similar name.
_SOME = 20


@dataclass(frozen=True, kw_only=True)
class Version:
    """A pipeline's version. `remark` is a warning about a version that was not chosen by name."""

    pipeline: str
    pipeline_id: str
    name: str
    version_id: str
    spec: dict[str, Any] | None
    remark: str = ""

    @property
    def is_of_this_code(self) -> bool:
        """Whether the version has the same steps as this code."""
        return contract.is_of_this_code(read_mark(self.spec))

    @property
    def origin(self) -> str:
        """The origin of the version, as a phrase for messages."""
        mark = read_mark(self.spec)
        if mark:
            return f"was compiled by {contract.describe_mark(mark)}"
        return "has no mark of Flotilla (it was uploaded by hand or by an older version)"


@dataclass(frozen=True, kw_only=True)
class Upload:
    """An uploaded pipeline. `created` is false if the version already existed."""

    version: Version
    created: bool
    page: str


def upload(access: Access, package: Package, name: str = "") -> Upload:
    """Upload a pipeline, or a new version of it. Equal content is uploaded only once."""
    if name and not name.strip():
        raise ConfigError("--name is blank: give the pipeline a name, or leave the option out")
    client = connect(access)
    version, created = find_or_upload(client, package, name or package.name)
    path = f"pipelines/details/{version.pipeline_id}/version/{version.version_id}"
    return Upload(version=version, created=created, page=client.page(path))


def find_default(access: Access, version: Version) -> Version:
    """Return the version of the pipeline that `submit` and `schedule` use by default."""
    return _default(connect(access), version.pipeline, version.pipeline_id) or version


def find_or_upload(client: Client, package: Package, name: str) -> tuple[Version, bool]:
    """Return the version with this content, and whether it was created by this call."""
    pipeline_id = find_pipeline_id(client, name) or _create(client, name)
    for version in versions(client, name, pipeline_id, package.digest):
        if version.name.startswith(package.digest):
            return version, False
    wanted = package.version()
    with package.write_temporary() as path:
        try:
            made = ask(client.upload_pipeline_version, path, wanted, pipeline_id=pipeline_id)
        except InstanceError as error:
            if error.status == CONFLICT:
                for version in versions(client, name, pipeline_id, wanted):
                    if version.name == wanted:
                        return version, False
            raise
    return _version(name, made), True


def find_pipeline_id(client: Client, name: str) -> str:
    """Return the id of the pipeline of this name, or an empty string."""
    for pipeline in pages(
        client.list_pipelines,
        "pipelines",
        namespace=client.access.namespace or None,
        filter=containing("display_name", name),
    ):
        if pipeline.display_name == name:
            return str(pipeline.pipeline_id)
    return ""


def versions(
    client: Client, name: str, pipeline_id: str, part: str = "", most: int = 0
) -> Iterator[Version]:
    """Yield up to `most` versions (0 means all) with `part` in their names, newest first."""
    found = pages(
        client.list_pipeline_versions,
        "pipeline_versions",
        size=min(most or _VERSIONS, _VERSIONS),
        most=most,
        pipeline_id=pipeline_id,
        sort_by=NEWEST,
        **({"filter": containing("display_name", part)} if part else {}),
    )
    for each in found:
        yield _version(name, each)


def find_version(client: Client, name: str, wanted: str) -> Version:
    """Return an uploaded version of the pipeline `name`. Raises `ConfigError` if there is none.

    `wanted` is a name, an id or the prefix of a name. If it is empty, return the newest version
    that has the steps of this code. If none of the newest 20 has them, return the newest version.
    """
    pipeline_id = _find_pipeline(client, name)
    found = _find_wanted(client, name, pipeline_id, wanted)
    if found is not None:
        return found
    some = [version.name for version in versions(client, name, pipeline_id, most=_SOME)]
    if not some:
        raise _make_version_error(name)
    hint = nearest(wanted, some) or f"; the newest is {some[0]}"
    raise ConfigError(f"the pipeline {name!r} has no version {wanted!r}{hint}")


def newest_version(client: Client, name: str) -> Version:
    """Return the newest version of the pipeline `name`. Raises `ConfigError` if there is none."""
    newest = next(versions(client, name, _find_pipeline(client, name), most=1), None)
    if newest is None:
        raise _make_version_error(name)
    if newest.is_of_this_code:
        return newest
    return replace(newest, remark=f"the newest version is now {newest.name}, which {newest.origin}")


def _make_version_error(name: str) -> ConfigError:
    return ConfigError(f"the pipeline {name!r} has no version: upload one with `flotilla upload`")


def _find_pipeline(client: Client, name: str) -> str:
    pipeline_id = find_pipeline_id(client, name)
    if not pipeline_id:
        known = [
            str(each.display_name)
            for each in pages(
                client.list_pipelines, "pipelines", namespace=client.access.namespace or None
            )
        ]
        hint = nearest(name, known) or (
            "; upload it with `flotilla upload`, or submit a compiled pipeline with --file"
        )
        raise ConfigError(f"{client.access.endpoint} has no pipeline {name!r}{hint}")
    return pipeline_id


def _default(client: Client, name: str, pipeline_id: str) -> Version | None:
    newest = next(versions(client, name, pipeline_id, most=1), None)
    if newest is None or newest.is_of_this_code:
        return newest
    for version in versions(client, name, pipeline_id, most=_SOME):
        if version.is_of_this_code:
            remark = (
                f"the newest version is {newest.name}, which {newest.origin}; to use it, add "
                f"--version {newest.name}"
            )
            return replace(version, remark=remark)
    own = contract.describe_mark(contract.mark())
    remark = (
        f"version {newest.name} {newest.origin}, but this is {own}; to upload the pipeline of this "
        "version, use `flotilla upload`"
    )
    return replace(newest, remark=remark)


def equals(key: str, value: str) -> str:
    """Return an API filter for a field with this value. The instance ignores case."""
    return _filter("EQUALS", key, value)


def containing(key: str, value: str) -> str:
    """Return a filter for fields that contain `value`, in which `%` and `_` are wildcards."""
    # A backslash would escape the next character, so use the longest part without one.
    return _filter("IS_SUBSTRING", key, max(value.split("\\"), key=len))


def _filter(operation: str, key: str, value: str) -> str:
    predicate = {"operation": operation, "key": key, "stringValue": value}
    # The server decodes this parameter twice, so a `+` would become a space.
    return quote(json.dumps({"predicates": [predicate]}), safe="")


def _find_wanted(client: Client, name: str, pipeline_id: str, wanted: str) -> Version | None:
    if not wanted:
        return _default(client, name, pipeline_id)
    if is_id(wanted):
        try:
            made = ask(client.get_pipeline_version, pipeline_id, wanted)
        except InstanceError as error:
            if error.status != ABSENT:
                raise
        else:
            # The instance ignores the pipeline's id in the request, so check it here.
            return _version(name, made) if made.pipeline_id == pipeline_id else None
    begins: Version | None = None
    for version in versions(client, name, pipeline_id, wanted):
        if version.name == wanted:
            return version
        if begins is None and version.name.startswith(wanted):
            begins = version
    return begins


def _create(client: Client, name: str) -> str:
    # Create the pipeline without a version, because the version would get the pipeline's name.
    body = V2beta1Pipeline(name=name, display_name=name, namespace=client.access.namespace or None)
    create = partial(ask, client.pipelines.pipeline_service_create_pipeline, pipeline=body)
    return create_or_find(create, "pipeline_id", partial(find_pipeline_id, client, name))


def _version(pipeline: str, made: Any) -> Version:
    return Version(
        pipeline=pipeline,
        pipeline_id=str(made.pipeline_id),
        name=str(made.display_name or made.name),
        version_id=str(made.pipeline_version_id),
        spec=made.pipeline_spec,
    )
