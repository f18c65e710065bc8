"""Tests what the package that `flotilla compile` writes must and must not contain."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kfp import compiler
from kfp import components as kfp_components

from flotilla.components.image import IMAGE, MARK_OPTION, SECRET_KEYS
from flotilla.components.table import STEPS
from flotilla.pipelines.compile import compile_all, compile_components, compile_pipeline
from flotilla.pipelines.step_settings import check_image
from flotilla.pipelines.training import COMPONENTS
from flotilla.trainer import storage
from flotilla.trainer.config.form import to_form, to_local_form
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.uri import KFP_SECRET
from tests.kubernetes.admission import ENFORCE, refusal
from tests.pipelines.reused import RUN, loaded, pipeline_of

ROOT = Path(__file__).parents[2]
OTHER = "registry.example:5000/team/flotilla_python:1.2-gpu"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def executors(compiled):
    return documents(compiled)[0]["deploymentSpec"]["executors"]


def documents(text):
    return list(yaml.load_all(text, yaml.CSafeLoader))


def images_of(text):
    executors = documents(text)[0]["deploymentSpec"]["executors"]
    return [each["container"]["image"] for each in executors.values()]


def default_image(text):
    return documents(text)[0]["root"]["inputDefinitions"]["parameters"]["image"]["defaultValue"]


def test_twice_compiled_is_the_same_bytes_in_any_file(compiled, tmp_path):
    again = tmp_path / "deep" / "again.txt"
    compile_pipeline(again)
    assert again.read_bytes() == compiled.encode()
    again.write_text("old\n" * 10_000, encoding="utf-8")
    compile_pipeline(again)
    assert again.read_bytes() == compiled.encode()


def test_the_sdk_loads_two_small_documents_without_a_path_of_this_machine(compiled):
    loaded = kfp_components.load_component_from_text(compiled)
    assert loaded.name == "flotilla-training"
    assert not [name for name, each in loaded.component_spec.inputs.items() if not each.optional]
    pipeline, platform = documents(compiled)
    assert "root" in pipeline
    assert set(platform) == {"platforms"}
    # The package has this size because every group of steps declares all of its inputs again.
    assert len(compiled.encode()) < 60_000
    for path in (str(ROOT), str(Path.home()), "pip install"):
        assert path not in compiled
    assert not re.search(r"file:///|/tmp/|/usr/|/var/|site-packages", compiled)


def test_it_holds_no_secret_and_no_value_of_a_variable(tmp_path, monkeypatch, executors):
    for name in SECRET_KEYS:
        monkeypatch.setenv(name, f"hush-hush-{name}")
    compile_all(tmp_path / "pipeline.yaml", "", tmp_path / "components")
    for path in tmp_path.rglob("*.yaml"):
        assert "hush-hush" not in path.read_text(encoding="utf-8")
    assert not [name for name, each in executors.items() if "env" in each["container"]]


def test_the_pods_of_every_step_take_what_they_need_of_the_secret(compiled, executors):
    pods = documents(compiled)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert set(pods) == set(executors)
    for pod in pods.values():
        (secret,) = pod["secretAsEnv"]
        # Kubernetes skips a missing secret or key.
        assert secret["optional"] is True
        keys = {each["envVar"]: each["secretKey"] for each in secret["keyToEnv"]}
        assert keys == {key: key for key in SECRET_KEYS}
        assert secret["secretNameParameter"] == {"runtimeValue": {"constant": KFP_SECRET}}


def test_the_pods_of_every_step_are_admitted_by_pod_security_restricted(compiled):
    # KFP 2.16 and later sets `least` on the container of a step and `whole` on its pod. From the
    # pipeline, it takes only the user.
    least = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    whole = {"seccompProfile": {"type": "RuntimeDefault"}}
    pods = documents(compiled)[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for name, pod in pods.items():
        own = pod.get("securityContext", {})
        assert set(own) <= {"runAsUser", "runAsGroup", "runAsNonRoot"}
        spec = {
            "containers": [{"name": "main", "securityContext": {**least, **own}}],
            "securityContext": whole,
        }
        made = {"metadata": {"name": name}, "spec": spec}
        assert refusal(made, {ENFORCE: "restricted"}) == ""


def test_it_holds_no_source_of_the_trainer(executors):
    for name, each in executors.items():
        source = each["container"]["command"][-1]
        assert len(source) < 4000, name
        # The source contains only KFP's imports, our own imports, and one call.
        body = source.split("def ", 1)[1]
        module = name.removeprefix("exec-").replace("-", "_")
        expected = [
            f"    from flotilla.components.{module} import work",
            "    from flotilla.components.records.record import run",
        ]
        assert sorted(re.findall(r"^ +(?:from|import) .*$", body, re.MULTILINE)) == sorted(expected)
        assert len(re.findall(r"\brun\(", body)) == 1, name


def test_every_step_has_the_image_of_the_run(compiled):
    (image,) = set(images_of(compiled))
    assert image == "{{$.inputs.parameters['pipelinechannel--image']}}"
    assert len(images_of(compiled)) == len(COMPONENTS)
    assert default_image(compiled) == IMAGE


def test_another_image_is_put_everywhere(tmp_path, compiled):
    compile_all(tmp_path / "pipeline.yaml", OTHER, tmp_path / "components")
    text = (tmp_path / "pipeline.yaml").read_text(encoding="utf-8")
    assert default_image(text) == OTHER
    assert text.replace(OTHER, IMAGE) == compiled
    for component in COMPONENTS:
        text = (tmp_path / "components" / f"{component.name}.yaml").read_text(encoding="utf-8")
        assert images_of(text) == [OTHER]
        assert IMAGE not in text


@pytest.mark.parametrize(
    "image",
    [
        # YAML would not parse the first values as strings.
        "123", "1e5", "12:30", "true", "null", "flotilla", "flotilla_python:0.1.0",
        "localhost:5000/flotilla", "host.example/a/b-c/d:v1.2_3",
        f"host.example/flotilla@sha256:{'0123456789abcdef' * 4}",
        f"host.example:8080/flotilla:tag@sha256:{'0' * 64}",
    ],
)  # fmt: skip
def test_a_good_image_name_is_taken(image):
    check_image(image)


@pytest.mark.parametrize(
    "image", ["12:30", "null", f"host.example:80/flotilla:a@sha256:{'0' * 64}"]
)
def test_a_good_image_name_arrives_as_it_is(tmp_path, image):
    compile_all(tmp_path / "pipeline.yaml", image, None)
    text = (tmp_path / "pipeline.yaml").read_text(encoding="utf-8")
    assert default_image(text) == image
    compile_components(tmp_path, image)
    for component in COMPONENTS:
        text = (tmp_path / f"{component.name}.yaml").read_text(encoding="utf-8")
        assert images_of(text) == [image]
    kfp_components.load_component_from_text(text)


@pytest.mark.parametrize(
    "image",
    [
        " ", "a b", "a: b", "a #b", "x\ny", "x\n", "-x", '"', "'x'", "{x}", "[x]", "&x", "*x", "!x",
        "%x", "@x", "Upper", "ümage", "https://host/x", "/x", "x/", "x//y", "x:", "x@sha256:12",
        "host/x:a:b", "x" * 10 + ":" + "t" * 129,
    ],
)  # fmt: skip
def test_an_odd_image_name_is_refused(tmp_path, image):
    with pytest.raises(ConfigError) as caught:
        compile_all(tmp_path / "pipeline.yaml", image, None)
    said = f"--image {image!r} is not the name of an image; write it as host/name:tag"
    assert str(caught.value) == said
    assert not list(tmp_path.iterdir())


def test_a_folder_or_a_file_in_the_place_of_the_other(tmp_path):
    with pytest.raises(UserError, match=r"^cannot write .*: Is a directory$"):
        compile_pipeline(tmp_path)
    (tmp_path / "build").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"^cannot write .*build.pipeline\.yaml: "):
        compile_pipeline(tmp_path / "build" / "pipeline.yaml")


THEIRS = "their.registry/flotilla:2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("components")
    compile_components(found, THEIRS)
    return found


def run(name, folder, root, config):
    arguments = json.dumps(to_local_form(config))
    command = [sys.executable, "-m", "tests.pipelines.reused", name, folder, root, arguments]
    # KFP starts a step with `python3` from the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    environment = {"PATH": path, "TMPDIR": str(root), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [str(word) for word in command], cwd=root, env=environment, check=False, text=True,
        capture_output=True, timeout=600,
    )  # fmt: skip


def config_of(tmp_path, **sections):
    root = storage.uri_of(tmp_path / "published")
    return parse_config({"storage": {"root": root}, **sections})


def test_a_file_says_all_that_its_component_does(folder):
    assert set(loaded(folder)) == {step.kfp_name for step in STEPS}
    for component in COMPONENTS:
        assert loaded(folder)[component.name].name == component.name
        again = loaded(folder)[component.name].component_spec
        assert set(again.inputs) == set(component.component_spec.inputs)
        assert again.outputs == component.component_spec.outputs
        # The description in a component file is its first paragraph.
        words = component.component_spec.description.split()
        assert words[: len(again.description.split())] == again.description.split()
        assert again.implementation.container.image == THEIRS


def test_they_compile_into_another_pipeline(folder, tmp_path):
    given = to_form(config_of(tmp_path))
    path = tmp_path / "reused.yaml"
    compiler.Compiler().compile(pipeline_of(loaded(folder), given), str(path))
    spec = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    executors = spec["deploymentSpec"]["executors"]
    assert {name.removeprefix("exec-") for name in executors} <= set(loaded(folder))
    assert {each["container"]["image"] for each in executors.values()} == {THEIRS}


@pytest.mark.slow
def test_the_first_one_runs_alone(folder, tmp_path):
    config = config_of(tmp_path, training={"steps": 7})
    ended = run("one", folder, tmp_path, config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads((tmp_path / "outputs.json").read_text(encoding="utf-8"))
    assert Config.model_validate_json(answer["config"]) == config
    assert (answer["root"], answer["run_id"]) == (config.storage.root, RUN)
    assert answer["Output"] == "ready"


LAST = "is_whole_run: bool = True"


def test_a_file_of_another_version_is_refused_in_one_line(folder, tmp_path):
    # A pipeline with an additional key; `tests/components/test_image.py` tests an older one.
    change, mark = (LAST, f"{LAST}, new: int = 5"), "9.9.9 0123456789ab"
    tree = yaml.load((folder / "prepare-data.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    container = tree["deploymentSpec"]["executors"]["exec-prepare-data"]["container"]
    *command, source = container["command"]
    assert source.count(change[0]) == 1
    container["command"] = [*command, source.replace(*change)]
    container["args"] = [*container["args"][:-2], MARK_OPTION, mark]
    (tmp_path / "prepare-data.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended = run("one", tmp_path, tmp_path, config_of(tmp_path))
    assert ended.returncode != 0
    [line] = [line for line in ended.stdout.splitlines() if "flotilla: resolve_config: " in line]
    theirs = f"Flotilla {mark.replace(' ', ' (steps ')})"
    assert f"the pipeline was compiled by {theirs}, but the image contains " in line
    # The errors contain frames of KFP; the step's output does not.
    assert "Traceback" not in ended.stdout


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_all_of_them_run(folder, tmp_path):
    training = {"strategy": "single", "steps": 60, "checkpoint_every": 60}
    others = {"gate": {"min": {}}, "export": {"formats": ["saved_model"]}}
    config = config_of(tmp_path, data={"shards": 1}, training=training, **others)
    ended = run("all", folder, tmp_path, config)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    champion = registry.champion(config.storage.root, config.name)
    lineage = champion.manifest.fields["lineage"]
    assert (lineage["run_id"], lineage["image"]) == (RUN, "theirs:1")
    (page,) = tmp_path.glob("reused*/finish/report*")
    assert RUN in page.read_text(encoding="utf-8")
    (summary,) = tmp_path.glob("reused*/finish/summary*")
    assert summary.read_text(encoding="utf-8").startswith(f"# {RUN}: ")
    (viewers,) = tmp_path.glob("reused*/train-model/mlpipeline_ui_metadata*")
    _, board = json.loads(viewers.read_text(encoding="utf-8"))["outputs"]
    assert board["source"].endswith(f"/{RUN}/checkpoints/logs")
