"""Writes a blessed model in its formats, with a parity proof."""
