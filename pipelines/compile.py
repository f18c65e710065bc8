"""Compile the pipeline to one YAML document, and each component to one of its own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from kfp import compiler

from components.image import IMAGE, is_image
from pipelines.training import COMPONENTS, PIPELINES
from trainer.errors import ConfigError, UserError


def compile_all(output: Path, image: str, components: Path | None) -> dict[str, str]:
    """Write the pipeline to `output`, and its components below a folder if one is given.

    Args:
        output: the file of the pipeline.
        image: the image of all steps; the default when empty.
        components: the folder, or None.

    Returns:
        Where the pipeline, and the components, were written.

    Raises:
        ConfigError: `image` is not the name of an image.
        UserError: a file cannot be written.
    """
    if image and not is_image(image):
        raise ConfigError(
            f"--image {image!r} is not the name of an image: write it as host/name:tag"
        )
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
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        # The compiler takes no other ending than this one.
        compiled = Path(folder, "compiled.yaml")
        compiler.Compiler().compile(source, str(compiled))
        text = compiled.read_text(encoding="utf-8")
    # In quotes: YAML would take some names, such as `12:30`, for a number.
    text = text.replace(f"image: {IMAGE}", f"image: {json.dumps(image)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
