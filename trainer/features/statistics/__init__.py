"""One-pass statistics of examples, without TensorFlow: means, quantiles and vocabularies."""
