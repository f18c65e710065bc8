"""Export of a blessed model in several formats, with a check that they are equivalent."""
