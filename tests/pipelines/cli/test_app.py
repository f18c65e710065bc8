"""Tests the command line's error messages, both for people and as JSON."""

import json
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from flotilla.components.image import IMAGE
from flotilla.pipelines.cli import __main__

ROOT = Path(__file__).parents[3]
FLOTILLA = Path(sys.executable).with_name("flotilla")
REMARK = (
    f"flotilla: warning: no cluster can pull {IMAGE}, because its name has no registry: "
    "compile or upload with --image HOST/NAME:TAG\n"
)
KEYS = {"status", "run_id", "metrics", "artifacts", "message"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Change to an empty folder, so that files with default paths are written there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def flotilla(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["flotilla", *map(str, arguments)])
        monkeypatch.setattr(__main__, "_own_temporary", lambda: None)
        with pytest.raises(SystemExit) as ended:
            __main__.main()
        return (ended.value.code, *capsys.readouterr())

    before = signal.getsignal(signal.SIGINT)
    yield call
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def refused(flotilla):
    """Return a function that calls a failing command, also with `--json`, and returns its error."""

    def call(*arguments, code=2):
        assert flotilla(*arguments)[:2] == (code, "")
        found, out, err = flotilla(*arguments, "--json")
        assert found == code
        assert err.startswith("flotilla: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        line = err.removeprefix("flotilla: ").rstrip("\n")
        answer = json.loads(out.splitlines()[-1])
        assert set(answer) == KEYS
        assert (answer["status"], answer["message"]) == ("failed", line)
        return line

    return call


@pytest.mark.parametrize("command", ["run", "train"])
def test_a_run_that_was_spelled_wrong(refused, here, command):
    for name in ("digits-20250101-000000-aaaa", "a-b-20250102-000000-bbbb"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "config.json").write_text("{}", encoding="utf-8")
    assert refused(command, "--resume", "digits-20250101-000000-aaab").endswith(
        "below runs; did you mean 'digits-20250101-000000-aaaa'?"
    )
    # The newest run is found by time, not by name.
    assert refused(command, "--resume", "?").endswith(" (newest: a-b-20250102-000000-bbbb)")
    assert refused(command, "--resume", "../runs").startswith("no run '../runs' below runs")


def test_compiling(flotilla, here):
    code, out, err = flotilla("compile", "--components", "parts", "--json")
    assert code == 0
    written = {"pipeline": "build/pipeline.yaml", "components": "parts"}
    answer = json.loads(out)
    assert set(answer) == KEYS
    assert (answer["status"], answer["artifacts"]) == ("done", written)
    assert err == f"wrote build/pipeline.yaml\nwrote parts\n{REMARK}"
    assert (here / "build" / "pipeline.yaml").is_file()
    assert len(list((here / "parts").iterdir())) == 5
    answer = "wrote p.yaml\n"
    assert flotilla("compile", "-o", "p.yaml", "--image", "a.example/b:1") == (0, "", answer)
    for words in ((), ("--image", IMAGE)):
        assert flotilla("compile", "-o", "p.yaml", *words) == (0, "", answer + REMARK)


def test_help_lists_the_commands_and_the_module_is_the_console_script(flotilla):
    code, out, err = flotilla()
    assert (code, out, err) == flotilla("--help")
    assert (code, err) == (0, "")
    for command in ("run", "prepare", "train", "compile"):
        assert f" {command} " in out
    words = [sys.executable, "-m", "flotilla.pipelines.cli", "--help"]
    script, module = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        for command in ([FLOTILLA], words)
    )
    assert (script.returncode, script.stderr) == (module.returncode, module.stderr) == (0, "")
    assert module.stdout == script.stdout
    assert "Usage: flotilla" in module.stdout


def test_a_compiled_source_of_this_machine_is_remarked_on(flotilla):
    Path("left.csv").write_text("x,left\n" + "1,no\n2,yes\n" * 20)
    words = ["compile", "left.csv", "--label", "left", "-o", "p.yaml", "--image", "a.example/b:1"]
    code, _, err = flotilla(*words)
    assert (code, err.splitlines()[-1]) == (
        0,
        "flotilla: warning: data.source: the steps of the pipeline cannot read left.csv, because "
        "it is on this machine; copy the files to gs://, s3:// or minio://BUCKET/FOLDER",
    )


def test_the_version_is_one_line(flotilla, monkeypatch):
    number = version("kfp-flotilla")
    monkeypatch.setenv("FLOTILLA_COMMIT", "0123abc")
    assert flotilla("--version") == (0, f"flotilla {number} (commit 0123abc)\n", "")
    code, out, _ = flotilla("--version", "--json")
    found = json.loads(out)
    assert (code, found["version"], found["commit"]) == (0, number, "0123abc")
    assert found.keys() > KEYS
    assert flotilla("--json", "--version") == (code, out, "")
    monkeypatch.setattr("flotilla.trainer.promotion.lineage.commit", lambda: "")
    assert flotilla("--version")[1] == f"flotilla {number}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_its_variable(flotilla, shell):
    code, out, err = flotilla("completion", shell)
    assert (code, err) == (0, "")
    assert f"_FLOTILLA_COMPLETE=complete_{shell}" in out
    assert json.loads(flotilla("completion", shell, "--json")[1])["script"] == out.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["completion", "bash", "--json"], "No space left on device"),
        (["runs"], "No space left on device"),
        (["--version"], "File too large"),
        (["--help"], "File too large"),
        (["run", "--help"], "File too large"),
    ],
)
def test_standard_output_that_takes_nothing(arguments, why, tmp_path):
    is_large = why == "File too large"
    limited = ["sh", "-c", 'ulimit -f 0 && "$@"', "sh"] if is_large else []
    with open(tmp_path / "out" if is_large else "/dev/full", "wb") as out:
        command = [*limited, FLOTILLA, *arguments]
        ended = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False)
    assert ended.stderr.decode() == f"flotilla: cannot write to standard output: {why}\n"
    assert ended.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["runs"], 0), (["configs", "nothing"], 2)]
)
def test_streams_that_are_closed(arguments, code):
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", FLOTILLA, *arguments]
    assert subprocess.run(command, check=False).returncode == code


def test_help_and_a_mistake_are_reported_without_loading_anything_heavy():
    program = (
        "import sys; from flotilla.pipelines.cli import __main__ as cli, app\n"
        "app.call(['--help'])\n"
        "heavy = {'kubernetes', 'pyarrow', 'pydantic', 'tensorflow', 'yaml'}\n"
        "also = {'kfp', 'numpy', 'requests'}\n"
        "print(sorted((heavy | also) & set(sys.modules)))\n"
        "sys.argv = ['flotilla', 'run', '--set', 'x=1']\n"
        "try: cli.main()\n"
        "finally: print(sorted(also & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-2:]) == (2, ["[]", "[]"])
    assert ended.stderr.startswith("flotilla: x: no such key")


def test_an_interrupt_before_there_is_a_run(monkeypatch, flotilla):
    def interrupt(*_given, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr("flotilla.pipelines.runs.local.load_config", interrupt)
    assert flotilla("run") == (130, "", "flotilla: interrupted\n")
