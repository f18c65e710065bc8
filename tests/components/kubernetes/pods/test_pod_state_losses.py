"""Tests which pod was lost, why, and which of several pods was lost first."""

import pytest

from flotilla.components.kubernetes.pods import pod_state

NAMES = {"training.kubeflow.org/replica-type": "worker"}
TEN, ELEVEN = "2026-01-01T00:00:10Z", "2026-01-01T00:00:11Z"


def pod(index=0, version=1, code=None, finished=TEN, **more):
    """Return a worker's pod; `deleted` is the time of its deletion, without a grace period."""
    labels = {**NAMES, "training.kubeflow.org/replica-index": str(index)}
    metadata = {"name": f"job-worker-{index}", "uid": f"u{index}", "labels": labels}
    metadata["resourceVersion"] = str(version)
    if "deleted" in more:
        metadata |= {"deletionTimestamp": more["deleted"], "deletionGracePeriodSeconds": 0}
    terminated = {"exitCode": code, "finishedAt": finished}
    current = {"terminated": terminated} if code is not None else {"running": {}}
    status = {
        "phase": "Failed" if code else "Running",
        "containerStatuses": [{"name": "tensorflow", "state": current}],
        "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": each}
            for each in more.get("reasons", ())
        ],
    }
    return {"metadata": metadata, "spec": {}, "status": status}


def test_a_pod_that_runs_is_not_lost():
    assert pod_state.loss(pod()) is None
    assert pod_state.loss(pod(code=1)) is None


def test_the_request_came_before_the_grace_period_whose_end_is_the_time_stamp():
    tree = pod(deleted=ELEVEN)
    tree["metadata"]["deletionGracePeriodSeconds"] = 1
    assert pod_state.loss(tree).requested == pod_state.loss(pod(deleted=TEN)).requested


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([pod(0, deleted=ELEVEN), pod(1, deleted=TEN)], "worker-1"),
        # Pods that are deleted because the job failed have no reason.
        ([pod(0, deleted=TEN), pod(1, deleted=ELEVEN, reasons=["X"])], "worker-1"),
        # Deletion times have a resolution of one second; resource versions break the tie.
        ([pod(0, 9, deleted=TEN), pod(1, 8, deleted=TEN)], "worker-1"),
    ],
)
def test_the_first_loss_is_the_one_that_others_followed(losses, expected):
    assert str(pod_state.first_loss(map(pod_state.loss, losses)).task) == expected


@pytest.mark.parametrize(
    ("tree", "by_deletion"),
    [
        (pod(code=1), False),
        (pod(code=1, finished=TEN, deleted=ELEVEN), False),
        (pod(code=1, finished=TEN, deleted=TEN), False),
        (pod(code=1, finished=ELEVEN, deleted=TEN), True),
        (pod(code=143, finished=TEN, deleted=TEN), True),
        (pod(code=137, finished=TEN, deleted=ELEVEN), False),
    ],
)
def test_a_task_that_ended_before_its_deletion_ended_by_itself(tree, by_deletion):
    (end,) = pod_state.ends(tree)
    assert end.pod_deleted is by_deletion
