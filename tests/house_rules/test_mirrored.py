"""Each module has tests, which `make check` runs when the module changes."""

from pathlib import PurePosixPath

from tests.house_rules.source import files, source_modules
from tests.mirror import find_tests


def test_every_source_module_has_tests_that_mirror_it():
    paths = [PurePosixPath(str(path)) for path in files()]
    sources = [PurePosixPath(str(path)) for path in source_modules()]
    assert not [str(path) for path in sources if not find_tests(path, paths)]
