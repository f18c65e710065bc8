"""Runs a server in a separate process: `python -m tests.stores gs|s3 BUCKET LATENCY`."""

import sys

from tests.stores.gcs_server import gcs_server
from tests.stores.s3_server import s3_server


def main() -> None:
    scheme, bucket, latency = sys.argv[1:]
    with {"gs": gcs_server, "s3": s3_server}[scheme]() as server:
        server.create_bucket(bucket)
        server.plan.latency = float(latency)
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
