"""Whether the images that a job names are names of images, and can be found from a node."""

from __future__ import annotations

from components.image import is_image
from pipelines.doctor.finding import Finding
from pipelines.doctor.requested import Tree


def named(manifest: Tree) -> Finding:
    """Check the images of all roles by the rule of `flotilla compile --image`."""
    replicas = manifest["spec"]["tfReplicaSpecs"].values()
    images = sorted({each["template"]["spec"]["containers"][0]["image"] for each in replicas})
    build = "docker build --tag HOST/NAME:TAG . && docker push HOST/NAME:TAG"
    setting = "flotilla doctor --set cluster.kubernetes.pod.image=HOST/NAME:TAG"
    for image in images:
        if not is_image(image):
            said = f"{image!r} is not the name of an image: write it as host/name:tag"
            return Finding("fail", said, setting)
    local = [image for image in images if not _has_host(image)]
    if local:
        said = f"{', '.join(local)} names no registry: every node has to have it already"
        return Finding("warn", said, f"{build} && {setting}")
    return Finding("ok", ", ".join(images))


def _has_host(image: str) -> bool:
    host, slash, _ = image.partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")
