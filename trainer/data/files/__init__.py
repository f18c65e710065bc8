"""Files as a source of data: csv, parquet, jsonl, tfrecord and images, without code of the user."""
