"""Tests that no run is lost if its schedule is removed or replaced while the run is active."""

from unittest.mock import Mock, patch

import pytest

from flotilla.pipelines.runs import kfp_watch, schedule

NIGHTLY = ("schedule", "--cron", "30 2 * * *")


@pytest.fixture
def fire(instance, remote, uploaded):
    """Create the schedule `digits`, and return a function that starts one of its runs."""
    assert uploaded
    assert remote(*NIGHTLY).code == 0
    instance.requests.clear()

    def fired():
        [key] = [key for key, each in instance.store.recurring.items() if each["mode"] == "ENABLE"]
        run = instance.store.fire(key)["run_id"]
        instance.store.workflows[run].begin("train_model")
        return run

    return fired


@pytest.fixture
def looks(monkeypatch):
    """Return a list of functions, to be called one by one in the pauses between queries."""
    calls = []

    def sleep(_seconds):
        if calls:
            calls.pop(0)()

    monkeypatch.setattr(schedule.time, "sleep", sleep)
    return calls


def nothing():
    pass


def test_a_schedule_is_removed_once_its_run_has_ended(instance, remote, fire, looks):
    run = fire()
    looks += [nothing, nothing, lambda: instance.store.end_run(run, "SUCCEEDED")]
    answer = remote("unschedule", "digits", "--json")
    assert (answer.code, answer.json["schedule"]["removed"]) == (0, 1)
    assert not looks
    said = f"its run {run} has ended (running); to cancel the run: flotilla cancel"
    assert answer.err.count(said) == 1
    writes = [each for each in instance.requests if not each.startswith("GET")]
    assert [each.rpartition(":")[2][:7] for each in writes[:-1]] == ["disable"]
    assert writes[-1].startswith("DELETE")


def test_a_run_that_begins_to_fire_meanwhile_is_waited_for(instance, remote, fire, looks):
    started = []

    def end():
        instance.store.end_run(started[0], "FAILED")

    looks += [lambda: started.append(fire_once()), nothing, end]
    [key] = instance.store.recurring

    def fire_once():
        return instance.store.fire(key)["run_id"]

    answer = remote("unschedule", "digits")
    assert (answer.code, looks) == (0, [])
    assert started[0] in answer.err
    assert fire is not None


def test_its_runs_are_cancelled_on_request(instance, remote, fire, looks):
    run, ended = fire(), fire()
    instance.store.end_run(ended, "SUCCEEDED")
    looks += [nothing, lambda: instance.store.end_run(run, "FAILED")]
    answer = remote("unschedule", "digits", "--cancel")
    assert answer.code == 0
    assert [run in each for each in instance.asked(":terminate")] == [True]
    assert "the run is being cancelled" in answer.err
    states = [each["state"] for each in instance.store.runs[run]["state_history"]]
    assert states == ["CANCELING", "FAILED"]
    assert not instance.store.recurring


@pytest.mark.usefixtures("looks")
def test_a_run_whose_workflow_is_gone_is_not_waited_for(instance, remote, fire):
    run = fire()
    instance.store.workflows[run].collect()
    answer = remote("unschedule", "digits", "--cancel")
    assert (answer.code, instance.store.recurring) == (0, {})
    assert f"not waiting for run {run}: the Workflow and the pods" in answer.err


def test_one_that_is_ending_already_is_not_cancelled_twice(instance, remote, fire, looks):
    run = fire()
    assert remote("cancel", run).code == 0
    looks += [nothing, lambda: instance.store.end_run(run, "FAILED")]
    answer = remote("unschedule", "digits", "--cancel")
    assert answer.code == 0, answer.err


@pytest.mark.usefixtures("looks")
def test_now_says_what_may_be_lost(instance, remote, fire):
    run = fire()
    answer = remote("unschedule", "digits", "--now")
    assert (answer.code, instance.store.recurring) == (0, {})
    assert f"run {run} is active: KFP before 2.16 deletes its pods with" in answer.err
    assert not instance.store.workflows[run].is_gone
    assert "running" in remote("status", run).out
    answer = remote("unschedule", "digits", "--now", "--cancel")
    assert (answer.code, "cannot be combined" in answer.err) == (2, True)


@pytest.mark.parametrize("command", ["status", "cancel", "cancel, then status"])
@pytest.mark.usefixtures("looks")
def test_a_run_whose_workflow_went_with_its_schedule_is_said_to_be_lost(
    instance, remote, fire, command
):
    run = fire()
    instance.store.leaves_orphans = False
    assert remote("unschedule", "digits", "--now").code == 0
    answer = [remote(each, run, "--json") for each in command.split(", then ")][-1]
    assert answer.json["status"] == "failed"
    assert "the Workflow and the pods of the run were deleted" in answer.json["message"]
    assert "archive and delete the run in the user interface" in answer.json["message"]


def test_a_cancelled_run_without_pods_is_said_to_be_lost(instance, remote, fire):
    run = fire()
    assert remote("cancel", run).code == 0
    assert "Workflow" not in remote("status", run).err
    # A user deletes the workflow by hand.
    instance.store.workflows[run].collect()
    assert "if this run does not end within minutes, the Workflow" in remote("status", run).err
    instance.store.end_run(run, "FAILED")
    assert "Workflow" not in remote("status", run).err


@pytest.mark.parametrize("how", ["removed", "not found"])
@pytest.mark.usefixtures("looks")
def test_two_at_once_both_succeed(instance, remote, fire, how):
    assert fire is not None
    [key] = instance.store.recurring
    if how == "removed":
        # Another client acted between this client's list request and its next requests.
        instance.faults.add(":disable", 404)
        instance.faults.add("DELETE", 404)
    else:
        body = b'{"message": "Failed to change recurring run mode: workflow not found"}'
        instance.faults.add(":disable", 500, body=body)
    answer = remote("unschedule", "digits")
    assert answer.code == 0, answer.err
    assert instance.asked("DELETE")[0].partition("?")[0].endswith(key)


@pytest.mark.parametrize("stays", [False, True])
def test_an_instance_that_is_away_during_the_wait(instance, remote, fire, looks, stays):
    run, away = fire(), r"GET .*/runs\?"
    times = {} if stays else {"times": 2}
    looks += [nothing, lambda: instance.faults.add(away, 500, **times)]
    looks += [nothing, lambda: instance.store.end_run(run, "SUCCEEDED")]
    with patch.object(kfp_watch, "RETRY_SECONDS", 0.0 if stays else 120.0):
        answer = remote("unschedule", "digits")
    assert answer.code == int(stays), answer.err
    assert answer.err.count("the state of the run cannot be read") == 1
    assert answer.err.count("the state of the run can be read again") == int(not stays)
    said = "the schedule is disabled but not removed: repeat the command"
    assert (said in answer.err) is stays
    assert [each["mode"] for each in instance.store.recurring.values()] == ["DISABLE"] * stays


def test_ctrl_c_leaves_it_disabled_and_its_run_alone(instance, remote, fire, looks):
    run = fire()

    looks += [nothing, Mock(side_effect=KeyboardInterrupt)]
    answer = remote("unschedule", "digits", "--json")
    assert (answer.code, answer.json["status"]) == (130, "interrupted")
    assert "repeat the command to remove it" in answer.json["message"]
    [made] = instance.store.recurring.values()
    assert (made["mode"], instance.store.runs[run]["state"]) == ("DISABLE", "RUNNING")
    instance.store.end_run(run, "SUCCEEDED")
    assert remote("unschedule", "digits").code == 0


@pytest.mark.usefixtures("looks")
def test_one_that_is_replaced_stays_while_its_run_is_active(instance, remote, fire):
    run = fire()
    [old] = instance.store.recurring
    answer = remote("schedule", "--cron", "0 4 * * *", "--json")
    assert (answer.code, answer.json["schedule"]["removed"]) == (0, 0)
    assert f"the previous schedule ({old}) is disabled but not removed, because" in answer.err
    assert f"its run {run} is active and would be deleted too" in answer.err
    modes = [each["mode"] for each in instance.store.recurring.values()]
    assert modes == ["DISABLE", "ENABLE"]
    assert not instance.store.workflows[run].is_gone
    instance.store.end_run(run, "SUCCEEDED")
    answer = remote("schedule", "--cron", "0 4 * * *", "--json")
    assert (answer.code, answer.json["schedule"]["removed"]) == (0, 1)
    assert [each["mode"] for each in instance.store.recurring.values()] == ["ENABLE"]


@pytest.mark.usefixtures("looks")
def test_back_to_the_one_of_before_enables_it_again(instance, remote, fire):
    fire()
    [old] = instance.store.recurring
    assert remote("schedule", "--cron", "0 4 * * *").code == 0
    assert "was disabled and is now enabled again" in remote(*NIGHTLY).err
    assert list(instance.store.recurring) == [old]


def test_runs_of_other_schedules_are_not_waited_for(instance, remote, fire, looks):
    fire()
    assert remote(*NIGHTLY, "--name", "other").code == 0
    assert remote("submit").code == 0
    answer = remote("unschedule", "other")
    assert (answer.code, looks) == (0, [])
    assert len(instance.store.recurring) == 1
