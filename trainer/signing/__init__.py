"""Signatures of exported models, and where a model is from, in the forms of OpenSSF and in-toto."""
