"""The launcher of a training cluster as a TFJob of the Kubeflow training operator."""
