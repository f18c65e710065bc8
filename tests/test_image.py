"""The image has the right contents, and the build context has all files that it needs."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

from flotilla.components.image import IMAGE
from tests.conftest import ROOT
from tests.dockerfile import copied, instructions, is_ignored, stages

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    return [path for path in listed.stdout.split("\0") if (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("path", "patterns", "expected"),
    [
        ("a.txt", [], False),
        ("a.txt", ["*"], True),
        ("trainer/storage/uri.py", ["*"], True),
        ("trainer/storage/uri.py", ["*", "!trainer"], False),
        ("trainer/storage/uri.py", ["!trainer", "*"], True),
        ("trainer/storage/uri.py", ["*", "!trainer", "trainer/storage"], True),
        ("trainer/storage/uri.py", ["*", "!trainer", "trainer/*/uri.py"], True),
        ("trainer/storage/uri.py", ["trainer/*.py"], False),
        ("trainer/storage/uri.py", ["**/uri.py"], True),
        ("uri.py", ["**/uri.py"], True),
        ("trainer/__pycache__/uri.pyc", ["!trainer", "**/__pycache__"], True),
        ("requirements-gpu.lock", ["*", "!requirements.lock"], True),
        ("requirements.lock", ["*", "!requirements?lock/"], False),
        ("a.txt", ["# a.txt", "", "/a.txt "], True),
    ],
)
def test_a_pattern_of_the_ignored_files(path, patterns, expected):
    assert is_ignored(path, patterns) is expected


def test_every_source_of_a_copy_is_in_the_build_context_whole():
    files = tracked()
    sources = copied(DOCKERFILE)
    assert {"trainer", "requirements-gpu.lock", "pyproject.toml"} <= set(sources)
    for source in sources:
        below = [path for path in files if path == source or path.startswith(f"{source}/")]
        assert below, f"COPY {source}: no such file in the repository"
        assert [path for path in below if is_ignored(path, IGNORED)] == [], source


def test_nothing_else_is_sent_to_the_container_engine():
    sent = [path for path in tracked() if not is_ignored(path, IGNORED)]
    sources = tuple(copied(DOCKERFILE))
    assert [path for path in sent if not path.startswith(sources)] == []
    for path in (".git/config", ".venv/bin/python", "runs/x/lock", "trainer/__pycache__/a.pyc"):
        assert is_ignored(path, IGNORED), path


def test_the_base_is_an_argument_that_takes_a_digest():
    (first, base), *others = instructions(DOCKERFILE)
    assert first == "ARG"
    images = [rest.partition(" AS ")[0] for name, rest in others if name == "FROM"]
    assert images == ["${BASE}", "${BASE}", "packages", "${BASE}"]
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-\w+", base)


def test_its_labels():
    labels = " ".join(rest for name, rest in instructions(DOCKERFILE) if name == "LABEL")
    found = dict(re.findall(r'org\.opencontainers\.image\.([\w.]+)="([^"]*)"', labels))
    assert found["licenses"] == PROJECT["license"]
    assert PROJECT["description"].startswith(found["description"])
    assert (found["version"], found["revision"]) == ("$VERSION", "$COMMIT")
    assert found["base.name"] == "$BASE"
    arguments = dict(
        rest.split("=", 1)
        for name, rest in instructions(DOCKERFILE)
        if name == "ARG" and "=" in rest
    )
    assert arguments["VERSION"] == PROJECT["version"] == IMAGE.rpartition(":")[2]


def test_no_process_in_it_looks_into_its_working_folder_first():
    settings = " ".join(rest for name, rest in instructions(DOCKERFILE) if name == "ENV")
    assert "PYTHONSAFEPATH=1" in settings


def test_a_change_of_code_installs_no_package_anew():
    sources = {
        stage: {
            word
            for name, rest in stages(DOCKERFILE)[stage]
            if name in ("COPY", "ADD") and "--from=" not in rest
            for word in shlex.split(rest)[:-1]
        }
        for stage in ("requirements", "packages")
    }
    assert sources["requirements"] == {f"requirements{kind}.lock" for kind in ("", "-cpu", "-gpu")}
    assert sources["packages"] == {".ci/uv.py", "requirements-build.lock"}
    copies = [rest for name, rest in stages(DOCKERFILE)[""] if name in ("COPY", "ADD")]
    assert copies[:2] == ["--from=packages /packages /usr/local", "--from=code /code /usr/local"]


def test_no_package_of_the_base_mixes_with_those_of_the_lock():
    image = [rest for _, rest in stages(DOCKERFILE)[""]]
    removal = image.index("pip uninstall --yes setuptools wheel")
    assert removal < image.index("--from=packages /packages /usr/local")


def test_the_code_is_in_it_once_as_pip_installs_it():
    image = stages(DOCKERFILE)[""]
    copies = [shlex.split(rest) for name, rest in image if name in ("COPY", "ADD")]
    assert ["--from=code", "/code", "/usr/local"] in copies
    from_context = {word for words in copies if "--from=" not in words[0] for word in words[:-1]}
    assert from_context == {"configs"}


def test_its_user_has_a_number_and_any_user_of_group_0_may_write_its_home():
    image = stages(DOCKERFILE)[""]
    (user,) = [rest for name, rest in image if name == "USER"]
    (added,) = [rest for name, rest in image if "useradd" in rest]
    assert image[-1] == ("USER", user)
    assert int(user) > 0
    assert f"useradd --uid {user} --gid 0 --create-home" in added
    assert "chmod 770 /home/flotilla" in added
    assert any(name == "ENV" and "HOME=/home/flotilla" in rest for name, rest in image)


@pytest.mark.parametrize(
    ("variant", "tensorflow", "pins"),
    [
        ("cpu", "tensorflow-cpu" if platform.machine() == "x86_64" else "tensorflow", 0),
        ("gpu", "tensorflow", 12),
    ],
)
def test_the_packages_of_a_variant(tmp_path, variant, tensorflow, pins):
    (command,) = [rest for name, rest in stages(DOCKERFILE)["requirements"] if name == "RUN"]
    build(tmp_path, "requirements", command, VARIANT=variant)
    lock = (tmp_path / "requirements.lock").read_text(encoding="utf-8")
    assert len(re.findall("^nvidia-.*==", lock, re.MULTILINE)) == pins
    (found,) = re.findall(r"^(tensorflow(?:-cpu)?)==\S+ \\\n    --hash", lock, re.MULTILINE)
    assert found == tensorflow
    assert not re.search("^ruff==", lock, re.MULTILINE)


def test_a_variant_that_is_none_ends_the_build(tmp_path):
    (command,) = [rest for name, rest in stages(DOCKERFILE)["requirements"] if name == "RUN"]
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build(tmp_path, "requirements", command, VARIANT="tpu")
    assert caught.value.returncode == 2
    assert "VARIANT is cpu or gpu, not tpu" in caught.value.stderr


def test_the_installed_code_has_no_left_overs(tmp_path, borrowing_venv):
    *_, command = [rest for name, rest in stages(DOCKERFILE)["code"] if name == "RUN"]
    build(tmp_path, "code", command.replace("/code", str(tmp_path / "made")), borrowing_venv)
    (packages,) = (tmp_path / "made").glob("lib/python3*/site-packages")
    version = PROJECT["version"]
    installed = {"flotilla", f"kfp_flotilla-{version}.dist-info"}
    assert {path.name for path in packages.iterdir()} == installed
    assert (tmp_path / "made" / "bin" / "flotilla").is_file()
    for path in (path for path in tracked() if path.startswith(("components/", "trainer/"))):
        assert (packages / "flotilla" / path).is_file(), path


@pytest.mark.skipif(platform.machine() != "x86_64", reason="tensorflow-cpu is for x86_64")
def test_packages_that_require_tensorflow_find_it_by_its_usual_name(tmp_path, borrowing_venv):
    (select,) = [rest for name, rest in stages(DOCKERFILE)["requirements"] if name == "RUN"]
    build(tmp_path, "requirements", select, VARIANT="cpu")
    command, _ = [rest for name, rest in stages(DOCKERFILE)["code"] if name == "RUN"]
    place = tmp_path / "made"
    build(tmp_path, "code", command.replace("/code", str(place)), borrowing_venv)
    (packages,) = place.glob("lib/python3*/site-packages")
    (found,) = distributions(path=[str(packages)])
    pinned = re.search(
        r"^tensorflow==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    assert pinned
    assert (found.name, found.version) == ("tensorflow", pinned[1])
    assert found.requires == [f"tensorflow-cpu=={pinned[1]}"]
    assert [path.name for path in packages.iterdir()] == [f"tensorflow-{pinned[1]}.dist-info"]


@pytest.fixture
def borrowing_venv(tmp_path):
    """Create a folder with a `pip` and a `python` that find the packages of this environment."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    borrowed = Path(distribution("pip").locate_file(""))
    (packages / "borrowed.pth").write_text(f"{borrowed}\n")
    pip = place / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{place}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    return place / "bin"


def build(folder, stage, command, programs=Path(sys.executable).parent, **arguments):
    """Run one command of a stage in a folder with the files that the stage copies."""
    for name, rest in stages(DOCKERFILE)[stage]:
        for source in shlex.split(rest)[:-1] if name == "COPY" else ():
            if (ROOT / source).is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, folder / source, ignore=skipped)
            else:
                shutil.copy(ROOT / source, folder / source)
    offline = {"PIP_NO_INDEX": "1", "PIP_IGNORE_INSTALLED": "1", "HOME": str(folder)}
    environment = {"PATH": f"{programs}:/usr/bin:/bin", **offline, **arguments}
    subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment,
        check=True,
        text=True,
        capture_output=True,
    )
