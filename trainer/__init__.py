"""Flotilla's trainer: TensorFlow code that depends on neither Kubeflow Pipelines nor Kubernetes."""

import os

# Keras reads this variable when it is imported. The variable overrides `~/.keras/keras.json`, which
# may name another backend.
os.environ["KERAS_BACKEND"] = "tensorflow"

# Exclude loopback addresses from a web proxy, which cannot reach a storage emulator or a forwarded
# port of this machine. Set the lower-case variable, because some libraries read only this one.
_ON_LOOPBACK = "localhost,127.0.0.1,::1"
if any(
    os.environ.get(f"{kind}_proxy", os.environ.get(f"{kind}_proxy".upper()))
    for kind in ("http", "https", "all")
):
    _direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if _direct.strip() != "*" and _ON_LOOPBACK not in _direct:
        os.environ["no_proxy"] = f"{_direct},{_ON_LOOPBACK}".lstrip(",")
