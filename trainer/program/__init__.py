"""A user's own training program as the tasks of the cluster. Free of TensorFlow."""
