"""Flotilla's trainer: pure TensorFlow, free of Kubeflow Pipelines and of Kubernetes."""

import os

# Keras reads this when it is imported, after it has read ~/.keras/keras.json: a person who works
# with another backend elsewhere has it set there, or in the shell.
os.environ["KERAS_BACKEND"] = "tensorflow"

# A proxy for the web does not reach what is on this machine, such as the emulator of a store or a
# forwarded port. All libraries read the lower-case name, and some of them alone.
_ON_LOOPBACK = "localhost,127.0.0.1,::1"
if any(
    os.environ.get(f"{kind}_proxy", os.environ.get(f"{kind}_proxy".upper()))
    for kind in ("http", "https", "all")
):
    _direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    if _direct.strip() != "*" and _ON_LOOPBACK not in _direct:
        os.environ["no_proxy"] = f"{_direct},{_ON_LOOPBACK}".lstrip(",")
