"""Defaults and validation of Jobs in Kubernetes 1.33, with the API's messages."""

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
