"""Sets the state of a pod, as the kubelet and the scheduler do."""

from typing import Any

from tests.kubernetes.store import Store, Tree, now


def _changed(store: Store, pod: Tree, status: Tree, node: str = "") -> Tree:
    def by(tree: Any) -> None:
        tree["status"] = {**tree["status"], **status}
        if node:
            tree["spec"]["nodeName"] = node

    return store.change("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], by)


def _container(pod: Tree, state: Tree, **more: object) -> list[Tree]:
    before = (pod.get("status", {}).get("containerStatuses") or [{}])[0]
    return [{"restartCount": 0, **before, "name": "tensorflow", "state": state, **more}]


def _scheduled(status: str, message: str = "") -> list[Tree]:
    return [
        {"type": "PodScheduled", "status": status, "reason": "Unschedulable", "message": message}
    ]


def unschedulable(store: Store, pod: Tree, message: str) -> Tree:
    return _changed(store, pod, {"conditions": _scheduled("False", message)})


def waiting(store: Store, pod: Tree, reason: str, message: str = "") -> Tree:
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"conditions": _scheduled("True"), "containerStatuses": _container(pod, state)}
    return _changed(store, pod, status, "node-1")


def running(store: Store, pod: Tree, address: str = "") -> Tree:
    """Mark the container as running; each pod gets an address that depends on its UID."""
    state = {"running": {"startedAt": now()}}
    high, low = bytes.fromhex(pod["metadata"]["uid"][:4])
    return _changed(
        store,
        pod,
        {
            "phase": "Running",
            "podIP": address or f"10.42.{high}.{low}",
            "conditions": _scheduled("True"),
            "containerStatuses": _container(pod, state),
        },
        "node-1",
    )


def ended(store: Store, pod: Tree, code: int, message: str = "", reason: str = "") -> Tree:
    """Mark the container as terminated, but leave the pod's phase unchanged while sidecars run."""
    return _changed(store, pod, {"containerStatuses": _terminated(pod, code, message, reason)})


def finished(store: Store, pod: Tree, code: int, message: str = "", reason: str = "") -> Tree:
    status = {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": _terminated(pod, code, message, reason),
    }
    return _changed(store, pod, status)


def _terminated(pod: Tree, code: int, message: str = "", reason: str = "") -> list[Tree]:
    reason = reason or ("Completed" if code == 0 else "Error")
    terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": now()}
    return _container(pod, {"terminated": terminated})


def initializing(store: Store, pod: Tree, name: str, restarts: int, state: Tree) -> Tree:
    """Set the state of an init container; containers that have not started yet wait."""
    known = pod["status"].get("initContainerStatuses", [])
    others = [each for each in known if each["name"] != name]
    status = {"name": name, "restartCount": restarts, "state": state}
    fields: Tree = {"initContainerStatuses": [*others, status]}
    if "containerStatuses" not in pod["status"]:
        pending = {"waiting": {"reason": "PodInitializing"}}
        fields |= {"containerStatuses": _container(pod, pending)}
    return _changed(store, pod, {**fields, "conditions": _scheduled("True")}, "node-1")


def evicted(store: Store, pod: Tree, message: str, code: int = 137) -> Tree:
    killed = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": now()}}
    status = {
        "phase": "Failed",
        "reason": "Evicted",
        "message": message,
        "containerStatuses": _container(pod, killed),
    }
    return _changed(store, disrupted(store, pod, "TerminationByKubelet", message), status)


def disrupted(store: Store, pod: Tree, reason: str, message: str = "") -> Tree:
    """Set the condition that announces a disruption of the pod, with its reason."""
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    before = pod.get("status", {}).get("conditions") or []
    rest = [each for each in before if each["type"] != "DisruptionTarget"]
    return _changed(store, pod, {"conditions": [*rest, {**target, "lastTransitionTime": now()}]})


def restarted(store: Store, pod: Tree, code: int) -> Tree:
    count = pod["status"]["containerStatuses"][0]["restartCount"]
    last = {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": now()}}
    states = _container(
        pod, {"running": {"startedAt": now()}}, restartCount=count + 1, lastState=last
    )
    return _changed(store, pod, {"containerStatuses": states})
