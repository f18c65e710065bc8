"""Why a pod of a run failed or does not start: the step, KFP's words, and what to do.

Only Argo's messages of nodes have this, for what is outside our code: that code reports itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipelines.runs.kfp_nodes import Nodes, Pod

_IMAGE = (
    "name one that is there by `flotilla upload --image` or `--parameter image=NAME`, or check "
    "the pull secret: that of `flotilla upload --pull-secret`, or of the service account"
)
_DRIVER = (
    "check the service account, the pipeline root and its keys, and the run parameters of the "
    "steps such as step_cpu"
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What a message of Argo means.

    Attributes:
        pattern: found in the message.
        remedy: what to do.
        blocks: whether a pod that waits for this does not start by itself as a rule.
        at_once: whether that is certain, so that nobody has to wait for it.
        of_image: whether it is the image that cannot be had.
    """

    pattern: str
    remedy: str
    blocks: bool = False
    at_once: bool = False
    of_image: bool = False


CAUSES = (
    Cause(
        pattern=r"^(InvalidImageName|ErrImageNeverPull)",
        remedy=_IMAGE,
        blocks=True,
        at_once=True,
        of_image=True,
    ),
    Cause(
        pattern=r"^(ErrImagePull|ImagePullBackOff|ImageInspectError|RegistryUnavailable)"
        r"|due to (ErrImagePull|ImagePullBackOff|InvalidImageName)",
        remedy=_IMAGE,
        blocks=True,
        of_image=True,
    ),
    Cause(
        pattern=r"^(CreateContainerConfigError|CreateContainerError|RunContainerError)",
        remedy="create the secret or config map that it names, or fix the run parameter",
        blocks=True,
    ),
    Cause(
        pattern=r"persistentvolumeclaim \S+ (not found|is being deleted)",
        remedy="create the claim in the namespace of the steps, or upload with another --mount",
        blocks=True,
    ),
    Cause(
        pattern=r"unbound immediate PersistentVolumeClaims",
        remedy="its claim has no volume: look at it with kubectl describe pvc",
        blocks=True,
    ),
    Cause(
        pattern=r"Usage of EmptyDir volume .* exceeds the limit",
        remedy="its temporary files were more than its limit: upload with a higher --scratch",
    ),
    Cause(
        pattern=r"^Unschedulable",
        remedy="no node has the room: lower step_cpu, step_memory or step_gpus, or add a node",
    ),
    Cause(
        pattern=r"serviceaccount \S+ not found",
        remedy="create this service account, or name one that is there by --service-account",
    ),
    Cause(
        pattern=r"exceeded quota",
        remedy="ask for a larger quota of the namespace, or lower step_cpu and step_memory",
    ),
    Cause(pattern=r"is forbidden", remedy="ask the owner of the namespace for the permission"),
    Cause(pattern=r"OOMKilled", remedy="its memory was not enough: raise step_memory"),
    Cause(
        pattern=r"longer than (the )?specified deadline|exceeded its deadline",
        remedy="it took longer than the deadline of the step",
    ),
)


def cause_of(message: str) -> Cause | None:
    """Return what a message means, None where that is not known."""
    return next((each for each in CAUSES if re.search(each.pattern, message)), None)


def explained(pod: Pod, more: str = "") -> str:
    """Return the line for a pod that failed or waits; `more` is what its log ends with."""
    cause, step = cause_of(pod.message), pod.step or "the run"
    what = "KFP's own driver of it failed" if pod.is_driver else "its pod failed"
    if pod.state == "PENDING":
        what = "its pod cannot start" if cause and cause.blocks else "its pod waits"
    if cause and cause.of_image and pod.image:
        what = f"the image {pod.image} cannot be pulled"
    words = "; ".join(filter(None, (pod.message, more))) or "KFP says nothing more"
    remedy = cause.remedy if cause else (_DRIVER if pod.is_driver else "")
    return f"{step}: {what} ({words})" + (f": {remedy}" if remedy else "")


def failed_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the pods that failed, in the order in which they began."""
    return tuple(pod for pod in nodes.pods if pod.state == "FAILED")


def waiting_pods(nodes: Nodes) -> tuple[Pod, ...]:
    """Return the pods that do not start, for a reason that Argo names."""
    return tuple(pod for pod in nodes.pods if pod.state == "PENDING" and pod.message)


def is_busy(nodes: Nodes) -> bool:
    """Return whether a pod is running or about to, if need be after a pause of minutes."""
    return nodes.is_pausing or any(pod.state in ("PENDING", "RUNNING") for pod in nodes.pods)
