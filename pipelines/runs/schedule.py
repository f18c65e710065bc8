"""Recurring runs on a KFP instance. Each schedule has a unique name."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from kfp_server_api import (
    V2beta1CronSchedule,
    V2beta1PeriodicSchedule,
    V2beta1PipelineVersionReference,
    V2beta1RecurringRun,
    V2beta1RuntimeConfig,
    V2beta1Trigger,
)

from flotilla.pipelines import notebook
from flotilla.pipelines.compile import read_defaults
from flotilla.pipelines.runs import kfp_watch
from flotilla.pipelines.runs.kfp_access import Access, Instance
from flotilla.pipelines.runs.kfp_client import (
    ABSENT,
    NEWEST,
    REFUSED,
    Client,
    InstanceError,
    ask,
    connect,
    equals,
    pages,
)
from flotilla.pipelines.runs.kfp_outcome import WORKFLOW_GONE
from flotilla.pipelines.runs.kfp_run import RemoteRun, view
from flotilla.pipelines.runs.local import GivenConfig
from flotilla.pipelines.runs.submission import (
    Submission,
    Target,
    Version,
    add_code,
    experiment_id,
    find_version,
    make_submission,
    newest_version,
    run_parameters,
)
from flotilla.pipelines.schedule_times import Timing, describe, make_timing
from flotilla.pipelines.settings import (
    Settings,
    are_old_parameters,
    convert_parameters,
    describe_ignored,
)
from flotilla.pipelines.step_settings import check_image
from flotilla.trainer.code import forget_schedule, note_schedule
from flotilla.trainer.config.form import SETTINGS, from_form, to_form
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest


@dataclass(frozen=True, kw_only=True, repr=False)
class Scheduled:
    """The current state of a schedule on the instance.

    Attributes:
        action: the result, such as `was created` or `already exists`.
        next: the next start in UTC; empty for an interval or if it is not computed.
        removed: number of other schedules of this name that were removed.
        existed: whether the same schedule existed before.
        version: the version of all runs; with `Timing.latest`, the version that is newest now.
        remarks: remarks about settings that were not copied and schedules that remain.
    """

    name: str
    schedule_id: str
    action: str
    timing: str
    next: str
    removed: int
    existed: bool
    version: Version
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the schedule, the action, and the timing."""
        return notebook.short("Scheduled", self.name, self.action, self.timing)

    def _repr_html_(self) -> str:
        facts = {"when": self.timing, "next": self.next, "version": self.version.name}
        return notebook.card(f"schedule {self.name} {self.action}", facts)


def schedule(
    config: GivenConfig = None,
    *,
    settings: Settings = (),
    cron: str = "",
    every: str = "",
    timezone: str = "UTC",
    name: str = "",
    latest: bool = False,
    catch_up: bool = False,
    at_once: int = 1,
    instance: Instance | None = None,
    code: str | Path = "",
    **target: Unpack[Target],
) -> Scheduled:
    """Schedule recurring runs on a KFP instance, and replace other schedules of the same name.

    Args:
        config: the configuration, as for `submit`.
        settings: overrides of the configuration, as for `submit`.
        cron: five fields, or six with seconds first.
        every: an interval instead of `cron`, such as 90s, 30m, 6h or 1d.
        timezone: the time zone of `cron` on the instance.
        name: name of the schedule; the name of the model if empty.
        latest: whether each run uses the newest version at its start.
        catch_up: whether missed runs are started later.
        at_once: maximum number of concurrent runs.
        instance: the KFP instance; from the environment by default.
        code: folder of your modules.
        target: see `flotilla.pipelines.runs.submission.Target`.

    Example:
        flotilla.schedule("configs/digits.yaml", cron="0 3 * * *", training={"steps": 200}).next
    """
    when = make_timing(
        cron, every, zone=timezone, catch_up=catch_up, at_once=at_once, latest=latest,
        version=target.get("version", ""),
    )  # fmt: skip
    access = (instance or Instance()).access()
    submission = make_submission(config, settings, target)
    submission = replace(submission, name=name or submission.config.name)
    if code:
        submission, _ = add_code(submission, code)
    return put_schedule(access, submission, when)


def put_schedule(access: Access, submission: Submission, timing: Timing) -> Scheduled:
    """Create this schedule, and replace all others with its name. Raises `UserError`."""
    words, upcoming = describe(timing)
    client = connect(access)
    if timing.latest:
        version = newest_version(client, submission.pipeline)
        words += "; each run uses the version that is newest when it starts"
    else:
        version = find_version(client, submission.pipeline, submission.version)
    wanted = _make_wanted(client, submission, timing, version)
    bundle, known_as = submission.config.code, _schedule_key(access, submission.name)
    if bundle:
        # Write the reference before the schedule exists, so that the bundle is never unreferenced.
        note_schedule(bundle, known_as)
    same, others = _find(client, submission.name, wanted)
    if same is not None:
        action, schedule_id = "already exists", str(same.recurring_run_id)
        if not _is_enabled(same):
            ask(client.enable_recurring_run, schedule_id)
            action = "was disabled and is now enabled again"
    else:
        # Create the new schedule first, so that nothing is lost if the instance refuses it.
        schedule_id = str(_create(client, wanted).recurring_run_id)
        action = "was changed" if others else "was created"
    removed, remarks = _replace(client, others, known_as, bundle)
    return Scheduled(
        name=submission.name,
        schedule_id=schedule_id,
        action=action,
        timing=words,
        next=upcoming,
        removed=removed,
        existed=same is not None,
        version=version,
        remarks=remarks,
    )


def reschedule(access: Access, name: str, pipeline: str, image: str = "") -> Scheduled:
    """Recreate a schedule for the newest version with the steps of this code.

    All settings except the version and the image are kept. The parameters of earlier versions are
    converted. If `image` is empty, the image of the version is used, because other images may have
    other steps.
    """
    check_image(image)
    client = connect(access)
    old, *others = sorted(_list_named(client, name), key=_is_enabled, reverse=True)
    version = find_version(client, pipeline, "")
    reference = old.pipeline_version_reference
    if reference is None or reference.pipeline_id != version.pipeline_id:
        raise ConfigError(
            f"the schedule {name!r} belongs to another pipeline: pass that pipeline with --pipeline"
        )
    if not version.is_of_this_code:
        raise ConfigError(
            f"version {version.name} {version.origin}; first upload the pipeline of this Flotilla "
            "version with `flotilla upload`"
        )
    values = {**_defaults(client, reference, version), **_meaning(old)["parameters"]}
    is_old = are_old_parameters(values)
    config = convert_parameters(values) if is_old else from_form({**to_form(Config()), **values})
    what = f"version {version.name} of {version.pipeline}"
    wanted = _copy(old, version, run_parameters(config, image, version.spec, what))
    is_same, known_as = _meaning(old) == _meaning(wanted), _schedule_key(access, name)
    if config.code:
        note_schedule(config.code, known_as)
    made = old if is_same else _create(client, wanted)
    when = _meaning(wanted)
    replaced = others if is_same else [old, *others]
    removed, remarks = _replace(client, replaced, known_as, config.code)
    return Scheduled(
        name=name,
        schedule_id=str(made.recurring_run_id),
        action="already exists" if is_same else "was recreated",
        timing=f"cron {when['cron']!r}" if when["cron"] else f"every {when['interval']} s",
        next="",
        removed=removed,
        existed=is_same,
        version=version,
        remarks=(*describe_ignored(values), *remarks),
    )


def _defaults(client: Client, reference: Any, newest: Version) -> dict[str, Any]:
    """Return the defaults of the schedule's version, or {} if the version was deleted."""
    if not reference.pipeline_version_id:
        return read_defaults(newest.spec)
    try:
        pinned = ask(
            client.get_pipeline_version, reference.pipeline_id, reference.pipeline_version_id
        )
    except InstanceError as error:
        if error.status != ABSENT:
            raise
        return {}
    return read_defaults(pinned.pipeline_spec)


def _copy(old: Any, version: Version, parameters: dict[str, Any]) -> V2beta1RecurringRun:
    pinned = old.pipeline_version_reference.pipeline_version_id
    return V2beta1RecurringRun(
        display_name=old.display_name,
        description=old.description,
        experiment_id=old.experiment_id,
        namespace=old.namespace,
        pipeline_version_reference=V2beta1PipelineVersionReference(
            pipeline_id=version.pipeline_id,
            pipeline_version_id=version.version_id if pinned else None,
        ),
        runtime_config=V2beta1RuntimeConfig(
            parameters=parameters, pipeline_root=_meaning(old)["pipeline_root"] or None
        ),
        service_account=old.service_account,
        trigger=old.trigger,
        mode="ENABLE" if _is_enabled(old) else "DISABLE",
        no_catchup=old.no_catchup,
        max_concurrency=old.max_concurrency,
    )


def _create(client: Client, wanted: V2beta1RecurringRun) -> Any:
    create = client.recurring_runs.recurring_run_service_create_recurring_run
    return ask(create, recurring_run=wanted)


def unschedule(
    access: Access,
    name: str,
    on_note: Callable[[str], None],
    *,
    cancel: bool = False,
    now: bool = False,
) -> int:
    """Remove every schedule of this name, and return their number.

    Before KFP 2.16, deleting a schedule also deletes the Workflows of its active runs, and their
    end is never reported. Therefore the schedule is disabled first, and deleted after its runs have
    ended. Raises `ConfigError` if there is no schedule of this name.

    Args:
        access: the instance.
        name: name of the schedules.
        on_note: called with a message about each run that delays the removal or is lost.
        cancel: whether to cancel the active runs.
        now: whether to delete without waiting for active runs, which may then be lost.
    """
    client = connect(access)
    named = _list_named(client, name)
    _disable(client, named)
    if now:
        for run in _active_runs(client, named):
            on_note(
                f"run {run.run_id} is active: KFP before 2.16 deletes its pods with the schedule; "
                "the run then publishes no last checkpoint or report, and its state stays the same"
            )
    else:
        _wait_for_runs(client, named, on_note, cancel=cancel)
    return _delete(client, named, _schedule_key(access, name))


def _wait_for_runs(
    client: Client, schedules: Sequence[Any], on_note: Callable[[str], None], *, cancel: bool
) -> None:
    seen, lost, outage = set[str](), set[str](), kfp_watch.Outage(on_note)
    while True:
        try:
            active = [run for run in _active_runs(client, schedules) if run.run_id not in lost]
            outage.end()
            for run in active:
                if run.run_id in seen:
                    continue
                on_note(_describe_wait(client.access, run, cancel=cancel))
                if cancel and not _terminate(client, run.run_id):
                    on_note(f"not waiting for run {run.run_id}: {WORKFLOW_GONE}")
                    lost.add(run.run_id)
                seen.add(run.run_id)
        except InstanceError as error:
            if not outage.may_pass(error):
                raise UserError(
                    f"{error}; the schedule is disabled but not removed: repeat the command"
                ) from None
        else:
            if not active:
                return
        time.sleep(kfp_watch.LOOK_SECONDS)


def _describe_wait(access: Access, run: RemoteRun, *, cancel: bool) -> str:
    what = f"the schedule is disabled and will be removed when its run {run.run_id} has ended"
    if cancel:
        return f"{what}; the run is being cancelled"
    by_hand = kfp_watch.command(access, "cancel", run.run_id)
    return f"{what} ({run.state.lower()}); to cancel the run: {by_hand}"


def _terminate(client: Client, run_id: str) -> bool:
    """Cancel a run, which may already be ending, and return whether it will end."""
    try:
        ask(client.terminate_run, run_id)
    except InstanceError as error:
        if error.is_of_absent_workflow:
            return False
        if error.status != REFUSED:
            raise
    return True


def _disable(client: Client, schedules: Sequence[Any]) -> None:
    """Disable schedules, and wait until runs that were about to start are visible."""
    enabled = [each for each in schedules if _is_enabled(each)]
    for each in enabled:
        try:
            ask(client.disable_recurring_run, each.recurring_run_id)
        except InstanceError as error:
            # Continue if another client removed the schedule or its object in the cluster.
            if error.status != ABSENT and not error.is_of_absent_workflow:
                raise
    if enabled:
        time.sleep(kfp_watch.LOOK_SECONDS)


def _active_runs(client: Client, schedules: Sequence[Any]) -> list[RemoteRun]:
    found: list[RemoteRun] = []
    for each in schedules:
        own = str(each.recurring_run_id)
        named = {"experiment_id": each.experiment_id, "filter": equals("recurring_run_id", own)}
        runs = map(view, pages(client.list_runs, "runs", sort_by=NEWEST, **named))
        found += [run for run in runs if run.schedule_id == own and not run.has_ended]
    return found


def _replace(
    client: Client, schedules: Sequence[Any], known_as: str, kept: str
) -> tuple[int, tuple[str, ...]]:
    """Remove schedules, but only disable those with active runs; see `unschedule`.

    Return the number of removed schedules, and a remark about each remaining one.
    """
    _disable(client, schedules)
    active = {each.recurring_run_id: _active_runs(client, [each]) for each in schedules}
    remarks = tuple(
        f"the previous schedule ({key}) is disabled but not removed, because its run "
        f"{runs[0].run_id} is active and would be deleted too; repeat the command later"
        for key, runs in active.items()
        if runs
    )
    idle = [each for each in schedules if not active[each.recurring_run_id]]
    return _delete(client, idle, known_as, kept), remarks


def _list_named(client: Client, name: str) -> list[Any]:
    every = _all(client)
    found = [each for each in every if each.display_name == name]
    if not found:
        known = sorted({str(each.display_name) for each in every})
        hint = nearest(name, known) or (f"; there are {', '.join(known[:5])}" if known else "")
        raise ConfigError(f"{client.access.endpoint} has no schedule {name!r}{hint}")
    return found


def _schedule_key(access: Access, name: str) -> str:
    """Return a key that identifies the schedule across all instances."""
    return "\n".join((access.endpoint, access.namespace, name))


def _make_wanted(
    client: Client, submission: Submission, timing: Timing, version: Version
) -> V2beta1RecurringRun:
    what = f"version {version.name} of {version.pipeline}"
    # Check the parameters first, so that a refused request leaves no empty experiment.
    parameters = run_parameters(submission.config, submission.image, version.spec, what)
    if timing.cron:
        trigger = V2beta1Trigger(cron_schedule=V2beta1CronSchedule(cron=timing.cron.text))
    else:
        every = V2beta1PeriodicSchedule(interval_second=str(timing.interval))
        trigger = V2beta1Trigger(periodic_schedule=every)
    return V2beta1RecurringRun(
        display_name=submission.name,
        experiment_id=experiment_id(client, submission.experiment),
        namespace=client.access.namespace or None,
        pipeline_version_reference=V2beta1PipelineVersionReference(
            pipeline_id=version.pipeline_id,
            pipeline_version_id=None if timing.latest else version.version_id,
        ),
        runtime_config=V2beta1RuntimeConfig(
            parameters=parameters, pipeline_root=submission.pipeline_root or None
        ),
        service_account=submission.service_account or None,
        trigger=trigger,
        mode="ENABLE",
        no_catchup=not timing.catch_up,
        max_concurrency=str(timing.at_once),
    )


def _find(client: Client, name: str, wanted: V2beta1RecurringRun) -> tuple[Any | None, list[Any]]:
    """Return the schedule that equals `wanted`, or None, and all others of this name."""
    named = [each for each in _all(client) if each.display_name == name]
    pipeline = wanted.pipeline_version_reference.pipeline_id
    for each in named:
        reference = each.pipeline_version_reference
        if reference is None or reference.pipeline_id != pipeline:
            raise UserError(
                f"the schedule {name!r} already exists for another pipeline: choose another "
                f"--name, or remove it with `flotilla unschedule {shlex.quote(name)}`"
            )
    account = wanted.service_account
    same = [
        each
        for each in named
        # If none is requested, accept any service account: the instance has chosen it.
        if _meaning(each) == _meaning(wanted) and account in (None, each.service_account)
    ]
    kept = max(same, key=_is_enabled, default=None)
    return kept, [each for each in named if each is not kept]


def _all(client: Client) -> list[Any]:
    namespace = client.access.namespace or None
    return list(pages(client.list_recurring_runs, "recurring_runs", namespace=namespace))


def _is_enabled(each: Any) -> bool:
    return each.status != "DISABLED" and each.mode != "DISABLE"


def _meaning(each: Any) -> dict[str, Any]:
    """Return the fields by which schedules are compared."""
    trigger, runtime = each.trigger, each.runtime_config
    cron = trigger.cron_schedule.cron if trigger and trigger.cron_schedule else None
    every = trigger.periodic_schedule if trigger else None
    reference = each.pipeline_version_reference
    return {
        "cron": cron or "",
        "interval": int(every.interval_second or 0) if every else 0,
        "version": (reference.pipeline_version_id if reference else None) or "",
        "parameters": (runtime.parameters if runtime else None) or {},
        "pipeline_root": (runtime.pipeline_root if runtime else None) or "",
        "experiment": each.experiment_id,
        "no_catchup": bool(each.no_catchup),
        "max_concurrency": int(each.max_concurrency or 0),
    }


def _delete(client: Client, schedules: list[Any], known_as: str, kept: str = "") -> int:
    """Remove schedules, and their references to bundles other than `kept`. Return their number."""
    for each in schedules:
        try:
            # Since KFP 2.16, this option lets started runs continue; earlier versions ignore it.
            ask(
                client.recurring_runs.recurring_run_service_delete_recurring_run,
                each.recurring_run_id,
                propagation_policy="ORPHAN",
            )
        except InstanceError as error:
            # Continue if another client removed the schedule.
            if error.status != ABSENT:
                raise
        given = _meaning(each)["parameters"]
        # In schedules of earlier versions, the bundle is a separate parameter.
        settings = given.get(SETTINGS)
        bundle = (settings if isinstance(settings, Mapping) else given).get("code", "")
        if bundle and bundle != kept:
            forget_schedule(str(bundle), known_as)
    return len(schedules)
