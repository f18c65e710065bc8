"""Uploads pipelines to a KFP instance, finds their versions, and starts runs.

Pipelines with equal content share one version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from kfp_server_api import V2beta1Experiment, V2beta1Pipeline

from flotilla.components.image import describe_mark, is_of_this_code, own_mark
from flotilla.components.in_use import publish_code
from flotilla.components.records.run_store import FLOTILLA
from flotilla.pipelines import notebook
from flotilla.pipelines.compile import Package, list_parameters, load_package, read_mark
from flotilla.pipelines.runs.kfp_access import Access, Instance
from flotilla.pipelines.runs.kfp_client import (
    ABSENT,
    CONFLICT,
    NEWEST,
    Client,
    InstanceError,
    ask,
    connect,
    containing,
    create_or_find,
    equals,
    is_id,
    pages,
)
from flotilla.pipelines.runs.local import GivenConfig, configuration, run_name
from flotilla.pipelines.settings import Sections, Settings, make_assignments
from flotilla.pipelines.step_settings import check_image, check_target
from flotilla.trainer import storage
from flotilla.trainer.code import Bundle
from flotilla.trainer.config.form import to_form
from flotilla.trainer.config.schema import Config
from flotilla.trainer.preflight.check import check
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

EXPERIMENT = "flotilla"
PIPELINE = "flotilla-training"
log = logging.getLogger(__name__)
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
        return is_of_this_code(read_mark(self.spec))

    @property
    def origin(self) -> str:
        """The origin of the version, as a phrase for messages."""
        mark = read_mark(self.spec)
        if mark:
            return f"was compiled by {describe_mark(mark)}"
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
    return _find_id(client, "pipeline", name, containing("display_name", name))


def _find_id(client: Client, kind: str, name: str, filtered: str) -> str:
    namespace, call = client.access.namespace or None, getattr(client, f"list_{kind}s")
    for each in pages(call, f"{kind}s", namespace=namespace, filter=filtered):
        if each.display_name == name:
            return str(getattr(each, f"{kind}_id"))
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
        namespace = client.access.namespace or None
        every = pages(client.list_pipelines, "pipelines", namespace=namespace)
        hint = nearest(name, [str(each.display_name) for each in every]) or (
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
    own = describe_mark(own_mark())
    remark = (
        f"version {newest.name} {newest.origin}, but this is {own}; to upload the pipeline of this "
        "version, use `flotilla upload`"
    )
    return replace(newest, remark=remark)


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


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The run to submit; see `submit` for the fields."""

    config: Config
    package: Package | None = None
    pipeline: str = PIPELINE
    version: str = ""
    experiment: str = EXPERIMENT
    name: str = ""
    pipeline_root: str = ""
    service_account: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for invalid values before any request is sent."""
        for option in ("pipeline", "experiment"):
            if not getattr(self, option).strip():
                raise ConfigError(f"--{option} is empty: give a value, or leave the option out")
        check_image(self.image)
        check_target(self.pipeline_root, self.service_account)


@dataclass(frozen=True, kw_only=True, repr=False)
class Submitted:
    """A started run. `version` is None if the pipeline was sent with the run."""

    run_id: str
    page: str
    version: Version | None = None

    def __repr__(self) -> str:
        """Return the run and its page."""
        return notebook.short("Submitted", self.run_id, self.page)

    def _repr_html_(self) -> str:
        version = self.version.name if self.version else ""
        return notebook.card(f"run {self.run_id}", {"page": self.page, "version": version})


class Target(Sections, total=False):
    """The destination of a run on an instance, and sections of the configuration.

    Attributes:
        pipeline: name of the uploaded pipeline.
        version: version of the pipeline; the newest by default.
        experiment: the group of runs, created if it does not exist.
        pipeline_root: where KFP stores artifacts; the instance's by default.
        service_account: service account of the pods; the instance's by default.
        image: image of all steps and tasks; the compiled pipeline's by default.
    """

    pipeline: str
    version: str
    experiment: str
    pipeline_root: str
    service_account: str
    image: str


_TARGET = ("pipeline", "version", "experiment", "pipeline_root", "service_account", "image")


def submit(
    config: GivenConfig = None,
    *,
    settings: Settings = (),
    instance: Instance | None = None,
    file: str | Path | None = None,
    name: str = "",
    code: str | Path = "",
    **target: Unpack[Target],
) -> Submitted:
    """Start a run on a KFP instance and return without waiting; see `follow`.

    Args:
        config: a configuration, its YAML file, a mapping, files to learn from, or None for the
            default.
        settings: overrides of the configuration, as for `run`.
        instance: the KFP instance; from the environment by default.
        file: a compiled pipeline to run instead of an uploaded version.
        name: name of the run; if empty, made from the configuration and the time.
        code: folder of your modules, which the steps import instead of the image's modules.
        target: see `Target`.

    Raises:
        UserError: the configuration or a parameter is invalid, or the instance refuses the run.

    Example:
        instance = flotilla.Instance(endpoint="http://localhost:8888")
        flotilla.submit("configs/digits.yaml", instance=instance, training={"steps": 200}).page
    """
    submission = make_submission(config, settings, target)
    package = package_to_send(file, submission.version)
    access = (instance or Instance()).access()
    submission = replace(submission, name=name, package=package)
    if code:
        submission, _ = add_code(submission, code)
    return start(connect(access), submission)


def make_submission(config: GivenConfig, settings: Settings, target: Target) -> Submission:
    """Return a submission without a run name. Raises `ConfigError`."""
    given: dict[str, Any] = dict(target)
    own = {name: given.pop(name) for name in _TARGET if name in given}
    return Submission(config=configuration(config, make_assignments(settings, given)), **own)


def add_code(submission: Submission, folder: str | Path) -> tuple[Submission, Bundle]:
    """Publish a folder of the user's modules where the steps find it; see `bundle.publish`."""
    config, root = submission.config, submission.config.storage.root
    if not root and submission.pipeline_root:
        root = storage.join(submission.pipeline_root, FLOTILLA)
    if not root:
        raise ConfigError(
            "--code: the artifact store of the instance is unknown on this machine, so the "
            "modules cannot be uploaded: set storage.root or --pipeline-root to a URI that this "
            "machine and the steps can reach"
        )
    if storage.local_path(root):
        raise ConfigError(
            f"--code: storage.root {root} is a folder on this machine, which the steps cannot "
            "read: set it to gs://, s3:// or minio://BUCKET/FOLDER"
        )
    config, bundle = publish_code(config, folder, root)
    return replace(submission, config=config), bundle


def package_to_send(file: str | Path | None, version: str) -> Package | None:
    """Return the compiled pipeline in a file, or None without a file. Raises `UserError`."""
    if file and version:
        raise ConfigError("--file and --version are mutually exclusive: leave one out")
    return load_package(Path(file)) if file else None


def start(client: Client, submission: Submission) -> Submitted:
    """Check a run as far as this machine can, and start it. Raises `UserError`."""
    for note in check(submission.config, is_remote=True).notes:
        log.info("%s", note)
    version = None
    if submission.package is None:
        version = find_version(client, submission.pipeline, submission.version)
    run_id = _start(client, submission, version)
    return Submitted(run_id=run_id, page=client.page(f"runs/details/{run_id}"), version=version)


def run_parameters(
    config: Config, image: str, spec: Mapping[str, Any] | None, what: str
) -> dict[str, Any]:
    """Return the run parameters for a pipeline with this `spec`. Raises `ConfigError`."""
    values = {**to_form(config), **({"image": image} if image else {})}
    known = list_parameters(spec)
    if known is not None and (unknown := values.keys() - known):
        raise ConfigError(
            f"{what} has no parameter {', '.join(sorted(unknown))}: upload the pipeline of this "
            "Flotilla version with `flotilla upload`"
        )
    return values


def experiment_id(client: Client, name: str) -> str:
    """Return the id of an experiment, and create it if it does not exist."""
    body = V2beta1Experiment(display_name=name, namespace=client.access.namespace or None)
    call = client.experiments.experiment_service_create_experiment
    create, find = partial(ask, call, experiment=body), partial(find_experiment, client, name)
    return find() or create_or_find(create, "experiment_id", find)


def find_experiment(client: Client, name: str) -> str:
    """Return the id of the experiment with this name, or an empty string."""
    return _find_id(client, "experiment", name, equals("display_name", name))


def _start(client: Client, submission: Submission, version: Version | None) -> str:
    with ExitStack() as stack:
        if version is not None:
            what, spec = f"version {version.name} of {version.pipeline}", version.spec
            pipeline = {"pipeline_id": version.pipeline_id, "version_id": version.version_id}
        elif package := submission.package:
            what, spec = f"the pipeline {package.name}", dict(package.spec)
            pipeline = {"pipeline_package_path": stack.enter_context(package.write_temporary())}
        named = {
            "params": run_parameters(submission.config, submission.image, spec, what),
            "job_name": submission.name or run_name(submission.config),
            "experiment_id": experiment_id(client, submission.experiment),
            "pipeline_root": submission.pipeline_root or None,
            "service_account": submission.service_account or None,
        }
        try:
            return str(ask(client.run_pipeline, **named, **pipeline).run_id)
        except InstanceError as error:
            if error.status:
                raise
            unsure = "the run may have started; check with `flotilla runs`"
            raise UserError(f"{error}; {unsure}") from None
