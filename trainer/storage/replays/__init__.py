"""The store of a replay, apart from those that serve a scheme."""
