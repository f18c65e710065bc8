"""`flotilla sweep`: options that do not go together, and its lines."""

import json

import pytest

from pipelines.cli.app import called

BATCHES = ["--set", "training.batch_size=16,32"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is searched"),
        (["--resume", "x", *BATCHES], "leave all but --workdir and --parallel out"),
        (["--resume", "x", "--asha"], "leave all but --workdir and --parallel out"),
        (["--resume", "x"], "no sweep 'x'"),
        ([*BATCHES, "-o", "file.yaml"], "-o is for --compile"),
        ([*BATCHES, "--image", "a/b:c"], "--image is for --compile"),
        ([*BATCHES, "--asha"], "there are 2"),
        ([*BATCHES, "--set", "training.nonsense=1"], "no such key"),
        ([*BATCHES, "--parallel", "0"], "--parallel 0"),
    ],
)
def test_wrong_usage_is_one_line_and_starts_nothing(words, message, tmp_path, capsys):
    assert called(["sweep", "--workdir", str(tmp_path / "w"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_compiling_says_how_it_is_started(tmp_path, capsys):
    file = tmp_path / "sweep.yaml"
    assert called(["sweep", "--compile", "-o", str(file), "--json", *BATCHES]) == 0
    out, err = capsys.readouterr()
    assert f"--file {file}" in err
    answer = json.loads(out.splitlines()[-1])
    assert answer["artifacts"] == {"pipeline": str(file)}
    assert [each["settings"] for each in answer["trials"]] == [
        {"training.batch_size": "16"},
        {"training.batch_size": "32"},
    ]
