import pytest


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "mine"
    (home / "sub").mkdir(parents=True)
    (home / "blocks.py").write_text("A = 1\n")
    (home / "sub" / "__init__.py").touch()
    return home
