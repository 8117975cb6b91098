"""JAX programs with calls that move state: as often and in the order written, and modules trained by their worker.

R41: XLA drops, merges and reorders what it takes for pure. R40: state moves once for each forward.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.experimental import io_callback

import gradwire.jax
from gradwire.background import Background
from gradwire.remote import Remote
from gradwire.site import Site
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import positional
from tests.doubles.scripted_handle import Message, ScriptedHandle
from tests.doubles.torch_handle import TorchHandle

Function = Callable[..., Any]
MODES = pytest.mark.parametrize("mode", ["eager", "jit"])
MODES_OF_MANY = pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.slow), "jit"])


def in_mode(mode: str, function: Function) -> Function:
    return jax.jit(function) if mode == "jit" else function


# ---- A worker that counts ------------------------------------------------------------------------------------------

SLOW = 50.0


def weighted(message: Message) -> Sequence[Any]:
    """(anchor, x) ↦ 2 x, and its derivatives; a SLOW call takes its time, so that others could overtake it."""
    anchored, word = message.site.anchored, message.word
    if not word:
        if message.arrays[-1].flat[0] == SLOW:
            time.sleep(0.05)
        return [message.arrays[-1] * 2]
    if word[-1][0] == "J":
        lines = dict(zip(word[-1][1], message.linear, strict=True))
        return [2 * lines[anchored] if anchored in lines else np.zeros_like(message.arrays[anchored])]
    return [None if anchored and i == 0 else message.linear[0] * 2 for i in word[-1][1]]


@pytest.fixture
def counted() -> SimpleNamespace:
    """handle, and calls to it that move state: ``net(x)``, ``net(x, anchor)``; ``first()``: the operands' first elements."""
    handle = ScriptedHandle(weighted, lambda avals: avals[-1:])

    def net(x: Any, anchor: Any = None, **site: Any) -> Any:
        anchored = anchor is not None
        here = Site(positional(1), stateful=True, accumulate=anchored, anchored=anchored, **site)
        return gradwire.jax.call(handle, here, [anchor, x] if anchored else [x])[0]

    def first() -> list[float]:
        gradwire.jax.barrier()
        return [float(m.arrays[-1].flat[0]) for m in handle.messages if not m.word]

    return SimpleNamespace(handle=handle, net=net, first=first)


x, big = jnp.ones((4, 3)), jnp.ones((700, 700))


def scan(step: Function, init: Any, length: int) -> Any:
    return lax.scan(lambda c, _: (step(c), None), init, None, length=length)[0]


def through_custom_vjp(s: Function) -> Function:
    f = jax.custom_vjp(lambda x: s(x))
    f.defvjp(lambda x: (s(x), None), lambda _, c: (c,))
    return f


ONCE_EACH: dict[str, tuple[Function, int]] = {
    "an unused result": (lambda s: (s(x), x)[1], 1),
    "an unused result of an inner jit": (lambda s: (jax.jit(s)(x), x)[1], 1),
    "two equal calls": (lambda s: s(x) + s(x), 2),
    "a scan whose call does not depend on the step": (lambda s: scan(lambda c: c + s(x), x, 10), 10),
    "a scan with unused results": (lambda s: (scan(lambda c: (s(x), c)[1], x, 10), x)[1], 10),
    "while": (lambda s: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, s(c[1])), (0, x))[1], 5),
    "the branch taken": (lambda s: lax.cond(x.sum() > 0, s, lambda x: x, x), 1),
    "the branch not taken": (lambda s: lax.cond(x.sum() > 99, s, lambda x: x, x), 0),
    "vmap around an operand that is shared": (lambda s: jax.vmap(lambda y: s(x[0]) + y)(x), 1),
    "jvp": (lambda s: jax.jvp(s, (x,), (x,)), 1),
    "vjp": (lambda s: jax.vjp(s, x)[1](x), 1),
    "grad": (lambda s: jax.grad(lambda x: s(x).sum())(x), 1),
    "grad with an unused value": (lambda s: jax.grad(lambda x: (s(x), (x * x).sum())[1])(x), 1),
    "grad with two equal calls": (lambda s: jax.grad(lambda x: (s(x) * s(x)).sum())(x), 2),
    "grad of scan": (lambda s: jax.grad(lambda x: scan(lambda c: jnp.sin(s(c)), x, 6).sum())(x), 6),
    "jacrev": (lambda s: jax.jacrev(s)(x[0]), 1),
    "checkpoint": (lambda s: jax.checkpoint(lambda x: jnp.sin(s(x)))(x), 1),
    "custom_vjp": (lambda s: jax.grad(lambda x: through_custom_vjp(s)(x).sum())(x), 1),
    "vmap, row by row": (lambda s: jax.vmap(lambda x: s(x, vmap="sequential"))(x), 4),
    "vmap of grad, row by row": (
        lambda s: jax.vmap(jax.grad(lambda x: s(x, vmap="sequential").sum()))(x),
        4,
    ),
}


@MODES_OF_MANY
@pytest.mark.parametrize("case", ONCE_EACH)
def test_r41_as_often_as_written(counted: Any, case: str, mode: str) -> None:
    run, times = ONCE_EACH[case]
    jax.block_until_ready(in_mode(mode, lambda: run(counted.net))())
    assert len(counted.first()) == times


@MODES
def test_r41_in_the_order_written(counted: Any, mode: str) -> None:
    """The first waits for a matrix product and is slow, the others could go at once."""

    def program(b: Any) -> Any:
        s = counted.net
        return s((b @ b)[0, :3] * 0 + SLOW), s(b[0, :3]), s(b[0, :3] + 1), jax.jit(s)(b[0, :3] + 2)

    jax.block_until_ready(in_mode(mode, program)(big))
    assert counted.first() == [SLOW, 1, 2, 3]


def test_two_programs_keep_their_order(counted: Any) -> None:
    one, two = jax.jit(lambda b: counted.net((b @ b)[0, :3] * 0 + SLOW)), jax.jit(counted.net)
    jax.block_until_ready((one(big), two(x)))
    counted.handle.messages.clear()
    results = one(big), two(x), counted.net(x + 1), two(x + 2)
    assert counted.first() == [SLOW, 1, 2, 3]
    jax.block_until_ready(results)


def test_barrier_before_what_python_does(counted: Any) -> None:
    """Otherwise `Optimizer.step` overtakes the pullback of a compiled step."""
    step = jax.jit(lambda b: counted.net((b @ b)[0, :3] * 0 + SLOW))
    slow = jax.jit(lambda b: b @ b / 700)
    jax.block_until_ready(step(slow(big)))
    counted.handle.messages.clear()
    result = step(slow(big))
    gradwire.jax.barrier()
    assert len(counted.handle.messages) == 1
    jax.block_until_ready(result)


def test_order_among_jaxs_own_ordered_callbacks(counted: Any) -> None:
    seen: list[str] = []

    def program(x: Any) -> Any:
        io_callback(lambda: seen.append("before"), None, ordered=True)
        y = counted.net((big @ big)[0, :3] * 0 + x)
        io_callback(lambda: seen.append(f"after {len(counted.handle.messages)}"), None, ordered=True)
        return y

    jax.block_until_ready(jax.jit(program)(x))
    gradwire.jax.barrier()
    assert seen == ["before", "after 1"]


def test_pure_calls_are_free_to_be_merged_and_dropped(counted: Any) -> None:
    pure = lambda x: gradwire.jax.call(counted.handle, Site(positional(1)), [x])[0]  # noqa: E731
    jax.block_until_ready(jax.jit(lambda x: (pure(x) + pure(x), pure(x + 1))[0])(x))
    assert len(counted.handle.messages) in (1, 2)  # early jax does not merge, but drops


DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import gradwire.jax
from gradwire.background import Background
from gradwire.remote import Remote
from gradwire.site import Site
from gradwire_wire.structures import positional
from tests.doubles.scripted_handle import ScriptedHandle

handle = ScriptedHandle(lambda m: [m.arrays[-1] * 2])
call = lambda stateful: lambda x: gradwire.jax.call(handle, Site(positional(1), stateful=stateful), [x])[0]
two = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
sharded, second = jax.device_put(jnp.arange(4.0), two), jax.device_put(jnp.arange(4.0), jax.devices()[1])
for wrap in (lambda f: f, jax.jit):
    assert wrap(call(False))(sharded).tolist() == wrap(call(False))(second).tolist() == [0, 2, 4, 6]
    assert wrap(jax.grad(lambda x: call(False)(x).sum()))(sharded).tolist() == [2] * 4
    before = len(handle.messages)
    assert wrap(call(True))(second).tolist() == [0, 2, 4, 6] and len(handle.messages) == before + 1
    try:
        wrap(call(True))(sharded)
        raise SystemExit("not refused")
    except gradwire.UsageError as error:
        assert "runs on 2 devices" in str(error)
    assert len(handle.messages) == before + 1

def products(m):
    pulled = [op[1] for op in m.word if op[0] == "T"]
    return [m.linear[0] * m.arrays[1 - i] for i in pulled[0]] if pulled else [m.arrays[0] * m.arrays[1]]

product = ScriptedHandle(products, lambda avals: avals[:1])
multiply = lambda x, w: gradwire.jax.call(product, Site(positional(2)), [x, w])[0]
if hasattr(jax, "shard_map"):  # what the shards share has the sum of their cotangents
    specs = {"in_specs": (PartitionSpec("d"), PartitionSpec()), "out_specs": PartitionSpec("d")}
    split = jax.shard_map(multiply, mesh=two.mesh, **specs)
    for wrap in (lambda f: f, jax.jit):
        bars = wrap(jax.grad(lambda x, w: split(x, w).sum(), (0, 1)))(jnp.arange(4.0), jnp.array([1.0, 3.0]))
        assert [bar.tolist() for bar in bars] == [[1, 3, 1, 3], [2, 4]]

if hasattr(jax, "set_mesh"):  # where types say what is sharded, cotangents and rows have the types of their operands
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = [jax.device_put(v, NamedSharding(mesh, PartitionSpec("d"))) for v in (jnp.arange(4.0), jnp.arange(4.0) + 1)]
        pull = jax.grad(lambda x, w: multiply(x, w).sum(), (0, 1))
        for wrap in (lambda f: f, jax.jit):
            for derivative in (pull, jax.vmap(pull)):
                bars = wrap(derivative)(x, w)
                assert [bar.tolist() for bar in bars] == [[1, 2, 3, 4], [0, 1, 2, 3]]
                assert all(jax.typeof(bar) == jax.typeof(x) for bar in bars)
"""


def test_several_devices(xla_way: str) -> None:
    """Pure calls run on each; a call that moves state would happen on each, and is refused."""
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---- What is refused -----------------------------------------------------------------------------------------------


@MODES
def test_vmap_of_a_call_that_moves_state_is_refused(counted: Any, mode: str) -> None:
    for f in (counted.net, jax.grad(lambda x: counted.net(x).sum())):
        with pytest.raises(UsageError, match=r"moves the state of its module.*vmap='sequential'"):
            in_mode(mode, jax.vmap(f))(x)
    assert not counted.handle.messages


@MODES
def test_a_gradient_of_checkpoint_is_refused(counted: Any, mode: str) -> None:
    """By JAX itself: it would run the forward twice."""
    with pytest.raises(NotImplementedError, match=r"Effects not supported in .*checkpoint"):
        in_mode(mode, jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(counted.net(x)).sum())(x)))(x)


def test_recomputing_is_refused(counted: Any) -> None:
    with pytest.raises(UsageError, match=r"residuals='recompute'.*second time"):
        counted.net(x, residuals="recompute")


# ---- The anchor ----------------------------------------------------------------------------------------------------

HEAD, ANCHOR = jnp.float32(3), jnp.float32(0)
both = lambda loss: jax.value_and_grad(loss, (0, 1))  # noqa: E731
row = x[0]


def two_paths(y: Any, h: Any) -> Any:
    return (y * h).sum() + (y**2).sum()


def pulled_twice(f: Function, a: Any) -> Any:
    y, pull = jax.vjp(f, a)
    return pull(y), pull(2 * y)


ANCHORED: dict[str, tuple[Function, list[str]]] = {
    "no anchor, no pullback": (
        lambda net: lambda h, a: jax.value_and_grad(lambda h: (net(row, a) * h).sum())(h),
        ["forward"],
    ),
    "value_and_grad": (lambda net: both(lambda h, a: (net(row, a) * h).sum()), ["forward", "T+"]),
    "the anchor's gradient dropped": (
        lambda net: lambda h, a: both(lambda h, a: (net(row, a) * h).sum())(h, a)[1][0],
        ["forward", "T+"],
    ),
    "two paths to one call": (lambda net: both(lambda h, a: two_paths(net(row, a), h)), ["forward", "T+"]),
    "two equal calls": (
        lambda net: both(lambda h, a: (net(row, a) * h).sum() + (net(row, a) ** 2).sum()),
        ["forward", "forward", "T+", "T+"],
    ),
    "scan of steps": (
        lambda net: (
            lambda h, a: scan(lambda h: h - both(lambda h, a: (net(row, a) * h).sum())(h, a)[1][0], h, 3)
        ),
        ["forward", "T+"] * 3,
    ),
    "grad of scan": (
        lambda net: both(lambda h, a: scan(lambda c: net(c, a) * h, row, 3).sum()),
        ["forward"] * 3 + ["T+"] * 3,
    ),
    "pulled twice": (
        lambda net: lambda h, a: pulled_twice(lambda a: net(row, a) * h, a),
        ["forward", "T+", "T+"],
    ),
    "cond": (
        lambda net: both(
            lambda h, a: lax.cond(h > 0, lambda a: (net(row, a) * h).sum(), lambda a: 0.0 * a, a)
        ),
        ["forward", "T+"],
    ),
    "jvp": (lambda net: lambda h, a: jax.jvp(lambda h, a: net(row, a) * h, (h, a), (h, a)), ["forward", "J"]),
    "a gradient penalty: its inner pullback adds nothing": (
        lambda net: both(lambda h, a: (jax.grad(lambda x: (net(x, a) * h).sum())(row) ** 2).sum()),
        ["forward", "T", "TT+"],
    ),
    "the tangent of a pullback adds nothing": (
        lambda net: (
            lambda h, a: jax.jvp(lambda h: both(lambda h, a: (net(row, a) * h).sum() ** 2)(h, a), (h,), (h,))
        ),
        ["forward", "T+", "T"],
    ),
}


@MODES_OF_MANY
@pytest.mark.parametrize("case", ANCHORED)
def test_pullbacks_happen_as_written(counted: Any, case: str, mode: str) -> None:
    make, verbs = ANCHORED[case]
    result = in_mode(mode, make(counted.net))(HEAD, ANCHOR)
    gradwire.jax.barrier()
    assert counted.handle.verbs == verbs
    if case == "value_and_grad":
        assert float(result[0]) == 18 and [float(g) for g in result[1]] == [6, 0]


# ---- Training: the gradients of the all-local model ----------------------------------------------------------------


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


@pytest.fixture
def trained() -> torch.nn.Module:
    return encoder()


@pytest.fixture
def module(trained: torch.nn.Module) -> Iterator[Remote]:
    """A remote whose worker is in this process."""
    handle = TorchHandle(trained)
    yield Remote(handle, Background("double"))  # type: ignore[arg-type]
    handle.close()


def gradients(module: torch.nn.Module) -> list[np.ndarray]:
    return [p.grad.numpy() for p in module.parameters() if p.grad is not None]


def all_local(loss: Callable[[Function, torch.Tensor], torch.Tensor], head: Any) -> list[np.ndarray]:
    module = encoder()
    parameter = torch.tensor(np.asarray(head), requires_grad=True)
    loss(module, parameter).backward()
    return [parameter.grad.numpy(), *gradients(module)]


DATA = np.random.RandomState(0).randn(4, 3).astype(np.float32)
HEADS = jnp.asarray(np.random.RandomState(1).randn(2).astype(np.float32))


def penalised(net: Function, head: torch.Tensor) -> torch.Tensor:
    inputs = torch.from_numpy(DATA).requires_grad_()
    out = (net(inputs) @ head).sum()
    (inner,) = torch.autograd.grad(out, inputs, create_graph=True)
    return (inner**2).sum() + out


@MODES
def test_a_first_stage_trains(module: Remote, trained: torch.nn.Module, mode: str) -> None:
    """Its input is data, which nobody differentiates: without the anchor no cotangent would ever reach it."""
    apply, anchor = gradwire.jax.functional(module, owner="worker")
    loss = lambda h, a: (jnp.tanh(apply(a, DATA) @ h) ** 2).sum()  # noqa: E731
    step = in_mode(mode, jax.value_and_grad(loss, (0, 1)))
    value, (head_bar, anchor_bar) = step(HEADS, anchor)
    gradwire.jax.barrier()
    local = all_local(lambda net, h: (torch.tanh(net(torch.from_numpy(DATA)) @ h) ** 2).sum(), HEADS)
    assert anchor_bar.shape == () and anchor_bar == 0 and np.isfinite(value)
    for got, expected in zip([head_bar, *gradients(trained)], local, strict=True):
        np.testing.assert_allclose(got, expected, 1e-5, 1e-6)
    with torch.no_grad():
        for p in trained.parameters():
            p -= 0.01 * p.grad
    assert step(HEADS, anchor)[0] < value


@MODES
def test_second_order_reaches_the_parameters(module: Remote, trained: torch.nn.Module, mode: str) -> None:
    """A gradient penalty: d/dθ through ∂f/∂x, and nothing counted twice."""
    apply, anchor = gradwire.jax.functional(module, owner="worker")

    def loss(h: Any, a: Any) -> Any:
        out, inner = jax.value_and_grad(lambda x: (apply(a, x) @ h).sum())(jnp.asarray(DATA))
        return (inner**2).sum() + out

    head_bar, _ = in_mode(mode, jax.grad(loss, (0, 1)))(HEADS, anchor)
    gradwire.jax.barrier()
    for got, expected in zip([head_bar, *gradients(trained)], all_local(penalised, HEADS), strict=True):
        np.testing.assert_allclose(got, expected, 1e-4, 1e-5)


@MODES
def test_r40_statistics_move_once_for_each_forward(mode: str) -> None:
    norm = torch.nn.BatchNorm1d(3)
    remote = Remote(TorchHandle(norm), Background("double"))  # type: ignore[arg-type]
    apply, anchor = gradwire.jax.functional(remote, owner="worker")
    step = in_mode(mode, jax.value_and_grad(lambda a, x: (apply(a, x) ** 2).sum()))
    remote.handle.spec = lambda site, avals: _same(avals[1:])  # type: ignore[method-assign]
    for _ in range(3):
        step(anchor, DATA)
    gradwire.jax.barrier()
    assert norm.num_batches_tracked == 3
    remote.handle.close()


def _same(avals: Any) -> Any:
    from gradwire.site import SpecResult
    from gradwire_wire.structures import Leaf, flatten

    return SpecResult(tuple(avals), flatten(Leaf(0), lambda x: type(x) is Leaf)[0])


def test_functional_refuses_what_it_cannot(module: Remote) -> None:
    with pytest.raises(UsageError, match="owner is 'caller' or 'worker'"):
        gradwire.jax.functional(module, owner="me")
    with pytest.raises(UsageError, match="buffers='explicit' needs owner='caller'"):
        gradwire.jax.functional(module, owner="worker", buffers="explicit")
    apply, _ = gradwire.jax.functional(module, owner="worker")
    for wrong in (DATA, jnp.zeros(1), 0, jnp.int32(0)):
        with pytest.raises(UsageError, match="must be the anchor"):
            apply(wrong, DATA)
    assert apply(0.0, DATA).shape == (4, 2)
    with pytest.raises(UsageError, match="of torch"):
        apply(ANCHOR, torch.ones(3))
