"""The pages on engines: what they leave out is refused, what they grant is granted."""

import re

import pytest
import yaml

from components.launchers import document_of
from tests.conftest import ROOT
from trainer.config.load import parse_config
from trainer.errors import ConfigError

MOVE = ROOT / "docs" / "how-to" / "move-to-jobset.md"
CHOOSE = ROOT / "docs" / "how-to" / "choose-an-engine.md"
ANOTHER = {
    "job.scheduling": {"job": {"scheduling": {"gang": True}}},
    "job.clean_pod_policy": {"job": {"clean_pod_policy": "All"}},
    "pod.restart_policy": {"pod": {"restart_policy": "Never"}},
}


def refused_keys():
    """Return the first cells of the table of what is left out."""
    part = MOVE.read_text(encoding="utf-8").partition("| leave out |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([\w.]+)`", part, re.MULTILINE)


def test_the_page_lists_what_is_tried_here():
    assert refused_keys() == list(ANOTHER)


@pytest.mark.parametrize("key", ANOTHER)
def test_what_the_page_leaves_out_is_refused_by_jobsets_and_taken_by_tfjobs(key):
    section, _, name = key.partition(".")
    clusters = {
        launcher: parse_config({"cluster": {"launcher": launcher, "kubernetes": ANOTHER[key]}})
        for launcher in ("jobset", "tfjob")
    }
    # A setting of all roles is refused by the name of one.
    role = r"\w+" if section == "pod" else section
    with pytest.raises(ConfigError, match=rf"cluster\.kubernetes\.{role}\.{name}: "):
        document_of(clusters["jobset"])
    assert document_of(clusters["tfjob"])["kind"] == "TFJob"


def granted(role):
    """Return the verbs that deploy/ grants to a role, by resource."""
    text = (ROOT / "deploy" / "base" / "rbac.yaml").read_text(encoding="utf-8")
    documents = list(yaml.load_all(text, yaml.CSafeLoader))
    (found,) = (
        each for each in documents if each["kind"] == "Role" and each["metadata"]["name"] == role
    )
    return {name: rule["verbs"] for rule in found["rules"] for name in rule["resources"]}


def test_the_page_names_the_permissions_that_are_new():
    prose = " ".join(MOVE.read_text(encoding="utf-8").split())
    launcher, tasks = prose.partition("New are, for who launches, ")[2].split(
        ", and for the tasks "
    )
    for role, part in (("flotilla-launcher", launcher), ("flotilla-trainer", tasks)):
        named = dict(re.findall(r"`(\w+)` \(([^)]+)\)", part.partition(".")[0]))
        assert "leases" in named
        for resource, verbs in named.items():
            assert re.findall(r"`(\w+)`", verbs) == granted(role)[resource]


def test_the_page_of_the_choice_names_every_launcher():
    cells = re.findall(r"^\| `(\w+)` \|", CHOOSE.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = parse_config({}).cluster.__class__.model_fields["launcher"].annotation
    assert set(cells) == set(kinds.__args__)
