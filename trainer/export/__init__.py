"""Export of a blessed model in several formats, with a proof that they are equivalent."""
