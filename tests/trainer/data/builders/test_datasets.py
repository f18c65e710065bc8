"""The builder of a name; and what is said about a name that has none."""

import sys
import textwrap

import pytest

from tests.trainer.data import made_builders as builders
from trainer.config.data import DataConfig
from trainer.data.builders import datasets
from trainer.data.embedded.generated import Clicks
from trainer.data.embedded.scikit import Digits
from trainer.errors import ConfigError

OWN = "tests.trainer.data.made_builders"


@pytest.fixture
def find(tmp_path):
    def make(dataset, version=""):
        return datasets.builder(DataConfig(dataset=dataset, version=version), tmp_path)

    return make


def refusal(find, *args):
    with pytest.raises(ConfigError) as caught:
        find(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data.")
    return message


@pytest.mark.parametrize(("name", "builder"), [("clicks", Clicks), ("digits", Digits)])
def test_these_are_embedded(find, name, builder):
    assert isinstance(find(name), builder)


def test_any_name_of_tfds(find, tmp_path):
    found = find("mnist")
    assert found.name == "mnist"
    assert str(found.version) == "3.0.1"
    assert str(found.data_dir).startswith(str(tmp_path))


def test_a_config_of_tfds(find):
    assert find("glue/sst2").info.full_name.startswith("glue/sst2/")


def test_a_builder_of_your_own(find):
    assert isinstance(find(f"{OWN}:Everything"), builders.Everything)


def test_a_module_that_is_loaded_for_it(find, tmp_path, monkeypatch):
    source = """
        from tests.trainer.data.made_builders import Small

        class Mine(Small, skip_registration=True):
            pass
    """
    (tmp_path / "own_module.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert type(find("own_module:Mine")).__name__ == "Mine"
    finally:
        sys.modules.pop("own_module", None)


@pytest.mark.parametrize("dataset", ["mnist", "digits", f"{OWN}:Small"])
def test_a_version(find, dataset):
    newest = str(find(dataset).version)
    assert str(find(dataset, newest).version) == newest


def test_an_older_version(find):
    assert str(find(f"{OWN}:Versions").version) == "2.0.0"
    assert str(find(f"{OWN}:Versions", "1.5.0").version) == "1.5.0"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("mnst", "mnist"), ("digit", "digits"), ("fashionmnist", "fashion_mnist")],
)
def test_an_unknown_name_gets_the_nearest(find, name, nearest):
    message = refusal(find, name)
    assert f"no dataset '{name}' in TFDS; did you mean '{nearest}'?" in message
    assert "package.module:Builder" in message


def test_a_name_like_no_other(find):
    assert "did you mean" not in refusal(find, "qqqqqqqqqqqq")


@pytest.mark.parametrize("dataset", ["mnist", "digits", f"{OWN}:Small"])
@pytest.mark.parametrize("version", ["9.9.9", "newest"])
def test_an_unknown_version(find, dataset, version):
    message = refusal(find, dataset, version)
    assert message.startswith(f"data.version: {version}")


def test_an_unknown_version_gets_the_known_ones(find):
    assert "3.0.1" in refusal(find, "mnist", "9.9.9")


def test_an_unknown_config_gets_the_nearest(find):
    assert "glue has no config 'sst'; did you mean 'sst2'?" in refusal(find, "glue/sst")


def test_an_unknown_config_like_no_other_gets_all(find):
    assert "(one of cola, sst2," in refusal(find, "glue/qqqqqqq")


@pytest.mark.parametrize("dataset", ["mnist/", "mnist/a=1", "no name", "-"])
def test_what_is_no_name(find, dataset):
    assert dataset in refusal(find, dataset)


def test_a_version_in_the_name(find):
    assert "set data.dataset to 'mnist' and data.version to '3.0.1'" in refusal(find, "mnist:3.0.1")


def test_a_module_that_is_not_there(find):
    message = refusal(find, "no_such_package.module:Builder")
    assert "cannot import no_such_package.module: ModuleNotFoundError" in message
    assert "PYTHONPATH" in message


def test_a_module_that_fails(find, tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('broken\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(find, "failing_module:Builder")
    place = tmp_path / "failing_module.py"
    assert f"cannot import failing_module: RuntimeError: broken ({place}:1)" in message


@pytest.mark.parametrize(
    ("name", "hint"),
    [("Evrything", "did you mean 'Everything'"), ("CLASSES", ""), ("image", ""), ("np", "")],
)
def test_what_is_no_builder(find, name, hint):
    message = refusal(find, f"{OWN}:{name}")
    assert f"no TFDS builder (tfds.core.DatasetBuilder) called '{name}'" in message
    assert hint in message


@pytest.mark.parametrize("name", [":Builder", "module:", "a..b:Builder"])
def test_half_a_name(find, name):
    refusal(find, name)


def test_a_builder_that_cannot_be_made(find):
    assert "RuntimeError: not today" in refusal(find, f"{OWN}:NotConstructed")
