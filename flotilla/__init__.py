"""Flotilla: TensorFlow models trained on parameter servers, as a Kubeflow pipeline."""
