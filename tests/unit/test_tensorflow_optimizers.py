"""Keras optimizers in a worker against the same ones in Keras's own loop, step by step, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradwire_wire.errors import UsageError
from gradwire_wire.structures import positional
from gradwire_workers import tensorflow as engine
from gradwire_workers.program import WorkerSite
from gradwire_workers.tensorflow.optimizers import Group

X = np.random.default_rng(0).normal(size=(6, 4))
SITE = WorkerSite(positional(1), training=True, accumulate=True)
WEIGHTS = np.random.default_rng(1).normal(
    size=(6, 3)
)  # of the loss; even ones have no gradient through BatchNorm
FIRST, LAST = "first", "last"


def make_net(**last: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(5, activation="tanh", name="first", dtype="float64"),
        keras.layers.BatchNormalization(name="norm", dtype="float64"),
        keras.layers.Dense(3, name="last", dtype="float64", **last),
    ]
    net = keras.Sequential(layers, name="net")
    net.build((None, 4))
    tf.random.set_seed(None)
    return net


@pytest.fixture
def program() -> Any:
    made = engine.program(make_net(), is_module=True)
    made.train(True)
    return made


def pull(program: Any, scale: float = 1.0) -> None:
    _, kept = program.keep(SITE, (), [tf.constant(X)])
    kept.derive(("T", (0,), 1), [tf.constant(scale * WEIGHTS)], keep=False, accumulate=True)


def local(
    net: Any, apply: Callable[[int, list[Any], list[Any]], None], steps: int = 4
) -> dict[str, np.ndarray]:
    for step in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(tf.constant(X), training=True) * WEIGHTS) * (step + 1)
        variables = net.trainable_variables
        apply(step, tape.gradient(loss, [v.value for v in variables]), variables)
    return {v.path.partition("/")[2]: np.asarray(v) for v in net.weights}


def train(program: Any, optimizer: Any, steps: int = 4, first: int = 0, **step: Any) -> dict[str, np.ndarray]:
    for number in range(first, first + steps):
        optimizer.zero_grad()
        pull(program, float(number + 1))
        optimizer.step(**step)
    return {name: np.asarray(v) for name, v in program.state_dict().items()}


def assert_agree(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_agree({"a": np.ones(2)}, {"a": np.array([1.0, 1.001])})


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"learning_rate": 0.01, "momentum": 0.9}),
        ("Adam", {"learning_rate": 0.01, "global_clipnorm": 0.5}),
        ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
        ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_keras(program: Any, kind: str, options: dict[str, Any]) -> None:
    target = getattr(keras.optimizers, kind)
    own = target(**options)
    wanted = local(make_net(), lambda _, g, v: own.apply_gradients(zip(g, v, strict=True)))
    assert_agree(train(program, program.optimizer(target, options)), wanted)
    assert program.generation == 4


def test_clipping_by_the_norm_of_all_gradients(program: Any) -> None:
    own, norms = keras.optimizers.SGD(0.1), []

    def apply(_: int, gradients: list[Any], variables: list[Any]) -> None:
        clipped, norm = tf.clip_by_global_norm(gradients, 0.7)
        norms.append(float(norm))
        own.apply_gradients(zip(clipped, variables, strict=True))

    wanted = local(make_net(), apply, 1)
    optimizer = program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.1})
    pull(program)
    assert optimizer.step(clip_norm=0.7) == pytest.approx(norms[0], rel=1e-12)
    found = program.state_dict()
    assert_agree({name: found[name] for name in wanted}, wanted)
    optimizer.zero_grad()
    pull(program)
    assert optimizer.step() is None


def test_groups_have_options_of_their_own_and_the_rest_is_left_alone(program: Any) -> None:
    names = list(program.parameters())
    first, last = [n for n in names if n.startswith(FIRST)], [n for n in names if n.startswith(LAST)]
    one, two = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.1)

    def apply(_: int, gradients: list[Any], variables: list[Any]) -> None:
        for own, members in ((one, first), (two, last)):
            own.apply_gradients(
                [
                    (g, v)
                    for g, v in zip(gradients, variables, strict=True)
                    if v.path.partition("/")[2] in members
                ]
            )

    groups = [{"names": first}, {"names": last, "learning_rate": 0.1}]
    optimizer = program.optimizer(keras.optimizers.Adam, {"learning_rate": 0.01}, groups)
    assert_agree(train(program, optimizer), local(make_net(), apply))
    with pytest.raises(UsageError, match="some groups have one of their own"):
        optimizer.schedule(
            keras.optimizers.schedules.CosineDecay, {"initial_learning_rate": 1.0, "decay_steps": 3}
        )


def test_an_optimizer_forgets_the_gradients_of_its_own_parameters_alone(program: Any) -> None:
    """As in torch: another one may have the others, and step when more have accumulated."""
    last = {n for n in program.parameters() if n.startswith(LAST)}
    optimizer = program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.1}, [{"names": [*last]}])
    pull(program)
    optimizer.step()
    optimizer.zero_grad()
    assert {name for name, gradient in program.grads().items() if gradient is None} == last
    program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.1}).zero_grad()
    assert not any(gradient is not None for gradient in program.grads().values())


def test_a_schedule_begins_when_it_is_given_and_goes_on_where_a_state_says(program: Any) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
    own = keras.optimizers.SGD(0.01, momentum=0.5)

    def apply(step: int, gradients: list[Any], variables: list[Any]) -> None:
        own.learning_rate = schedule(max(step - 1, 0))
        own.apply_gradients(zip(gradients, variables, strict=True))

    wanted = local(make_net(), apply, 6)
    options = {"initial_learning_rate": 0.01, "decay_steps": 2, "decay_rate": 0.5}

    def make() -> Any:
        return program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.01, "momentum": 0.5})

    def scheduled() -> Any:
        optimizer = make()
        optimizer.schedule(keras.optimizers.schedules.ExponentialDecay, options)
        return optimizer

    optimizer = make()
    train(program, optimizer, 1)
    optimizer.schedule(keras.optimizers.schedules.ExponentialDecay, options)
    train(program, optimizer, 2, 1)
    other = scheduled()
    state = optimizer.state_dict()
    (group,) = state["groups"]
    numbers = {name: tf.constant(x, tf.float64) for name, x in group["options"].items()}  # as from a file
    other.load_state_dict(
        {"groups": [{**group, "options": numbers}], "scheduled": tf.constant(state["scheduled"])}
    )
    assert_agree(train(program, other, 3, 3), wanted)
    with pytest.raises(UsageError, match="follows a schedule"):
        other.set({"learning_rate": 0.5})
    with pytest.raises(UsageError, match="call schedule"):
        make().load_state_dict(optimizer.state_dict())
    for target, kwargs in ((keras.optimizers.schedules.CosineDecay, {}), (keras.optimizers.Adam, {})):
        with pytest.raises(UsageError, match="makes no schedule"):
            other.schedule(target, kwargs)


def test_options_can_be_set(program: Any) -> None:
    own = keras.optimizers.Adam(0.01)

    def apply(step: int, gradients: list[Any], variables: list[Any]) -> None:
        if step == 2:
            own.learning_rate, own.beta_1 = 0.1, 0.5
        own.apply_gradients(zip(gradients, variables, strict=True))

    wanted = local(make_net(), apply)
    optimizer = program.optimizer(keras.optimizers.Adam, {"learning_rate": 0.01})
    train(program, optimizer, 2)
    optimizer.set({"learning_rate": 0.1, "beta_1": 0.5})
    assert_agree(train(program, optimizer, 2, 2), wanted)
    for options, said in [
        ({"lr": 0.1}, "no option lr .*learning_rate"),
        ({"learning_rate": "fast"}, "learning_rate='fast'"),
        ({"amsgrad": True}, "no option amsgrad"),
    ]:
        with pytest.raises(UsageError, match=said):
            optimizer.set(options)


@pytest.mark.parametrize(
    "kind", [keras.optimizers.Adam, keras.optimizers.Nadam]
)  # which has an unnamed variable
def test_state_goes_to_another_optimizer_and_what_does_not_fit_changes_nothing(
    program: Any, kind: Any
) -> None:
    one = program.optimizer(kind, {"learning_rate": 0.01})
    train(program, one, 3)
    state, before = one.state_dict(), dict(program.state_dict())
    wanted = train(program, one, 2, 3)
    program.load_state_dict(before)
    two = program.optimizer(kind, {"learning_rate": 0.5})
    with pytest.raises(UsageError, match="nothing was loaded"):
        two.load_state_dict({"groups": [], "scheduled": None})
    with pytest.raises(UsageError, match="is what its state_dict"):
        two.load_state_dict([1])
    (group,), variables = state["groups"], state["groups"][0]["variables"]
    fresh = {n: np.asarray(v) for n, v in two.state_dict()["groups"][0]["variables"].items()}
    for broken, said in [
        ({**group, "variables": {}}, "missing"),
        ({"variables": variables}, "KeyError"),
        ({**group, "options": {"learning_rate": "fast"}}, "ValueError"),
        ({**group, "variables": {**variables, "iteration": None}}, "ValueError"),
    ]:
        with pytest.raises(UsageError, match=f"nothing was loaded.*{said}"):
            two.load_state_dict({**state, "groups": [broken]})
        now = two.state_dict()["groups"][0]["variables"]
        assert all((np.asarray(v) == fresh[n]).all() for n, v in now.items())
    two.load_state_dict(state)
    assert_agree(train(program, two, 2, 3), wanted)
    traced = [dict(each._traced) for each in two._groups]
    two.load_state_dict(state)  # with the same options: a trace for each load would take memory for good
    assert [each._traced for each in two._groups] == traced and all(traced)


# ---- Frozen parts ----------------------------------------------------------------------------------------------------


def test_what_is_frozen_gets_no_gradient_and_is_not_moved(program: Any) -> None:
    first = [n for n in program.parameters() if n.startswith(FIRST)]
    optimizer = program.optimizer(keras.optimizers.Adam, {"learning_rate": 0.1})
    pull(program)
    program.requires_grad(False, first)
    assert program.frozen() == first and set(first) <= program.parameters().keys()
    assert [program.grads()[n] for n in first] == [None] * len(first)
    before = {n: np.asarray(v) for n, v in program.state_dict().items()}
    after = train(program, optimizer, 2)
    assert [n for n in program.parameters() if (after[n] == before[n]).all()] == first
    program.requires_grad(True, first[:1])
    assert program.frozen() == first[1:]
    again = train(program, optimizer, 1)
    assert (again[first[0]] != after[first[0]]).any() and (again[first[1]] == after[first[1]]).all()


def test_layers_that_keras_does_not_train_are_buffers() -> None:
    program = engine.program(make_net(trainable=False), is_module=True)
    program.train(True)
    assert f"{LAST}/kernel" in program.buffers() and f"{LAST}/kernel" not in program.parameters()
    before = np.asarray(program.buffers()[f"{LAST}/kernel"])
    after = train(program, program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.1}), 1)
    assert (after[f"{LAST}/kernel"] == before).all() and f"{LAST}/kernel" not in program.grads()


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_a_step_without_gradients_is_an_error(program: Any) -> None:
    optimizer = program.optimizer(keras.optimizers.Adam, {})
    for act in (lambda: None, lambda: pull(program), optimizer.zero_grad):
        act()
        if any(g is not None for g in program.grads().values()):
            continue
        with pytest.raises(UsageError, match=r"no gradients .* anchor"):
            optimizer.step()
    assert program.generation == 0


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        (keras.optimizers.Adam, {"lr_": 0.1}, "Adam.*lr_"),
        (keras.optimizers.Adam, {"learning_rate": 0.1, "clipnorm": 1.0, "clipvalue": 1.0}, "Adam"),
        (keras.layers.Dense, {"units": 3}, "no Keras optimizer"),
        (make_net, {}, "no Keras optimizer"),
    ],
)
def test_what_is_no_optimizer_or_has_no_such_option(
    program: Any, target: Any, kwargs: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        program.optimizer(target, kwargs)


def test_a_state_fits_the_optimizer_of_another_model_of_this_architecture() -> None:
    """Keras numbers models and layers by process, and calls slots after them."""

    def made() -> Any:
        net = keras.Sequential([keras.Input((4,), dtype="float64"), keras.layers.Dense(5, dtype="float64")])
        program = engine.program(net, is_module=True)
        optimizer = program.optimizer(keras.optimizers.SGD, {"learning_rate": 0.01, "momentum": 0.5})
        _, kept = program.keep(SITE, (), [tf.constant(X)])
        kept.derive(("T", (0,), 1), [tf.ones((len(X), 5), "float64")], keep=False, accumulate=True)
        optimizer.step()
        return optimizer

    one, two = made(), made()
    names = [list(x.state_dict()["groups"][0]["variables"]) for x in (one, two)]
    assert names[0] == names[1] and "dense_kernel_momentum" in names[0]
    two.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("of_keras", "wanted"),
    [("m/{}", "m/first/kernel"), ("{}/m", "first/kernel/m")],
    ids=["Keras 2.11 and later", "Keras 2 before that"],
)
def test_a_state_of_keras_2_has_the_names_of_parameters(of_keras: str, wanted: str) -> None:
    """Its own have the numbers of the process: another model of this architecture has others."""

    class Optimizer:
        name = "Adam"

        def build(self, variables: list[Any]) -> None:
            (kernel,) = variables
            path = kernel.name.partition(":")[0]
            slot = tf.Variable(tf.zeros(kernel.shape), name=f"Adam/{of_keras.format(path)}")
            self.variables = [tf.Variable(0, name="Adam/iter"), slot]

    group = Group("Adam", Optimizer(), None)
    group.build({"first/kernel": tf.Variable(tf.zeros((2, 3)), name="dense_14/kernel")})
    assert list(group.variables()) == ["iter", wanted]


@pytest.mark.parametrize(
    "options",
    [{"learning_rate": 0.1, "loss_scale_factor": 256.0}, {"name": "around"}],
    ids=["of its own", "around it"],
)
def test_a_loss_is_scaled_for_optimizers_that_ask_for_it(program: Any, options: dict[str, Any]) -> None:
    """These divide the gradients that they are given by their scale: without it a step would be a fraction of itself."""

    def make(**options: Any) -> Any:
        if "name" not in options:
            return keras.optimizers.SGD(**options)
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=512.0, dynamic_growth_steps=2
        )

    plain = keras.optimizers.SGD(0.1)
    wanted = local(make_net(), lambda _, g, v: plain.apply_gradients(zip(g, v, strict=True)))
    assert_agree(train(program, program.optimizer(make, options)), wanted)


# ---- An optimizer around another -------------------------------------------------------------------------------------


def make_scaled(learning_rate: float) -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(learning_rate), initial_scale=4.0)


def test_a_wrapped_optimizer_has_its_options_a_schedule_and_a_state_for_another_process(program: Any) -> None:
    own = make_scaled(0.01)

    def apply(step: int, gradients: list[Any], variables: list[Any]) -> None:
        own.learning_rate = 0.01 if step < 2 else 0.1
        own.inner_optimizer.beta_1 = 0.9 if step < 2 else 0.5
        own.apply_gradients(zip(map(own.scale_loss, gradients), variables, strict=True))

    wanted = local(make_net(), apply, 6)
    one = program.optimizer(make_scaled, {"learning_rate": 0.01})
    train(program, one, 2)
    one.set({"learning_rate": 0.1, "beta_1": 0.5})
    train(program, one, 2, 2)
    state = one.state_dict()
    variables = state["groups"][0]["variables"]  # with the name of no optimizer or model, which Keras numbers
    assert {"iteration", "dynamic_scale", "first_kernel_momentum"} <= variables.keys()
    another = program.optimizer(make_scaled, {"learning_rate": 1.0})
    another.load_state_dict(state)
    assert_agree(train(program, another, 2, 4), wanted)
    another.schedule(
        keras.optimizers.schedules.ExponentialDecay,
        {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 0.5},
    )
    assert another.state_dict()["groups"][0]["options"]["learning_rate"] == 0.5
    with pytest.raises(UsageError, match=r"has no option gamma .*beta_1"):
        another.set({"gamma": 1.0})
