"""Tests the output of `flotilla sweep --compile`."""

import json

from flotilla.pipelines.cli.app import call

BATCHES = ["--set", "training.batch_size=16,32"]


def test_compiling_says_how_it_is_started(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    assert call(["sweep", "--compile", "-o", str(file), "--json", *BATCHES]) == 0
    out, err = capsys.readouterr()
    assert f"--file {file}" in err
    answer = json.loads(out.splitlines()[-1])
    assert answer["artifacts"] == {"pipeline": str(file)}
    assert [each["settings"] for each in answer["trials"]] == [
        {"training.batch_size": "16"},
        {"training.batch_size": "32"},
    ]
