"""An instance for the tests that talk to one."""

from tests.kfp_instance.fixtures import instance, remote, uploaded

__all__ = ["instance", "remote", "uploaded"]
