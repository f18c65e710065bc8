"""Compile the pipeline to one YAML file, and each component to one of its own.

The file of the pipeline holds two documents: what KFP runs, and what Kubernetes has to know of it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from kfp import compiler

from components.image import IMAGE
from pipelines.step_parameters import check_image
from pipelines.training import COMPONENTS, cluster_pipeline
from trainer.errors import UserError


def compile_all(output: Path, image: str, components: Path | None) -> dict[str, str]:
    """Write the pipeline to `output`, and its components below a folder if one is given.

    Args:
        output: the file of the pipeline.
        image: the default of the run parameter `image`; the usual one when empty.
        components: the folder, or None.

    Returns:
        Where the pipeline, and the components, were written.

    Raises:
        ConfigError: `image` is not the name of an image.
        UserError: a file cannot be written.
    """
    check_image(image)
    compile_pipeline(output, image or IMAGE)
    if components is None:
        return {"pipeline": str(output)}
    compile_components(components, image or IMAGE)
    return {"pipeline": str(output), "components": str(components)}


def compile_pipeline(output: Path, image: str = IMAGE) -> None:
    """Write the IR YAML of the whole pipeline to `output`; raises `UserError` if that fails."""
    _write(output, _compiled(cluster_pipeline(image)))


def compile_components(folder: Path, image: str = IMAGE) -> None:
    """Write one YAML a component below `folder`; raises `UserError` if that fails."""
    for component in COMPONENTS:
        # In quotes: YAML would take some names, such as `12:30`, for a number.
        quoted = f"image: {json.dumps(image)}"
        text = _compiled(component).replace(f"image: {IMAGE}", quoted)
        _write(folder / f"{component.name}.yaml", text)


def image_remark(image: str) -> str:
    """Return the line that a person has to read of the default image; of others none."""
    if image != IMAGE:
        return ""
    remedy = "compile or upload with --image HOST/NAME:TAG"
    return f"flotilla: no cluster can pull {IMAGE}, which names no registry: {remedy}\n"


def _compiled(source: object) -> str:
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        # The compiler takes no other ending than this one.
        path = Path(folder, "compiled.yaml")
        compiler.Compiler().compile(source, str(path))
        return path.read_text(encoding="utf-8")


def _write(output: Path, text: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
