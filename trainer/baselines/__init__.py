"""Simple scikit-learn models, as baselines for a TensorFlow model."""
