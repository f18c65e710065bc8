"""Handles JobSets as the API server does, with the CRD's schema and the controller's webhooks."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.kubernetes import crd, jobset_webhook
from tests.kubernetes.job_validation import refuse
from tests.kubernetes.jobset_controller import NAME
from tests.kubernetes.store import RefusedError, Tree, generated

CRD = "jobset.x-k8s.io_jobsets"
#: Marks tests that need the CRD's schema.
with_schema = pytest.mark.skipif(
    not crd.schema(CRD), reason="the CRD of JobSet is absent: it is not part of Flotilla"
)
KINDS = {"jobset.x-k8s.io/v1alpha2": ["jobsets", "jobsets/status"]}


class JobSetApi:
    def __init__(self) -> None:
        self.is_installed = False
        self.is_away = False
        self.lacks: frozenset[str] = frozenset()

    def install(self, *, is_away: bool, lacks: Iterable[str]) -> None:
        self.is_installed, self.is_away, self.lacks = True, is_away, frozenset(lacks)

    def created(self, tree: Tree, *, strict: bool) -> Tree:
        """Validate a new JobSet and return it as stored; only the controller sets its status."""
        schema = crd.schema(CRD)
        unknown = crd.pruned(tree, schema, self.lacks)
        if unknown and strict:
            listed = ", ".join(f'unknown field "{each}"' for each in unknown)
            words = f"strict decoding error: {listed}"
            version = 'JobSet in version "v1alpha2"'
            raise RefusedError(
                400, "BadRequest", f"{version} cannot be handled as a JobSet: {words}"
            )
        tree.pop("status", None)
        if self.is_away:
            raise jobset_webhook.unanswered(
                "mjobset.kb.io", "mutate-jobset-x-k8s-io-v1alpha2-jobset"
            )
        name = tree["metadata"].get("name", "")
        refuse(jobset_webhook.KIND, name, crd.invalid(tree, schema))
        tree = jobset_webhook.defaulted(tree)
        # The validating webhook receives the generated name.
        tree["metadata"].setdefault("name", generated(tree["metadata"].get("generateName", "")))
        jobset_webhook.check_created(tree)
        return tree

    def changed(self, old: Tree, new: Tree) -> None:
        """Reject an invalid change of a JobSet; drop fields that the schema does not have."""
        schema = crd.schema(CRD)
        crd.pruned(new, schema, self.lacks)
        new["status"] = old.get("status", {})
        name = new["metadata"]["name"]
        refuse(jobset_webhook.KIND, name, crd.invalid(new, schema))
        refuse(jobset_webhook.KIND, name, crd.changed(old, new, schema))
        if self.is_away:
            raise jobset_webhook.unanswered(
                "vjobset.kb.io", "validate-jobset-x-k8s-io-v1alpha2-jobset"
            )
        jobset_webhook.check_changed(old, new)

    def check(self, kind: str, tree: dict[str, Any]) -> None:
        """Reject a JobSet's pod while the webhook for pods is unreachable."""
        labels = tree["metadata"].get("labels") or {}
        if kind == "pods" and self.is_installed and self.is_away and NAME in labels:
            raise jobset_webhook.unanswered("mpod.kb.io", "mutate--v1-pod")
