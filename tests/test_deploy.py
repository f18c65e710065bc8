"""Each overlay in `deploy/` is complete; its objects are valid, labelled and in one namespace."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kubernetes import client

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.requirements import BASE, FILE
from tests.conftest import ROOT
from tests.docs.markdown import read

DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs/how-to/install-on-a-cluster.md"
KUSTOMIZATIONS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
OVERLAYS = {path.name: path for path in sorted((DEPLOY / "overlays").iterdir())}
LABELS = yaml.safe_load((DEPLOY / "labels/kustomization.yaml").read_text())["labels"][0]["pairs"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PREFIX = "app.kubernetes.io/"
# The namespace and the service account of the steps, for each overlay.
STANDALONE = ("kubeflow", "pipeline-runner")
PROFILE = ("kubeflow-user-example-com", "default-editor")
EXPECTED = {
    "standalone": STANDALONE, "gke": STANDALONE, "profile": PROFILE, "restricted": PROFILE,
}  # fmt: skip
BUILDERS = {"kubectl": ["kubectl", "kustomize"], "kustomize": ["kustomize", "build"]}
NAMED = pytest.mark.parametrize(
    "folder", KUSTOMIZATIONS, ids=lambda path: str(path.relative_to(DEPLOY))
)


def parsed(path):
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def kustomization(folder):
    [tree] = parsed(folder / "kustomization.yaml")
    return tree


def named(folder):
    tree = kustomization(folder)
    listed = [*tree.get("resources", []), *tree.get("components", [])]
    return [(folder / each).resolve() for each in [*listed, *tree.get("transformers", [])]]


def objects():
    found = {path for folder in KUSTOMIZATIONS for path in named(folder) if path.is_file()}
    trees = [(path, tree) for path in sorted(found) for tree in parsed(path)]
    return [(path, tree) for path, tree in trees if tree["apiVersion"] != "builtin"]


@NAMED
def test_a_kustomization_is_made_of_what_is_there(folder):
    for path in named(folder):
        assert path.is_relative_to(DEPLOY)
        assert path.is_file() or path in KUSTOMIZATIONS, path


def test_no_file_is_left_out():
    used = {path for folder in KUSTOMIZATIONS for path in named(folder)}
    used |= {folder / "kustomization.yaml" for folder in KUSTOMIZATIONS}
    assert {path for path in DEPLOY.rglob("*") if path.is_file()} <= used
    assert ROOT / FILE in used
    assert set(OVERLAYS) == set(EXPECTED)


def test_every_object_gets_every_label():
    assert set(LABELS) == {
        f"{PREFIX}{each}" for each in ("name", "part-of", "managed-by", "version")
    }
    assert LABELS[f"{PREFIX}version"] == VERSION
    labelled = [folder for folder in KUSTOMIZATIONS if DEPLOY / "labels" in named(folder)]
    for path, tree in objects():
        assert tree["metadata"]["labels"][f"{PREFIX}component"], (path, tree["metadata"]["name"])
        users = [folder for folder in KUSTOMIZATIONS if path in named(folder)]
        assert users
        assert set(users) <= set(labelled), path


def test_the_base_is_of_no_namespace_and_binds_nobody():
    for path in filter(Path.is_file, named(ROOT / BASE)):
        for tree in parsed(path):
            assert "namespace" not in tree["metadata"]
            assert tree["kind"] != "RoleBinding"


def test_the_monitor_finds_the_port_and_the_leading_pod_of_either_engine():
    [monitor] = parsed(DEPLOY / "monitoring/podmonitor.yaml")
    [selected] = monitor["spec"]["selector"]["matchExpressions"]
    assert selected == {"key": names.MANAGED, "operator": "Exists"}
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == names.METRICS_PORT
    keep, label = endpoint["relabelings"]

    def meta(name):
        return "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", name)

    assert keep["sourceLabels"] == [meta(each) for each in names.INDEX_LABELS]
    # A pod has only one of the two labels. Prometheus joins their values with `;` and matches the
    # whole text.
    found = {each: bool(re.fullmatch(keep["regex"], each)) for each in ("0;", ";0", "1;", ";10")}
    assert found == {"0;": True, ";0": True, "1;": False, ";10": False}
    assert label["sourceLabels"] == [meta(names.RUN)]


def test_the_page_names_every_overlay():
    text = PAGE.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `deploy/overlays/(\w+)` (\|.*)$", text, re.MULTILINE))
    for name, (namespace, account) in EXPECTED.items():
        assert f"| `{namespace}` | `{account}` |" in rows[name]


@pytest.fixture(scope="module")
def build():
    tool = next((words for name, words in BUILDERS.items() if shutil.which(name)), None)
    if tool is None:
        pytest.skip("neither kubectl nor kustomize is installed")

    def built(folder: Path):
        made = subprocess.run(
            [*tool, str(folder)], capture_output=True, text=True, check=False, timeout=300
        )
        assert made.returncode == 0, made.stderr
        return list(yaml.safe_load_all(made.stdout))

    return built


def subjects(trees):
    bindings = [tree for tree in trees if tree["kind"] == "RoleBinding"]
    return {tree["roleRef"]["name"]: tree["subjects"] for tree in bindings}


def check(trees, namespace, account):
    for tree in trees:
        metadata = tree["metadata"]
        where = metadata["name"] if tree["kind"] == "Namespace" else metadata["namespace"]
        assert where == namespace
        labels = {each for each in metadata["labels"] if each.startswith(PREFIX)}
        assert labels == {*LABELS, f"{PREFIX}component"}
    assert subjects(trees) == {
        role: [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
        for role, name in (("flotilla-launcher", account), ("flotilla-trainer", "flotilla-trainer"))
    }


def test_the_monitoring_builds_into_two_labelled_objects(build):
    trees = build(DEPLOY / "monitoring")
    assert {tree["kind"] for tree in trees} == {"PodMonitor", "PrometheusRule"}
    for tree in trees:
        assert set(tree["metadata"]["labels"]) == {*LABELS, f"{PREFIX}component"}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_overlay_is_of_one_namespace(build, name):
    trees = build(OVERLAYS[name])
    check(trees, *EXPECTED[name])
    kinds = {tree["kind"]: tree["metadata"] for tree in trees}
    assert ("Namespace" in kinds) == (name == "restricted")
    annotated = "iam.gke.io/gcp-service-account" in kinds["ServiceAccount"].get("annotations", {})
    assert annotated == (name == "gke")
    for tree in trees:
        assert round_trip(tree) == tree


def round_trip(tree):
    """Convert an object to the client's typed model and back; unknown keys are dropped."""
    api, answer = client.ApiClient(), SimpleNamespace(data=json.dumps(tree))
    model = f"{tree['apiVersion'].rpartition('/')[2].capitalize()}{tree['kind']}"
    return api.sanitize_for_serialization(api.deserialize(answer, model))


def test_the_kustomization_of_the_page_builds(build, tmp_path):
    [block] = [each for each in read(PAGE, ROOT).of("yaml") if "Kustomization" in each.text]
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(block.text, encoding="utf-8")
    trees = build(mine)
    check(trees, "team-a", "default-editor")
    [account] = [tree["metadata"] for tree in trees if tree["kind"] == "ServiceAccount"]
    assert account["annotations"]["iam.gke.io/gcp-service-account"].startswith(
        "flotilla@my-project."
    )
