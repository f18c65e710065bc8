"""An instance for the tests that talk to one."""

from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]
