"""Tests the Jinja environment that all pages share."""

from pathlib import Path

import jinja2
import pytest

from flotilla.trainer.report.pages import environment


def test_a_template_of_another_room_has_the_style_the_words_and_the_escaping(
    tmp_path: Path,
) -> None:
    source = (
        '<style>{% include "style.css.j2" %}</style>{{ name | titled }} {{ 0.97777 | rounded }}'
    )
    (tmp_path / "mine.html.j2").write_text(source, encoding="utf-8")
    html = environment(tmp_path).get_template("mine.html.j2").render(name="<b>_auc")
    assert "prefers-color-scheme: dark" in html
    assert "@media print" in html
    assert html.endswith("</style>&lt;b&gt; AUC 0.9778")


def test_a_name_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.html.j2").write_text("{{ absent }}", encoding="utf-8")
    with pytest.raises(jinja2.UndefinedError, match="absent"):
        environment(tmp_path).get_template("mine.html.j2").render()


def test_text_that_turns_the_direction_of_what_follows_is_made_harmless() -> None:
    page = environment().from_string("{{ name }} is 0.4").render(name="a\u202eb\u2066<i>")
    assert page == "a\\u202eb\\u2066&lt;i&gt; is 0.4"
