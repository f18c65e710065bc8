"""What is compiled into the pods of the steps: where it arrives, and what is refused."""

from __future__ import annotations

import pytest
import yaml

from components.table import STEPS
from pipelines.compile import compile_pipeline, package_of
from pipelines.step_pods import NO_SETTINGS, StepPods, step_pods
from trainer.errors import ConfigError

GIVEN = {
    "pull_secrets": ["registry", "registry"],
    "mounts": ["official:/data/official", "more:/data/more"],
    "scratch": "50Gi",
    "labels": ["kueue.x-k8s.io/queue-name=team-a", "team="],
    "variables": ["HTTPS_PROXY=http://proxy:3128", "EMPTY="],
}
ROWS = {step.kfp_name: step for step in STEPS}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path, pods=step_pods(**GIVEN))
    return list(yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader))


@pytest.fixture(scope="module")
def pods(documents):
    executors = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    found = {name.removeprefix("exec-"): each for name, each in executors.items()}
    assert set(found) == set(ROWS)
    return found


def constant(parameter):
    return parameter["runtimeValue"]["constant"]


def test_every_step_gets_pull_secrets_labels_and_variables(documents, pods):
    executors = documents[0]["deploymentSpec"]["executors"]
    for step, pod in pods.items():
        [secret] = pod["imagePullSecret"]
        assert constant(secret["secretNameParameter"]) == "registry"
        labels = pod["podMetadata"]["labels"]
        assert labels.items() >= {"kueue.x-k8s.io/queue-name": "team-a", "team": ""}.items()
        assert labels["app.kubernetes.io/component"] == step
        env = executors[f"exec-{step}"]["container"]["env"]
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in env
        assert "EMPTY" in [each["name"] for each in env]


def test_claims_are_mounted_where_data_is_prepared_alone(pods):
    mounted = {
        step: {constant(each["pvcNameParameter"]): each["mountPath"] for each in pod["pvcMount"]}
        for step, pod in pods.items()
        if "pvcMount" in pod
    }
    assert mounted == {"prepare-data": {"official": "/data/official", "more": "/data/more"}}


def test_scratch_is_the_folder_of_temporary_files_of_every_working_step(pods):
    for step, pod in pods.items():
        found = [(each["mountPath"], each["sizeLimit"]) for each in pod.get("emptyDirMounts", [])]
        assert found == ([] if ROWS[step].is_light else [("/tmp", "50Gi")])


def test_without_settings_the_pipeline_is_the_same(tmp_path):
    first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
    compile_pipeline(first)
    compile_pipeline(second, pods=step_pods())
    assert first.read_text(encoding="utf-8") == second.read_text(encoding="utf-8")
    assert step_pods() == NO_SETTINGS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pull_secrets": ["My_Secret"]}, "--pull-secret 'My_Secret' is not a name of Kubernetes"),
        ({"pull_secrets": [""]}, "--pull-secret '' is not a name"),
        ({"mounts": ["data"]}, "--mount 'data' is not of the form CLAIM:FOLDER"),
        ({"mounts": [":/data"]}, "--mount ':/data' is not of the form"),
        ({"mounts": ["a.b:/data"]}, "--mount 'a.b' is not a claim that KFP can mount"),
        ({"mounts": ["data:data"]}, "--mount 'data' is not a folder in a pod: write it as /data"),
        ({"mounts": ["data:/"]}, "--mount '/' is not a folder in a pod"),
        ({"mounts": ["data:/a/../etc"]}, "--mount '/a/../etc' is not a folder"),
        ({"mounts": ["data:/a:ro"]}, "--mount '/a:ro' is not a folder"),
        ({"mounts": ["data:/tmp/x"]}, "--mount '/tmp/x' is in a folder of the image or of KFP"),
        ({"mounts": ["data:/gcs"]}, "--mount '/gcs' is in a folder of the image or of KFP"),
        ({"mounts": ["a:/data", "b:/data"]}, "--mount /data is given twice"),
        ({"mounts": ["a:/data", "a:/more"]}, "--mount a is given twice"),
        ({"scratch": "50"}, "--scratch '50' is less than 1Mi: write it with its unit"),
        ({"scratch": "big"}, "--scratch 'big' is not a quantity of Kubernetes"),
        ({"labels": ["team"]}, "--label 'team' is not of the form KEY=VALUE"),
        ({"labels": ["team=a b"]}, "--label team: 'a b' is not the value of a label"),
        ({"labels": ["a b=c"]}, "--label 'a b' is not the key of a label"),
        ({"labels": ["app.kubernetes.io/name=x"]}, "app.kubernetes.io/name is set by Flotilla"),
        ({"labels": ["pipeline/runid=x"]}, "--label pipeline/runid is set by Flotilla or by KFP"),
        ({"variables": ["1A=x"]}, "--env '1A' is not the name of a variable"),
        ({"variables": ["A"]}, "--env 'A' is not of the form NAME=VALUE"),
        ({"variables": ["AWS_SECRET_ACCESS_KEY=x"]}, "is a secret, which the pipeline would show"),
        ({"variables": ["KFP_POD_NAME=x"]}, "--env KFP_POD_NAME is set by Flotilla or by KFP"),
        ({"variables": ["A={{x}}"]}, "--env A: KFP takes no value with {{ in it"),
    ],
)
def test_what_no_pod_can_have_is_one_line(given, said):
    with pytest.raises(ConfigError) as error:
        step_pods(**given)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_refusal_of_a_secret_does_not_repeat_it():
    with pytest.raises(ConfigError) as error:
        step_pods(variables=["secretkey=do-not-repeat"])
    assert "do-not-repeat" not in str(error.value)


def test_a_compiled_file_takes_no_more_settings(tmp_path):
    compile_pipeline(tmp_path / "pipeline.yaml")
    with pytest.raises(ConfigError, match="a setting of the pods is for compiling, and"):
        package_of(tmp_path / "pipeline.yaml", "", StepPods(scratch="1Gi"))
