"""A pipeline of two steps for `flotilla`: the second step stores the first one's output."""

from typing import Any

from kfp import dsl

from flotilla.components.image import IMAGE
from flotilla.pipelines import training
from flotilla.pipelines.runs import local_child


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def keep(config: str, root: str, run_id: str, path: str):
    """Write the outputs of the first step to the file `path`."""
    import json  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    kept = {"config": config, "root": root, "run_id": run_id}
    Path(path).write_text(json.dumps(kept), encoding="utf-8")


def two_steps(wiring: training.Wiring, path: Any) -> None:
    """Resolve the form, and write the result to `path`."""
    prepared = wiring.prepare(published="file:///nowhere")
    kept = {**training.common_inputs(prepared), "path": path}
    keep(**kept).set_caching_options(False)


_PATH = training.DATASET.replace(name="path")

if __name__ == "__main__":
    training.PIPELINES["two_steps"] = training.local_pipeline(two_steps, "two-steps", _PATH)
    local_child.main()
