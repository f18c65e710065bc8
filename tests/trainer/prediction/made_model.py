"""Published models with easily computed outputs, in the layout of an export."""

from __future__ import annotations

import json

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import argument_names

AGE = FeatureSpec(shape=(), dtype="float32", stored="float")
COUNT = FeatureSpec(shape=(), dtype="int64", stored="int")
CITY = FeatureSpec(shape=(), dtype="string", stored="bytes")


def published(  # noqa: PLR0913
    folder,
    features,
    answer,
    *,
    kinds=None,
    labels=None,
    types=None,
    data=None,
    dataset="",
    batch_size=3,
):
    """Publish a model that applies `answer` to the features' tensors, in their order."""
    source = folder.with_name(f"{folder.name}-source")
    arguments = argument_names(list(features))
    takes = [
        tf.TensorSpec((None, *spec.shape), spec.dtype, name=arguments[name])
        for name, spec in features.items()
    ]
    module = tf.Module()
    module.serve = tf.function(answer, takes)
    served = module.serve.get_concrete_function()
    tf.saved_model.save(module, str(source / "serving/m/1"), signatures={"serving_default": served})
    tree = {"name": "m", "data": data or {}, "evaluation": {"batch_size": batch_size}}
    written = json.dumps(parse_config(tree).model_dump(mode="json"))
    (source / "config.json").write_text(written)
    if isinstance(labels, list):
        (source / "labels.txt").write_text("\n".join(labels) + "\n")
        labels = {}
    fields = {
        "name": "m",
        "saved_model": "serving/m/1",
        "task": "classification",
        "inputs": [{"feature": name, "name": word} for name, word in arguments.items()],
        "reads": [
            {"feature": name, "type": (types or {}).get(name, ""), **spec.to_json()}
            for name, spec in features.items()
        ],
        "outputs": [
            {"name": name, "shape": list(each.shape[1:]), "dtype": each.dtype.name}
            for name, each in served.structured_outputs.items()
        ],
        "kinds": kinds or {"": "regression"},
        "labels": labels or {},
        "made_from": {"dataset": dataset},
    }
    uri = storage.uri_of(folder)
    storage.publish(source, uri, kind="model", fields=fields)
    return uri


def sums(folder, **more):
    """Publish a model that returns `age` plus `count`, plus 1000 if the city is Rome."""

    def answer(age, count, city):
        rome = 1000 * tf.cast(city == "Rome", tf.float32)
        return {"prediction": age + tf.cast(count, tf.float32) + rome}

    return published(folder, {"age": AGE, "count": COUNT, "city": CITY}, answer, **more)
