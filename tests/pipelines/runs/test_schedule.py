"""Tests that `flotilla schedule` keeps one schedule per name, with the last call's settings."""

import copy

import pytest

from flotilla.trainer.config.load import load_config
from tests.pipelines.test_settings_old import flat


@pytest.fixture
def remote(remote, uploaded):  # noqa: ARG001
    return remote


NIGHTLY = ("schedule", "--cron", "30 2 * * *")


def the_schedule(instance):
    [found] = instance.store.recurring.values()
    return found


def test_a_schedule_as_it_is_by_default(instance, remote):
    answer = remote(*NIGHTLY, "--set", "training.steps=9", "--json")
    assert answer.code == 0
    made = the_schedule(instance)
    [version] = instance.store.versions.values()
    assert made["display_name"] == "digits"
    assert made["trigger"] == {"cron_schedule": {"cron": "0 30 2 * * *"}}
    assert (made["no_catchup"], made["max_concurrency"], made["mode"]) == (True, "1", "ENABLE")
    reference = made["pipeline_version_reference"]
    assert reference == {each: version[each] for each in ("pipeline_id", "pipeline_version_id")}
    assert made["runtime_config"]["parameters"]["steps"] == 9
    assert answer.json["schedule"]["id"] == made["recurring_run_id"]
    assert answer.json["schedule"]["next"].endswith("T02:30:00Z")
    assert "02:30:00 UTC; the instance uses UTC, unless CRON_SCHEDULE_TIMEZONE" in answer.err


def test_the_same_again_changes_nothing_or_enables_it_and_removes_duplicates(instance, remote):
    remote(*NIGHTLY)
    before = copy.deepcopy(instance.store.recurring)
    answer = remote(*NIGHTLY)
    assert (answer.code, "already exists" in answer.err) == (0, True)
    assert instance.store.recurring == before
    assert len(instance.asked("POST .*recurringruns")) == 1
    assert not instance.asked("DELETE")
    made = the_schedule(instance)
    instance.store.enable(made["recurring_run_id"], False)
    assert "was disabled and is now enabled again" in remote(*NIGHTLY).err
    assert the_schedule(instance)["status"] == "ENABLED"
    assert the_schedule(instance)["recurring_run_id"] == made["recurring_run_id"]
    for number in range(3):
        more = {**made, "recurring_run_id": f"more-{number}"}
        instance.store.recurring[f"more-{number}"] = more
    answer = remote(*NIGHTLY, "--json")
    assert (answer.code, answer.json["schedule"]["removed"]) == (0, 3)
    assert "removed 3 other schedules with this name" in answer.err
    assert len(instance.store.recurring) == 1


CHANGES = (
    ("--cron", "0 4 * * *"),
    ("--every", "6h"),
    (*NIGHTLY[1:], "--set", "training.steps=8"),
    (*NIGHTLY[1:], "--catch-up"),
    (*NIGHTLY[1:], "--at-once", "2"),
    (*NIGHTLY[1:], "--latest"),
    (*NIGHTLY[1:], "--experiment", "other"),
    (*NIGHTLY[1:], "--pipeline-root", "gs://b/r"),
    (*NIGHTLY[1:], "--service-account", "trainer"),
)


@pytest.mark.parametrize("words", CHANGES, ids=" ".join)
def test_a_change_replaces_it_once(instance, remote, words):
    remote(*NIGHTLY)
    before = the_schedule(instance)["recurring_run_id"]
    answer = remote("schedule", *words)
    assert (answer.code, "was changed" in answer.err) == (0, True)
    after = the_schedule(instance)["recurring_run_id"]
    assert after != before
    assert "already exists" in remote("schedule", *words).err
    assert the_schedule(instance)["recurring_run_id"] == after


def test_a_refusal_or_a_namesake_of_another_pipeline_leaves_what_was_there(instance, remote):
    remote(*NIGHTLY)
    before = the_schedule(instance)
    instance.faults.add("POST .*recurringruns", 403)
    answer = remote("schedule", "--cron", "0 4 * * *")
    assert (answer.code, "answered 403" in answer.err) == (1, True)
    assert the_schedule(instance)["recurring_run_id"] == before["recurring_run_id"]
    before["pipeline_version_reference"]["pipeline_id"] = "another"
    answer = remote(*NIGHTLY)
    assert answer.code == 1
    assert "the schedule 'digits' already exists for another pipeline" in answer.err
    assert len(instance.store.recurring) == 1


def test_names_are_found_over_pages(instance, remote):
    remote(*NIGHTLY)
    made = the_schedule(instance)
    for number in range(150):
        key = f"other-{number}"
        other = {**made, "recurring_run_id": key, "display_name": key}
        instance.store.recurring = {key: other, **instance.store.recurring}
    assert "already exists" in remote(*NIGHTLY).err
    remote(*NIGHTLY, "--name", "nightly")
    assert len(instance.store.recurring) == 152


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("6h", 21600), ("1d", 86400)]
)
def test_intervals(instance, remote, words, seconds):
    assert remote("schedule", "--every", words).code == 0
    assert the_schedule(instance)["trigger"] == {
        "periodic_schedule": {"interval_second": str(seconds)}
    }


def test_a_time_zone_is_said_in_both_clocks(instance, remote):
    answer = remote(*NIGHTLY, "--timezone", "Asia/Kolkata")
    assert answer.code == 0
    assert "02:30:00 Asia/Kolkata (" in answer.err
    assert "UTC); the instance must set CRON_SCHEDULE_TIMEZONE=Asia/Kolkata" in answer.err
    # The API has no field for the time zone.
    assert the_schedule(instance)["trigger"] == {"cron_schedule": {"cron": "0 30 2 * * *"}}


def test_unschedule_removes_all_of_the_name_and_no_other(instance, remote):
    remote(*NIGHTLY)
    remote(*NIGHTLY, "--name", "other")
    made = next(iter(instance.store.recurring.values()))
    instance.store.recurring["twin"] = {**made, "recurring_run_id": "twin"}
    answer = remote("unschedule", "digits", "--json")
    assert (answer.code, answer.json["schedule"]) == (0, {"name": "digits", "removed": 2})
    assert the_schedule(instance)["display_name"] == "other"


def before(instance, **more):
    """Convert the schedule to the format that older versions of the pipeline used."""
    made = the_schedule(instance)
    config = load_config(None, ["training.steps=9", "gate.min.accuracy=0.5"])
    made["runtime_config"] = {"parameters": {**flat(config), **more}, "pipeline_root": "gs://b/r"}
    made["pipeline_version_reference"]["pipeline_version_id"] = "of-before"
    return copy.deepcopy(made)


def test_a_schedule_of_before_is_made_again(instance, remote):
    remote(*NIGHTLY, "--experiment", "nights", "--catch-up", "--service-account", "trainer")
    old = before(instance, step_memory="16Gi", image="a/old:1")
    answer = remote("reschedule", "digits", "--json")
    assert answer.code == 0, answer.err
    assert "schedule digits was recreated: cron '0 30 2 * * *'" in answer.err
    assert "step_memory=16Gi is no longer a run parameter; use --memory of" in answer.err
    made = the_schedule(instance)
    assert made["recurring_run_id"] != old["recurring_run_id"]
    for kept in ("trigger", "experiment_id", "no_catchup", "max_concurrency", "service_account"):
        assert made[kept] == old[kept]
    assert made["runtime_config"]["pipeline_root"] == "gs://b/r"
    sent = made["runtime_config"]["parameters"]
    assert (sent["steps"], sent["settings"]) == (9, {"gate": {"min": {"accuracy": 0.5}}})
    # No image is sent, because the version's own image has the version's steps.
    assert "image" not in sent
    [version] = instance.store.versions
    assert made["pipeline_version_reference"]["pipeline_version_id"] == version
    assert "already exists" in remote("reschedule", "digits").err
    assert the_schedule(instance)["recurring_run_id"] == made["recurring_run_id"]


@pytest.mark.parametrize("pinned", ["its version", "gone", ""])
def test_what_a_schedule_leaves_to_its_version_is_made_again(instance, remote, pinned):
    remote(*NIGHTLY)
    made = the_schedule(instance)
    made["runtime_config"]["parameters"] = {"steps": 9}
    if pinned != "its version":
        made["pipeline_version_reference"]["pipeline_version_id"] = pinned
    answer = remote("reschedule", "digits")
    assert answer.code == 0, answer.err
    sent = the_schedule(instance)["runtime_config"]["parameters"]
    assert (sent["steps"], sent["batch_size"], sent["settings"]) == (9, 64, {})


def test_unschedule_of_odd_settings_or_of_what_is_not_there(instance, remote):
    remote(*NIGHTLY)
    answer = remote("unschedule", "digit")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "has no schedule 'digit'; did you mean 'digits'?" in answer.err
    assert len(instance.store.recurring) == 1
    the_schedule(instance)["runtime_config"]["parameters"] = {"settings": "of someone"}
    # Another client has removed it meanwhile.
    instance.faults.add("DELETE", 404, late=True)
    assert remote("unschedule", "digits").code == 0
    assert not instance.store.recurring


def test_what_cannot_be_made_again_stays(instance, remote):
    remote(*NIGHTLY)
    old = before(instance, training_cached_rows=5)
    answer = remote("reschedule", "digits")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "training.cached_rows: removed in 0.2" in answer.err
    before(instance)
    instance.faults.add("POST .*recurringruns", 403)
    assert remote("reschedule", "digits").code == 1
    assert the_schedule(instance)["recurring_run_id"] == old["recurring_run_id"]
    assert "has no schedule 'digit'; did you mean" in remote("reschedule", "digit").err


def test_where_several_users_share_the_instance(instance, remote):
    instance.multi_user = True
    answer = remote(*NIGHTLY)
    assert (answer.code, "--namespace" in answer.err) == (1, True)
    [pipeline] = instance.store.pipelines.values()
    pipeline["namespace"] = "me"
    assert remote(*NIGHTLY, "--namespace", "me").code == 0
    assert the_schedule(instance)["namespace"] == "me"
