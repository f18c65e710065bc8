"""The files of the components in other people's pipelines: loaded, compiled, run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kfp import compiler

from components import contract
from pipelines.compile import compile_components
from pipelines.training import COMPONENTS
from tests.pipelines.reused import RUN, loaded, pipeline_of
from trainer import storage
from trainer.config.load import parse_config
from trainer.config.run_parameters import to_parameters
from trainer.config.schema import Config
from trainer.promotion import registry

ROOT = Path(__file__).parents[2]
IMAGE = "their.registry/flotilla:2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("components")
    compile_components(found, IMAGE)
    return found


def run(name, folder, root, config):
    arguments = json.dumps(to_parameters(config))
    command = [sys.executable, "-m", "tests.pipelines.reused", name, folder, root, arguments]
    # KFP starts a step by the word `python3` of the path.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}"
    environment = {"PATH": path, "TMPDIR": str(root), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [str(word) for word in command],
        cwd=root,
        env=environment,
        check=False,
        text=True,
        capture_output=True,
        timeout=600,
    )


def config_of(tmp_path, **sections):
    root = storage.uri_of(tmp_path / "published")
    return parse_config({"storage": {"root": root}, **sections})


def test_every_component_is_a_file(folder):
    assert set(loaded(folder)) == {component.name for component in COMPONENTS}


def test_a_file_says_all_that_its_component_does(folder):
    for component in COMPONENTS:
        again = loaded(folder)[component.name].component_spec
        assert set(again.inputs) == set(component.component_spec.inputs)
        assert again.outputs == component.component_spec.outputs
        assert again.description == component.component_spec.description
        assert again.implementation.container.image == IMAGE


def test_they_compile_into_another_pipeline(folder, tmp_path):
    given = to_parameters(config_of(tmp_path))
    path = tmp_path / "reused.yaml"
    compiler.Compiler().compile(pipeline_of(loaded(folder), given), str(path))
    spec = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)
    executors = spec["deploymentSpec"]["executors"]
    # A new step of ours is no step of theirs.
    assert {name.removeprefix("exec-") for name in executors} <= set(loaded(folder))
    assert {each["container"]["image"] for each in executors.values()} == {IMAGE}


@pytest.mark.slow
def test_the_first_one_runs_alone(folder, tmp_path):
    config = config_of(tmp_path, training={"steps": 7})
    ended = run("one", folder, tmp_path, config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads((tmp_path / "outputs.json").read_text(encoding="utf-8"))
    assert Config.model_validate_json(answer["config"]) == config
    # There is no dataset that a cache could know of.
    assert (answer["root"], answer["run_id"], answer["seal"]) == (config.storage.root, RUN, RUN)


LAST = "configuration: dsl.Output[dsl.Artifact]"
SOURCES = {
    # One that was compiled before there was a batch size, and before there was a mark.
    "older": (("training_batch_size: int,", ""), None),
    # One that knows a key more.
    "newer": ((LAST, f"{LAST}, training_new: int = 5"), "9.9.9 0123456789ab"),
}


@pytest.mark.parametrize("age", SOURCES)
def test_a_file_of_another_version_is_refused_in_one_line(folder, tmp_path, age):
    change, mark = SOURCES[age]
    tree = yaml.load((folder / "resolve-config.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    container = tree["deploymentSpec"]["executors"]["exec-resolve-config"]["container"]
    *command, source = container["command"]
    assert source.count(change[0]) == 1
    container["command"] = [*command, source.replace(*change)]
    container["args"] = [*container["args"][:-2], *([contract.OPTION, mark] if mark else [])]
    (tmp_path / "resolve-config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended = run("one", tmp_path, tmp_path, config_of(tmp_path))
    assert ended.returncode != 0
    [line] = [line for line in ended.stdout.splitlines() if "flotilla: resolve_config: " in line]
    theirs = (
        f"Flotilla {mark.replace(' ', ' (steps ')})" if mark else "a Flotilla that left no mark"
    )
    assert f"the pipeline was compiled by {theirs}, and the image has " in line
    # KFP's own frames are in the errors; in the output of the step there are none.
    assert "Traceback" not in ended.stdout


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_all_of_them_run(folder, tmp_path):
    config = config_of(
        tmp_path,
        data={"shards": 1},
        training={"strategy": "single", "steps": 60, "checkpoint_every": 60},
        gate={"min": {}},
        export={"formats": ["saved_model"]},
    )
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
