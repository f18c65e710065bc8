"""Fixtures of a fake KFP instance for its own tests."""

from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]
