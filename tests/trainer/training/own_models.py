"""A module of a user, with valid and invalid models and tasks."""

# This file is written like a user's code, not like ours.
# ruff: noqa: ARG001, ARG002, ARG005, E402, PLC0415, PLW0108

import keras

from flotilla.trainer.models.spec import scaled_input


def net(spec, end=lambda x: x, kind=keras.Model, **compiled):
    given, x = scaled_input(spec)
    x = keras.layers.Flatten()(x)
    return kind(given, end(keras.layers.Dense(spec.num_classes)(x)))


def logs(spec):
    return net(spec, lambda x: keras.ops.log(0 * x))


def roots(spec):
    return net(spec, lambda x: keras.ops.sqrt(0 * x))


def huge(spec):
    return net(spec, lambda x: keras.layers.Rescaling(1e8, dtype="float16")(x))


def constant(spec):
    return net(spec, lambda x: 0 * x)


class Silent(keras.Model):
    def train_step(self, data):
        return {"d_loss": 1.0}


def silent(spec):
    return net(spec, kind=Silent)


class Broken(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return y_pred.no_such_thing


def broken(spec):
    return net(spec, kind=Broken)


class Eager(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return float(y_pred[0, 0])


def eager(spec):
    return net(spec, kind=Eager)


def compiled(spec):
    model = net(spec, keras.ops.softmax)
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def other_loss(spec):
    model = net(spec)
    model.compile(loss=lambda labels, outputs: outputs.no_such_thing)
    return model


def hidden(spec, end=lambda x: x, units=8, middle="hidden", last=None):
    given, x = scaled_input(spec)
    x = end(keras.layers.Flatten()(x))
    x = keras.layers.Dense(units, name=middle)(x)
    return keras.Model(given, keras.layers.Dense(spec.num_classes, activation=last)(x))


def trained(spec, units=8):
    model = hidden(spec, units=units, last="softmax")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def loaded(spec, path):
    return keras.models.load_model(path)


def darkness(spec):
    return hidden(spec, lambda x: keras.ops.log(x))


def dictionary(spec):
    model = hidden(spec)
    return keras.Model(model.input, {"label": model.output})


def seven(spec, units=7, end=lambda x: x):
    given = spec.symbols()
    x = keras.ops.expand_dims(given["age"] if isinstance(given, dict) else given, -1)
    return keras.Model(given, end(keras.layers.Dense(units)(x)))


def python(spec, units):
    import tensorflow as tf

    class Python(keras.layers.Layer):
        def call(self, x):
            return x + tf.ensure_shape(tf.numpy_function(lambda y: y, [x], tf.float32), x.shape)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    return seven(spec, units, Python())


class Chance(keras.layers.Layer):
    def call(self, x):
        return x + 9 * keras.random.normal((1, 1))


def chance(spec):
    return seven(spec, 1, Chance())


from flotilla.trainer.tasks.classification import BinaryClassification


class Failing(BinaryClassification):
    def loss(self):
        raise ValueError("not today")


class Asking(BinaryClassification):
    def __init__(self, target, scale):
        super().__init__(target)


def certain(spec):
    return seven(spec, 1, keras.ops.softmax)


class Choice(keras.Model):
    def call(self, x):
        return x if x[0] > 0 else -x


def without_bias(spec):
    given, x = scaled_input(spec)
    x = keras.layers.Dense(spec.num_classes, use_bias=False)(keras.layers.Flatten()(x))
    return keras.Model(given, x)


def choice(spec):
    return Choice()


def table(spec):
    import tensorflow as tf

    known = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0], [1]), 0)
    tables.append(known)

    class Known(keras.layers.Layer):
        def call(self, x):
            return x + tf.cast(known.lookup(tf.cast(x, "int32")), "float32")

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    return seven(spec, 1, Known())


tables = []


def leaves(spec):
    raise SystemExit(3)


def swish(x):
    return x * keras.ops.sigmoid(x)


def own_function(spec):
    return hidden(spec, keras.layers.Activation(swish, name="own"))
