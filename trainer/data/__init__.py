"""Datasets: `prepare` downloads, splits and shards them; `read` makes `tf.data` of the shards."""
