"""A Jacobian is of one forward: of the module as it is now, of the mask that was drawn, of the branch that was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradwire as gw

Workers = Callable[[str], gw.Worker]
X = np.random.default_rng(1).normal(size=3)
OPTIMIZERS = {
    "torch": ("torch.optim:SGD", {"lr": 0.1}),
    "tensorflow": ("keras.optimizers:SGD", {"learning_rate": 0.1}),
    "jax": ("optax:sgd", {"learning_rate": 0.1}),
}

every_differentiating_worker = pytest.mark.parametrize("framework", list(OPTIMIZERS))


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """JAX with 64 bits."""
    with jax.enable_x64(True):
        yield


def stepped_net(worker: gw.Worker) -> gw.Remote:
    """A module that an optimizer in the worker has moved, in evaluation mode."""
    net = worker.module(f"jacobians_{worker.info['framework']}:make_net")
    target, options = OPTIMIZERS[worker.info["framework"]]
    optimizer = net.optimizer(target, **options)
    if net.training is not None:
        net.train()
    y, pullback = net.vjp(X)
    pullback(2 * y)
    optimizer.step()
    return net if net.training is None else net.eval()


def jacobian_of(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """By central differences."""
    steps = 1e-6 * np.eye(x.size)
    return np.stack([(f(x + d) - f(x - d)) / 2e-6 for d in steps], -1)


def from_tape(f: Callable[[Any], Any]) -> Callable[[np.ndarray], Any]:
    def jacobian(x: np.ndarray) -> Any:
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return tape.jacobian(y, x)

    return jacobian


def from_torch(transform: Any) -> Callable[[Any], Callable[[np.ndarray], Any]]:
    return lambda f: lambda x: transform(f)(torch.tensor(x)).detach()


JACOBIANS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "jit of jacrev": lambda f: jax.jit(jax.jacrev(f)),
    "jit of jacfwd": lambda f: jax.jit(jax.jacfwd(f)),
    "func.jacrev": from_torch(torch.func.jacrev),
    "func.jacfwd": from_torch(torch.func.jacfwd),
    "tape.jacobian": from_tape,
}


@every_differentiating_worker
@pytest.mark.parametrize("way", list(JACOBIANS))
def test_after_a_step_in_the_worker_a_jacobian_is_that_of_the_new_module(
    worker_of: Workers, framework: str, way: str
) -> None:
    net = stepped_net(worker_of(framework))
    np.testing.assert_allclose(np.asarray(JACOBIANS[way](net)(X)), jacobian_of(net, X), atol=1e-8)


@every_differentiating_worker
def test_after_a_step_in_the_worker_so_are_jacobians_of_rows_and_second_derivatives(
    worker_of: Workers, framework: str
) -> None:
    net = stepped_net(worker_of(framework))
    xs = np.stack([X, 2 * X, -X, X + 1])
    each = np.stack([jacobian_of(net, x) for x in xs])
    for rows in (jax.vmap(jax.jacrev(net)), jax.vmap(jax.jacfwd(net)), jax.jit(jax.vmap(jax.jacrev(net)))):
        np.testing.assert_allclose(rows(xs), each, atol=1e-8)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        rows = torch.func.vmap(transform(net))(torch.tensor(xs)).detach()
        np.testing.assert_allclose(rows, each, atol=1e-8)
    rows = torch.func.jacrev(torch.func.vmap(net))(torch.tensor(xs)).detach()
    np.testing.assert_allclose(np.einsum("rirj->rij", rows), each, atol=1e-8)
    summed = torch.func.grad(lambda xs: torch.func.vmap(net)(xs).sum())(torch.tensor(xs)).detach()
    np.testing.assert_allclose(summed, each.sum(1), atol=1e-8)
    second = jacobian_of(lambda x: np.asarray(jax.jacrev(net)(x)), X)
    for hessian in (jax.hessian(net), jax.jit(jax.hessian(net)), jax.jacrev(jax.jacrev(net))):
        np.testing.assert_allclose(hessian(X), second, atol=1e-7)
    np.testing.assert_allclose(torch.func.hessian(net)(torch.tensor(X)).detach(), second, atol=1e-7)
    np.testing.assert_allclose(jax.vmap(jax.hessian(net))(xs)[0], second, atol=1e-7)


@every_differentiating_worker
@pytest.mark.parametrize("compiled", [False, True])
def test_a_jacobian_of_a_tape_adds_nothing_in_the_worker_but_what_is_made_of_it_does(
    worker_of: Workers, framework: str, compiled: bool
) -> None:
    net = worker_of(framework).module(f"jacobians_{framework}:make_net")
    target, options = OPTIMIZERS[framework]
    optimizer = net.optimizer(target, **options)
    wrapped = tf.function if compiled else lambda f: f
    wrapped(from_tape(net))(X)
    assert set(net.grads().values()) == {None}

    def penalty(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(from_tape(net)(x) ** 2)
        return tape.gradient(loss, tf.zeros(())), loss

    wrapped(penalty)(X)
    found = net.grads()
    optimizer.zero_grad()
    x = torch.tensor(X, requires_grad=True)
    torch.autograd.functional.jacobian(net, x, create_graph=True).square().sum().backward()
    for name, expected in net.grads().items():
        if expected is None:
            assert found[name] is None
        else:
            np.testing.assert_allclose(found[name], expected, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("way", ["jacrev", "jacfwd", "func.jacrev", "func.jacfwd", "tape.jacobian"])
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "numpy"])
def test_a_jacobian_has_the_mask_of_its_forward(worker_of: Workers, framework: str, way: str) -> None:
    if framework == "numpy" and "fwd" in way:
        pytest.skip("a numpy function's own jvp computes the forward itself")
    f, x, seen = worker_of(framework).function(f"jacobians_{framework}:noisy"), np.arange(1.0, 33.0), []

    def noted(x: Any) -> Any:
        y = f(x)
        seen.append(y)
        return y

    if way.startswith("jac"):
        jacobian, y = getattr(jax, way)(lambda x: (f(x),) * 2, has_aux=True)(x)
    elif way.startswith("func"):
        jacobian, y = getattr(torch.func, way[5:])(lambda x: (f(x),) * 2, has_aux=True)(torch.tensor(x))
    else:
        jacobian = from_tape(noted)(x)
        (y,) = seen
    mask = np.asarray(y) / x**2
    assert set(mask) == {0.0, 2.0}
    np.testing.assert_allclose(np.asarray(jacobian), np.diag(2 * mask * x))


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "numpy"])
def test_the_gradient_of_a_batch_has_the_masks_of_its_rows(worker_of: Workers, framework: str) -> None:
    f = worker_of(framework).function(f"jacobians_{framework}:noisy")
    xs = torch.arange(1.0, 65.0, dtype=torch.float64).reshape(4, 16)

    def total(xs: Any) -> Any:
        ys = torch.func.vmap(f)(xs)
        return ys.sum(), ys

    bars, ys = torch.func.grad(total, has_aux=True)(xs)
    assert set((ys / xs**2).flatten().tolist()) == {0.0, 2.0}
    np.testing.assert_allclose(bars, 2 * ys / xs)
    rows, ys = torch.func.jacrev(lambda xs: (torch.func.vmap(f)(xs),) * 2, has_aux=True)(xs)
    np.testing.assert_allclose(rows.sum((0, 1)), 2 * ys / xs)


def test_a_jacobian_is_of_the_branch_that_was_taken(worker_of: Workers) -> None:
    """Where torch's vmap could not run the function, nor its backward."""
    branching = worker_of("torch").function("jacobians_torch:branching")
    clipped = worker_of("torch").function("jacobians_torch:clipped")
    like = branching.options(out_spec=gw.ShapeDtype((3,), "float64"))
    for x in (X, -X):
        wanted = jacobian_of(branching, x)
        for transform in (torch.func.jacrev, torch.func.jacfwd):
            np.testing.assert_allclose(transform(branching)(torch.tensor(x)), wanted, atol=1e-6)
        for transform in (jax.jacrev, jax.jacfwd):
            np.testing.assert_allclose(transform(like)(x), wanted, atol=1e-6)
    np.testing.assert_array_equal(torch.func.jacrev(clipped)(torch.tensor(X)), 2 * np.eye(3))
    _, pullback = jax.vjp(clipped, X)
    rows = jnp.stack([jnp.ones(3), 3 * jnp.ones(3)])
    np.testing.assert_array_equal(jax.vmap(pullback)(rows)[0], [[2.0] * 3, [6.0] * 3])


def test_rows_of_a_numpy_function_that_writes_over_what_it_was_given_and_gave(worker_of: Workers) -> None:
    thrifty = worker_of("numpy").function("jacobians_numpy:thrifty")
    xs, w = np.arange(1.0, 13.0).reshape(3, 4), np.array([1.0, -2.0, 3.0, 0.5])
    for vmap in (jax.vmap(thrifty, (0, None)), jax.jit(jax.vmap(thrifty, (0, None)))):
        np.testing.assert_array_equal(vmap(xs, w), 2 * xs * w)
    for transform in (jax.jacrev, jax.jacfwd):
        by_x, by_w = transform(thrifty, (0, 1))(xs[0], w)
        np.testing.assert_array_equal(by_x, np.diag(2 * w))
        np.testing.assert_array_equal(by_w, np.diag(2 * xs[0]))

    def total(x: Any, w: Any) -> Any:
        return (thrifty(x, w) * jnp.arange(1.0, 5.0)).sum()

    by_x, by_w = jax.vmap(jax.grad(total, (0, 1)), (0, None))(xs, w)
    np.testing.assert_array_equal(by_x, np.tile(2 * w * np.arange(1.0, 5.0), (3, 1)))
    np.testing.assert_array_equal(by_w, 2 * xs * np.arange(1.0, 5.0))
    shared = jax.grad(lambda x, w: jax.vmap(total, (0, None))(x, w).sum(), (0, 1))(xs, w)
    np.testing.assert_array_equal(shared[0], by_x)
    np.testing.assert_array_equal(shared[1], by_w.sum(0))
    dots = jax.vmap(lambda x, dx, dw: jax.jvp(thrifty, (x, w), (dx, dw))[1], (0, None, None))(xs, w, w)
    np.testing.assert_array_equal(dots, 2 * w * w + 2 * xs * w)


@every_differentiating_worker
@pytest.mark.parametrize(
    "way", ["jacrev", "jit of jacfwd", "func.jacrev", "func.jacfwd"]
)  # (tape.jacobian fails by itself)
def test_the_jacobian_of_nothing_has_no_rows(worker_of: Workers, framework: str, way: str) -> None:
    nothing = worker_of(framework).function(f"jacobians_{framework}:nothing")
    assert JACOBIANS[way](nothing)(X).shape == (0, 3)
