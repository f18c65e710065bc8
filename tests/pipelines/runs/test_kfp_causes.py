"""What a message of Argo means, and what a person can do."""

from __future__ import annotations

import pytest

from pipelines.runs.kfp_causes import cause_of, explained
from pipelines.runs.kfp_nodes import Pod


def pod(message, state="FAILED", **more):
    values = {"name": "p", "step": "train_model", "is_driver": False, "image": "host/a:1", **more}
    return Pod(state=state, message=message, **values)


# As the kubelet, Argo 4.0.5 and Kubernetes word them.
@pytest.mark.parametrize(
    ("message", "words", "blocks"),
    [
        ("ImagePullBackOff: Back-off pulling", "the image host/a:1 cannot be pulled", True),
        ("ErrImagePull: failed to resolve", "the image host/a:1 cannot be pulled", True),
        ("InvalidImageName: Failed to apply", "the image host/a:1 cannot be pulled", True),
        (
            "Pod failed before main container starts due to ErrImagePull: x",
            "the image host/a:1 cannot be pulled",
            True,
        ),
        ('CreateContainerConfigError: secret "x" not found', "create the secret", True),
        ("Unschedulable: 0/3 nodes are available", "no node has the room", False),
        (
            'Unschedulable: 0/3 nodes are available: persistentvolumeclaim "official" not found.',
            "create the claim in the namespace of the steps",
            True,
        ),
        (
            "Unschedulable: 0/3 nodes are available: pod has unbound immediate "
            "PersistentVolumeClaims.",
            "its claim has no volume",
            True,
        ),
        (
            'Usage of EmptyDir volume "scratch" exceeds the limit "50Gi".',
            "upload with a higher --scratch",
            False,
        ),
        ("is forbidden: exceeded quota: compute", "a larger quota", False),
        ("main: OOMKilled (exit code 137)", "raise step_memory", False),
        (
            "Pod was active on the node longer than the specified deadline",
            "longer than the deadline of the step",
            False,
        ),
        ("PodInitializing", "", False),
    ],
)
def test_each_message_has_its_remedy(message, words, blocks):
    line = explained(pod(message))
    assert line.startswith("train_model: ")
    assert message in line
    assert words in line
    assert bool((found := cause_of(message)) and found.blocks) is blocks


def test_a_pod_that_waits_is_not_said_to_have_failed():
    line = explained(pod("Unschedulable: 0/3 nodes", "PENDING"))
    assert line.startswith("train_model: its pod waits (Unschedulable: 0/3 nodes)")


def test_without_words_of_kfp_it_says_so():
    assert explained(pod("")) == "train_model: its pod failed (KFP says nothing more)"


def test_a_driver_of_the_run_is_no_step():
    line = explained(pod("main: Error (exit code 1)", step="", is_driver=True, image=""), "bad key")
    assert line.startswith(
        "the run: KFP's own driver of it failed (main: Error (exit code 1); bad key): check the"
    )
