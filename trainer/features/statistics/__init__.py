"""One-pass statistics: means, quantiles, vocabularies. Does not import TensorFlow."""
