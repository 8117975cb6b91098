"""A TensorFlow module as a function of its parameters, against the module itself with these values assigned to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, flatten
from gradwire_workers import tensorflow as engine
from gradwire_workers.program import WorkerSite
from gradwire_workers.tensorflow.residuals import Replayed, Taped

COMPILE = pytest.mark.parametrize("compile", [None, False], ids=["traced", "eager"])
X = np.random.default_rng(3).normal(size=(6, 4))
IDS = np.array([[1, 2, 3, 4, 5], [3, 3, 3, 2, 1]])


@pytest.fixture(scope="module", autouse=True)
def prepared() -> Iterator[None]:
    engine.prepare(None, None, None)
    yield
    switches = ("constant_folding", "arithmetic_optimization", "remapping")
    tf.config.optimizer.set_experimental_options(dict.fromkeys(switches, True))


class Mixed(tf.Module):
    """Compiled Python control flow, rows of a table, a layer of Keras's inside, and a frozen weight."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.w, self.table = tf.Variable(rng.normal(size=(4, 3))), tf.Variable(rng.normal(size=(7, 3)))
        self.scale = tf.Variable(2.0, trainable=False, dtype=tf.float64)
        self.head = keras.layers.Dense(3, dtype="float64")
        self.head.build((None, 3))

    @tf.function
    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 1e9:
            x = x * 2
        y = (x @ self.w) * self.scale + tf.reduce_sum(tf.nn.embedding_lookup(self.table, [1, 1, 3]), 0)
        for _ in tf.range(2):
            y = tf.tanh(self.head(y))
        return y


def dense_net() -> Any:
    layers = keras.layers
    net = keras.Sequential(
        [layers.Dense(5, activation="tanh"), layers.BatchNormalization(), layers.Dense(3)], name="net"
    )
    for layer in net.layers:
        layer.dtype_policy = "float64"
    net.build((None, 4))
    return net


def recurrent_net() -> Any:
    layers = keras.layers
    net = keras.Sequential(
        [layers.Embedding(11, 4), layers.LSTM(3, return_sequences=True), layers.Dropout(0.5), layers.Dense(2)]
    )
    net(IDS)
    return net


class Case(NamedTuple):
    make: Callable[[], Any]
    x: Any
    training: bool | None


CASES = {
    "keras in training": Case(dense_net, X, True),
    "keras in evaluation": Case(dense_net, X, False),
    "rows of a table, a loop, integers": Case(recurrent_net, IDS, False),
    "tf.Module": Case(Mixed, X, None),
}


def site_of(args: list[Any], **options: Any) -> tuple[WorkerSite, list[Any]]:
    structure, leaves = flatten([args, {}], tf.is_tensor)
    return WorkerSite(structure, **options), leaves


def loaded(case: Case) -> Any:
    base = engine.program(case.make(), is_module=True)
    if case.training is not None:
        base.train(case.training)
    return base


def values(program: Any) -> dict[str, np.ndarray]:
    return {name: v.numpy() for name, v in program.state_dict().items()}


def assert_close(found: list[Any], wanted: list[Any], tolerance: float = 1e-12) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            np.asarray(tf.convert_to_tensor(a)), np.asarray(tf.convert_to_tensor(b)), tolerance, tolerance
        )


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_close([tf.constant(1.0)], [tf.constant(1.001)])


@COMPILE
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_modules_own(name: str, compile: bool | None) -> None:
    case = CASES[name]
    base = loaded(case)
    functional, x = base.functional(False), tf.constant(case.x)
    given = {name: p * 1.5 for name, p in base.parameters().items()}
    site, leaves = site_of([given, x], training=case.training, compile=compile)
    before = values(base)
    (aval,), _ = functional.spec(site, [engine.aval(t) for t in leaves])
    assert_close(list(values(base).values()), list(before.values()), 0)

    result, kept = functional.keep(site, (), leaves)
    assert type(kept) is (Taped if compile is False else Replayed)
    assert aval.shape == tuple(result.tensors[0].shape)
    cotangent = tf.cos(result.tensors[0])
    wrt = tuple(i for i, t in enumerate(leaves) if t.dtype.is_floating)
    moved = values(base)
    found, _ = kept.derive(("T", wrt, 1), [cotangent], keep=False, accumulate=False)
    assert_close(list(values(base).values()), list(moved.values()), 0)  # the pullback moves nothing

    base.load_state_dict(before)
    base.load_state_dict({name: v.numpy() for name, v in given.items()}, strict=False)
    module, mode = base._module.target, {} if case.training is None else {"training": case.training}
    variables = list(base.trainable_values())
    with tf.GradientTape() as tape:
        tape.watch(x)
        expected = module(x, **mode)
    wanted = tape.gradient(expected, [*variables, x], output_gradients=cotangent)
    assert_close([result.tensors[0]], [expected])
    assert_close(found, [g for g in wanted if g is not None], 1e-6 if name.startswith("rows") else 1e-12)
    for name, value in base.buffers().items():  # moved as by the module's own call, or not at all
        assert_close([moved[name]], [value])
    has_moved = any((moved[name] != value).any() for name, value in before.items())
    assert has_moved is bool(case.training) and functional.generation == base.generation == 2
    for name, value in before.items():
        if name in given:
            assert (moved[name] == value).all()  # the module's own parameters were not touched


@COMPILE
def test_explicit_buffers_come_and_go(compile: bool | None) -> None:
    base = loaded(CASES["keras in training"])
    before, x = values(base), tf.constant(X)
    site, leaves = site_of([base.parameters(), base.buffers(), x], training=True, compile=compile)
    result, _ = base.functional(True).keep(site, (), leaves)
    _, buffers = fill(result.structure, list(result.tensors))
    assert_close(list(values(base).values()), list(before.values()), 0)
    base._module.target(x, training=True)
    assert buffers.keys() == base.buffers().keys() != {}
    assert_close(list(buffers.values()), list(base.buffers().values()))
    assert all((values(base)[name] != before[name]).any() for name in buffers)
    assert not base.has_moved()  # by none of its calls
    site, leaves = site_of([base.parameters(), x], training=True, compile=compile)
    base.functional(False).run(site, (), leaves)
    assert base.has_moved() and base.functional(False).has_moved() and not base.functional(True).has_moved()


def test_parameters_that_are_not_given_stay_the_modules_own() -> None:
    base = loaded(CASES["keras in evaluation"])
    name = next(iter(base.parameters()))
    site, leaves = site_of([{name: base.parameters()[name]}, tf.constant(X)], training=False)
    base.load_state_dict({n: v * 2 for n, v in base.parameters().items() if n != name}, strict=False)
    assert_close(base.functional(False).run(site, (), leaves).tensors, [base._module.target(X)])


@COMPILE
def test_second_order_and_batches(compile: bool | None) -> None:
    """Against the same functional form under TensorFlow's own tapes."""
    base = loaded(CASES["keras in training"])
    parameters, x = base.parameters(), tf.constant(X)
    functional = base.functional(False)
    site, leaves = site_of([parameters, x], training=True, compile=compile)
    wrt = tuple(range(len(leaves)))
    result, kept = functional.keep(site, (), leaves)
    cotangent = tf.ones_like(result.tensors[0])
    first, again = kept.derive(("T", wrt, 1), [cotangent], keep=True, accumulate=False)
    found, _ = again.derive(("T", (0, 4), len(wrt)), first, keep=False, accumulate=False)

    variables = base.trainable_values()
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = base._module.target(x, training=True)
        gradients = inner.gradient(y, [*variables, x], output_gradients=cotangent)
    wanted = outer.gradient(gradients, [variables[0], variables[4]], output_gradients=first)
    assert_close(found, wanted, 1e-9)

    site, _ = site_of([parameters, x], training=False, compile=compile)
    stacked = [tf.stack([p, p * 2]) for p in leaves[:-1]]
    axes = (True,) * len(stacked) + (False,)
    rows = functional.run(site, (("V", axes),), [*stacked, x]).tensors[0]
    for number in (0, 1):
        single = functional.run(site, (), [*[p[number] for p in stacked], x]).tensors
        assert_close([rows[number]], single)


@COMPILE
def test_forward_and_pullback_share_the_dropout_mask_and_a_seed_reproduces(compile: bool | None) -> None:
    base = loaded(Case(recurrent_net, IDS, True))
    site, leaves = site_of([base.parameters(), tf.constant(IDS)], training=True, compile=compile)
    functional, ones = base.functional(False), tf.ones((2, 5, 2))
    result, kept = functional.keep(site, (), leaves)
    wrt = (len(leaves) - 3,)  # the last layer's kernel: its gradient is what came out of the dropout
    kernel, bias = leaves[wrt[0]], leaves[wrt[0] + 1]
    found, _ = kept.derive(("T", wrt, 1), [ones], keep=False, accumulate=False)
    assert_close(
        [tf.reduce_sum(kernel * found[0]) + 10 * tf.reduce_sum(bias)],
        [tf.reduce_sum(result.tensors[0])],
        1e-5,
    )
    other = functional.run(site, (), leaves).tensors[0]
    assert (other.numpy() != result.tensors[0].numpy()).any()
    seeded, _ = site_of([base.parameters(), tf.constant(IDS)], training=True, compile=compile, seed=7)
    one, two = (functional.run(seeded, (), leaves).tensors[0].numpy() for _ in range(2))
    assert one.tobytes() == two.tobytes()


def test_a_mode_of_its_own() -> None:
    base = loaded(CASES["keras in evaluation"])
    training, parameters = base.functional(False, True), base.parameters()
    assert (base.training, training.training, base.functional(False).training) == (False, True, False)
    site, leaves = site_of([parameters, tf.constant(X)], training=True)
    before = values(base)
    training.run(site, (), leaves)
    assert any((values(base)[name] != value).any() for name, value in before.items())
    assert base.training is False


def test_gradients_in_half_precision() -> None:
    layer = keras.layers.Dense(3, dtype="mixed_bfloat16")
    layer.build((None, 4))
    base = engine.program(layer, is_module=True)
    site, leaves = site_of([base.parameters(), tf.ones((2, 4))], training=False)
    result, kept = base.functional(False).keep(site, (), leaves)
    found, _ = kept.derive(("T", (0, 1), 1), [tf.ones_like(result.tensors[0])], keep=False, accumulate=False)
    assert result.tensors[0].dtype == tf.bfloat16 and [g.dtype for g in found] == [tf.float32] * 2
    assert (found[0].numpy() == 2).all()
    whole = keras.layers.Dense(3, dtype="bfloat16")
    whole.build((None, 4))
    base = engine.program(whole, is_module=True)
    site, leaves = site_of([base.parameters(), tf.ones((2, 4), tf.bfloat16)], training=False)
    word = (("T", (0, 1), 1),)
    found = base.functional(False).run(site, word, [*leaves, tf.ones((2, 3), tf.bfloat16)]).tensors
    assert [g.dtype for g in found] == [tf.bfloat16] * 2 and (
        tf.cast(found[0], tf.float32).numpy() == 2
    ).all()


# ---- What cannot be done is refused, never computed with the module's own values ------------------------------------------


class Direct(tf.Module):
    def __init__(self, how: str, folder: Path) -> None:
        self.w = tf.Variable(np.ones((4, 3)))
        whole = tf.TensorSpec((6, 4), tf.float64)
        if how == "concrete function":
            self.way = tf.function(lambda x: x @ self.w).get_concrete_function(whole)
        elif how == "SavedModel":
            inner = tf.Module()
            inner.w = self.w
            inner.call = tf.function(lambda x: x @ inner.w, input_signature=[whole])
            tf.saved_model.save(inner, str(folder))
            self.inner = tf.saved_model.load(str(folder))
            self.w = self.inner.w
            self.way = self.inner.call
        elif (
            how == "tf.recompute_grad"
        ):  # TensorFlow drops gradients of what is not an argument of its function
            self.way = tf.recompute_grad(lambda x: tf.sin(x @ self.w))
        elif how == "handle":
            self.way = lambda x: x @ tf.raw_ops.ReadVariableOp(resource=self.w.handle, dtype=tf.float64)
        else:
            handle = self.w.handle
            self.way = lambda x: x @ tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)

    def __call__(self, x: Any) -> Any:
        return self.way(x)


@pytest.mark.parametrize(
    ("how", "compile"),
    [
        (how, c)
        for how in ("concrete function", "SavedModel", "tf.recompute_grad", "handle")
        for c in (None, True, False)
    ]
    + [("a handle asked for before", True)],
)
def test_a_direct_read_is_refused(how: str, compile: bool | None, tmp_path: Path) -> None:
    base = engine.program(Direct(how, tmp_path), is_module=True)
    name = next(iter(base.parameters()))
    site, leaves = site_of([{name: base.parameters()[name]}, tf.constant(X)], compile=compile)
    for word, more in (((), []), ((("T", (0, 1), 1),), [tf.ones((6, 3), tf.float64)])):
        with pytest.raises(UsageError, match=name):
            base.functional(False).run(site, word, [*leaves, *more])
    wanted = np.sin(X @ np.ones((4, 3))) if how == "tf.recompute_grad" else X @ np.ones((4, 3))
    assert_close([base._module.target(tf.constant(X))], [wanted])  # and it is as it was before


def test_what_is_wrong_with_the_given_values_is_said() -> None:
    base = loaded(CASES["keras in evaluation"])
    name, value = next(iter(base.parameters().items()))
    for given, said in [
        ({"nope": value}, "no parameter nope. It has dense"),
        ({name: value[:2]}, r"float64 of shape \(4, 5\) in the module, and float64 of shape \(2, 5\)"),
        ({name: tf.cast(value, tf.float32)}, "and float32 of"),
    ]:
        site, leaves = site_of([given, tf.constant(X)], training=False)
        with pytest.raises(UsageError, match=said):
            base.functional(False).run(site, (), leaves)
    unbuilt = engine.program(keras.Sequential([keras.layers.Dense(2)]), is_module=True)
    site, leaves = site_of([{name: value}, tf.constant(X)], training=False)
    with pytest.raises(UsageError, match="none yet: call it once"):
        unbuilt.functional(False, trainable=True).run(site, (), leaves)
    function = engine.program(lambda x: x, is_module=False)
    with pytest.raises(UsageError, match="has no variables"):
        function.functional(False)


@pytest.mark.parametrize("compile", [None, False])
def test_parameters_that_are_made_at_the_first_call_are_missed_and_told(compile: bool | None) -> None:
    class Flexible(tf.Module):
        def __call__(self, x: Any) -> Any:
            if not hasattr(self, "w"):
                self.w = tf.Variable(tf.ones((x.shape[-1], 2), x.dtype))
            return tf.matmul(x, self.w)

    base = engine.program(Flexible(), is_module=True)
    site, leaves = site_of([{}, tf.constant(X)], compile=compile)
    form = base.functional(False)
    for _ in range(2):  # later it is there, and still not the caller's
        with pytest.raises(
            UsageError, match=r"this module made w when it was called, .* functional form anew"
        ):
            form.run(site, (), leaves)
    site, leaves = site_of([base.parameters(), tf.constant(X)], compile=compile)
    base.functional(False).run(site, (), leaves)


def test_an_error_of_the_target_leaves_it_as_it_was() -> None:
    class Failing(tf.Module):
        def __init__(self) -> None:
            self.w = tf.Variable(1.0)

        def __call__(self, x: Any) -> Any:
            raise ValueError(f"bad {float(self.w.shape.rank)}")

    base = engine.program(Failing(), is_module=True)
    site, leaves = site_of([{"w": tf.constant(2.0)}, tf.constant(1.0)])
    with pytest.raises(ValueError, match="bad 0"):
        base.functional(False).run(site, (), leaves)
    variable = base._module.target.w
    assert type(variable).__module__.startswith("tensorflow") and variable.numpy() == 1.0
    assert tf.function(lambda: variable + 1)().numpy() == 2.0


def test_verbs_about_state_act_on_the_module() -> None:
    base = loaded(CASES["keras in evaluation"])
    functional = base.functional(False)
    functional.train(True)
    assert base.training is True
    functional.load_state_dict({n: v * 0 for n, v in functional.state_dict().items()})
    assert all((v == 0).all() for v in values(base).values()) and base.generation == 1


class Clamped(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(4,), name="w", initializer="ones", dtype="float64")

    def call(self, x: Any) -> Any:
        self.w.assign(keras.ops.clip(self.w, -0.5, 0.5))
        return x * self.w


@COMPILE
@pytest.mark.parametrize("buffers", [False, True])
def test_a_module_that_assigns_to_its_parameter_is_refused(buffers: bool, compile: bool | None) -> None:
    """In one process the value stays; here it would end with the call, and training would go another way."""
    layer = Clamped()
    layer.build((None, 4))
    base = engine.program(layer, is_module=True)
    site, leaves = site_of(
        [base.parameters(), *([{}] if buffers else []), tf.constant(X)], training=True, compile=compile
    )
    with pytest.raises(UsageError, match=r"assigns to its parameter .*w when it is called"):
        base.functional(buffers).run(site, (), leaves)
    np.testing.assert_array_equal(layer.w, np.ones(4))


def test_a_constraint_is_refused_for_only_a_keras_optimizer_would_apply_it() -> None:
    layer = keras.layers.Dense(2, kernel_constraint=keras.constraints.MaxNorm(0.5), dtype="float64")
    layer.build((None, 4))
    base = engine.program(layer, is_module=True)
    site, leaves = site_of([base.parameters(), tf.constant(X)], training=False)
    with pytest.raises(UsageError, match=r"kernel has a constraint \(MaxNorm\)"):
        base.functional(False).run(site, (), leaves)
