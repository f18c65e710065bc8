"""Whether the cluster knows TFJobs."""

from __future__ import annotations

from components.tfjob.names import GROUP, PLURAL, VERSION
from pipelines.doctor.finding import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, told

OPERATOR = (
    "kubectl apply --server-side --kustomize "
    "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4'"
)


def served(kubernetes: Kubernetes) -> Finding:
    """Check that the version of TFJobs that the launcher writes is served."""
    answer = kubernetes.get(f"/apis/{GROUP}/{VERSION}")
    if answer.is_good:
        if PLURAL in [each.get("name") for each in answer.tree.get("resources", [])]:
            return Finding("ok", f"{PLURAL}.{GROUP}/{VERSION} is served")
        return Finding("fail", f"{GROUP}/{VERSION} is served without {PLURAL}", OPERATOR)
    if not answer.is_missing:
        return told(answer, f"{GROUP}/{VERSION}", f"kubectl api-resources --api-group {GROUP}")
    others = kubernetes.get(f"/apis/{GROUP}").tree.get("versions", [])
    versions = ", ".join(each.get("version", "") for each in others)
    said = f"{PLURAL}.{GROUP}/{VERSION} is not served: the training operator is not installed"
    if versions:
        said = f"{PLURAL}.{GROUP}/{VERSION} is not served, only {GROUP}/{versions}"
    return Finding("fail", said, OPERATOR)
