"""R44: a remote that is the first stage trains, from JAX and torch, and exactly as it would locally."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"
SIZES = [6, 8, 4]
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Workers = Callable[[str], gw.Worker]


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The worker's own factory, in this process."""
    monkeypatch.syspath_prepend(str(TARGETS))
    sys.modules.pop("in_torch", None)
    import in_torch

    yield in_torch.make_block
    sys.modules.pop("in_torch", None)


def local_training(
    block: Callable[..., Any], steps: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """First gradients, parameters after ``steps``, and the head, all in one process."""
    import torch

    net, head = block(SIZES, batch_norm=True), torch.full((4,), 0.5, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first: dict[str, np.ndarray] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        head.grad = None
        ((net(torch.tensor(X)) * head).sum(-1) ** 2).mean().backward()
        first = first or {name: p.grad.numpy().copy() for name, p in net.named_parameters()}
        optimizer.step()
        with torch.no_grad():
            head -= 0.1 * head.grad
    return first, {name: p.detach().numpy() for name, p in net.named_parameters()}, head.detach().numpy()


def assert_agree(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True])
def test_r44_first_stage_from_jax(worker_of: Workers, block: Callable[..., Any], compiled: bool) -> None:
    import jax
    import jax.numpy as jnp

    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True)
    apply, anchor = gw.jax.functional(net, owner="worker")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1, momentum=0.9)
    before = net.parameters()

    def loss(head: Any, anchor: Any) -> Any:
        return ((apply(anchor, X) * head).sum(-1) ** 2).mean()

    step = jax.value_and_grad(loss, (0, 1))
    step = jax.jit(step) if compiled else step
    head, first = jnp.full(4, 0.5), None
    for _ in range(10):
        optimizer.zero_grad()
        _, (head_bar, anchor_bar) = step(head, anchor)
        head = head - 0.1 * head_bar
        jax.effects_barrier()
        first = first or net.grads()
        optimizer.step()
        assert anchor_bar == 0
    wanted_first, wanted, wanted_head = local_training(block, 10)
    assert_agree(first, wanted_first)
    assert_agree(net.parameters(), wanted)
    np.testing.assert_allclose(head, wanted_head, rtol=1e-5)
    assert all(
        (before[name] != value).any() for name, value in net.parameters().items() if name.endswith("weight")
    )
    assert net.buffers()["1.num_batches_tracked"] == 10  # once a forward, never in spec or pullback (R40)


def test_r44_first_stage_from_torch(worker_of: Workers, block: Callable[..., Any]) -> None:
    import torch

    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True)
    optimizer, head = (
        net.optimizer("torch.optim:SGD", lr=0.1, momentum=0.9),
        torch.full((4,), 0.5, requires_grad=True),
    )
    first = None
    for _ in range(10):
        optimizer.zero_grad()
        head.grad = None
        ((net(torch.tensor(X)) * head).sum(-1) ** 2).mean().backward()
        first = first or net.grads()
        optimizer.step()
        with torch.no_grad():
            head -= 0.1 * head.grad
    wanted_first, wanted, _ = local_training(block, 10)
    assert_agree(first, wanted_first)
    assert_agree(net.parameters(), wanted)


@pytest.mark.parametrize("vmap", ["batch", "sequential"])
def test_r44_a_stage_under_vmap_from_torch(worker_of: Workers, block: Callable[..., Any], vmap: str) -> None:
    import torch

    net, local = worker_of("torch").module("in_torch:make_block", SIZES).eval(), block(SIZES).eval()
    for model in (net.options(vmap=vmap), local):
        torch.func.vmap(model)(torch.tensor(X)).square().sum().backward()
    assert_agree(net.grads(), {name: p.grad.numpy() for name, p in local.named_parameters()})


def test_a_step_without_gradients_is_an_error(worker_of: Workers) -> None:
    net = worker_of("torch").module("in_torch:make_block", SIZES)
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    with pytest.raises(gw.UsageError, match="gradient"):
        optimizer.step()
    with pytest.raises(gw.UnknownTargetError):
        net.optimizer("torch.optim:Adamm")
    with pytest.raises(gw.UsageError, match="module"):
        worker_of("torch").function("in_torch:cube").parameters()


def test_modes_and_state(worker_of: Workers) -> None:
    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True)
    assert net.training is True and net.eval().training is False
    before = net.state_dict()
    net(X)
    np.testing.assert_array_equal(net.buffers()["1.running_mean"], before["1.running_mean"])
    net.train()
    net(X)
    assert (net.buffers()["1.running_mean"] != before["1.running_mean"]).any()
    net.load_state_dict(before)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    with pytest.raises(gw.UsageError, match=r"0\.weight"):
        net.load_state_dict({"0.weight": np.zeros((1, 1), np.float32)}, strict=False)


def test_a_state_may_have_numpy_scalars_and_what_is_no_tensor(worker_of: Workers) -> None:
    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True)
    net.load_state_dict({"1.num_batches_tracked": np.int64(7)}, strict=False)
    assert net.buffers()["1.num_batches_tracked"] == 7
    with pytest.raises(gw.UsageError, match=r"1\.num_batches_tracked is given as a int, not as a tensor"):
        net.load_state_dict({"1.num_batches_tracked": 9}, strict=False)
    assert net.buffers()["1.num_batches_tracked"] == 7
    versioned = worker_of("torch").module("in_torch:Versioned")
    state = versioned.state_dict()
    assert state["_extra_state"] == {"version": 3}
    versioned.load_state_dict({**state, "_extra_state": {"version": 4}})
    assert versioned.state_dict()["_extra_state"] == {"version": 4}


def test_r42_a_jax_pullback_of_an_eval_module_after_a_restart(torch_python: str) -> None:
    """The module is made anew with other parameters, so its forward must not be computed again for a pullback."""
    import jax

    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=torch_python, path=[TARGETS], threads=1)
        net = worker.module("in_torch:make_block", SIZES).eval()
        y, pullback = jax.vjp(net, jax.numpy.asarray(X))
        pullback(y)
        worker.restart()
        net.eval()
        with pytest.raises(Exception, match="pullback is gone"):
            jax.block_until_ready(pullback(y))


def test_r42_after_a_restart_the_pullback_is_lost(torch_python: str) -> None:
    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=torch_python, path=[TARGETS], threads=1)
        net = worker.module("in_torch:make_block", SIZES)
        _, pullback = net.vjp(X)
        pid = worker.pid
        worker.restart(discard_state=True)
        assert worker.pid != pid and net(X).shape == (16, 4)
        with pytest.raises(gw.ResidualLostError):
            pullback(np.ones((16, 4), np.float32))


# ---- R43: both halves ------------------------------------------------------------------------------------------------

LR, STEPS = 0.05, 20


def local_chain(block: Callable[..., Any]) -> dict[str, np.ndarray]:
    """Linear, block, linear in one process, trained by SGD; the block's first layer is frozen. Everything by name."""
    import torch

    net = block(SIZES, batch_norm=True, dtype="float64")
    net[0].requires_grad_(False)
    ends = {name: torch.tensor(x, requires_grad=True) for name, x in first_ends().items()}
    optimizer = torch.optim.SGD([*net.parameters(), *ends.values()], lr=LR)
    x = torch.tensor(X.astype(np.float64))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (net(x @ ends["a"]) @ ends["b"]).pow(2).mean().backward()
        optimizer.step()
    state = {name: v.numpy() for name, v in net.state_dict().items()}
    return {**state, **{name: v.detach().numpy() for name, v in ends.items()}}


def first_ends() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {"a": random.normal(size=(6, 6)), "b": random.normal(size=(4, 3))}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("owner", ["worker", "caller"])
def test_r43_both_halves_train_as_one_model(
    worker_of: Workers, block: Callable[..., Any], owner: str, compiled: bool
) -> None:
    import jax

    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True, dtype="float64")
    net.requires_grad_(False, "0")
    optimizer = net.optimizer("torch.optim:SGD", lr=LR)
    with jax.enable_x64(True):
        apply, own = gw.jax.functional(net, owner=owner)
        trained = {"ends": {n: jax.numpy.asarray(v) for n, v in first_ends().items()}, "own": own}
        x = jax.numpy.asarray(X.astype(np.float64))

        def loss(trained: Any) -> Any:
            ends = trained["ends"]
            return ((apply(trained["own"], x @ ends["a"]) @ ends["b"]) ** 2).mean()

        gradient = jax.jit(jax.grad(loss)) if compiled else jax.grad(loss)
        for _ in range(STEPS):
            bars = gradient(trained)
            if owner == "worker":
                optimizer.step(zero_grad=True)
                bars["own"] = jax.numpy.zeros_like(own)
            trained = jax.tree.map(lambda p, g: p - LR * g, trained, bars)
        values = dict(net.state_dict())
        if owner == "caller":
            assert "0.weight" not in trained["own"]  # frozen: not the caller's to move
            values.update({n: np.asarray(v) for n, v in trained["own"].items()})
        found = {**values, **{n: np.asarray(v) for n, v in trained["ends"].items()}}
    wanted = local_chain(block)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
    start = block(SIZES, batch_norm=True, dtype="float64").state_dict()
    np.testing.assert_array_equal(found["0.weight"], start["0.weight"].numpy())
    other = worker_of("torch").module("in_torch:make_block", SIZES, seed=5, batch_norm=True, dtype="float64")
    other.load_state_dict({name: found[name] for name in start})
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, found[name])


def test_clipping_schedules_and_state_from_a_caller(worker_of: Workers, block: Callable[..., Any]) -> None:
    import torch

    net, local = worker_of("torch").module("in_torch:make_block", SIZES), block(SIZES)
    groups = [{"names": ["0"], "lr": 0.2}, {"names": "2"}]
    optimizer = net.optimizer("torch.optim:SGD", groups, lr=0.1, momentum=0.9)
    optimizer.schedule("torch.optim.lr_scheduler:ExponentialLR", gamma=0.9)
    theirs = torch.optim.SGD(
        [{"params": local[0].parameters(), "lr": 0.2}, {"params": local[2].parameters()}],
        lr=0.1,
        momentum=0.9,
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(theirs, 0.9)
    x = torch.tensor(X)
    for i in range(6):
        net(x).pow(2).sum().backward()
        local(x).pow(2).sum().backward()
        wanted = torch.nn.utils.clip_grad_norm_(local.parameters(), 1.0)
        assert optimizer.step(clip_norm=1.0, zero_grad=True) == pytest.approx(float(wanted), rel=1e-5)
        assert all(g is None for g in net.grads().values())
        theirs.step()
        schedule.step()
        theirs.zero_grad()
        if i == 2:  # another goes on from here
            saved = optimizer.state_dict()
            optimizer = net.optimizer("torch.optim:SGD", groups, lr=1.0, momentum=0.9)
            optimizer.schedule("torch.optim.lr_scheduler:ExponentialLR", gamma=0.9)
            optimizer.load_state_dict(saved)
        if i == 3:
            optimizer.set(momentum=0.5)
            for group in theirs.param_groups:
                group["momentum"] = 0.5
    assert_agree(net.parameters(), {n: p.detach().numpy() for n, p in local.named_parameters()})
    with pytest.raises(gw.UsageError, match="no option speed"):
        optimizer.set(speed=1)
    for norm in (True, "much", [1.0]):
        with pytest.raises(gw.UsageError, match="must be a positive number"):
            optimizer.step(clip_norm=norm)
    with pytest.raises(gw.UsageError, match=r"parameters.*names and options|names and options"):
        net.optimizer("torch.optim:SGD", [{"lr": 1}])
    with pytest.raises(gw.UsageError, match="'nowhere' names no parameter"):
        net.requires_grad_(False, "nowhere")


def test_generations_after_a_step(worker_of: Workers) -> None:
    """What was kept before a step is pulled with the values of then, or said to be lost."""
    import torch

    net = worker_of("torch").module("in_torch:make_block", SIZES)
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x = torch.tensor(X, requires_grad=True)
    first, second = net(x), net(x)
    first.sum().backward()
    optimizer.step()
    with pytest.raises(gw.ResidualLostError, match="the parameters were changed"):
        second.sum().backward()
    third = net(x)
    net.load_state_dict(net.state_dict())
    with pytest.raises(gw.ResidualLostError, match="the parameters were changed"):
        third.sum().backward()
    fourth = net.options(residuals="recompute").eval()(x)
    optimizer.step()
    with pytest.raises(gw.ResidualLostError):
        fourth.sum().backward()


def test_r40_a_forward_is_not_computed_again_with_other_statistics(worker_of: Workers) -> None:
    """Its gradient would be that of another function, without an error."""
    import torch

    net = worker_of("torch").module("in_torch:make_block", SIZES, batch_norm=True).eval()
    again, x = net.options(residuals="recompute"), torch.tensor(X, requires_grad=True)
    (y, pullback), here, owned = again.vjp(X), again(x), gw.torch.Module(again)(x)
    pullback(np.ones_like(y))
    net.train()(X)
    net.eval()
    for derive in (lambda: pullback(np.ones_like(y)), here.sum().backward, owned.sum().backward):
        with pytest.raises(gw.ResidualLostError, match="a call in training mode, which moves"):
            derive()
