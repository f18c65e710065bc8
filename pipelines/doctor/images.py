"""Whether the images that a job names are names of images, and can be found from a node."""

from __future__ import annotations

from collections.abc import Iterable

from components.image import IMAGE, is_image
from pipelines.doctor.finding import Finding
from pipelines.doctor.requested import Tree

_BUILD = "docker build --tag HOST/NAME:TAG . && docker push HOST/NAME:TAG"
_GIVE = "flotilla doctor --image HOST/NAME:TAG"


def named(manifest: Tree) -> set[str]:
    """Return the images of all roles of a job."""
    replicas = manifest["spec"]["tfReplicaSpecs"].values()
    return {each["template"]["spec"]["containers"][0]["image"] for each in replicas}


def judged(images: Iterable[str]) -> Finding:
    """Check images by the rule of `flotilla compile --image`."""
    names = sorted(images)
    for image in names:
        if not is_image(image):
            said = f"{image!r} is not the name of an image: write it as host/name:tag"
            setting = "flotilla doctor --set cluster.kubernetes.pod.image=HOST/NAME:TAG"
            return Finding("fail", said, setting)
    local = [image for image in names if not _has_host(image)]
    if IMAGE in local:
        said = (
            "none is named, and that of the upload is not known here: give it by --image; without "
            f"an upload it is {IMAGE}, of no registry, unless cluster.kubernetes.pod.image says so"
        )
        return Finding("warn", said, _GIVE)
    if local:
        said = f"{', '.join(local)} names no registry: every node has to have it already"
        return Finding("warn", said, f"{_BUILD} && {_GIVE}")
    return Finding("ok", ", ".join(names))


def _has_host(image: str) -> bool:
    host, slash, _ = image.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")
