"""Datasets: `prepare` downloads, splits and shards one; `read` makes `tf.data` of the shards."""
