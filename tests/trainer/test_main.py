"""Tests that `python -m flotilla.trainer` reports each error with the right exit code."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from flotilla.trainer import __main__ as module
from flotilla.trainer import events
from flotilla.trainer.__main__ import main
from flotilla.trainer.cluster import termination
from flotilla.trainer.config import topology
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime import errors, user_code

ROOT = Path(module.__file__).parents[1]


@pytest.fixture(autouse=True)
def _environment():
    """Restore the environment, because a task in this process sets variables for its children."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def options(tmp_path, monkeypatch):
    # A task changes its working directory; `monkeypatch` restores it.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CONFIG", tf_config())
    (tmp_path / "config.json").write_text(Config().model_dump_json())
    return {
        "--config": str(tmp_path / "config.json"),
        "--dataset": f"file://{tmp_path}/dataset",
        "--checkpoints": f"file://{tmp_path}/checkpoints",
        "--workdir": str(tmp_path),
    }


def flat(options):
    return ["task", *(part for option in options.items() for part in option)]


def words(options):
    return termination.read(Path(options["--workdir"])) + "\n"


NEEDS_PS = "training.strategy: async_parameter_server needs a ps, but the cluster has none"


def tf_config(role="ps", index=0, port=1, cluster=None):
    addresses = {"ps": [f"127.0.0.1:{port}"], "worker": [f"127.0.0.1:{port + 1}"]}
    task = {"type": role, "index": index}
    return json.dumps({"cluster": cluster or addresses, "task": task})


def one_line(text):
    assert text.endswith("\n")
    assert len(text.splitlines()) == 1
    return text.rstrip("\n")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "flotilla.trainer", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_says_which_stages_there_are(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == errors.DONE
    assert "run one task of the training cluster" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "TF_CONFIG is not set; start the task with the launcher"),
        ("{", "TF_CONFIG is not JSON: "),
        (tf_config("ps", 1), "TF_CONFIG: task ps-1 is not in the cluster"),
        (tf_config(cluster={"worker": ["127.0.0.1:1"]}, role="worker"), NEEDS_PS),
        (tf_config(cluster={"ps": ["127.0.0.1:1"]}), NEEDS_PS.replace("a ps", "a worker")),
        (tf_config("worke"), "TF_CONFIG: there is no task type 'worke'; did you mean 'worker'?"),
    ],
)
def test_a_wrong_tf_config(capsys, monkeypatch, options, text, said):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    assert main(flat(options)) == errors.USAGE
    line = one_line(capsys.readouterr().err)
    assert line.startswith(f"flotilla: {said}")
    assert one_line(words(options)) == line.removeprefix("flotilla: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read the configuration"),
        ("{", "is not valid YAML"),
        ('{"training": {"step": 3}}', "training.step: no such key; did you mean 'steps'?"),
    ],
)
def test_a_wrong_configuration(capsys, options, text, said):
    path = Path(options["--config"])
    path.unlink() if text is None else path.write_text(text)
    assert main(flat(options)) == errors.USAGE
    assert said in one_line(capsys.readouterr().err)


def test_a_port_in_use(capsys, monkeypatch, options):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("TF_CONFIG", tf_config(port=server.getsockname()[1]))
        assert main(flat(options)) == errors.FAILED
    line = one_line(capsys.readouterr().err)
    assert line.startswith("flotilla: ps-0 cannot serve on 127.0.0.1:")
    assert "Address already in use" in line
    assert one_line(words(options)) == line.removeprefix("flotilla: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UserError("a cause"), 1),
        (errors.ConfigError("a cause"), 2),
        (errors.TransientError("a cause"), 75),
        (errors.RunInterruptedError("a cause"), 130),
        (errors.ClusterLostError("a cause"), 138),
    ],
)
def test_an_error_of_the_user_is_its_line_and_its_code(capsys, monkeypatch, options, error, code):
    monkeypatch.setattr(topology, "check_port", fails_with(error))
    assert main(flat(options)) == code
    assert capsys.readouterr().err == "flotilla: a cause\n"
    assert words(options) == "a cause\n"


def fails_with(error):
    def fail(*_):
        raise error

    return fail


def test_a_bug_is_a_traceback_for_us_and_one_line_for_the_launcher(caplog, monkeypatch, options):
    # An error outside of the user's code counts as a bug.
    monkeypatch.setattr(topology, "check_port", Mock(side_effect=KeyError("two\nlines")))
    assert main(flat(options)) == errors.FAILED
    assert "Traceback" in caplog.text
    assert one_line(words(options)) == r"KeyError: 'two\nlines'"
    monkeypatch.setattr(topology, "check_port", Mock(side_effect=RuntimeError(" two\n lines ")))
    assert main(flat(options)) == errors.FAILED
    assert one_line(words(options)) == "RuntimeError: two"


def test_an_error_in_the_users_code_is_a_line_with_its_place(
    capsys, caplog, monkeypatch, options, tmp_path
):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(topology, "check_port", fails_with(KeyError("two\nlines")))
    assert main(flat(options)) == errors.FAILED
    line = one_line(capsys.readouterr().err)
    assert line.startswith("flotilla: your code raised KeyError: 'two")
    assert re.search(r"\(.*test_main\.py:\d+\)$", line)
    assert f"flotilla: {one_line(words(options))}" == line
    assert "Traceback" in caplog.text
    (event,) = events.read(tmp_path / "events.jsonl")
    assert isinstance(event, events.UserCodeFailed)
    assert "in fail" in event.traceback


def test_the_traceback_of_a_wrapped_error_is_that_of_its_cause(monkeypatch, options, tmp_path):
    def fail(*_):
        try:
            fails_with(ValueError("bad shape"))()
        except ValueError as error:
            raise errors.ConfigError("model blocks:residual: bad shape") from error

    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(topology, "check_port", fail)
    assert main(flat(options)) == errors.USAGE
    assert words(options) == "model blocks:residual: bad shape\n"
    (event,) = events.read(tmp_path / "events.jsonl")
    assert event.traceback.endswith("ValueError: bad shape\n")
    assert "ConfigError" not in event.traceback


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise SystemExit('bye')", "called sys.exit('bye')"),
        ("raise SystemExit", "called sys.exit(None)"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)
def test_what_is_no_exception_in_the_users_code_is_a_line_with_its_place(
    capsys, monkeypatch, options, statement, said
):
    Path("ending_blocks.py").write_text(f"def block(*_):\n    {statement}\n")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "ending_blocks", raising=False)
    own = user_code.import_module("ending_blocks")
    monkeypatch.setattr(topology, "check_port", own.block)
    assert main(flat(options)) == errors.FAILED
    line = f"your code {said} (ending_blocks.py:2)"
    assert capsys.readouterr().err.splitlines()[-1] == f"flotilla: {line}"
    assert one_line(words(options)) == line


def test_flags_say_which_task_it_is(capsys, monkeypatch, options):
    monkeypatch.setenv("TF_CONFIG", "nobody reads this")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        flags = ["--job_name", "ps", "--ps_hosts", f"h:1,{taken}", "--worker_hosts", "h:2"]
        assert main([*flat(options), *flags, "--task_index", "1"]) == errors.FAILED
    assert f"ps-1 cannot serve on {taken}: " in one_line(capsys.readouterr().err)


def test_a_chief_that_a_strategy_does_not_know(capsys, monkeypatch, options):
    Path(options["--config"]).write_text('{"training": {"strategy": "multi_worker_mirrored"}}')
    addresses = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", cluster=addresses))
    assert main(flat(options)) == errors.USAGE
    assert "has no chief (worker 0 leads); remove the chief" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("way", ["no folder", "a file", "no room"])
def test_where_no_words_can_be_left_the_exit_code_still_arrives(
    capsys, monkeypatch, options, tmp_path, way
):
    monkeypatch.setattr(topology, "check_port", fails_with(errors.ClusterLostError("a cause")))
    if way == "no room":
        (tmp_path / "termination.txt").symlink_to("/dev/full")
    else:
        options["--workdir"] = str(tmp_path / ("absent" if way == "no folder" else "config.json"))
    assert main(flat(options)) == errors.BEGIN_AGAIN
    assert capsys.readouterr().err == "flotilla: a cause\n"


def test_a_worker_without_its_dataset(capsys, monkeypatch, options):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("TF_CONFIG", tf_config("worker", port=port - 1))
    assert main(flat(options)) == errors.FAILED
    assert f"{options['--dataset']} is not published" in one_line(capsys.readouterr().err)


def test_the_process_ends_with_the_code_of_a_wrong_command_line():
    done = run("tusk")
    assert done.returncode == errors.USAGE
    assert one_line(done.stderr).startswith("python -m flotilla.trainer: ")
    assert done.stdout == ""


def test_the_process_ends_with_the_code_of_its_stage(options):
    done = run(*flat(options), TF_CONFIG="")
    assert (done.returncode, done.stdout) == (errors.USAGE, "")
    assert one_line(done.stderr).startswith("flotilla: TF_CONFIG is not set")


@pytest.mark.slow
def test_the_chief_of_a_dataset_that_is_not_there(options):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    addresses = {"chief": [f"127.0.0.1:{port}"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:1"]}
    task = {"type": "chief", "index": 0}
    done = run(*flat(options), TF_CONFIG=json.dumps({"cluster": addresses, "task": task}))
    assert done.returncode == errors.FAILED
    assert done.stderr.splitlines()[-1].startswith(f"flotilla: {options['--dataset']} is not publ")
    assert "Traceback" not in done.stderr
    assert one_line(words(options)).startswith(f"{options['--dataset']} is not published")


def test_a_trial_ends_as_its_error_says(options, monkeypatch, capsys):
    words = ["fit", "--config", options["--config"], "--workdir", options["--workdir"]]
    for kind, code in ((errors.ConfigError, 2), (errors.TransientError, 75)):
        monkeypatch.setattr(module, "_try_model", Mock(side_effect=kind("no answer")))
        assert main(words) == code
        assert capsys.readouterr().err == "flotilla: no answer\n"


def test_what_another_machine_may_have_is_not_known_of_a_run_there(options, monkeypatch, capsys):
    words = ["fit", "--config", options["--config"], "--workdir", options["--workdir"]]
    absent = Mock(side_effect=lambda *_: user_code.import_named("model x", "no_such_package"))
    monkeypatch.setattr(module, "_try_model", absent)
    assert [main(words), main([*words, "--elsewhere"])] == [2, 1]
    assert capsys.readouterr().err.count("flotilla: model x: cannot import no_such_package: ") == 2
    monkeypatch.setattr(module, "_try_model", Mock(side_effect=errors.ConfigError("model x: no")))
    assert main([*words, "--elsewhere"]) == 2


def test_in_a_trial_what_the_users_code_raises_is_a_mistake(options, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_trial.py").write_text("def fails(*_):\n    raise SystemExit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = user_code.import_module("own_trial")
    monkeypatch.setattr(module, "_try_model", own.fails)
    words = ["fit", "--config", options["--config"], "--workdir", options["--workdir"]]
    assert main(words) == 2
    said = "flotilla: your code raised SystemExit: 4 (own_trial.py:2)\n"
    assert capsys.readouterr().err.endswith(said)
    # An error in Flotilla's own code counts as a bug.
    monkeypatch.setattr(module, "_try_model", Mock(side_effect=ValueError("no")))
    assert main(words) == 1
