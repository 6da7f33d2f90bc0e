"""Trains with TensorFlow's strategy for several workers: ``poprun -n 2 python examples/tensorflow_training.py``.

poprun sets TF_CONFIG. A loop of one's own, then ``fit`` of Keras 2 (the package tf_keras): that of Keras 3 fails
under this strategy in TensorFlow 2.21, with and without poprun.
"""

import numpy as np
import tensorflow as tf
import tf_keras


def main() -> None:
    """Train twice, and print both weights."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before anything else of TensorFlow
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    y = x @ np.arange(4, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(256)  # of the whole job
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    with strategy.scope():
        weights = tf.Variable(tf.zeros((4, 1)))
        model = tf_keras.Sequential([tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(tf_keras.optimizers.SGD(0.1), "mse")

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ weights - y) ** 2) / 256
        gradient = tape.gradient(loss, weights)
        total = tf.distribute.get_replica_context().all_reduce("sum", gradient)
        weights.assign_sub(0.1 * total)

    step = tf.function(lambda batch: strategy.run(replica_step, args=batch))
    for batch in strategy.experimental_distribute_dataset(dataset.repeat(100).with_options(options)):
        step(batch)
    model.fit(dataset.with_options(options), epochs=100, verbose=0)
    if not strategy.cluster_resolver.task_id:
        fitted = np.round(model.get_weights()[0].ravel(), 4)
        print(f"{strategy.num_replicas_in_sync} replicas: {np.round(weights.numpy().ravel(), 4)} {fitted}")


if __name__ == "__main__":
    main()
