"""External trackers: MLflow and Kubeflow's Model Registry. Their errors never end a run."""
