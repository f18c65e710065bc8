"""Write the lock files: what is installed and required, with the hash of every file of each pin.

pip's own code reads the index: the only client that takes all of pip's settings (mirror, proxy,
certificates, credentials). The hashes are those that the index lists, nothing is downloaded, and no
address is written. A package that the requirements need on another platform has to be installed.
"""

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions, version
from itertools import product
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.link import Link

#: Where the pins have to be complete.
PLATFORMS = (
    ("linux", "Linux", "x86_64"),
    ("linux", "Linux", "aarch64"),
    ("darwin", "Darwin", "arm64"),
)
PYTHONS = ("3.11", "3.12", "3.13")
#: What the image has beside the package itself: KFP's default store, a tracker, signatures.
IMAGE_EXTRAS = ("s3", "mlflow", "signing")
INSTALLED = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}


def environments() -> list[dict[str, str]]:
    """Return the values of the markers on each platform with each Python."""
    return [
        {
            **default_environment(),
            "sys_platform": sys_platform,
            "platform_system": system,
            "platform_machine": machine,
            "python_version": python,
            "python_full_version": f"{python}.0",
        }
        for (sys_platform, system, machine), python in product(PLATFORMS, PYTHONS)
    ]


def needed_by(requirements: Iterable[str]) -> set[str]:
    """Return the names of all packages that these requirements need on any of the platforms."""
    places = environments()
    open_ones = [Requirement(each) for each in requirements]
    found: set[tuple[str, frozenset[str]]] = set()
    while open_ones:
        one = open_ones.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if name not in INSTALLED:
            sys.exit(f"{one} is required, and not installed: it cannot be pinned")
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for below in map(Requirement, INSTALLED[name].requires or ()):
            values = ({**place, "extra": extra} for place in places for extra in {"", *extras})
            if below.marker is None or any(map(below.marker.evaluate, values)):
                open_ones.append(below)
    return {name for name, _ in found}


def read_index() -> LinkCollector:
    """Return pip's reader of the index, with pip's settings."""
    command = create_command("download")
    options, _ = command.parse_args([])
    return LinkCollector.create(command._build_session(options), options)


def hashes(index: LinkCollector, name: str, pin: str) -> Iterator[str]:
    """Yield the SHA-256 of each file of one version that the index lists."""
    for location in index.search_scope.get_index_urls_locations(name):
        content = index.fetch_response(Link(location))
        for link in parse_links(content) if content else ():
            parse = parse_wheel_filename if link.is_wheel else parse_sdist_filename
            try:
                is_of_pin = parse(link.filename)[1] == Version(pin)
            except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
                continue
            if is_of_pin and link.hash_name == "sha256" and link.hash:
                yield link.hash


def write(path: str, about: str, pins: dict[str, str], index: LinkCollector) -> None:
    """Write one lock; a file that stays the same is not touched, so that make sees no change."""
    lines = [f"# {about}; `make lock` writes this file."]
    for name, pin in sorted(pins.items(), key=lambda each: each[0].lower()):
        files = sorted(set(hashes(index, name, pin)))
        if not files:
            sys.exit(f"{path}: the index lists no file with a SHA-256 for {name}=={pin}")
        lines.append(
            " \\\n".join([f"{name}=={pin}", *(f"    --hash=sha256:{one}" for one in files)])
        )
    text = "\n".join([*lines, ""])
    if not Path(path).is_file() or Path(path).read_text(encoding="utf-8") != text:
        Path(path).write_text(text, encoding="utf-8")


def of_gpus(path: str) -> dict[str, str]:
    """Return the pins that stand in the lock of the GPU image: they are not installed here."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    pins = [line.removesuffix("\\").strip().partition("==") for line in lines if "==" in line]
    return {name: pin for name, _, pin in pins}


def main() -> None:
    """Write all lock files."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    built = needed_by(
        [*project["dependencies"], *(one for name in IMAGE_EXTRAS for one in extras[name])]
    )
    index = read_index()

    def pinned(names: Iterable[str]) -> dict[str, str]:
        return {INSTALLED[name].metadata["Name"]: INSTALLED[name].version for name in names}

    write("requirements.lock", "What the image needs", pinned(built), index)
    developed = needed_by([*project["dependencies"], *extras["dev"]])
    write("requirements-dev.lock", "Development, too", pinned(developed - built), index)
    cpu = {"tensorflow-cpu": version("tensorflow")}
    write("requirements-cpu.lock", "Instead of tensorflow in an image for CPUs", cpu, index)
    gpu = "requirements-gpu.lock"
    write(gpu, "CUDA for tensorflow[and-cuda] in an image for GPUs", of_gpus(gpu), index)


if __name__ == "__main__":
    main()
