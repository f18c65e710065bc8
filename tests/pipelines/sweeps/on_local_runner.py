"""A compiled sweep in KFP's local runner: `python -m ... FILE ROOT`.

ROOT gets what the steps publish, and the outputs of KFP.
"""

import sys
from pathlib import Path

from kfp import components, local


def main() -> None:
    """Run the pipeline of the file with the defaults of its parameters."""
    file, root = sys.argv[1:]
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(Path(root, "kfp")),
        raise_on_error=True,
    )
    components.load_component_from_file(file)(storage_root=Path(root).as_uri())


if __name__ == "__main__":
    main()
