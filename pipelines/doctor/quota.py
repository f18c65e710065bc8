"""Whether the quotas of the namespace have room for all pods of the job at once."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from decimal import Decimal

from components.tfjob.names import GROUP, PLURAL
from pipelines.doctor.finding import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, told
from pipelines.doctor.requested import Role, Tree, amount, defaults_of, roles, written

# A pod that says nothing of these is refused where a quota counts them.
_DEMANDED = ("cpu", "memory")


def room(kubernetes: Kubernetes, manifest: Tree) -> Finding:
    """Check the job against every `ResourceQuota` and what is used of it."""
    where = kubernetes.namespace
    show = f"kubectl describe resourcequotas --namespace {where}"
    answer = kubernetes.find("resourcequotas")
    if not answer.is_good:
        return told(answer, f"the quotas of {where}", show)
    if not answer.items:
        return Finding("ok", f"{where} has no quota")
    wanted = roles(manifest, defaults_of(kubernetes.find("limitranges").items))
    scoped = [each["metadata"]["name"] for each in answer.items if _is_scoped(each)]
    plain = [each for each in answer.items if not _is_scoped(each)]
    for quota in plain:
        if finding := _exceeded(where, quota, wanted) or _refused(quota, wanted):
            return finding
    if scoped:
        said = f"the quotas {', '.join(scoped)} count some pods only, and were left out"
        return Finding("warn", said, show)
    names = ", ".join(each["metadata"]["name"] for each in plain)
    return Finding("ok", f"room for the job in {names}")


def _is_scoped(quota: Tree) -> bool:
    return bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))


def _exceeded(where: str, quota: Tree, wanted: Sequence[Role]) -> Finding | None:
    name = quota["metadata"]["name"]
    hard, used = _limits(quota), quota.get("status", {}).get("used", {})
    needed = {key: amount(used.get(key, 0)) + _wanted(key, wanted) for key in hard}
    over = {key: total for key, total in needed.items() if total > amount(hard[key])}
    own = {key: total for key, total in over.items() if _wanted(key, wanted)}
    if not own:
        return None
    said = "; ".join(
        f"{key}: the job asks for {written(_wanted(key, wanted))}, {used.get(key, 0)} of "
        f"{hard[key]} are used"
        for key in own
    )
    patch = json.dumps({"spec": {"hard": {key: written(total) for key, total in own.items()}}})
    remedy = f"kubectl patch resourcequota {name} --namespace {where} --patch {shlex.quote(patch)}"
    return Finding("fail", f"the quota {name} is too small: {said}", remedy)


def _refused(quota: Tree, wanted: Sequence[Role]) -> Finding | None:
    """Return the finding where pods have to name what they do not name."""
    for key in _limits(quota):
        kind, _, resource = key.rpartition(".")
        if resource not in _DEMANDED:
            continue
        side = "limits" if kind == "limits" else "requests"
        silent = [role for role in wanted if resource not in getattr(role, side)]
        if silent:
            names = ", ".join(role.name for role in silent)
            said = (
                f"the quota {quota['metadata']['name']} counts {key}, of which the job says "
                f"nothing for {names}: its pods would be refused"
            )
            setting = f"cluster.kubernetes.pod.resources.{side}.{resource}=AMOUNT"
            return Finding("fail", said, f"flotilla doctor --set {setting}")
    return None


def _limits(quota: Tree) -> dict[str, str]:
    return dict(quota.get("status", {}).get("hard") or quota["spec"].get("hard", {}))


def _wanted(key: str, wanted: Sequence[Role]) -> Decimal:
    """Return how much of what a quota counts as `key` the job asks for."""
    if key in ("pods", "count/pods", "services", "count/services"):
        # The operator makes a service for every pod.
        return Decimal(sum(role.count for role in wanted))
    if key == f"count/{PLURAL}.{GROUP}":
        return Decimal(1)
    limited = key.startswith("limits.")
    resource = key.removeprefix("limits.").removeprefix("requests.")
    return sum(
        (
            role.count * (role.limits if limited else role.requests).get(resource, Decimal(0))
            for role in wanted
        ),
        Decimal(0),
    )
