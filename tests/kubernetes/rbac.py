"""The permissions of the roles in deploy/base/rbac.yaml, and the errors for missing permissions."""

from pathlib import Path

import yaml

from tests.kubernetes.store import RefusedError

FILE = Path(__file__).parents[2] / "deploy" / "base" / "rbac.yaml"
LAUNCHER, TRAINER = "flotilla-launcher", "flotilla-trainer"
GROUPS = {
    "tfjobs": "kubeflow.org",
    "jobsets": "jobset.x-k8s.io",
    "jobs": "batch",
    "leases": "coordination.k8s.io",
    "networkpolicies": "networking.k8s.io",
}
_VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}

Grants = set[tuple[str, str]]


def grants(role: str) -> Grants:
    documents = yaml.safe_load_all(FILE.read_text(encoding="utf-8"))
    rules = next(
        each["rules"]
        for each in documents
        if (each["kind"], each["metadata"]["name"]) == ("Role", role)
    )
    return {
        (verb, resource)
        for rule in rules
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def verb_of(method: str, name: str | None, *, watches: bool) -> str:
    """Return the verb that Kubernetes checks for a request."""
    if watches:
        return "watch"
    return _VERBS.get(method) or ("get" if name else "list")


def refusal(user: str, verb: str, resource: str, namespace: str, name: str) -> RefusedError:
    """Return the error for a missing permission on a resource such as `pods/log`."""
    kind = resource.partition("/")[0]
    group = GROUPS.get(kind, "")
    what = f"{kind}.{group}" if group else kind
    named = f'{what} "{name}"' if name else what
    message = (
        f'{named} is forbidden: User "{user}" cannot {verb} resource "{resource}" in API group '
        f'"{group}" in the namespace "{namespace}"'
    )
    return RefusedError(403, "Forbidden", message)
