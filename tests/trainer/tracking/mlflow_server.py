"""MLflow's own server, from its package: SQLite, on loopback, in a folder of the test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

from trainer.tracking import addresses, tracker

_READY = re.compile(r"Uvicorn running on (http://127\.0\.0\.1:\d+)")


class MlflowServer:
    """A server that can be killed and started again on its port."""

    def __init__(self, folder, port):
        self.folder, self.url, self._process = folder, "", None
        self._port = str(port)

    def start(self):
        store, files = self.folder / "mlflow.db", self.folder / "artifacts"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", self._port, "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination"]
        quiet = {name: value for name, value in os.environ.items() if name[:7] != "MLFLOW_"}
        quiet["MLFLOW_DISABLE_TELEMETRY"] = "true"
        self._process = subprocess.Popen(
            [*command, str(files)],
            env=quiet,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if found := _READY.search(line):
                self.url = found[1]
                break
        else:
            raise RuntimeError("".join(lines))
        # It would stop at a full pipe.
        self._drain = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._drain.start()

    def kill(self):
        """End all of its processes at once."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._drain.join()
            self._process.stdout.close()
            self._process = None

    def client(self):
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.url)

    def name_in(self, environment):
        """Set the variable of the address in an environment, or by a monkeypatch."""
        for name in addresses.VARIABLES:
            environment.delenv(name, raising=False)
        environment.setenv(addresses.URI, self.url)
        # On a machine that does much else, the server is slow and not away.
        environment.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")
        environment.setattr(tracker, "CLOSE_SECONDS", 120.0)
