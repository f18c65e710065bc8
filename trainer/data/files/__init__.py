"""Files as a data source, without user code: csv, parquet, jsonl, tfrecord, npz and images."""
