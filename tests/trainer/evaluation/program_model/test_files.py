"""Tests which model in a program's folder is used."""

import pytest

from flotilla.trainer.evaluation.program_model.files import find_model
from flotilla.trainer.runtime.errors import UserError


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["saved_model.pb", "variables/variables.index"], ("saved_model", "")),
        (["1/saved_model.pb", "12/saved_model.pb", "9/saved_model.pb"], ("saved_model", "12")),
        (["export/saved_model.pb", "notes.txt"], ("saved_model", "export")),
        (["best.keras", "notes.txt"], ("keras", "best.keras")),
        # A SavedModel is preferred, because its signature describes the inputs.
        (["saved_model.pb", "best.keras"], ("saved_model", "")),
    ],
)
def test_the_model_of_a_folder(paths, found):
    assert find_model(paths) == found


@pytest.mark.parametrize(
    "paths",
    [[], ["a.keras", "b.keras"], ["one/saved_model.pb", "two/saved_model.pb"], ["model.h5"]],
)
def test_what_is_no_model_or_several_is_refused(paths):
    with pytest.raises(UserError, match=r"write one SavedModel or one \.keras file"):
        find_model(paths)
