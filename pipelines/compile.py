"""Compiles the pipeline to one YAML file, and each component to its own file.

The pipeline's file has two documents: the pipeline spec, and the platform spec with pod settings.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from flotilla.components.image import IMAGE, find_mark
from flotilla.pipelines.step_settings import NO_SETTINGS, StepPods, check_image
from flotilla.pipelines.training import COMPONENTS, cluster_pipeline
from flotilla.trainer.config.form import SETTINGS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import lineage
from flotilla.trainer.runtime.errors import ConfigError, UserError


def compile_all(
    output: Path,
    image: str,
    components: Path | None,
    pods: StepPods = NO_SETTINGS,
    config: Config | None = None,
) -> dict[str, str]:
    """Write the pipeline, and the components if a folder is given. Raises `UserError`."""
    check_image(image)
    if components is not None:
        # Create the folder before any file is written, so that an error leaves no incomplete set.
        with _writing(components):
            components.mkdir(parents=True, exist_ok=True)
    compile_pipeline(output, image or IMAGE, pods, config)
    if components is None:
        return {"pipeline": str(output)}
    compile_components(components, image or IMAGE)
    return {"pipeline": str(output), "components": str(components)}


def compile_pipeline(
    output: Path,
    image: str = IMAGE,
    pods: StepPods = NO_SETTINGS,
    config: Config | None = None,
) -> None:
    """Write the IR YAML of the whole pipeline to `output`. Raises `UserError` if that fails."""
    write_pipeline(output, cluster_pipeline(image, pods, config))


def write_pipeline(output: Path, pipeline: object) -> None:
    """Write the IR YAML of a pipeline to `output`. Raises `UserError` if that fails."""
    _write(output, _compile(pipeline))


def compile_components(folder: Path, image: str = IMAGE) -> None:
    """Write one YAML file for each component into `folder`. Raises `UserError` if that fails."""
    for component in COMPONENTS:
        # Quote the image name, because YAML reads some names, such as `12:30`, as numbers.
        quoted = f"image: {json.dumps(image)}"
        text = _compile(component).replace(f"image: {IMAGE}", quoted)
        _write(folder / f"{component.name}.yaml", text)


def image_remark(image: str) -> str:
    """Return a warning if no cluster can pull the image, or an empty string."""
    if image != IMAGE:
        return ""
    remedy = "compile or upload with --image HOST/NAME:TAG"
    return f"no cluster can pull {IMAGE}, because its name has no registry: {remedy}"


def _text_of_pipeline(image: str, pods: StepPods, config: Config | None) -> str:
    return _compile(cluster_pipeline(image, pods, config))


def _compile(source: object) -> str:
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        # The compiler requires this suffix.
        path = Path(folder, "compiled.yaml")
        compiler.Compiler().compile(source, str(path))
        text = path.read_text(encoding="utf-8")
    # Remove the default of the settings from KFP's comment, because the order of the keys in it
    # differs between processes, and equal pipelines must have equal text.
    return _DEFAULT_MAPPING.sub(r"\1", text)


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None


def _write(output: Path, text: str) -> None:
    with _writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")


# Lengths of the digest and the commit in a version name, in characters.
DIGEST_LENGTH, COMMIT_LENGTH = 12, 7
# Use PyYAML's C loader if it is available, because it is seven times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SUFFIXES = (".yaml", ".yml")
_DEFAULT_MAPPING = re.compile(rf"^(#\s+{SETTINGS}: dict) \[Default: .*\]$", re.MULTILINE)
# Top-level keys of compiled YAML that do not occur in a configuration.
_OF_PIPELINE = re.compile(r"(pipelineInfo|deploymentSpec|schemaVersion):")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A compiled pipeline. `spec` is the first document of the YAML `text`."""

    name: str
    text: str
    spec: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The first characters of the SHA-256 digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def image(self) -> str:
        """The default of the run parameter `image`, or an empty string if there is none."""
        return str(read_defaults(self.spec).get("image", ""))

    @contextmanager
    def write_temporary(self) -> Iterator[str]:
        """Write the YAML to a temporary file for the KFP client, and yield its path."""
        with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
            path = Path(folder, "pipeline.yaml")
            path.write_text(self.text, encoding="utf-8")
            yield str(path)

    def version(self) -> str:
        """Return the version name: the digest, the commit, and `dirty` for uncommitted changes."""
        commit, _, dirty = lineage.commit().partition("-")
        return "-".join(filter(None, [self.digest, commit[:COMMIT_LENGTH], dirty]))


def own_package(
    image: str = "", pods: StepPods = NO_SETTINGS, config: Config | None = None
) -> Package:
    """Compile Flotilla's pipeline. Raises `ConfigError`."""
    check_image(image)
    return _package(_text_of_pipeline(image or IMAGE, pods, config), "the pipeline")


def load_package(file: Path, image: str = "", pods: StepPods = NO_SETTINGS) -> Package:
    """Read a compiled pipeline. Raises `ConfigError`, for example if `image` or `pods` is set."""
    if image or pods != NO_SETTINGS:
        option = "--image" if image else "a setting of the pods"
        raise ConfigError(
            f"{option} applies to compilation, but {file} is already compiled; omit the option"
        )
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: the name of a compiled pipeline must end with .yaml")
    try:
        return _package(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        return _package("", str(file))


def is_compiled(file: Path) -> bool:
    """Return whether a file is a compiled pipeline and not a configuration."""
    try:
        with file.open(encoding="utf-8") as lines:
            return any(_OF_PIPELINE.match(line) for line in lines)
    except (OSError, UnicodeDecodeError):
        return False


def read_mark(spec: Mapping[str, Any] | None) -> str:
    """Return the mark that Flotilla's compiler left in a pipeline, or an empty string."""
    pipeline = (spec or {}).get("pipeline_spec") or spec or {}
    executors = (pipeline.get("deploymentSpec") or {}).get("executors") or {}
    for executor in executors.values():
        if mark := find_mark((executor.get("container") or {}).get("args") or ()):
            return mark
    return ""


def list_parameters(spec: Mapping[str, Any] | None) -> set[str] | None:
    """Return the names of the run parameters, or None if the spec is not a pipeline."""
    declared = _inputs(spec)
    return None if declared is None else set(declared)


def read_defaults(spec: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the default of each run parameter that has one."""
    declared = _inputs(spec) or {}
    return {
        name: each["defaultValue"]
        for name, each in declared.items()
        if isinstance(each, Mapping) and "defaultValue" in each
    }


def _inputs(spec: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if not spec:
        return None
    pipeline = spec.get("pipeline_spec") or spec
    root = pipeline.get("root")
    if not isinstance(root, Mapping):
        return None
    return (root.get("inputDefinitions") or {}).get("parameters") or {}


def _package(text: str, source: str) -> Package:
    try:
        spec = next(iter(yaml.load_all(text, _LOADER)), None)
        name = spec["pipelineInfo"]["name"]  # type: ignore[index]
    except (ValueError, yaml.YAMLError, KeyError, TypeError):
        spec, name = None, ""
    if not (isinstance(name, str) and name and isinstance(spec, dict) and "root" in spec):
        raise ConfigError(
            f"{source} does not contain a compiled pipeline: write one with `flotilla compile`"
        )
    return Package(name=name, text=text, spec=spec)
