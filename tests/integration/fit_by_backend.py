"""A remote torch block trained by `model.fit`, and what `test_keras_layer` wants to know of it with each backend of Keras.

As a program (for a backend other than that of the tests): its arguments are the torch interpreter, the folder of targets
and where the weights go, and it prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

if __name__ == "__main__":
    sys.path.append(sys.argv[2])
    import keras_alone  # noqa: F401 - before Keras

import keras
import numpy as np

import gradwire as gw

X = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")


def make_model(net: gw.Remote, **options: Any) -> tuple[Any, Any]:
    layer = gw.keras.Layer(net, name="block", **options)
    inputs = keras.Input((5,))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones", name="head")(layer(inputs)))
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model, layer


def copying(worker: gw.Worker) -> tuple[dict[str, int], dict[str, bool]]:
    """Bytes copied by a call of a layer with 1 MiB of weights, and whether it saw these, after three kinds of change."""
    layer = gw.keras.Layer(worker.module("in_torch:make_block", [512, 512]))
    kernel, bias = layer.weights
    x, copied, right = np.ones((2, 512), "float32"), {}, {}
    changes = {
        "made": lambda: None,
        "assigned": lambda: kernel.assign(kernel * 2 + 1),
        "set": lambda: layer.set_weights([w / 8 for w in layer.get_weights()]),
    }
    for name, change in changes.items():
        change()
        layer(x)
        before = worker.stats()["copied_bytes"]
        y = keras.ops.convert_to_numpy(layer(x))
        copied[name] = worker.stats()["copied_bytes"] - before
        values = [keras.ops.convert_to_numpy(v) for v in (kernel, bias)]
        right[name] = bool(np.allclose(y, np.tanh(x @ values[0].T + values[1]), 1e-4, 1e-4))
    return copied, right


def trained(worker: gw.Worker, weights: str) -> dict[str, Any]:
    """By a torch worker with the folder of targets on its path."""
    nets = [worker.module("keras_torch:make_block", "float32") for _ in range(2)]
    model, layer = make_model(nets[0])
    counted = [int(nets[0].buffers()["1.num_batches_tracked"])]
    history = model.fit(X, Y, epochs=3, batch_size=16, shuffle=False, verbose=0).history["loss"]
    counted.append(int(nets[0].buffers()["1.num_batches_tracked"]))
    loss, predicted = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    counted.append(int(nets[0].buffers()["1.num_batches_tracked"]))
    model.save_weights(weights)
    other, _ = make_model(nets[1])
    other.load_weights(weights)
    first = layer.trainable_weights[0]
    first.assign(first * 0)
    copied, right = copying(worker)
    return {
        "backend": keras.backend.backend(),
        "copied": copied,
        "right": right,
        "jit": model.jit_compile,
        "history": history,
        "loss": float(loss),
        "counted": counted,
        "again": bool((other.predict(X, verbose=0) == predicted).all()),
        "assigned": bool((model.predict(X, verbose=0) != predicted).any()),
        "output": str(model.output.shape),
        "names": [v.name for v in layer.weights],
    }


def main(python: str, targets: str, weights: str) -> None:
    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=python, path=[targets], threads=1)
        print(json.dumps(trained(worker, weights)))


if __name__ == "__main__":
    main(*sys.argv[1:])
