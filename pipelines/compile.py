"""Compile the pipeline to one YAML document, and each component to one of its own."""

from __future__ import annotations

from pathlib import Path

from kfp import compiler

from components.image import IMAGE
from pipelines.training import COMPONENTS, PIPELINES
from trainer.errors import UserError


def compile_all(output: Path, image: str, components: Path | None) -> dict[str, str]:
    """Write the pipeline to `output`, and its components below a folder if one is given.

    Args:
        output: the file of the pipeline.
        image: the image of all steps; the default when empty.
        components: the folder, or None.

    Returns:
        Where the pipeline, and the components, were written.

    Raises:
        UserError: a file cannot be written.
    """
    compile_pipeline(output, image or IMAGE)
    if components is None:
        return {"pipeline": str(output)}
    compile_components(components, image or IMAGE)
    return {"pipeline": str(output), "components": str(components)}


def compile_pipeline(output: Path, image: str = IMAGE) -> None:
    """Write the IR YAML of the whole pipeline to `output`; raises `UserError` if that fails."""
    _write(PIPELINES["run"], output, image)


def compile_components(folder: Path, image: str = IMAGE) -> None:
    """Write one YAML a component below `folder`; raises `UserError` if that fails."""
    for component in COMPONENTS:
        _write(component, folder / f"{component.name}.yaml", image)


def _write(source: object, output: Path, image: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(source, str(output))
        text = output.read_text(encoding="utf-8")
        output.write_text(text.replace(f"image: {IMAGE}", f"image: {image}"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
