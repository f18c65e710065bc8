"""The programs of the examples: their configurations, and each run as by a launcher by hand."""

from pathlib import Path

import pytest

from flotilla.trainer.config.load import load_config

FOLDER = Path(__file__).parents[2] / "examples/programs"
LONGEST_CONFIGURATION = 20


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_is_short_and_names_its_program(path):
    config = load_config(path)
    assert len(path.read_text().splitlines()) <= LONGEST_CONFIGURATION
    assert (FOLDER / config.program.command[1]).is_file()
    assert config.program.working_dir == "examples/programs"
