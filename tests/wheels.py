"""Writes wheels with one module, for tests of an installation."""

from pathlib import Path
from zipfile import ZipFile


def write_wheel(folder: Path, name: str, module: str = "", version: str = "1") -> Path:
    """Write a wheel for every platform, with one module that has the given text."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", module)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel
