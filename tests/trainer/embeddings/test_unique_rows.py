import numpy as np
import tensorflow as tf

from flotilla.trainer.embeddings.unique_rows import spread


def test_the_gradient_of_a_row_is_the_sum_over_its_places():
    rows, places = tf.constant([[1.0], [2.0], [3.0]]), tf.constant([2, 0, 2])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        found = spread(rows, places)
        total = tf.reduce_sum(found * tf.constant([[1.0], [10.0], [100.0]]))
    np.testing.assert_array_equal(found, [[3.0], [1.0], [3.0]])
    np.testing.assert_array_equal(tape.gradient(total, rows), [[10.0], [0.0], [101.0]])
