"""External trackers: MLflow and Kubeflow's Model Registry; their errors never end a run."""
