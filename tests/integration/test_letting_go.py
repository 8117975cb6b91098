"""What a worker has loaded for a program goes when nobody in the program can name it any more."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw
from gradwire.jax import express
from gradwire.torch import anchors
from gradwire_workers.garbage import GROWN

X = np.arange(6, dtype="f4").reshape(2, 3)


@pytest.fixture
def worker(worker_of: Callable[[str], gw.Worker]) -> gw.Worker:
    return worker_of("torch")


@pytest.fixture
def there(worker: gw.Worker) -> Callable[[], list[int]]:
    """How many modules and optimizers there are in the worker, more than at the beginning."""
    count = worker.function("dropped:there")
    before = count()
    return lambda: [now - then for now, then in zip(count(), before, strict=True)]


def until(there: Callable[[], list[int]], wanted: list[int]) -> None:
    deadline = time.monotonic() + 30
    while (found := there()) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_modules_and_optimizers_go_with_their_proxies(
    worker: gw.Worker, there: Callable[[], list[int]]
) -> None:
    net = worker.module("dropped:Net")
    first = net.optimizer("dropped:SGD", lr=0.1)
    second = net.optimizer("dropped:SGD", lr=0.2)
    y, pullback = net.vjp(X)
    pullback(np.ones_like(y))
    assert there() == [1, 2]
    del first
    until(there, [1, 1])
    del net, pullback
    assert there() == [1, 1], "its optimizer is there"
    second.step()
    del second
    until(there, [0, 0])


def test_one_large_module_after_the_other_takes_the_room_of_few(
    worker: gw.Worker, there: Callable[[], list[int]]
) -> None:
    for _ in range(5):
        net = worker.module("dropped:Net", GROWN // 3)  # of four bytes
        for _ in range(3):
            net(X)  # also as a plan
        net.optimizer("dropped:SGD", lr=0.1)
        del net
    assert there()[0] <= 3, "before the next is loaded the worker is told; it may put off one"
    until(there, [0, 0])


@pytest.mark.parametrize(
    "use",
    [
        lambda net: net(torch.ones(2, 3)).sum(),  # a graph
        lambda net: gw.torch.Module(net),
        lambda net: net.options(seed=3),
        lambda net: net.submit(X),
        lambda net: net.vjp(X)[1],
    ],
    ids=["graph", "torch module", "options", "future", "pullback"],
)
def test_what_can_still_be_used_is_there(
    worker: gw.Worker, there: Callable[[], list[int]], use: Callable[[Any], Any]
) -> None:
    net = worker.module("dropped:Net")
    kept = use(net)
    del net
    gc.collect()
    worker.module("dropped:Net")  # whatever is to be told is told before
    assert there()[0] >= 1
    if isinstance(kept, torch.Tensor):
        kept.backward()
    elif isinstance(kept, torch.nn.Module):
        assert kept(torch.ones(2, 3)).shape == (2, 2)
    elif isinstance(kept, gw.Remote):
        assert kept(X).shape == (2, 2)
    elif isinstance(kept, gw.Pullback):
        kept(np.ones((2, 2), "f4"))
    else:
        assert kept.result().shape == (2, 2)
    del kept
    gc.collect()
    until(there, [0, 0])


def test_functions_are_loaded_again_and_again(worker: gw.Worker) -> None:
    for i in range(300):
        assert worker.function("any_framework:double")(np.float32(i)) == 2 * i


@pytest.mark.parametrize("is_functional", [False, True])
def test_jax_keeps_nothing_of_a_module_that_it_has_called(
    worker: gw.Worker, there: Callable[[], list[int]], is_functional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(express, "UNUSED_S", -1.0)
    x = jax.numpy.ones((2, 3))
    for _ in range(3):
        net: Any = worker.module("dropped:Net")
        apply = partial(*gw.jax.functional(net)) if is_functional else net
        jax.grad(lambda x, apply: jax.jit(apply)(x).sum() + apply(x).sum())(x, apply)
        del net, apply

    def still_there() -> list[int]:
        gc.collect()  # by which JAX lets go of what its threads, without Python's lock, could not
        return there()

    until(still_there, [0, 0])


def test_a_graph_of_torch_compile_holds_what_it_calls(
    worker: gw.Worker, there: Callable[[], list[int]]
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net: Any = worker.module("dropped:Net")
    x = torch.ones(2, 3, requires_grad=True)
    twice = net(x).detach() * 2
    torch.compile(lambda x, net: net(x) + net(x), backend=backend)(x, net)
    del net
    torch.compiler.reset()
    gc.collect()
    given = [
        x if node.meta["example_value"].ndim else anchors.leaf()
        for node in graphs[0].graph.find_nodes(op="placeholder")
    ]
    result = graphs[0](*given)[0]
    assert torch.equal(result, twice)
    graphs.clear()
    gc.collect()
    result.sum().backward()
    del result

    def still_there() -> list[int]:
        gc.collect()
        return there()

    until(still_there, [0, 0])


def loop_of(net: gw.Remote) -> Any:
    def loop(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y + net(x)), (0, 0 * net(x)))[1]

    return tf.function(loop)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_graph_of_tensorflow_holds_what_it_calls(
    worker: gw.Worker, there: Callable[[], list[int]], is_persistent: bool
) -> None:
    net: Any = worker.module("dropped:Net")
    x = tf.ones((2, 3))
    graph = loop_of(net).get_concrete_function(x)
    del net
    gc.collect()
    with tf.GradientTape(persistent=is_persistent) as tape:
        tape.watch(x)
        y = graph(x)
    del graph
    gc.collect()
    assert tape.gradient(y, x).shape == (2, 3)
    del y, tape
    gc.collect()
    until(there, [0, 0])


def test_models_that_keras_has_trained_go_when_the_next_is_traced(
    worker: gw.Worker, there: Callable[[], list[int]]
) -> None:
    """Its optimizers keep the graphs, for ever."""
    for _ in range(3):
        layer = gw.keras.Layer(worker.module("dropped:Net"))
        model = keras.Sequential([keras.Input((3,)), layer])
        model.compile("sgd", "mse")
        model.fit(X, np.zeros((2, 2), "f4"), verbose=0)
        del layer, model
        gc.collect()
    double = worker.function("any_framework:double")
    tf.function(lambda x: double(x))(tf.ones(2))
    until(there, [0, 0])
