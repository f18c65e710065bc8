"""Trackers outside of Flotilla: MLflow, and Kubeflow's Model Registry; none can end a run."""
