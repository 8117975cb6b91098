"""A torch module whose parameters, and if wanted buffers, a JAX program owns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire as gw

TARGETS = Path(__file__).parent / "targets"
SIZES = [6, 8, 4]
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Workers = Callable[[str], gw.Worker]


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module, made in this process."""
    monkeypatch.syspath_prepend(str(TARGETS))
    sys.modules.pop("in_torch", None)
    import in_torch

    yield in_torch.make_block(SIZES, batch_norm=True)
    sys.modules.pop("in_torch", None)


@pytest.fixture
def net(worker_of: Workers) -> gw.Remote:
    return worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True)


def local_step(block: Any, x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients of the parameters, and the buffers after the forward."""
    import torch

    (block(torch.tensor(x)) ** 2).sum().backward()
    return (
        {name: p.grad.numpy() for name, p in block.named_parameters()},
        {name: b.numpy() for name, b in block.named_buffers()},
    )


@pytest.mark.parametrize("x64", [False, True])
def test_explicit_buffers_come_and_go_and_nothing_moves_in_the_worker(
    net: gw.Remote, block: Any, x64: bool
) -> None:
    with jax.enable_x64(x64):
        before = net.buffers()
        apply, params, buffers = gw.jax.functional(net.train().options(seed=1), buffers="explicit")

        @jax.jit
        def step(params: Any, buffers: Any) -> Any:
            def loss(p: Any) -> Any:
                y, moved = apply(p, buffers, X)
                return (y**2).sum(), moved

            return jax.grad(loss, has_aux=True)(params)

        gradient, moved = step(params, buffers)
        expected_gradient, expected_buffers = local_step(block, X)
        for name, value in expected_gradient.items():
            np.testing.assert_allclose(gradient[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
        assert moved.keys() == expected_buffers.keys()
        for name, value in expected_buffers.items():
            found = np.asarray(moved[name])
            if value.dtype == np.int64 and not x64:  # its bits, for JAX has no such type then
                assert found.dtype == np.int32
                found = found.view(np.int64)[..., 0]
            np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=name)
        for name, value in net.buffers().items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_buffers_in_the_worker_move_once_for_each_call_in_the_order_written(
    net: gw.Remote, block: Any
) -> None:
    import torch

    apply, params = gw.jax.functional(net.train())

    @jax.jit
    def three(params: Any) -> Any:
        apply(params, X)  # unused, and still made
        return jax.grad(lambda p: apply(p, 2 * X).sum() + apply(p, X + 1).sum())(params)

    jax.block_until_ready(three(params))
    for x in (X, 2 * X, X + 1):
        block(torch.tensor(x))
    for name, value in block.named_buffers():
        np.testing.assert_allclose(net.buffers()[name], value.numpy(), rtol=1e-5, err_msg=name)


def test_parameters_of_a_scan_and_a_hessian(net: gw.Remote) -> None:
    apply, params = gw.jax.functional(net.eval())
    last = {name: x for name, x in params.items() if name.startswith("3.")}

    def loss(last: Any) -> Any:
        return (apply({**params, **last}, X) ** 2).sum()

    flat, unflatten = jax.flatten_util.ravel_pytree(last)
    hessian = jax.jit(jax.hessian(lambda v: loss(unflatten(v))))(flat)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-3, atol=1e-4)
    direction = jnp.ones_like(flat) * 1e-2
    gradient = jax.grad(lambda v: loss(unflatten(v)))
    np.testing.assert_allclose(
        hessian @ direction,
        gradient(flat + direction / 2) - gradient(flat - direction / 2),
        rtol=5e-2,
        atol=5e-2,
    )

    def descended(p: Any, _: Any) -> Any:
        return jax.tree.map(lambda x, g: x - 0.01 * g, p, jax.grad(loss)(p)), loss(p)

    _, losses = jax.jit(lambda p: jax.lax.scan(descended, p, None, length=5))(last)
    assert (losses[1:] < losses[:-1]).all()


def test_parameters_left_out_stay_the_modules_own(net: gw.Remote) -> None:
    apply, params = gw.jax.functional(net.eval())
    some = {"0.weight": params["0.weight"]}
    np.testing.assert_allclose(apply(some, X), net(X), rtol=1e-6)
    for forgotten in (X, None):
        with pytest.raises(gw.UsageError, match="the first argument of apply must be the parameters"):
            apply(forgotten, X)
    with pytest.raises(gw.UsageError, match=r"no parameter 'nonsense'.*0\.weight"):
        apply({"nonsense": params["0.weight"]}, X)
    with pytest.raises(gw.UsageError, match=r"0\.bias.*shape"):
        apply({"0.bias": params["0.weight"]}, X)


def test_changing_the_mode_under_a_compiled_program_is_an_error(net: gw.Remote) -> None:
    apply, params = gw.jax.functional(net.eval())
    compiled = jax.jit(apply)
    compiled(params, X)
    net.train()
    with pytest.raises(Exception, match="training=False"):
        jax.block_until_ready(compiled(params, X))


def test_a_function_has_no_parameters(worker_of: Workers) -> None:
    with pytest.raises(gw.UsageError, match=r"is a function.*worker\.module"):
        gw.jax.functional(worker_of("torch").function("in_torch:cube"))


@pytest.mark.parametrize("nested", [False, True])
def test_a_forward_of_before_a_change_is_not_computed_again_after_it(net: gw.Remote, nested: bool) -> None:
    """What keeps nothing in the worker, by wish or under nested vmap, has the gradient of its own forward, or an error."""
    net = net.eval()
    f = jax.vmap(jax.vmap(net)) if nested else net.options(residuals="recompute")
    x = X[None, :, None] if nested else X
    y, pullback = jax.vjp(f, x)
    (before,) = pullback(jnp.ones_like(y))
    expected = jax.grad(lambda x: net(x).sum())(X)
    np.testing.assert_allclose(before.reshape(X.shape), expected, rtol=1e-5, atol=1e-6)
    net.load_state_dict({"0.weight": 2 * net.parameters()["0.weight"]}, strict=False)
    with pytest.raises(gw.ResidualLostError, match="changed"):
        pullback(jnp.ones_like(y))
    jax.block_until_ready(jax.jit(jax.grad(lambda x: f(x).sum()))(x))  # and from then on all is as before


def test_unchanged_parameters_are_not_copied_by_eager_calls(worker_of: Workers, block: Any) -> None:
    """They lie in shared memory as they are given; what takes their place does not, and is copied."""
    import in_torch
    import torch

    worker = worker_of("torch")
    apply, params = gw.jax.functional(worker.module("in_torch:make_block", [512, 512]).eval())
    local = in_torch.make_block([512, 512])
    x = jnp.ones((2, 512))
    for other, copied in ((params, 0), (jax.tree.map(lambda p: p * 2, params), 512 * 512 * 4)):
        local.load_state_dict({name: torch.tensor(np.asarray(p)) for name, p in other.items()})
        apply(other, x)
        before = worker.stats()["copied_bytes"]
        y = apply(other, x)
        assert worker.stats()["copied_bytes"] - before == copied
        np.testing.assert_allclose(y, local(torch.ones(2, 512)).detach(), 1e-5, 1e-5)
    donated = jax.jit(lambda params: jax.tree.map(lambda p: p + 1, params), donate_argnums=0)(dict(params))
    local.load_state_dict({name: torch.tensor(np.asarray(p)) for name, p in donated.items()})
    np.testing.assert_allclose(apply(donated, x), local(torch.ones(2, 512)).detach(), 1e-5, 1e-5)
    value, bars = jax.value_and_grad(lambda p: (apply(p, x) ** 2).sum())(donated)
    loss = (local(torch.ones(2, 512)) ** 2).sum()
    loss.backward()
    np.testing.assert_allclose(value, loss.item(), 1e-5)
    for name, p in local.named_parameters():
        np.testing.assert_allclose(bars[name], p.grad, 1e-4, 1e-4)
