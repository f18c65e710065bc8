"""What is learnt from examples in one pass: means, quantiles, vocabularies. Free of TensorFlow."""
