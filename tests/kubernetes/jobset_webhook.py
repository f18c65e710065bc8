"""The webhooks of JobSet v0.12.0, which set defaults and validate JobSets.

The implementation follows `pkg/webhooks` of that version. All webhooks have `failurePolicy: Fail`:
while the controller is down, JobSets cannot be created or patched and their pods cannot be created,
but both can be read and deleted.
"""

import copy
import json
import re

from tests.kubernetes.job_validation import refuse
from tests.kubernetes.store import RefusedError, Tree

KIND = "JobSet.jobset.x-k8s.io"
DENIED = 'admission webhook "vjobset.kb.io" denied the request: '
LENGTH = 63
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1035 = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an "
    "alphabetic character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', "
    "regex used for validation is '[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_TOO_LONG = "JobSet name is too long, {} names generated for this JobSet will exceed 63 characters"
_GATE = (
    "RestartJob and RestartJobAndIgnoreMaxRestarts failure policy actions are not allowed when "
    "RestartJob feature gate is disabled"
)
# Pod template fields that Kueue may change while a JobSet is suspended.
_MUTABLE = ("nodeSelector", "tolerations", "schedulingGates")


def unanswered(name: str, path: str) -> RefusedError:
    message = (
        f'Internal error occurred: failed calling webhook "{name}": failed to call webhook: Post '
        f'"https://jobset-webhook-service.jobset-system.svc:443/{path}?timeout=10s": '
        'no endpoints available for service "jobset-webhook-service"'
    )
    return RefusedError(500, "InternalError", message)


def defaulted(jobset: Tree) -> Tree:
    spec = jobset["spec"]
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    for role in spec.get("replicatedJobs", []):
        # These two defaults come from the CRD's schema.
        role.setdefault("replicas", 1)
        role.setdefault("groupName", "default")
        job = role["template"]["spec"]
        job.setdefault("completionMode", "Indexed")
        job["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    for index, rule in enumerate(spec.get("failurePolicy", {}).get("rules", [])):
        rule.setdefault("name", f"failurePolicyRule{index}")
    return jobset


def check_created(jobset: Tree) -> None:
    """Reject a JobSet with invalid names, or with policies that name unknown replicated Jobs."""
    spec = jobset["spec"]
    roles = spec.get("replicatedJobs", [])
    found = []
    for index, role in enumerate(roles):
        found += _names(jobset["metadata"].get("name", ""), role, f"spec.replicatedJobs[{index}]")
    known = [role["name"] for role in roles]
    for name in spec["successPolicy"].get("targetReplicatedJobs") or []:
        if name not in known:
            words = f"invalid replicatedJob name '{name}' does not appear in .spec.ReplicatedJobs"
            found.append(f"<nil>: Internal error: {words}")
    for rule in spec.get("failurePolicy", {}).get("rules", []):
        if rule["action"] in ("RestartJob", "RestartJobAndIgnoreMaxRestarts"):
            found.append(f"<nil>: Internal error: {_GATE}")
            break
    refuse(KIND, jobset["metadata"].get("name", ""), found, DENIED)


def _names(name: str, role: Tree, path: str) -> list[str]:
    last = role["replicas"] - 1
    job = f"{name}-{role['name']}-{last}"
    found = [
        f'{path}.groupName: Invalid value: "{role["groupName"]}": {each}'
        for each in _wrong(role["groupName"], "group")
    ]
    found += [f'{path}.name: Invalid value: "{job}": {each}' for each in _wrong(job, "job")]
    spec = role["template"]["spec"]
    if spec["completionMode"] == "Indexed" and "completions" in spec:
        pod = f"{job}-{spec['completions'] - 1}-abcde"
        found += [f'{path}.name: Invalid value: "{job}": {each}' for each in _wrong(pod, "pod")]
    return found


def _wrong(label: str, kind: str) -> list[str]:
    found = [_TOO_LONG.format(kind)] if len(label) > LENGTH else []
    return [*found, _DNS_1035] if not _LABEL.fullmatch(label) else found


def check_changed(old: Tree, new: Tree) -> None:
    """Reject changes of replicated Jobs, except changes of mutable fields while suspended."""
    judged = copy.deepcopy(new["spec"].get("replicatedJobs", []))
    before = {role["name"]: role for role in old["spec"]["replicatedJobs"]}
    if old["spec"].get("suspend") or new["spec"].get("suspend"):
        for role in judged:
            if role["name"] in before:
                _keep(role["template"]["spec"], before[role["name"]]["template"]["spec"])
    found = []
    if judged != old["spec"]["replicatedJobs"]:
        value = json.dumps(judged, separators=(",", ":"))
        found.append(f"spec.replicatedJobs: Invalid value: {value}: field is immutable")
    if new["spec"].get("managedBy") != old["spec"].get("managedBy"):
        value = json.dumps(new["spec"].get("managedBy"))
        found.append(f"spec.managedBy: Invalid value: {value}: field is immutable")
    refuse(KIND, new["metadata"]["name"], found, DENIED)


def _keep(job: Tree, before: Tree) -> None:
    """Reset the mutable fields to their old values, so that a comparison ignores them."""
    pairs = [(job["template"], before["template"], "metadata")]
    pairs += [(job["template"]["spec"], before["template"]["spec"], key) for key in _MUTABLE]
    for tree, old, key in pairs:
        if key in old:
            tree[key] = old[key]
        else:
            tree.pop(key, None)
