"""Bad input: each its own error that says what to do, and the worker stays usable."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire.sending import Sender

TARGETS = pathlib.Path(__file__).parent / "targets"
Workers = Callable[[str], gw.Worker]
X = np.ones(3, np.float32)


@pytest.fixture
def numpy_worker(worker_of: Workers) -> Iterator[gw.Worker]:
    worker = worker_of("numpy")
    yield worker
    assert (worker.function("any_framework:double")(X) == 2).all()  # still usable


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("any_framework:dubble", "double"),
        ("no_such_module:f", "path="),
        ("no/such/file.py:f", "looked at"),
        ("any_framework", "pkg.mod:attr"),
        ("any_framework.double", "did you mean 'any_framework:double'"),
        ("package.any.Model.from_pretrained", "did you mean 'package.any:Model.from_pretrained'"),
        ("any_framework.py", "'any_framework.py:attr'"),
    ],
)
def test_unknown_target(numpy_worker: gw.Worker, target: str, said: str) -> None:
    with pytest.raises(gw.UsageError, match=said):
        numpy_worker.function(target)


def test_a_module_that_raises_while_imported(numpy_worker: gw.Worker) -> None:
    with pytest.raises(RuntimeError, match="broken on purpose") as caught:
        numpy_worker.function("raises_on_import:f")
    assert isinstance(caught.value, gw.RemoteError) and "raises_on_import.py" in caught.value.traceback


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4")]),
        {1, 2},
        object(),
    ],
    ids=["object", "string", "datetime", "structured", "set", "instance"],
)
def test_what_cannot_be_sent(numpy_worker: gw.Worker, value: object) -> None:
    with pytest.raises(gw.UnsupportedTensorError):
        numpy_worker.function("any_framework:identity")(value)


def test_what_a_factory_loaded_as_a_function_makes(numpy_worker: gw.Worker) -> None:
    with pytest.raises(gw.UnsupportedTensorError, match=r"the result: a operator.itemgetter .*worker.module"):
        numpy_worker.function("operator:itemgetter")(0)


def test_two_families_in_one_call(numpy_worker: gw.Worker) -> None:
    import jax.numpy as jnp
    import torch

    with pytest.raises(gw.UsageError, match=r"args\[0\].*args\[1\]"):
        numpy_worker.function("any_framework:both")(torch.ones(3), jnp.ones(3))


def test_unknown_options(numpy_worker: gw.Worker) -> None:
    identity = numpy_worker.function("any_framework:identity")
    with pytest.raises(gw.UsageError, match="timeout"):
        identity.options(time_out=1)
    with pytest.raises(gw.UsageError, match="positive"):
        identity.options(timeout=0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout", 0),
        ("timeout", float("nan")),
        ("timeout", True),
        ("timeout", 10**400),
        ("seed", True),
        ("seed", np.float64(3)),
        ("compile", np.ones(2)),
        ("compile", 1),
        ("vmap", ["batch"]),
        ("out_spec", gw.ShapeDtype((-2,), "float32")),
        ("out_spec", gw.ShapeDtype("ab", "float32")),
    ],
)
def test_values_that_are_none_of_the_options(numpy_worker: gw.Worker, option: str, value: object) -> None:
    remote = numpy_worker.function("any_framework:double")
    with pytest.raises(gw.UsageError, match=option if option != "out_spec" else "shape"):
        remote.options(**{option: value})


def test_numbers_of_numpy_are_numbers(numpy_worker: gw.Worker) -> None:
    remote = numpy_worker.function("any_framework:double")
    assert (remote.options(timeout=np.float32(20), seed=np.int64(3))(X) == 2).all()


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda w, b: w.function(5), "a target is named by a text"),
        (lambda w, b: w.function("half:\ud800"), "cannot be sent"),
        (lambda w, b: w.module(None), "a target is named by a text"),
        (lambda w, b: b.empty(-1), "a shape is a natural number"),
        (lambda w, b: b.empty((2, 2.5)), "a shape is a natural number"),
        (lambda w, b: b.empty(2, "flaot32"), "none of numpy's"),
        (lambda w, b: gw.connect(5), "path of a .toml file"),
        (lambda w, b: gw.connect(start_timeout=0), "start_timeout=0"),
        (lambda w, b: gw.connect(start_timeout="5"), "start_timeout='5'"),
        (lambda w, b: w.function("any_framework:double").jvp(X, X), "jvp takes two tuples"),
        (lambda w, b: w.function("any_framework:double").load_state_dict(5), "dict of tensors by name"),
        (lambda w, b: w.function("any_framework:double").load_state_dict({0: X}), "dict of tensors by name"),
        (lambda w, b: w.function("any_framework:double").requires_grad_(True, 5), "names of parameters"),
        (lambda w, b: w.function("any_framework:double").requires_grad_("encoder"), "and then the names"),
        (lambda w, b: w.function("any_framework:double").optimizer(dict), "a target is named by a text"),
        (lambda w, b: w.function("any_framework:double").optimizer("a:b"), r"optimizer\(\) needs a module"),
        (
            lambda w, b: w.function("any_framework:double")(Future()),
            r"\.submit\(\.\.\.\), which takes futures",
        ),
        (lambda w, b: gw.jax.functional(w), r"give what worker\.module"),
        (lambda w, b: w.function("any_framework:double").train("yes"), "True or False, not 'yes'"),
        (lambda w, b: w.function("any_framework:double")("\ud800"), "a text in it is not Unicode"),
    ],
)
def test_wrong_arguments_of_the_public_api(
    numpy_worker: gw.Worker, shared_bridge: gw.Bridge, use: Callable[..., object], said: str
) -> None:
    with pytest.raises(gw.UsageError, match=said):
        use(numpy_worker, shared_bridge)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda remote, optimizer: remote.forward(X), "only a call reaches"),
        (lambda remote, optimizer: remote.named_parameters(), r"gw\.torch\.Module\(remote\)"),
        (lambda remote, optimizer: setattr(remote, "timeout", 5), "no attribute 'timeout'"),
        (lambda remote, optimizer: setattr(optimizer, "lr", 0.1), r"set\(lr="),
        (lambda remote, optimizer: optimizer.param_groups, "state_dict"),
    ],
)
def test_attributes_that_a_proxy_does_not_have(
    numpy_worker: gw.Worker, use: Callable[..., object], said: str
) -> None:
    remote = numpy_worker.function("any_framework:double")
    with pytest.raises(AttributeError, match=said):
        use(remote, gw.Optimizer(remote, "a:b", 0))


def test_a_function_loaded_as_a_module_is_said_to_be_one(numpy_worker: gw.Worker) -> None:
    with pytest.raises(TypeError, match=r"load it by worker\.function\('any_framework:double'\)"):
        numpy_worker.module("any_framework:double")


def test_a_remote_error_is_the_builtin_too(numpy_worker: gw.Worker) -> None:
    with pytest.raises(ValueError, match="bad 42") as caught:
        numpy_worker.function("any_framework:bad")(X)
    assert caught.value.type_name == "ValueError" and "any_framework.py" in caught.value.traceback


def test_a_deadline(numpy_worker: gw.Worker) -> None:
    nap = numpy_worker.function("in_numpy:nap")
    with pytest.raises(gw.DeadlineError, match=r"sent an interrupt.*blocked signals.*restart"):
        nap.options(timeout=0.3)(30.0)
    assert (nap(0.0) == 1).all()  # it was interrupted, and its late reply is nobody's


def test_a_closed_bridge_and_worker() -> None:
    bridge = gw.connect()
    worker = bridge.worker("numpy")
    assert repr(bridge) == "<gradwire.Bridge with workers: 'numpy'>"
    remote, other = worker.function("operator:neg"), worker.function("operator:pos")
    assert repr(remote) == "<gradwire.Remote numpy/operator:neg>"
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(gw.WorkerDiedError):
        remote(X)
    assert repr(remote) == "<gradwire.Remote numpy/operator:neg dead>"
    worker.restart()
    remote(X)
    assert repr(remote) == "<gradwire.Remote numpy/operator:neg>"
    worker.close()
    assert [repr(r)[-7:] for r in (remote, other)] == ["closed>"] * 2
    with pytest.raises(gw.ClosedError, match=r"bridge\.worker"):
        remote(X)
    bridge.close()
    bridge.close()
    assert repr(bridge) == "<gradwire.Bridge closed>"
    with pytest.raises(gw.ClosedError, match="connect"):
        bridge.worker("numpy")


def test_folders_with_files_named_like_what_a_worker_needs(
    shared_bridge: gw.Bridge, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They stand in for nothing of ours; and a worker that takes warnings for errors ends without one."""
    for name in ("msgpack", "zmq", "numpy", "messages", "desk"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not what was meant')\n")
    worker = shared_bridge.worker(
        "numpy", name="strict", path=[tmp_path, TARGETS], env={"PYTHONWARNINGS": "error"}
    )
    assert (worker.function("fragile:double")(X) == 2 * X).all()
    worker.close()
    assert "[strict]" not in capfd.readouterr().err


def test_what_the_broker_cannot_be_told(shared_bridge: gw.Bridge) -> None:
    for env in ({"A": "half a character \ud800"}, {"A": "x" * (17 << 20)}):
        with pytest.raises(gw.UsageError, match="cannot be told"):
            shared_bridge.worker("numpy", name="never", env=env, start_timeout=5.0)
    assert "never" not in shared_bridge.stats()


def test_wrong_interpreter_and_framework(shared_bridge: gw.Bridge, torch_python: str) -> None:
    with pytest.raises(gw.WorkerStartError, match="no/such/python"):
        shared_bridge.worker("torch", python="no/such/python")
    with pytest.raises(gw.WorkerStartError, match="jax"):
        shared_bridge.worker("jax", python=torch_python)
    with pytest.raises(gw.GradwireError, match="paddel"):
        shared_bridge.worker("paddel", python=sys.executable)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_r62_a_call_that_was_interrupted_as_it_was_sent_ends_in_the_worker(
    numpy_worker: gw.Worker, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """It was sent, and whoever made it does not know: the next call waited until it had ended by itself."""
    double, nap = (numpy_worker.function(name) for name in ("any_framework:double", "fragile:nap"))
    send = Sender._send_by

    def interrupted(self: Sender, *args: Any) -> None:
        send(self, *args)
        raise error

    monkeypatch.setattr(Sender, "_send_by", interrupted)
    with pytest.raises(error):
        nap(X, 600.0)
    monkeypatch.undo()
    np.testing.assert_array_equal(double.options(timeout=60)(X), 2 * X)
