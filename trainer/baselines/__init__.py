"""Simple models of scikit-learn, which say what a model of TensorFlow is worth beside them."""
