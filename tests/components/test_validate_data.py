"""The step that judges data: its word, its reasons, and its page."""

import json

import pytest
from kfp import dsl

from components import validate_data
from tests.components.called_steps import RUN, artifact_in, text_of
from trainer import storage

pytestmark = pytest.mark.usefixtures("emitted")


def validated(run, root, folder, **gate):
    tree = json.loads(text_of(run))
    tree["data"]["gate"] = gate
    path = folder / "validation.txt"
    page = artifact_in(folder, dsl.HTML)
    page.path = str(folder / "page.html")
    given = (json.dumps(tree), root, RUN, run.dataset, str(path), artifact_in(folder), page)
    word = validate_data.validate_data.python_func(*given)
    return word, path.read_text(encoding="utf-8"), (folder / "page.html").read_text()


def test_data_that_is_accepted(run, root, tmp_path, emitted):
    word, uri, page = validated(run, root, tmp_path)
    assert word == "accepted"
    tree = json.loads(storage.read_file(uri, "validation.json"))
    assert tree["champion"]["note"] == "digits has no champion yet"
    assert tree["decision"] == "accepted"
    assert storage.read_file(uri, "page.html").decode() == page
    assert "has no champion yet" in page
    end = emitted()[-1]
    assert (end.uri, end.metrics["decision"]) == (uri, "accepted")
