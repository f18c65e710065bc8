"""Announces promotions to MLflow's registry and Kubeflow's Model Registry."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.tracking import addresses
from flotilla.trainer.tracking.hub import Hub, PromotedModel
from flotilla.trainer.tracking.mlflow_registry import register_in_mlflow
from flotilla.trainer.tracking.tracker import MISSING

# Timeout for each registry in seconds, including the upload of a local model.
SECONDS = 120.0
log = logging.getLogger(__name__)


def announce(
    model: PromotedModel,
    hub: str,
    list_earlier: Callable[[], Sequence[PromotedModel]] = tuple,
    *,
    seconds: float = SECONDS,
) -> None:
    """Announce a promotion to all configured registries. Failures are only logged.

    `list_earlier` returns the earlier versions, to register those that MLflow lacks.
    """
    wanted: dict[str, Callable[[], object]] = {}
    if addresses.is_tracked():
        wanted["MLflow"] = lambda: register_in_mlflow(model, list_earlier)
    if hub:
        wanted["the model registry"] = lambda: Hub(hub).announce(model)
    answers: dict[str, queue.SimpleQueue[str]] = {}
    for name, call in wanted.items():
        answers[name] = queue.SimpleQueue()
        # Use a daemon thread, so that a slow registry does not keep the process alive.
        work = functools.partial(_answer, call, answers[name])
        threading.Thread(target=work, name="promotion", daemon=True).start()
    for name, answer in answers.items():
        try:
            words = answer.get(timeout=seconds)
        except queue.Empty:
            words = f"no response within {seconds:g} s"
        if words:
            log.warning(
                "cannot tell %s that version %d of %s was promoted: %s; the promotion is valid, "
                "and the next run or promotion of this model tries again",
                name,
                model.version,
                model.name,
                words,
            )


def _answer(call: Callable[[], object], answer: queue.SimpleQueue[str]) -> None:
    words = ""
    try:
        call()
    except ImportError:
        words = MISSING
    except Exception as error:
        words = " ".join(mask(f"{type(error).__name__}: {error}").split())[:300]
    answer.put(words)
