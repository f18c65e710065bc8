"""The instance itself, for the tests of what it does."""

from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]
