"""Modules of a JAX worker, trained from other programs as in one process; checkpoints of every worker."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gradwire as gw

Workers = Callable[[str], gw.Worker]
X = np.random.default_rng(0).normal(size=(5, 3))
TARGETS = pathlib.Path(__file__).parent / "targets"
KINDS = ["linen", "nnx", "equinox", "plain"]


@pytest.fixture
def jax64() -> Iterator[Any]:
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    monkeypatch.syspath_prepend(str(TARGETS))
    import jax_modules

    return jax_modules


def locally_trained(local: Any, kind: str, dtype: str, steps: int) -> tuple[list[Any], Any]:
    """Parameters and head after training by the library and optax alone."""
    import jax
    import jax.numpy as jnp
    import optax

    leaves, run = local.local_run(local.MAKERS[kind](dtype=dtype), True)
    head, optimizer = jnp.full(2, 0.5, dtype), optax.sgd(0.1, momentum=0.9)
    x, state = jnp.asarray(X, dtype), optimizer.init(leaves)
    for _ in range(steps):
        loss = lambda p, h: ((run(p, x)[0] * h) ** 2).sum()  # noqa: E731
        bars, head_bar = jax.grad(loss, (0, 1))(leaves, head)
        updates, state = optimizer.update(bars, state, leaves)
        leaves, head = optax.apply_updates(leaves, updates), head - 0.1 * head_bar
    return leaves, head


def agree(got: Any, wanted: Any, tolerance: float) -> None:
    for a, b in zip(list(got), list(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, tolerance, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_r43_worker_owned_by_optax_from_jax(worker_of: Workers, local: Any, jax64: Any, kind: str) -> None:
    import jax.numpy as jnp

    net = worker_of("jax").module(f"jax_modules:make_{kind}", dtype="float64")
    apply, anchor = gw.jax.functional(net, owner="worker")
    optimizer = net.optimizer("optax:sgd", learning_rate=0.1, momentum=0.9)
    step = jax64.jit(jax64.grad(lambda h, a: ((apply(a, X) * h) ** 2).sum(), (0, 1)))
    head = jnp.full(2, 0.5)
    for _ in range(4):
        optimizer.zero_grad()
        head_bar, anchor_bar = step(head, anchor)
        optimizer.step()
        head = head - 0.1 * head_bar
        assert anchor_bar == 0
    wanted, wanted_head = locally_trained(local, kind, "float64", 4)
    agree(net.parameters().values(), wanted, 1e-9)
    agree([head], [wanted_head], 1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_r43_caller_owned_from_jax(worker_of: Workers, local: Any, jax64: Any, dtype: str) -> None:
    import jax.numpy as jnp
    import optax

    net = worker_of("jax").module("jax_modules:make_linen", dtype=dtype)
    apply, params = gw.jax.functional(net)
    optimizer, head = optax.sgd(0.1, momentum=0.9), jnp.full(2, 0.5, dtype)
    x, state = jnp.asarray(X, dtype), optimizer.init(params)
    step = jax64.jit(jax64.grad(lambda p, h: ((apply(p, x) * h) ** 2).sum(), (0, 1)))
    for _ in range(4):
        bars, head_bar = step(params, head)
        updates, state = optimizer.update(bars, state, params)
        params, head = optax.apply_updates(params, updates), head - 0.1 * head_bar
    wanted, wanted_head = locally_trained(local, "linen", dtype, 4)
    agree([*params.values(), head], [*wanted, wanted_head], 1e-9 if dtype == "float64" else 1e-5)


def test_r43_worker_owned_from_numpy(worker_of: Workers, local: Any, jax64: Any) -> None:
    net = worker_of("jax").module("jax_modules:make_nnx", dtype="float64")
    optimizer = net.optimizer("optax:sgd", learning_rate=0.1, momentum=0.9)
    head = np.full(2, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        y, pullback = net.vjp(X)
        pullback(2 * y * head**2)
        optimizer.step()
        head = head - 0.1 * (2 * y**2 * head).sum(0)
    wanted, wanted_head = locally_trained(local, "nnx", "float64", 3)
    agree(net.parameters().values(), wanted, 1e-9)
    agree([head], [np.asarray(wanted_head)], 1e-9)


def test_r40_r41_effects_of_a_compiled_loop(worker_of: Workers, jax64: Any) -> None:
    """Statistics move once a forward, in the order written; a step from Python waits for a compiled program."""
    net = worker_of("jax").module("jax_modules:make_linen", dtype="float64")
    apply, anchor = gw.jax.functional(net, owner="worker")
    before = net.buffers()["batch_stats.BatchNorm_0.mean"]
    kernel = net.parameters()["Dense_0.kernel"]
    net.spec(X)

    def loss(a: Any) -> Any:
        return jax64.lax.scan(lambda c, x: (c + (apply(a, x) ** 2).sum(), None), 0.0, np.stack([X, 2 * X]))[0]

    optimizer = net.optimizer("optax:sgd", learning_rate=0.1)
    jax64.jit(jax64.grad(loss))(anchor)
    optimizer.step()
    mean = (X @ kernel).mean(0)
    moved = 0.9 * (0.9 * before + 0.1 * mean) + 0.1 * 2 * mean
    np.testing.assert_allclose(net.buffers()["batch_stats.BatchNorm_0.mean"], moved, 1e-9)
    assert (net.parameters()["Dense_0.kernel"] != kernel).any()


def test_r42_generations(worker_of: Workers) -> None:
    """A pullback after a step is that of its forward: JAX's residuals are immutable."""
    net = worker_of("jax").module("jax_modules:make_plain", dtype="float64").eval()
    optimizer = net.optimizer("optax:sgd", learning_rate=0.5)
    y, pullback = net.vjp(X)
    (before,) = pullback(y)
    optimizer.step()
    assert not np.array_equal(net(X), y)
    (after,) = pullback(y)
    np.testing.assert_array_equal(before, after)


def test_a_cnn_with_dropout(worker_of: Workers) -> None:
    net = worker_of("jax").module("jax_modules:make_cnn")
    images = np.random.default_rng(0).normal(size=(4, 6, 6, 1)).astype(np.float32)
    assert (net(images) != net(images)).any()
    seeded = net.options(seed=3)
    np.testing.assert_array_equal(seeded(images), seeded(images))
    net.eval()
    np.testing.assert_array_equal(net(images), net(images))


def test_bad_input(worker_of: Workers) -> None:
    worker = worker_of("jax")
    net = worker.module("jax_modules:make_linen", dtype="float64")
    with pytest.raises(gw.UnknownTargetError, match="adamm"):
        net.optimizer("optax:adamm", learning_rate=0.1)
    with pytest.raises(gw.UsageError, match="lrate"):
        net.optimizer("optax:adam", lrate=0.1)
    with pytest.raises(gw.UsageError, match="no gradient"):
        net.optimizer("optax:adam", learning_rate=0.1).step()
    with pytest.raises(gw.UsageError, match="Missing key"):
        net.load_state_dict({})
    with pytest.raises(gw.UsageError, match="linen module without variables"):
        worker.module("jax_modules:Cnn")
    with pytest.raises(gw.UsageError, match="is no module"):
        worker.module("jax_modules:SIZES")
    with pytest.raises(gw.UsageError, match="needs a module"):
        worker.function("any_framework:double").parameters()


# ---- Checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_jax_module(worker_of: Workers, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    one, other = (
        worker_of("jax").module("jax_modules:make_nnx", dtype="float64", seed=seed) for seed in (0, 1)
    )
    one(X)
    one.save(tmp_path / "net.safetensors")
    there = safetensors.load_file(tmp_path / "net.safetensors")
    state = one.state_dict()
    assert there.keys() == state.keys()
    agree((there[n] for n in state), state.values(), 0)
    other.load(tmp_path / "net.safetensors")
    np.testing.assert_array_equal(one.eval()(X), other.eval()(X))
    del there["norm.mean"]
    safetensors.save_file({n: x + 1 for n, x in there.items()}, tmp_path / "net.safetensors")
    with pytest.raises(gw.UsageError, match=r"Missing key.*norm\.mean"):
        other.load(tmp_path / "net.safetensors")
    np.testing.assert_array_equal(one(X), other(X))
    other.load(tmp_path / "net.safetensors", strict=False)
    assert (other(X) != one(X)).any()


def test_a_checkpoint_of_a_torch_module(worker_of: Workers, tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    net = worker_of("torch").module("in_torch:make_block", [3, 4, 2], batch_norm=True)
    net.save(tmp_path / "net.safetensors")
    there = safetensors.load_file(tmp_path / "net.safetensors")
    for name, x in net.state_dict().items():
        np.testing.assert_array_equal(there[name].numpy(), x)
    safetensors.save_file({n: torch.zeros_like(x) for n, x in there.items()}, tmp_path / "net.safetensors")
    net.load(tmp_path / "net.safetensors")
    assert not any(x.any() for x in net.state_dict().values())
    with pytest.raises(gw.UsageError, match="no folder"):
        net.save(tmp_path / "none" / "net.safetensors")


@pytest.mark.parametrize("kept", ["first.weight", "second.weight"])
def test_a_checkpoint_that_has_a_tied_parameter_under_one_of_its_names(
    worker_of: Workers, tmp_path: pathlib.Path, kept: str
) -> None:
    """So safetensors' `save_model` and transformers' `save_pretrained` write it."""
    safetensors = pytest.importorskip("safetensors")
    numpy_files = pytest.importorskip("safetensors.numpy")
    net, path = worker_of("torch").module("in_torch:Tied"), tmp_path / "net.safetensors"
    net.save(path)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
    there = {
        n: x * 2 for n, x in numpy_files.load_file(path).items() if not n.endswith(".weight") or n == kept
    }
    numpy_files.save_file(there, path)
    net.load(path)
    for name, x in net.state_dict().items():
        np.testing.assert_array_equal(there[kept if name.endswith(".weight") else name], x)
    numpy_files.save_file({n: x * 2 for n, x in there.items() if n != kept}, path)
    with pytest.raises(gw.UsageError, match=r"Missing key.*first\.weight"):
        net.load(path)
    np.testing.assert_array_equal(there[kept], net.state_dict()[kept])


def test_a_checkpoint_that_has_a_shared_part_under_one_of_its_names(
    worker_of: Workers, tmp_path: pathlib.Path
) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    net, path = worker_of("torch").module("in_torch:Shared"), tmp_path / "net.safetensors"
    net.save(path)
    state = numpy_files.load_file(path)
    there = {n: np.asarray(x + 1) for n, x in state.items() if not n.startswith("norm")}
    numpy_files.save_file(there, path)
    net.load(path)
    state = net.state_dict()
    np.testing.assert_array_equal(state["norm.running_mean"], there["layers.2.running_mean"])
    np.testing.assert_array_equal(state["layers.2.running_var"], there["layers.2.running_var"])
    with pytest.raises(gw.UsageError, match=r"'norm.running_mean' names no parameter"):
        net.requires_grad_(False, ["norm.running_mean"])


def test_a_checkpoint_of_a_tensorflow_module(worker_of: Workers, tmp_path: pathlib.Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    net = worker_of("tensorflow").module("tf_scale:make_scale", 2.0)
    net.save(tmp_path / "net.safetensors")
    there = safetensors.load_file(tmp_path / "net.safetensors")
    assert there.keys() == net.state_dict().keys() and len(there) == 1
    safetensors.save_file({n: np.asarray(x * 3) for n, x in there.items()}, tmp_path / "net.safetensors")
    net.load(tmp_path / "net.safetensors")
    assert (net(np.ones(3, np.float32)) == 6).all()
