"""The conditions of a job, which controllers add, replace and remove."""

from datetime import UTC, datetime

from tests.kubernetes.store import Tree, now


def condition(
    job: Tree, kind: str, reason: str = "", message: str = "", status: str = "True"
) -> None:
    """Set a condition of a TFJob as the operator does; a failed job's conditions do not change."""
    if is_true(job, "Failed"):
        return
    reason = reason or f"TFJob{kind}"
    found = job.setdefault("status", {}).setdefault("conditions", [])
    same = next((each for each in found if each["type"] == kind), None)
    if same and (same["status"], same["reason"]) == (status, reason):
        return
    since = same["lastTransitionTime"] if same and same["status"] == status else now()
    replaced = {kind, *({"Running", "Restarting"} if kind in ("Running", "Restarting") else ())}
    rest = [dict(each) for each in found if each["type"] not in replaced]
    for each in rest:
        if kind in ("Failed", "Succeeded") and each["type"] == "Running":
            each["status"] = "False"
    new = {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastUpdateTime": now(),
        "lastTransitionTime": since,
    }
    job["status"]["conditions"] = [*rest, new]


def put(tree: Tree, kind: str, status: str, reason: str, message: str) -> bool:
    """Set a condition as JobSet and Job controllers do; return whether anything changed."""
    found = tree.setdefault("status", {}).setdefault("conditions", [])
    new = {"type": kind, "status": status, "reason": reason, "message": message}
    same = next((each for each in found if each["type"] == kind), None)
    if same is None:
        if status == "True":
            found.append({**new, "lastTransitionTime": now()})
        return status == "True"
    if {**same, **new} == same:
        return False
    if same["status"] != status:
        new["lastTransitionTime"] = now()
    same.update(new)
    return True


def is_true(job: Tree, kind: str) -> bool:
    return any(
        each["type"] == kind and each["status"] == "True"
        for each in job.get("status", {}).get("conditions", [])
    )


def is_finished(job: Tree) -> bool:
    return is_true(job, "Succeeded") or is_true(job, "Failed")


def message_of(job: Tree, kind: str) -> str:
    found = job.get("status", {}).get("conditions", [])
    return next((str(each["message"] or kind) for each in found if each["type"] == kind), "")


def seconds_since(time: str | None) -> float:
    """Return the seconds since an API timestamp, or a negative number if there is none."""
    if not time:
        return -1.0
    return (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
