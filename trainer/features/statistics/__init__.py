"""One-pass statistics of examples: means, quantiles, vocabularies. Free of TensorFlow."""
