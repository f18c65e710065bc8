"""The wheel works without a checkout, next to folders with the names of Flotilla's packages."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

HIDING = ("components", "pipelines", "trainer")
MODEL = """
from components import sizes
from flotilla.trainer.models.spec import scaled_input
import keras


def small(spec):
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(given, keras.layers.Dense(sizes.classes(spec), name="logits")(x))
"""
SMALL = [
    "training.steps=60",
    "training.checkpoint_every=30",
    "training.validate_every=30",
    "gate.min.accuracy=0.05",
    "training.strategy=single",
    "model.name=trainer.task:small",
    "model.args={}",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of this checkout, because building leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("flotilla", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=skipped)
        else:
            shutil.copy(ROOT / name, source / name)
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", "."]
    run([sys.executable, "-m", "pip", *words], cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def flotilla(wheel, tmp_path_factory):
    """Create an environment that uses the installed dependencies; return its console script."""
    place = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", str(place)], cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    words = ["install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    # pip must run in the new environment, because it writes its own interpreter into the first line
    # of the script.
    pip = Path(distribution("pip").locate_file(""))
    run([str(place / "bin/python"), str(pip / "pip"), *words], cwd=place)
    # A `.pth` line adds a folder, but not the `.pth` files in it, so no editable install is found.
    (packages / "dependencies.pth").write_text(f"{pip}\n")
    return place / "bin" / "flotilla"


@pytest.fixture
def own(tmp_path):
    """Create a project with folders and files named like packages of Flotilla and Python."""
    folder = tmp_path / "own"
    for name in HIDING:
        (folder / name).mkdir(parents=True)
    (folder / "trainer/__init__.py").touch()
    (folder / "trainer/task.py").write_text(MODEL)
    (folder / "components/sizes.py").write_text("def classes(spec): return spec.num_classes")
    (folder / "pipelines/__init__.py").write_text("raise RuntimeError('pipelines of the user')")
    for name in ("json", "queue", "types"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('{name} of the user')")
    (folder / "flotilla.yaml").write_text("name: digits\n")
    return folder


def run(command, cwd):
    hidden = ("PYTHONPATH", "PYTHONSAFEPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    process = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout[-2000:]}{process.stderr[-6000:]}"
    return process.stdout


def test_it_holds_every_module_and_template(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = [path for top in HIDING for path in (ROOT / top).rglob("*")]
    examples = [*(ROOT / "configs").glob("*.yaml"), ROOT / "configs/tumors.csv"]
    metadata = [*(ROOT / "components/metadata").glob("*.yaml")]
    expected = {
        f"flotilla/{path.relative_to(ROOT)}"
        for path in [
            *(path for path in files if path.suffix in (".py", ".j2")),
            *examples,
            *metadata,
        ]
    } | {"flotilla/__init__.py", "flotilla/py.typed"}
    assert any(name.endswith(".j2") for name in expected)
    assert metadata
    assert held == expected


def test_it_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        (licence,) = (each for each in archive.namelist() if each.endswith("/LICENSE"))
        assert "TERMS AND CONDITIONS" in archive.read(licence).decode()
        said = Parser().parsestr(archive.read(name).decode())
    assert (said["Name"], said["License-Expression"]) == ("kfp-flotilla", "Apache-2.0")
    assert "Typing :: Typed" in said.get_all("Classifier")


def test_help_compile_and_examples(flotilla, own):
    assert "compile" in run([flotilla, "--help"], cwd=own)
    run([flotilla, "compile", "flotilla.yaml", "-o", "pipeline.yaml"], cwd=own)
    assert re.search(r"^# PIPELINE DEFINITION", (own / "pipeline.yaml").read_text())
    assert "tumors.csv" in run([flotilla, "configs"], cwd=own)
    run([flotilla, "configs", "wine"], cwd=own)
    assert (own / "wine.yaml").read_bytes() == (ROOT / "configs/wine.yaml").read_bytes()


def test_a_run_with_a_model_of_the_users_own_trainer(flotilla, own):
    settings = [word for setting in SMALL for word in ("--set", setting)]
    words = ["run", "flotilla.yaml", *settings, "--code", ".", "--json"]
    printed = run([flotilla, *words], cwd=own)
    result = json.loads(printed.splitlines()[-1])
    assert (result["status"], result["global_step"]) == ("blessed", 60)


@pytest.mark.long
def test_a_run_from_python(flotilla, own):
    program = f"""
import flotilla
result = flotilla.run("flotilla.yaml", settings={SMALL!r})
print(flotilla.evaluate(result, gate={{"min": {{"accuracy": 1.0}}}}).status, flotilla.__file__)
print(result.status, len(flotilla.predict(result, split="test").predictions))
"""
    # `-P` keeps the current folder off the module path, as in a notebook.
    printed = run([flotilla.with_name("python"), "-P", "-c", program], cwd=own).splitlines()
    assert printed[0].startswith(f"refused {flotilla.parents[1]}")
    status, rows = printed[1].split()
    assert status == "blessed"
    assert int(rows) > 100
