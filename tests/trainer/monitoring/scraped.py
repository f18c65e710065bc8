"""A scrape of the metrics of a run, read by Prometheus's own parser."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Return each sample by its name and the values of its labels."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(port: int, host: str = "127.0.0.1") -> dict[tuple[str, ...], float]:
    """Return what the server at a port of this machine answers."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())
