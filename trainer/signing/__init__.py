"""Signatures and provenance of exported models, in the formats of OpenSSF and in-toto."""
