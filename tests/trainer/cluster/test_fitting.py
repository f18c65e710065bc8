"""Tests the results and messages of a dry run in a child process."""

import pytest

from flotilla.trainer.cluster import child_process, fitting
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError


@pytest.fixture
def ends(monkeypatch):
    """Return a function that sets how dry runs end, and returns the list of calls."""
    calls = []

    def given(code, out="", err=""):
        def call(*arguments, **options):
            calls.append((arguments, options))
            return child_process.answer(code, out, err)

        monkeypatch.setattr(child_process, "call", call)
        return calls

    return given


def test_what_fits_is_the_last_line(ends):
    calls = ends(0, 'a line of the user\n{"task": "regression"}\n')
    assert fitting.try_fit(Config(), "file:///d") == {"task": "regression"}
    ((arguments, options),) = calls
    assert Config.model_validate_json(options["config"]) == Config()
    assert arguments == ("flotilla.trainer", "fit", "--dataset", "file:///d")
    # The fork server of a run has already loaded this module.
    assert options["loads"] == "flotilla.trainer.training.chief"


def test_what_the_trainer_says_is_the_message(ends):
    ends(2, err="a warning\nflotilla: model mlp: it does not fit\nlater\n")
    with pytest.raises(ConfigError, match=r"^model mlp: it does not fit$"):
        fitting.require(Config())


def test_a_run_on_other_machines_says_so(ends):
    calls = ends(0, "{}\n")
    fitting.try_fit(Config(), elsewhere=True)
    ((arguments, _),) = calls
    assert arguments == ("flotilla.trainer", "fit", "--dataset", "", "--elsewhere")


@pytest.mark.parametrize("code", [1, 75])
def test_a_bug_or_a_store_that_does_not_answer_refuses_nothing(ends, code):
    ends(code, err="flotilla: cannot reach gs://b\n")
    with pytest.raises(
        fitting.NotKnownError, match=r"^the dry run of the model failed \(cannot reach gs"
    ):
        fitting.try_fit(Config())


def test_a_trial_that_was_killed_says_nothing_of_the_model(ends, caplog):
    ends(-9)
    fitting.require(Config())
    assert (
        "cannot check whether the model fits the dataset: the dry run of the model failed "
        "(terminated by SIGKILL; check whether there is enough memory" in caplog.text
    )


def test_a_trial_that_ends_with_its_run_says_nothing(ends, caplog):
    ends(-9)
    fitting.begin(Config(), "", pytest.fail, lambda: True).join()
    assert not caplog.text
    fitting.begin(Config(), "", pytest.fail).join()
    assert "the dry run of the model failed (terminated by SIGKILL" in caplog.text
