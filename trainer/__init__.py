"""Flotilla's trainer: pure TensorFlow, free of Kubeflow Pipelines and of Kubernetes."""
