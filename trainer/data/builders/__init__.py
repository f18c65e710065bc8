"""TFDS datasets: find a builder by name, download its data, and read it as a source."""
