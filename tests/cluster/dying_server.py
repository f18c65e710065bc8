"""A parameter server that is killed as soon as it is asked to publish its second part.

With `DIES_AFTER=difference` it is killed at the first part after a difference is published.

`python -m tests.cluster.dying_server` takes the words of `python -m trainer`.
"""

from __future__ import annotations

import os
import signal
import sys

from trainer import __main__ as trainer
from trainer import storage
from trainer.checkpoints import bases, part_server


def _has_difference(draft):
    found = storage.published(storage.parent_of(draft))
    return any(bases.FIELD in manifest.fields for _, manifest in found)


def main() -> None:
    """Run the task, as the kernel ends it when memory is gone."""
    publish = part_server._ACTIONS["publish"]
    seen = []

    def once(folder, request):
        seen.append(request)
        after_difference = os.environ.get("DIES_AFTER") == "difference"
        if _has_difference(request.uri) if after_difference else len(seen) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(folder, request)

    part_server._ACTIONS["publish"] = once
    trainer.main()


if __name__ == "__main__":
    sys.exit(main())
