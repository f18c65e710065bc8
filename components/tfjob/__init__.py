"""The TFJob engine, for the Kubeflow training operator."""
