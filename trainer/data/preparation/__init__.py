"""From a source to shards: its parts are mapped one by one, and assembled."""
