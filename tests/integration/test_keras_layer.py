"""Remote modules as Keras layers, and Keras models in the loops of others: against all-local models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradwire as gw
from tests.integration import fit_by_backend
from tests.integration.keras_alike import as_numpy, assert_layers_as_in_process

HERE = Path(__file__).parent
Workers = Callable[[str], gw.Worker]
X = np.random.default_rng(0).normal(size=(16, 6))
IDS = np.random.default_rng(1).integers(0, 11, (8, 5))


# ---- Training as the all-local model ---------------------------------------------------------------------------------


def make_ends(dtype: str) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    return keras.layers.Dense(5, dtype=dtype, name="first"), keras.layers.Dense(1, dtype=dtype, name="last")


def local_training(dtype: str, steps: int) -> dict[str, np.ndarray]:
    """The same three parts, all in torch."""
    import torch

    sys.path.insert(0, str(HERE / "targets"))
    try:
        import keras_torch
    finally:
        sys.path.pop(0)
    net = keras_torch.make_block(dtype)
    linears = [torch.nn.Linear(6, 5), torch.nn.Linear(4, 1)]
    ends = make_ends(dtype)
    for linear, end, size in zip(linears, ends, (6, 4), strict=True):
        end.build((None, size))
        linear.to(net[0].weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(as_numpy(end.kernel).T))
            linear.bias.zero_()
    model = torch.nn.Sequential(linears[0], net, linears[1])
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0625, momentum=0.875
    )  # exact in float32, as Keras keeps it
    x = torch.tensor(X.astype(dtype))
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) ** 2 - x[:, :1] * model[0](x)[:, :1]).mean().backward()
        optimizer.step()
    return {name: v.detach().numpy() for name, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("dtype", "tolerance", "compiled"),
    [
        ("float64", 1e-9, True),
        pytest.param("float32", 1e-5, True, marks=pytest.mark.slow),
        pytest.param("float64", 1e-9, False, marks=pytest.mark.slow),
    ],
)
def test_r43_both_ends_and_the_remote_layer_train_as_the_local_model(
    worker_of: Workers, dtype: str, tolerance: float, compiled: bool
) -> None:
    net = worker_of("torch").module("keras_torch:make_block", dtype)
    first, last = make_ends(dtype)
    layer, x = gw.keras.Layer(net), tf.constant(X, dtype)
    optimizer = keras.optimizers.SGD(0.0625, momentum=0.875)

    def step() -> None:
        with tf.GradientTape() as tape:
            hidden = first(x)
            # (the first stage is called twice, as in the oracle, so that its gradients meet in front of the remote)
            loss = tf.reduce_mean(last(layer(hidden, training=True)) ** 2 - x[:, :1] * first(x)[:, :1])
        variables = [*first.trainable_weights, *layer.trainable_weights, *last.trainable_weights]
        optimizer.apply_gradients(
            zip(tape.gradient(loss, [v.value for v in variables]), variables, strict=True)
        )

    steps = 50 if compiled else 10
    first(x), last(layer(first(x)))
    run = tf.function(step) if compiled else step
    for _ in range(steps):
        run()
    wanted = local_training(dtype, steps)
    got = {v.name: as_numpy(v) for v in layer.trainable_weights}
    for name, value in wanted.items():
        part, _, own = name.partition(".")
        if part == "1" and "running" not in own and "num" not in own:
            np.testing.assert_allclose(got[own.replace(".", "_")], value, tolerance, tolerance, err_msg=name)
    np.testing.assert_allclose(as_numpy(first.kernel).T, wanted["0.weight"], tolerance, tolerance)
    np.testing.assert_allclose(as_numpy(last.kernel).T, wanted["2.weight"], tolerance, tolerance)
    buffers = net.buffers()
    np.testing.assert_allclose(buffers["1.running_mean"], wanted["1.1.running_mean"], tolerance, tolerance)
    assert buffers["1.num_batches_tracked"] == steps  # no spec, trace or evaluation moved it (R40)


def said_by_the_program(backend: str, python: Path, weights: Path) -> dict[str, Any]:
    """What `fit_by_backend` tells as a program of its own."""
    done = subprocess.run(
        [sys.executable, HERE / "fit_by_backend.py", python, HERE / "targets", weights],
        check=False,
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings(  # Keras reading a variable of its own, as a weight file has it do
    "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning:keras.src.backend.tensorflow"
)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_r39_fit_evaluate_predict_and_weight_files_with_each_backend(
    worker_of: Workers, torch_python: Path, tmp_path: Path, backend: str, history_of_torch: list[float]
) -> None:
    weights = tmp_path / "w.weights.h5"
    if backend == keras.backend.backend():
        said = fit_by_backend.trained(worker_of("torch"), str(weights))
    else:
        said = said_by_the_program(backend, torch_python, weights)
    assert said["backend"] == backend
    np.testing.assert_allclose(said["history"], history_of_torch, 1e-4)
    assert said["counted"] == [0, 12, 12] and said["again"] and said["assigned"]
    assert said["jit"] is (backend == "jax") and said["output"] == "(None, 1)"
    assert said["names"] == [f"{i}_{kind}" for i in (0, 1, 4) for kind in ("weight", "bias")]
    # (of unchanged weights; an assign in JAX and TensorFlow puts them elsewhere, in torch not)
    assert said["copied"] == {"made": 0, "assigned": 0 if backend == "torch" else 512 * 512 * 4, "set": 0}
    assert said["right"] == {"made": True, "assigned": True, "set": True}


@pytest.fixture(scope="module")
def history_of_torch() -> list[float]:
    """What `fit_by_backend` must show, by torch alone."""
    import torch

    sys.path.insert(0, str(HERE / "targets"))
    try:
        import keras_torch
    finally:
        sys.path.pop(0)
    head = torch.nn.Linear(4, 1)
    torch.nn.init.ones_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(keras_torch.make_block("float32"), head)
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.05), []
    x, y = torch.tensor(fit_by_backend.X), torch.tensor(fit_by_backend.Y)
    for _ in range(3):
        losses = []
        for at in range(0, 64, 16):
            optimizer.zero_grad()
            loss = ((model(x[at : at + 16]) - y[at : at + 16]) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        history.append(float(np.mean(losses)))
    return history


@pytest.mark.parametrize("compiled", [False, True])
def test_a_policy_of_mixed_precision_casts_inputs_and_weights_alike(
    worker_of: Workers, compiled: bool
) -> None:
    net = worker_of("torch").module("torch.nn:Linear", 6, 3)
    layer, x = gw.keras.Layer(net, dtype="mixed_bfloat16"), tf.constant(X, "float32")
    like = keras.layers.Dense(3, dtype="mixed_bfloat16")
    like.build(x.shape)
    like.set_weights([as_numpy(layer.weights[0]).T, as_numpy(layer.weights[1])])

    def run(layer: Any) -> Any:
        with tf.GradientTape() as tape:
            y = layer(x)
            loss = tf.reduce_sum(tf.cast(y, "float32") ** 2)
        return y, tape.gradient(loss, [v.value for v in layer.trainable_weights])

    (y, (kernel, bias)), (wanted, (kernel_like, bias_like)) = (
        (tf.function(run) if compiled else run)(one) for one in (layer, like)
    )
    assert y.dtype == wanted.dtype == layer(keras.Input((6,))).dtype == tf.bfloat16
    assert {v.dtype for v in layer.weights} == {"float32"} and kernel.dtype == bias.dtype == tf.float32
    np.testing.assert_allclose(
        as_numpy(tf.cast(y, "float32")), as_numpy(tf.cast(wanted, "float32")), 0.02, 0.02
    )
    np.testing.assert_allclose(as_numpy(kernel).T, as_numpy(kernel_like), 0.05, 0.2)
    np.testing.assert_allclose(as_numpy(bias), as_numpy(bias_like), 0.05, 0.2)


# ---- Layers of other frameworks ---------------------------------------------------------------------------------------


def test_a_keras_model_that_has_no_weights_yet_honours_training(worker_of: Workers) -> None:
    net = worker_of("tensorflow").module("keras_models:make_sequence")
    layer = gw.keras.Layer(net, name="remote")
    assert layer.weights == [] and net.parameters() == {}
    symbolic = layer(keras.Input((5,), dtype="int64"))
    assert (symbolic.shape, symbolic.dtype) == ((None, 5, 3), "float32")
    assert layer.trainable_weights[0].name == "embedding_embeddings"
    before = net.buffers()
    one, two = (as_numpy(layer(IDS, training=True)) for _ in range(2))
    still, same = as_numpy(layer(IDS)), as_numpy(layer(IDS, training=False))
    assert (one != two).any() and (still == same).all()
    moved = net.buffers()
    assert any((moved[name] != value).any() for name, value in before.items())
    assert net.training is False  # its own mode is another matter
    seeded = gw.keras.Layer(net.options(seed=3))
    assert (as_numpy(seeded(IDS, training=True)) == as_numpy(seeded(IDS, training=True))).all()
    variables = [v.value for v in layer.trainable_weights]
    with tf.GradientTape() as tape:
        y = layer(tf.constant(IDS), training=True)
    found = tape.gradient(y, variables)
    assert [g.shape for g in found] == [v.shape for v in variables]
    np.testing.assert_allclose(found[-1], [40, 40, 40])


def test_autograph_rewrites_nothing_of_a_layer_that_makes_its_weights_in_a_dataset(
    worker_of: Workers,
) -> None:
    layer = gw.keras.Layer(worker_of("tensorflow").module("keras_models:make_sequence"))
    found = tf.data.Dataset.from_tensor_slices(IDS).batch(4).map(lambda ids: layer(ids, training=False))
    np.testing.assert_allclose(np.concatenate(list(found)), as_numpy(layer(IDS)), 1e-5, 1e-6)


def test_explicit_buffers_are_weights_here_and_nothing_changes_there(worker_of: Workers) -> None:
    net = worker_of("torch").module("keras_torch:make_block", "float32")
    layer = gw.keras.Layer(net, buffers="explicit")
    before, x = net.state_dict(), X[:, :5].astype("float32")
    names = [v.name for v in layer.non_trainable_weights]
    assert names == ["1_running_mean", "1_running_var", "1_num_batches_tracked"]
    tf.function(lambda: layer(x, training=True))()
    layer(x, training=True), layer(x)
    assert as_numpy(layer.non_trainable_weights[2]) == 2
    widening = gw.keras.Layer(worker_of("jax").module("jax_modules:make_widening"), buffers="explicit")
    with pytest.raises(gw.DtypeError, match="is float32 and a call has made float64 of it"):
        widening(X[:, :3], training=True)
    assert all((net.state_dict()[name] == value).all() for name, value in before.items())
    net.train()
    net(x), net(x)
    np.testing.assert_allclose(
        as_numpy(layer.non_trainable_weights[0]), net.buffers()["1.running_mean"], 1e-6
    )


def test_frozen_parts_stay_in_the_worker(worker_of: Workers) -> None:
    net = worker_of("torch").module("keras_torch:make_block", "float32")
    net.requires_grad_(False, ["0", "1"])
    layer = gw.keras.Layer(net)
    assert [v.name for v in layer.trainable_weights] == ["4_weight", "4_bias"]
    layer.trainable = False
    assert layer.trainable_weights == [] and len(layer.non_trainable_weights) == 2
    assert layer(X[:, :5].astype("float32")).shape == (16, 4)


def test_tensors_and_settings_in_one_call(worker_of: Workers) -> None:
    """Keras refuses them beside each other where a layer's signature does not name its arguments."""
    remote = worker_of("torch").module("in_torch:Attending")
    layer, x = gw.keras.Layer(remote), X[:, :4].astype("float32")
    mask, shift = (x > 0).astype("float32"), np.ones((16, 4), "float32")

    def call(x: Any, mask: Any, shift: Any, **mode: Any) -> Any:
        options = {"shift": shift, "scale": 3, "unused": None}
        return layer(x, 2.0, mask=mask, options=options, as_tuple=False, **mode)

    expected = remote(x, 2.0, mask=mask, options={"shift": shift, "scale": 3}, as_tuple=False)
    np.testing.assert_allclose(call(x, mask, shift, training=True), expected, rtol=1e-6)
    inputs = [keras.Input((4,)) for _ in range(3)]
    model = keras.Model(inputs, call(*inputs))
    np.testing.assert_allclose(model.predict([x, mask, shift], batch_size=7, verbose=0), expected, rtol=1e-6)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    before = model.evaluate([x, mask, shift], shift, verbose=0)
    model.fit([x, mask, shift], shift, epochs=3, verbose=0)
    assert model.evaluate([x, mask, shift], shift, verbose=0) < before


# ---- What is not copied again -------------------------------------------------------------------------------------------


def test_unchanged_weights_are_not_copied_and_no_change_is_missed(worker_of: Workers, tmp_path: Path) -> None:
    worker = worker_of("torch")
    layer = gw.keras.Layer(worker.module("in_torch:make_block", [512, 512]), name="block")
    model = keras.Sequential([keras.Input((512,)), layer])
    kernel, bias = (v.value for v in layer.weights)
    x = np.random.default_rng(0).normal(size=(2, 512)).astype("float32")
    compiled = tf.function(lambda: layer(x))
    nbytes = 512 * 512 * 4

    def check(call: Callable[[], Any], copied: int) -> None:
        wanted = np.tanh(x @ kernel.numpy().T + bias.numpy())
        call()
        before = worker.stats()["copied_bytes"]
        np.testing.assert_allclose(call(), wanted, 1e-5, 1e-5)
        assert worker.stats()["copied_bytes"] - before == copied

    def apply_gradients() -> None:
        keras.optimizers.Adam(0.1).apply_gradients([(tf.ones_like(v.value), v) for v in layer.weights])

    model.compile(keras.optimizers.SGD(0.5), "mse")
    check(lambda: model.predict(x, verbose=0), 0)
    made = [as_numpy(v) for v in layer.weights]
    model.fit(x, x, batch_size=2, verbose=0)
    assert all((as_numpy(v) != value).any() for v, value in zip(layer.weights, made, strict=True))
    check(lambda: model.predict(x, verbose=0), nbytes)
    changes: list[tuple[Callable[[], Any], int]] = [
        (lambda: layer.set_weights(made), 0),
        (
            lambda: np.asarray(tf.convert_to_tensor(kernel)._numpy()).fill(0.0625),
            0,
        ),  # behind TensorFlow's back
        (lambda: layer.weights[0].assign(layer.weights[0] * 2), nbytes),
        (lambda: layer.set_weights(layer.get_weights()), 0),
        (lambda: kernel.assign_add(tf.ones_like(kernel)), nbytes),
        (lambda: kernel.assign_add(tf.ones_like(kernel)), nbytes),  # in place, at the same address
        (lambda: model.save_weights(tmp_path / "w.weights.h5"), nbytes),
        (lambda: model.load_weights(tmp_path / "w.weights.h5"), 0),
        (lambda: layer.set_weights([w + 1 for w in layer.get_weights()]), 0),
        (lambda: layer.set_weights(layer.get_weights()), 0),
        (apply_gradients, nbytes),
        (tf.function(lambda: kernel.assign_sub(tf.ones_like(kernel))), nbytes),
        (lambda: layer.set_weights(layer.get_weights()), 0),
        (lambda: kernel.scatter_nd_update([[0]], tf.zeros((1, 512))), nbytes),  # reading copies from then on
    ]
    for change, copied in changes:
        change()
        for call in (lambda: layer(x), compiled):
            check(call, copied)


# ---- A Keras model in a loop of JAX's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_keras_model_with_results_of_three_dimensions_in_an_optax_loop(
    worker_of: Workers, dtype: str
) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    jax.config.update("jax_enable_x64", dtype == "float64")
    try:
        net = worker_of("tensorflow").module("keras_models:make_dense", dtype=dtype)
        apply, params = gw.jax.functional(net)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 5, 4)), dtype)
        optimizer = optax.adam(0.01)
        first = params
        tolerance = 1e-9 if dtype == "float64" else 1e-5

        def loss(params: Any, apply: Any = apply) -> Any:
            y = apply(params, x)
            return jnp.mean((y - jnp.sin(x[..., :3])) ** 2)

        def local(params: Any, x: Any) -> Any:
            one, two = params["dense/kernel"], params["dense_1/kernel"]
            return jnp.tanh(x @ one + params["dense/bias"]) @ two + params["dense_1/bias"]

        def trained(apply: Any, params: Any) -> tuple[Any, list[float]]:
            @jax.jit
            def step(params: Any, state: Any) -> Any:
                value, gradients = jax.value_and_grad(loss)(params, apply)
                updates, state = optimizer.update(gradients, state)
                return optax.apply_updates(params, updates), state, value

            state, values = optimizer.init(params), []
            for _ in range(20):
                params, state, value = step(params, state)
                values.append(float(value))
            return params, values

        names = dict(
            zip(
                sorted(params),
                sorted(["dense/bias", "dense/kernel", "dense_1/bias", "dense_1/kernel"]),
                strict=True,
            )
        )
        assert apply(params, x).shape == (7, 5, 3) and apply(params, x).dtype == dtype
        remote, values = trained(apply, params)
        wanted, expected = trained(lambda p, x: local({names[n]: v for n, v in p.items()}, x), first)
        np.testing.assert_allclose(values, expected, tolerance)
        assert values[-1] < values[0]
        for name, value in wanted.items():
            np.testing.assert_allclose(remote[name], value, tolerance, tolerance * 10, err_msg=name)
        with pytest.raises(gw.UsageError, match="no parameter nope"):
            apply({"nope": x}, x)
    finally:
        jax.config.update("jax_enable_x64", False)


# ---- What is refused, and what files do -------------------------------------------------------------------------------


def test_bad_input_says_what_to_do(worker_of: Workers, tmp_path: Path) -> None:
    torch_worker = worker_of("torch")
    with pytest.raises(gw.UsageError, match=r"is a function .*worker\.module"):
        gw.keras.Layer(torch_worker.function("in_torch:cube"))
    net = torch_worker.module("keras_torch:make_block", "float32")
    with pytest.raises(gw.UsageError, match="'worker' or 'explicit'"):
        gw.keras.Layer(net, buffers="here")
    layer, x = gw.keras.Layer(net, name="block"), X[:, :5].astype("float32")
    with pytest.raises(gw.UsageError, match="training must be True or False"):
        layer(x, training=tf.constant(True))
    model = keras.Sequential([keras.Input((5,)), layer])
    with pytest.raises(gw.UsageError, match="save_weights"):
        model.save(tmp_path / "whole.keras")
    model.save_weights(tmp_path / "w.weights.h5")
    other = gw.keras.Layer(torch_worker.module("in_torch:make_block", [5, 3]), name="block")
    before = [as_numpy(v) for v in other.weights]
    with pytest.raises(ValueError, match=r"nothing was loaded: unexpected: .*4_weight.*; 0_weight has shape"):
        keras.Sequential([keras.Input((5,)), other]).load_weights(tmp_path / "w.weights.h5")
    assert all((as_numpy(v) == value).all() for v, value in zip(other.weights, before, strict=True))
    with pytest.raises(Exception, match="gradwire_calls_another_process__use_jit_compile_False"):
        tf.function(lambda: layer(x), jit_compile=True)()
    with pytest.warns(UserWarning, match="jit_compile=False"):
        model.compile("sgd", "mse", jit_compile=True)


def test_a_weight_file_says_what_it_leaves_out(worker_of: Workers, tmp_path: Path) -> None:
    worker = worker_of("torch")
    for odd, what in ((False, r"inner\._extra_state"), (True, "cannot be sent")):
        layer = gw.keras.Layer(worker.module("in_torch:Nested", odd=odd))
        model = keras.Sequential([keras.Input((3,)), layer])
        with pytest.warns(UserWarning, match=rf"weight files do not have .*{what}"):
            model.save_weights(tmp_path / "w.weights.h5")


@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_r39_tensorflows_checkpoints_have_weights_and_statistics(
    worker_of: Workers, tmp_path: Path, buffers: str
) -> None:
    x, path = tf.constant(X[:, :5], "float32"), str(tmp_path / "saved")
    layers = [
        gw.keras.Layer(worker_of("torch").module("keras_torch:make_block", "float32"), buffers=buffers)
        for _ in range(2)
    ]
    layers[0](x, training=True)
    layers[0].trainable_weights[0].assign_add(tf.ones_like(layers[0].trainable_weights[0]))
    y = layers[0](x)
    assert (as_numpy(layers[1](x)) != as_numpy(y)).any()
    tf.train.Checkpoint(part=layers[0]).write(path)
    tf.train.Checkpoint(part=layers[1]).read(path).assert_consumed()
    np.testing.assert_array_equal(layers[1](x), y)


def test_generations_a_step_in_the_worker_a_load_and_a_restart(
    shared_bridge: gw.Bridge, torch_python: Any
) -> None:
    """The layer's parameters are its own: what becomes of the worker's does not reach it, and a restart loses the forward."""
    worker = shared_bridge.worker("torch", python=torch_python, path=[HERE / "targets"], threads=1)
    net = worker.module("keras_torch:make_block", "float64")
    layer, x = gw.keras.Layer(net), tf.constant(X[:, :5])
    variables = [v.value for v in layer.trainable_weights]
    with tf.GradientTape(persistent=True) as tape:
        y = layer(x)
    wanted = tape.gradient(y, variables)
    net.load_state_dict({name: value * 2 for name, value in net.parameters().items()}, strict=False)
    again = tape.gradient(y, variables)
    np.testing.assert_array_equal(again[0], wanted[0])
    np.testing.assert_array_equal(layer(x), y)
    worker.restart(discard_state=True)
    with pytest.raises(gw.ResidualLostError):
        tape.gradient(y, variables)
    np.testing.assert_allclose(layer(x), y, 1e-12)
    worker.close()


def test_r39_frozen_layers_losses_masks_and_names_with_tensorflow(
    worker_of: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE / "targets"))
    assert_layers_as_in_process(worker_of("tensorflow"))
    import keras_models

    local = keras_models.make_regularized()
    layer = gw.keras.Layer(worker_of("tensorflow").module("keras_models:make_regularized"))
    histories = []
    for part in (local, layer):
        model = keras.Sequential([keras.Input((4,)), part])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = X[:, :4].astype("float32")
        histories.append(
            model.fit(x, x[:, :3], epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"]
        )
    np.testing.assert_allclose(*histories, 1e-4)


def test_a_layer_for_each_step_of_a_sequence(worker_of: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """`TimeDistributed` asks for the shape alone."""
    monkeypatch.syspath_prepend(str(HERE / "targets"))
    import keras_models

    local = keras_models.make_dense()
    layer = gw.keras.Layer(worker_of("tensorflow").module("keras_models:make_dense"))
    layer.set_weights(local.get_weights())
    x, found = tf.constant(np.random.default_rng(0).normal(size=(2, 3, 5, 4)), "float32"), []
    for part in (local, layer):
        given = keras.Input((3, 5, 4))
        model = keras.Model(given, keras.layers.TimeDistributed(part)(given))
        with tf.GradientTape() as tape:
            y = model(x)
        found.append([y, *tape.gradient(y, [v.value for v in model.trainable_weights])])
    for mine, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(mine, wanted, 1e-5, 1e-5)


def test_losses_elsewhere_are_never_left_out_in_silence(
    worker_of: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    monkeypatch.syspath_prepend(str(HERE / "targets"))
    import keras_models

    worker = worker_of("tensorflow")
    net = worker.module("keras_models:make_regularized")
    with pytest.warns(UserWarning, match=r"has regularizers .*gw\.keras\.Layer.*sum\(net\.losses\)"):
        net.optimizer("keras.optimizers:SGD", learning_rate=0.1)
    gw.jax.functional(net)  # told once
    with pytest.warns(UserWarning, match="has regularizers"):
        apply, params = gw.jax.functional(worker.module("keras_models:make_with_losses"))
    with pytest.warns(UserWarning, match="has regularizers or losses of its own"):
        gw.jax.functional(worker.module("keras_models:make_regularized"), owner="worker")
    x = X[:, :4].astype("float32")
    adding = worker.module("keras_models:make_adding")
    optimizer = adding.optimizer("keras.optimizers:SGD", learning_rate=0.1)
    y, pullback = adding.vjp(x)
    pullback(y)
    with pytest.warns(UserWarning, match="has regularizers or losses of its own"):  # known after a call
        optimizer.step()
    loss, bars = jax.value_and_grad(lambda p: apply(p, x)[1])(params)
    local = keras_models.make_regularized()
    for v, value in zip(local.trainable_weights, params.values(), strict=True):
        v.assign(value)
    with tf.GradientTape() as tape:
        local(x)
        wanted = tf.add_n(local.losses)
    np.testing.assert_allclose(loss, wanted, 1e-5)
    gradients = tape.gradient(wanted, [v.value for v in local.trainable_weights])
    for name, gradient in zip(params, gradients, strict=True):
        np.testing.assert_allclose(bars[name], gradient, 1e-4, 1e-6)
