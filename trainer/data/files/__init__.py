"""Files as a source of data without user code: csv, parquet, jsonl, tfrecord and images."""
