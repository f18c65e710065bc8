"""Applies a Job's `podFailurePolicy` to a failed pod.

It follows `pkg/controller/job/pod_failure_policy.go` of Kubernetes 1.33.
"""

from tests.kubernetes.store import Tree


def judged(policy: Tree | None, pod: Tree) -> tuple[str, bool]:
    """Return the message if the Job fails (otherwise ""), and whether the pod counts as failed."""
    for index, rule in enumerate((policy or {}).get("rules", [])):
        found = _matching(rule, pod)
        if found and rule["action"] == "Ignore":
            return "", False
        if found and rule["action"] == "FailJob":
            return f"{found} matching FailJob rule at index {index}", True
        if found:
            break
    return "", True


def _matching(rule: Tree, pod: Tree) -> str:
    meta = pod["metadata"]
    name = f"{meta['namespace']}/{meta['name']}"
    wanted = rule.get("onExitCodes")
    if not wanted:
        there = {(c["type"], c["status"]) for c in pod["status"].get("conditions") or []}
        found = [c["type"] for c in rule.get("onPodConditions", []) if _pair(c) in there]
        return f"Pod {name} has condition {found[0]}" if found else ""
    for status in pod["status"].get("containerStatuses", []):
        code = status["state"].get("terminated", {}).get("exitCode", 0)
        is_named = wanted.get("containerName") in (None, status["name"])
        is_in = (code in wanted["values"]) == (wanted["operator"] == "In")
        if code and is_named and is_in:
            return f"Container {status['name']} for pod {name} failed with exit code {code}"
    return ""


def _pair(condition: Tree) -> tuple[str, str]:
    return condition["type"], condition.get("status", "True")
