"""Simple scikit-learn models that serve as baselines for a TensorFlow model."""
