"""Defaults, validation and pod failure policies of Jobs in Kubernetes 1.33."""

from tests.kubernetes.store import RefusedError, Tree

_TEMPLATE = "spec.template.spec.restartPolicy"


def defaulted(job: Tree) -> Tree:
    """Return a Job with its defaults, which depend on whether it has a `podFailurePolicy`."""
    spec = job["spec"]
    if "completions" not in spec and "parallelism" not in spec:
        spec |= {"completions": 1, "parallelism": 1}
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    waits = "podFailurePolicy" in spec
    spec.setdefault("podReplacementPolicy", "Failed" if waits else "TerminatingOrFailed")
    return job


def check(job: Tree) -> None:
    spec = job["spec"]
    restart = spec["template"]["spec"].get("restartPolicy", "Always")
    found = []
    if "podFailurePolicy" in spec and spec["podReplacementPolicy"] != "Failed":
        value = spec["podReplacementPolicy"]
        found.append(
            f'spec.podReplacementPolicy: Unsupported value: "{value}": supported values: "Failed"'
        )
    if spec["completionMode"] == "Indexed" and "completions" not in spec:
        found.append("spec.completions: Required value: when completion mode is Indexed")
    if restart not in ("OnFailure", "Never"):
        supported = '"OnFailure", "Never"'
        found.append(f'{_TEMPLATE}: Unsupported value: "{restart}": supported values: {supported}')
    elif "podFailurePolicy" in spec and restart != "Never":
        only = 'only "Never" is supported when podFailurePolicy is specified'
        found.append(f'{_TEMPLATE}: Invalid value: "{restart}": {only}')
    refuse("Job.batch", job["metadata"]["name"], found)


def refuse(kind: str, name: str, found: list[str], before: str = "") -> None:
    if found:
        listed = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
        raise RefusedError(422, "Invalid", f'{before}{kind} "{name}" is invalid: {listed}')


def judged(policy: Tree | None, pod: Tree) -> tuple[str, bool]:
    """Return the message if the Job fails (otherwise ""), and whether the pod counts as failed.

    It follows `pkg/controller/job/pod_failure_policy.go` of Kubernetes 1.33.
    """
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
