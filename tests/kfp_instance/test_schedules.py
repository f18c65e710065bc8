"""Tests schedules of the fake instance and the runs that they start."""

import pytest

from flotilla.pipelines.runs.kfp_access import Access
from flotilla.pipelines.runs.kfp_client import Client, InstanceError, ask
from flotilla.pipelines.runs.kfp_run import read_log
from tests.kfp_instance.workflow import Workflow

pytestmark = pytest.mark.usefixtures("uploaded")


@pytest.fixture
def client(instance):
    return Client(Access(endpoint=instance.url))


@pytest.fixture
def fired(instance, remote):
    """Return the IDs of a schedule and of a run that it started."""
    assert remote("schedule", "--every", "6h").code == 0
    [schedule] = instance.store.recurring
    run = instance.store.fire(schedule)["run_id"]
    instance.store.workflows[run].begin("train_model")
    return schedule, run


def test_a_run_of_a_schedule_names_it(client, fired):
    schedule, run = fired
    assert ask(client.get_run, run_id=run).recurring_run_id == schedule


def test_a_schedule_that_is_deleted_takes_its_workflows_away(instance, client, fired):
    schedule, run = fired
    workflow: Workflow = instance.store.workflows[run]
    ask(client.delete_recurring_run, schedule)
    with pytest.raises(InstanceError, match="not found"):
        read_log(client, run, None, workflow.pod("train_model"))
    # The run never ends, because no controller updates its state.
    assert ask(client.get_run, run_id=run).state == "RUNNING"
    with pytest.raises(InstanceError, match=r"500.*terminating its workflow: not found"):
        ask(client.terminate_run, run)
    assert ask(client.get_run, run_id=run).state == "CANCELING"


@pytest.mark.parametrize("leaves_orphans", [True, False])
def test_since_2_16_its_workflows_can_be_left(instance, client, fired, leaves_orphans):
    schedule, run = fired
    instance.store.leaves_orphans = leaves_orphans
    ask(
        client.recurring_runs.recurring_run_service_delete_recurring_run,
        schedule,
        propagation_policy="ORPHAN",
    )
    assert instance.store.workflows[run].is_gone is not leaves_orphans
