"""`Optimizer.minimize`: a training step in one message does what call, pullback, step and zero_grad do in three."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.steps import QUICK_NS, TOGETHER, UNDER_WAY, together
from tests.doubles.patience import soon

TARGETS = pathlib.Path(__file__).parent / "targets"
Workers = Callable[[str], gw.Worker]
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(16, 3)), RNG.normal(size=(16, 2))
OPTIMIZERS = {"torch": "torch.optim:Adam", "tensorflow": "keras.optimizers:Adam", "jax": "optax:adam"}
RATE = {"torch": "lr", "tensorflow": "learning_rate", "jax": "learning_rate"}
FACTORY = {"torch": "make_torch", "tensorflow": "make_keras", "jax": "make_jax"}


def as_of(caller: str, x: np.ndarray) -> Any:
    if caller == "torch":
        import torch

        return torch.tensor(x)
    if caller == "tensorflow":
        import tensorflow as tf

        return tf.constant(x)
    if caller == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    return x


def by_three(
    net: gw.Remote, optimizer: gw.Optimizer, x: Any, y: Any, scale: float, clip_norm: float | None
) -> float:
    loss, pullback = net.vjp(x, y, scale=scale)
    pullback(1.0)
    optimizer.step(clip_norm, zero_grad=True)
    return float(loss)


def trained(net: gw.Remote, framework: str) -> gw.Optimizer:
    return net.optimizer(OPTIMIZERS[framework], **{RATE[framework]: 0.05})


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("caller", ["numpy", "torch", "tensorflow", "jax"])
def test_one_message_does_what_three_do(worker_of: Workers, framework: str, caller: str) -> None:
    worker, target = worker_of(framework), f"with_loss:{FACTORY[framework]}"
    dtype = "float32" if caller == "jax" else "float64"  # which JAX has not, as it is here
    net, other = worker.module(target, dtype), worker.module(target, dtype)
    one, three = trained(net, framework), trained(other, framework)
    here = X.astype(dtype), Y.astype(dtype)
    x, y = (as_of(caller, a) for a in here)
    for i in range(5):  # as a message, as one that becomes short, and short
        clip, scale = (0.5, 2.0) if i == 4 else (None, 1.0)
        loss = one.minimize(x, y, scale=scale, clip_norm=clip)
        assert type(loss) is type(x) or caller == "numpy"
        assert np.shape(loss) == ()
        np.testing.assert_allclose(loss, by_three(other, three, *here, scale, clip), rtol=1e-6)
    wanted = other.state_dict()
    for name, value in net.state_dict().items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert all(g is None for g in net.grads().values())


def test_it_is_one_message_and_one_forward(worker_of: Workers) -> None:
    worker = worker_of("torch")
    net = worker.module("with_loss:make_torch")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    for n in range(1, 5):
        optimizer.minimize(X, Y)
        before = worker.stats()["calls"]
        assert net.buffers()["calls"] == n
        assert worker.stats()["calls"] == before + 1  # of the buffers
    before = worker.stats()["calls"]
    optimizer.minimize(X, Y)
    assert worker.stats()["calls"] == before + 1


def test_gradients_that_are_there_count_as_in_a_step(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_torch")
    optimizer = net.optimizer("torch.optim:SGD", lr=1.0)
    before = net.parameters()
    _, pullback = net.vjp(X, Y)
    pullback(1.0)
    gradients = net.grads()
    optimizer.minimize(X, Y)
    for name, value in net.parameters().items():
        np.testing.assert_allclose(value, before[name] - 2 * gradients[name], rtol=1e-12)


def test_what_evaluates_the_loss_itself_does_so_in_the_worker(
    worker_of: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.syspath_prepend(str(TARGETS))
    from with_loss import make_torch

    net, local = worker_of("torch").module("with_loss:make_torch"), make_torch()
    options = {"lr": 0.5, "max_iter": 7, "history_size": 4}
    optimizer = net.optimizer("torch.optim:LBFGS", line_search_fn="strong_wolfe", **options)
    theirs = torch.optim.LBFGS(local.parameters(), line_search_fn="strong_wolfe", **options)
    x, y = torch.tensor(X), torch.tensor(Y)

    def closure() -> Any:
        theirs.zero_grad()
        loss = local(x, y)
        loss.backward()
        return loss

    for _ in range(3):
        assert float(optimizer.minimize(X, Y)) == pytest.approx(
            float(theirs.step(closure).detach()), rel=1e-9
        )
    for name, p in local.named_parameters():
        np.testing.assert_allclose(net.parameters()[name], p.detach(), rtol=1e-9)
    assert net.buffers()["calls"] == local.calls
    with pytest.raises(gw.UsageError, match=r"minimize\(\.\.\.\) instead of step"):
        net.vjp(X, Y)[1](1.0)
        optimizer.step()


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_results_beside_the_loss_have_no_part_in_the_step(worker_of: Workers, framework: str) -> None:
    net = worker_of(framework).module(f"with_loss:{FACTORY[framework]}_beside_a_cusp")
    kind = {"torch": "torch.optim:SGD", "tensorflow": "keras.optimizers:SGD", "jax": "optax:sgd"}[framework]
    options = {"weight_decay": 0.5} if framework == "torch" else {}
    optimizer = net.optimizer(kind, **{RATE[framework]: 0.1}, **options)
    x = np.ones(2, "f4")
    assert float(optimizer.minimize(x)["loss"]) == 5
    found = {name.rpartition("/")[2]: value for name, value in net.parameters().items()}
    w = np.array([1.0, 2.0])
    np.testing.assert_allclose(found["w"], w - 0.1 * (2 * w + options.get("weight_decay", 0) * w), rtol=1e-6)
    assert found["v"] == 3  # in torch no gradient, and so no decay
    assert np.isfinite(float(optimizer.minimize(x)["loss"]))


def test_the_loss_is_pulled_back_as_by_its_own_backward(worker_of: Workers) -> None:
    """torch refuses the older checkpoint where leaves are named; a leaf that is no parameter has its gradient as well."""
    net = worker_of("torch").module("with_loss:make_checkpointed")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.5)
    x = np.ones((2, 3), "f4")
    assert optimizer.minimize(x) == {"loss": 6, "of the leaf": None}
    (weight,) = net.parameters().values()
    assert weight.tolist() == [[0, 0, 0]]
    assert optimizer.minimize(x)["of the leaf"].tolist() == [6]


def test_a_result_that_is_no_loss_moves_nothing(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_without_loss")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    before = net.parameters()
    with pytest.raises(gw.UsageError, match=r"must be its loss, one real number.* and is float32\[16, 2\]"):
        optimizer.minimize(X.astype(np.float32))
    assert all(g is None for g in net.grads().values())
    for name, value in net.parameters().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("caller", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_result_may_have_more_than_its_loss(worker_of: Workers, caller: str, kind: str) -> None:
    net = worker_of("torch").module("with_loss:make_with_more", kind)
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x = as_of(caller, X.astype(np.float32))
    for _ in range(4):
        weight, bias = net.parameters()["weight"], net.parameters()["bias"]
        wanted = X.astype(np.float32) @ weight.T + bias
        result = optimizer.minimize(x)
        loss, logits = (
            (result["loss"], result["logits"]) if kind == "dict" else (result[0], result[1]["logits"])
        )
        np.testing.assert_allclose(logits, wanted, rtol=1e-5)
        assert float(loss) == pytest.approx(float((wanted**2).mean()), rel=1e-5)
        np.testing.assert_allclose(
            net.parameters()["bias"], bias - 0.1 * wanted.mean(0), rtol=1e-4, atol=1e-7
        )
        if kind == "dict":
            np.testing.assert_array_equal(result["best"], wanted.argmax(-1))


def test_a_result_without_a_loss_is_told_what_it_is(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_with_more", "odd")
    with pytest.raises(gw.UsageError, match=r"as 'loss', and is float32\[16, 2\], float32\[\]"):
        net.optimizer("torch.optim:SGD", lr=0.1).minimize(X.astype(np.float32))


def test_arguments_are_constants(worker_of: Workers) -> None:
    import jax
    import torch

    net = worker_of("torch").module("with_loss:make_torch", "float32")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x, y = torch.tensor(X, dtype=torch.float32, requires_grad=True), torch.tensor(Y, dtype=torch.float32)
    with pytest.raises(gw.UsageError, match=r"detach\(\) it, or call the module"):
        optimizer.minimize(x, y)
    with torch.no_grad():
        assert not optimizer.minimize(x, y).requires_grad
    assert not optimizer.minimize(x.detach(), y).requires_grad
    calls = net.buffers()["calls"]
    with pytest.raises((gw.GradwireError, jax.errors.TracerArrayConversionError)):
        jax.jit(lambda x: optimizer.minimize(x, np.float32(Y)))(X.astype(np.float32))
    assert net.buffers()["calls"] == calls == 2


def test_a_compiled_torch_program_calls_state_and_pullbacks_as_they_are(
    worker_of: Workers, recwarn: pytest.WarningsRecorder
) -> None:
    """torch.compile traced into the client: warnings, and an error of its own guards at the pullback."""
    import torch

    net = worker_of("torch").module("with_loss:make_torch", "float32")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x, y = as_of("torch", X.astype(np.float32)), as_of("torch", Y.astype(np.float32))

    def step(x: Any, y: Any) -> Any:
        before = net.buffers()["calls"]
        loss, pullback = net.vjp(2 * x, y)
        bars = pullback(1.0)
        norm = optimizer.step(clip_norm=10.0, zero_grad=True)
        again = optimizer.minimize(2 * x, y)
        return loss * 2, bars[0] + again, norm, int(before), net.spec(x, y).shape

    start = net.state_dict()
    wanted = [step(x, y) for _ in range(3)]
    net.load_state_dict(start)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    recwarn.clear()
    for loss, bar, norm, before, shape in wanted:
        got = compiled(x, y)
        torch.testing.assert_close((got[0], got[1]), (loss, bar))
        assert got[2:] == (pytest.approx(norm), before, shape)
    assert [str(w.message) for w in recwarn if "Dynamo" in str(w.message)] == []


def test_a_seed_makes_the_step_reproducible(worker_of: Workers) -> None:
    made = []
    for _ in range(2):
        net = worker_of("torch").module("with_loss:make_torch", dropout=0.5).options(seed=7)
        optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
        made.append([float(optimizer.minimize(X, Y)) for _ in range(3)])
    assert made[0] == made[1]


def test_an_error_of_the_backward_pass_moves_nothing(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_failing")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x = X.astype(np.float32)
    optimizer.minimize(x)
    before = net.parameters()
    with pytest.raises(ValueError, match="bad 42"):
        optimizer.minimize(x)
    for name, value in net.parameters().items():
        np.testing.assert_array_equal(value, before[name])
    optimizer.minimize(x)
    assert any((net.parameters()[name] != before[name]).any() for name in before)


@pytest.mark.parametrize("begin", [lambda o, *a: o.minimize(*a), lambda o, *a: o.submit(*a).result(60)])
def test_half_a_backward_pass_is_no_part_of_the_next_step(worker_of: Workers, begin: Any) -> None:
    after = []
    for failures in (0, 2):
        net = worker_of("torch").module("with_loss:make_that_fails_late")
        optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
        for _ in range(failures):
            with pytest.raises(ValueError, match="bad 42"):
                begin(optimizer, X, True)
            assert all(gradient is None for gradient in net.grads().values())
        begin(optimizer, X)
        after.append(net.parameters())
    for name, value in after[0].items():
        np.testing.assert_array_equal(value, after[1][name])


def test_one_that_is_given_up_moves_nothing(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_torch")
    patient = net.optimizer("torch.optim:SGD", lr=0.1)
    hurried = net.options(timeout=2.0).optimizer("torch.optim:SGD", lr=0.1)
    before = net.parameters()
    with pytest.raises(gw.DeadlineError):
        hurried.minimize(X, Y, nap=60.0)
    assert net.buffers()["calls"] == 1
    for name, value in net.parameters().items():
        np.testing.assert_array_equal(value, before[name])
    wanted = float(net(X, Y))
    assert float(patient.minimize(X, Y)) == pytest.approx(wanted)


@pytest.mark.parametrize("norm", [0, -1.0, True, "much", float("nan")])
def test_a_norm_must_be_positive(worker_of: Workers, norm: Any) -> None:
    optimizer = worker_of("torch").module("with_loss:make_torch").optimizer("torch.optim:SGD", lr=0.1)
    with pytest.raises(gw.UsageError, match="must be a positive number"):
        optimizer.minimize(X, Y, clip_norm=norm)


@pytest.mark.parametrize("lane", ["zmq", "socket"])
def test_by_each_line_and_after_a_restart(
    torch_python: str, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    monkeypatch.setenv("GRADWIRE_LANE", lane)
    with gw.connect() as bridge:
        worker = bridge.worker("torch", python=torch_python, path=[TARGETS], threads=1)
        net = worker.module("with_loss:make_torch")
        optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
        losses = [float(optimizer.minimize(X, Y)) for _ in range(3)]
        losses += [float(future.result(60)) for future in [optimizer.submit(X, Y) for _ in range(20)]]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]
        if lane == "zmq":
            return
        worker.restart()
        with pytest.raises(gw.WorkerDiedError, match="as new from its factory"):
            optimizer.minimize(X, Y)
        with pytest.raises(gw.UsageError, match="former life"):
            optimizer.minimize(X, Y)
        assert net.buffers()["calls"] == 0
        optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
        under_way = [optimizer.submit(X, Y, nap=60.0) for _ in range(3)]
        os.kill(worker.pid, signal.SIGKILL)
        for future in under_way:
            with pytest.raises(gw.WorkerDiedError):
                future.result(60)


# ---- Steps that are submitted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
@pytest.mark.parametrize("caller", ["numpy", "torch", "tensorflow", "jax"])
def test_submitted_steps_are_those_that_are_waited_for(
    worker_of: Workers, framework: str, caller: str
) -> None:
    """Bit for bit; and whatever is asked next, by whatever line, finds all of them made."""
    worker, target = worker_of(framework), f"with_loss:{FACTORY[framework]}"
    dtype = "float32" if caller == "jax" else "float64"
    net, other = worker.module(target, dtype), worker.module(target, dtype)
    submitted, waited = trained(net, framework), trained(other, framework)
    y = as_of(caller, Y.astype(dtype))
    xs = [as_of(caller, (X + i).astype(dtype)) for i in range(12)]
    wanted = [waited.minimize(x, y, clip_norm=3.0) for x in xs]
    futures = [submitted.submit(x, y, clip_norm=3.0) for x in xs]
    last = net(xs[0], y)
    assert all(future.done() for future in futures)
    for future, loss in zip(futures, wanted, strict=True):
        assert type(future.result(0)) is type(loss)
        np.testing.assert_array_equal(future.result(0), loss)
    np.testing.assert_array_equal(as_numpy(last), as_numpy(other(xs[0], y)))
    parameters = other.parameters()
    futures = [submitted.submit(x, y) for x in xs]
    for x in xs:
        waited.minimize(x, y)
    for name, value in net.parameters().items():
        assert (value != parameters[name]).any()
        np.testing.assert_array_equal(value, other.parameters()[name])


def as_numpy(x: Any) -> np.ndarray:
    return np.asarray(x.detach() if hasattr(x, "detach") else x)


def test_few_steps_are_under_way_at_once(worker_of: Workers, tmp_path: pathlib.Path) -> None:
    """Or the worker would read arguments that have left its caches long ago."""
    optimizer = worker_of("torch").module("with_loss:make_that_waits").optimizer("torch.optim:SGD", lr=0.1)
    sign, futures = tmp_path / "go", []

    def submit() -> None:
        for _ in range(UNDER_WAY + 1):
            futures.append(optimizer.submit(X, str(sign)))

    thread = threading.Thread(target=submit)
    thread.start()
    assert soon(lambda: len(futures) == UNDER_WAY)
    thread.join(0.2)
    assert thread.is_alive() and len(futures) == UNDER_WAY
    assert not any(future.done() for future in futures)
    sign.touch()
    thread.join(60)
    assert [float(future.result(60)) > 0 for future in futures] == [True] * (UNDER_WAY + 1)


QUICK_S = 3e-4
"""Seconds of a step which is long enough that others come meanwhile, and short enough that its answer waits for theirs."""


def test_a_deadline_ends_the_step_that_is_slow_and_none_before_it(worker_of: Workers) -> None:
    """Answers of quick steps come together, but not where a step may be given up: the first of them would be blamed."""
    net = worker_of("torch").module("with_loss:make_that_naps")
    optimizer = net.options(timeout=1.0).optimizer("torch.optim:SGD", lr=0.01)
    for _ in range(12):
        optimizer.submit(X, np.array(QUICK_S)).result(60)
    for count in range(18, 22):  # whatever number would come together
        futures = [optimizer.submit(X, np.array(nap)) for nap in [QUICK_S] * count + [60.0, 0.0]]
        with pytest.raises(gw.DeadlineError):
            futures.pop(count).result(60)
        losses = [float(future.result(60)) for future in futures]
        assert losses == sorted(losses, reverse=True) and len(set(losses)) == count + 1


def test_quick_steps_before_a_slow_one(worker_of: Workers) -> None:
    optimizer = worker_of("torch").module("with_loss:make_that_naps").optimizer("torch.optim:SGD", lr=0.01)
    naps = [QUICK_S] * 40 + [0.5] + [QUICK_S] * 20 + [0.2]
    losses = [float(f.result(60)) for f in [optimizer.submit(X, np.array(nap)) for nap in naps]]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == len(naps)


@pytest.mark.parametrize(
    ("took_ns", "under_way", "wanted"),
    [(0, 7, 0), (QUICK_NS, 7, 0), *((1000, n, min((n + 1) // 2, TOGETHER)) for n in range(UNDER_WAY))],
)
def test_how_many_answers_come_together(took_ns: int, under_way: int, wanted: int) -> None:
    """Of quick steps, and as long as the worker has as many others: it needs them until the next ones come."""
    assert together(took_ns, under_way) == wanted
    assert wanted <= 1 or 2 * wanted <= under_way + 1


def failing_steps(worker_of: Workers, sign: pathlib.Path) -> tuple[gw.Remote, gw.Optimizer, list[Any]]:
    """Three steps, of which the second fails by its arguments, when the third is submitted: or that would tell of it."""
    worker = worker_of("torch")
    net, between = worker.module("with_loss:make_torch"), worker.module("with_loss:make_that_waits")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    first = optimizer.submit(X, Y)
    between.submit(X, str(sign))
    others = [optimizer.submit(X, y) for y in (Y[:5], Y)]
    sign.touch()
    return net, optimizer, [first, *others]


def test_a_step_that_fails_says_so_and_the_others_are_made(
    worker_of: Workers, tmp_path: pathlib.Path
) -> None:
    net, optimizer, futures = failing_steps(worker_of, tmp_path / "go")
    with pytest.raises(RuntimeError, match="must match the size"):
        futures[1].result(60)
    assert float(futures[2].result(60)) < float(futures[0].result(60))
    assert float(optimizer.submit(X, Y).result(60)) < float(futures[2].result(60))  # it is not told again
    assert net.buffers()["calls"] == 4


@pytest.mark.parametrize("asked", ["call", "verb", "minimize", "submit", "vjp"])
def test_what_a_step_has_raised_that_nobody_asked_for_is_raised_by_what_comes_next(
    worker_of: Workers, asked: str, tmp_path: pathlib.Path
) -> None:
    net, optimizer, futures = failing_steps(worker_of, tmp_path / "go")
    futures[2].result(60)
    act: dict[str, Any] = {
        "call": lambda: net(X, Y),
        "verb": net.parameters,
        "minimize": lambda: optimizer.minimize(X, Y),
        "submit": lambda: optimizer.submit(X, Y).result(60),
        "vjp": lambda: net.vjp(X, Y),
    }
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        act[asked]()
    assert "a step that was submitted before" in caught.value.__notes__[-1]
    act[asked]()  # once


def test_a_trace_keeps_no_step_s_error_for_itself(
    worker_of: Workers, shared_bridge: gw.Bridge, tmp_path: pathlib.Path
) -> None:
    net, optimizer, futures = failing_steps(worker_of, tmp_path / "go")
    futures[2].result(60)
    with shared_bridge.trace(tmp_path / "t.json"):
        pass
    with pytest.raises(RuntimeError, match="must match the size"):
        net(X, Y)
    with shared_bridge.trace(tmp_path / "t.json"):
        optimizer.submit(X, Y[:5])
    with pytest.raises(RuntimeError, match="must match the size"):
        net(X, Y)


def test_an_optimizer_stays_until_its_steps_are_made(worker_of: Workers) -> None:
    net = worker_of("torch").module("with_loss:make_torch")
    before = net.parameters()
    futures = [net.optimizer("torch.optim:SGD", lr=0.1).submit(X, Y, nap=0.1) for _ in range(3)]
    assert len({float(future.result(60)) for future in futures}) == 3
    assert any((net.parameters()[name] != before[name]).any() for name in before)


def test_what_refuses_the_arguments_is_raised_at_once(worker_of: Workers) -> None:
    import torch

    net = worker_of("torch").module("with_loss:make_torch")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    with pytest.raises(gw.UsageError, match=r"submit\(\) .* detach\(\)"):
        optimizer.submit(torch.tensor(X, requires_grad=True), torch.tensor(Y))
    with pytest.raises(gw.UnsupportedTensorError, match=r"args\[1\]"):
        optimizer.submit(X, np.array(["text"]))
    assert net.buffers()["calls"] == 0


def test_steps_that_no_line_takes_are_made_in_their_turn(
    worker_of: Workers, shared_bridge: gw.Bridge, tmp_path: pathlib.Path
) -> None:
    """Arguments longer than any packet, futures as arguments, and a bridge that is traced."""
    worker = worker_of("torch")
    net, other = (worker.module("with_loss:make_that_waits") for _ in range(2))
    optimizer, reference = (n.optimizer("torch.optim:SGD", lr=0.1) for n in (net, other))
    net.eval()
    x = other.submit(X, "")
    futures = [optimizer.submit(X + i, "a" * 400_000 if i % 2 else "") for i in range(4)]
    futures.append(optimizer.submit(X + x.result(60) * np.zeros_like(X), ""))
    with shared_bridge.trace(tmp_path / "steps.json"):
        futures.append(optimizer.submit(X, ""))
        failing = optimizer.submit(X[:, :2], "")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            failing.result(0)
    wanted = [reference.minimize(X + (i if i < 4 else 0), "") for i in range(6)]
    np.testing.assert_array_equal([float(f.result(60)) for f in futures], np.array(wanted, float))


@pytest.mark.parametrize("compiler", ["jax.jit", "lax.scan", "tf.function"])
def test_r41_what_would_be_done_only_while_a_program_is_traced_is_refused(
    worker_of: Workers, compiler: str
) -> None:
    import jax
    import tensorflow as tf

    net = worker_of("torch").module("with_loss:make_torch", "float32")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x, y = X.astype(np.float32), Y.astype(np.float32)
    net.vjp(x, y)[1](1.0)
    before = net.state_dict()
    net.options(family="tensorflow" if compiler == "tf.function" else "jax")(x, y)  # so that it is in use
    acts: dict[str, Callable[[], Any]] = {
        "step": lambda: optimizer.step(),
        "zero_grad": lambda: optimizer.zero_grad(),
        "set": lambda: optimizer.set(lr=0.5),
        "minimize": lambda: optimizer.minimize(x, y),
        "train": lambda: net.eval(),
        "load_state_dict": lambda: net.load_state_dict(before),
        "requires_grad": lambda: net.requires_grad_(False),
    }

    def compiled(act: Callable[[], Any]) -> None:
        def body(carry: Any, _: Any = None) -> Any:
            act()
            return carry, None

        if compiler == "jax.jit":
            jax.jit(lambda x: body(x)[0])(1.0)
        elif compiler == "lax.scan":
            jax.lax.scan(body, 1.0, None, length=3)
        else:
            tf.function(lambda x: body(x)[0], autograph=False)(tf.constant(1.0))

    for verb, act in acts.items():
        with pytest.raises(gw.UsageError, match=f"{verb} of .* would be done once, now"):
            compiled(act)
    assert all(g is not None for g in net.grads().values())
    assert net.training
    compiled(net.parameters)  # what is read is a constant of the program, as elsewhere


def test_r41_eager_transforms_trace_nothing(worker_of: Workers) -> None:
    import jax
    import jax.numpy as jnp

    net = worker_of("torch").module("with_loss:make_torch", "float32")
    optimizer = net.optimizer("torch.optim:SGD", lr=0.1)
    x, y = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)

    def loss(scale: Any) -> Any:
        return scale * optimizer.minimize(x, y)

    first = jax.grad(loss)(1.0)
    second = jax.vmap(loss)(jnp.ones(3))
    third = jax.jit(lambda s: jax.pure_callback(lambda s: loss(s).astype(np.float32), s, s))(jnp.float32(1.0))
    assert float(third) < float(second[0]) < float(first)
    assert net.buffers()["calls"] == 3
