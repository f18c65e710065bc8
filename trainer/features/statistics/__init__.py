"""One-pass statistics of examples: means, quantiles and vocabularies. Free of TensorFlow."""
