"""From a JAX program down to the handle and back: bits, refusals, errors, threads. The worker is a script."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradwire.jax
from gradwire.jax import express
from gradwire.site import Site
from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BOOL, BY_NAME
from gradwire_wire.errors import (
    DtypeError,
    GradwireError,
    RemoteError,
    UnsupportedTensorError,
    UsageError,
    WorkerDiedError,
    remote_error,
)
from gradwire_wire.structures import Leaf, flatten, positional
from tests.doubles.scripted_handle import Message, ScriptedHandle, like

pytestmark = pytest.mark.usefixtures("xla_way")

Answer = Callable[[Message], Sequence[Any]]


def remote(handle: ScriptedHandle, **site: Any) -> Callable[..., Any]:
    """A function of tensors alone; its one result is not in a list."""

    def call(*operands: Any) -> Any:
        results = gradwire.jax.call(handle, Site(positional(len(operands)), **site), list(operands))
        return results[0] if isinstance(results, list) and len(results) == 1 else results

    return call


def twice(message: Message) -> list[Any]:
    """x ↦ 2 x of one real operand, with all its derivatives."""
    carrier = message.carriers[-1]
    return [carrier._replace(array=carrier.array * 2)]


@pytest.fixture
def x64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


# ---- Bits ----------------------------------------------------------------------------------------------------------

SHAPES = [(), (0, 3), (2, 3, 4)]
WIDE = {"int64", "uint64", "float64", "complex128"}


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


NOT_EXPRESS = [
    "complex64",
    "complex128",
    "float8_e3m4",
]  # what jax-tvm-ffi refuses: such a call goes another way


@pytest.mark.parametrize(
    "names",
    [sorted({*BY_NAME} - {*NOT_EXPRESS}), NOT_EXPRESS],
    ids=["by either way", "not by XLA's own call"],
)
def test_every_dtype_both_ways(names: list[str], x64: None, xla_way: str) -> None:
    """All in one call, which compiles once."""
    f = remote(ScriptedHandle(lambda m: m.carriers))
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        element = np.dtype(getattr(ml_dtypes, name, None) or name)
        if name.startswith("float8") and not hasattr(jnp, name):
            with pytest.raises(UnsupportedTensorError, match=rf"jax .* has no {name}"):
                f(np.zeros(3, element))
            continue
        for shape in SHAPES:
            count = int(np.prod(shape)) * element.itemsize
            array = np.arange(1, count + 1, dtype=np.uint8).view(element).reshape(shape)
            arrays[f"{name} {shape}"] = np.asarray(array.view(np.uint8) % 2 == 0) if name == "bool" else array
    assert len(arrays) >= (13 if len(names) > 3 else 2) * len(SHAPES)
    given = list(arrays.values())
    goes_express = express.TARGET in jax.jit(f).lower(*given).as_text()
    assert goes_express is (xla_way == "express" and names is not NOT_EXPRESS)
    for results in (f(*given), f(*map(jnp.asarray, given)), jax.jit(f)(*given)):
        for (name, array), got in zip(arrays.items(), results, strict=True):
            assert isinstance(got, jax.Array) and (got.dtype, got.shape) == (array.dtype, array.shape), name
            assert bits(got) == bits(array), name


def test_r17_wide_arguments_are_refused() -> None:
    """Never narrowed: 1 + 1e-12, 2**40."""
    f = remote(ScriptedHandle(lambda m: m.carriers))
    for name in WIDE:
        for run in (f, jax.jit(lambda x, name=name: f(np.ones(2, name)))):
            with pytest.raises(DtypeError, match=rf"args\[0\]: .*{name}.*jax_enable_x64"):
                run(np.ones(2, name))


def test_r17_wide_results_are_refused() -> None:
    """Never 2**40 modulo 2**32."""
    for name in WIDE:
        f = remote(ScriptedHandle(lambda m: [], lambda avals, name=name: [Aval((2,), BY_NAME[name])]))
        for run in (f, jax.jit(f)):
            with pytest.raises(
                DtypeError, match=rf"result\[0\] of scripted/double.py:f: .*{name}.*jax_enable_x64"
            ):
                run(jnp.ones(3))


def test_refused_by_name() -> None:
    f = remote(ScriptedHandle(lambda m: m.carriers))
    x = jnp.ones(3)
    for operand in (
        jax.random.key(0),
        jnp.ones(3, "int4"),
        np.array(["a"]),
        np.array([None]),
        np.zeros(3, "M8[s]"),
    ):
        with pytest.raises(UnsupportedTensorError, match=r"args\[1\]: "):
            f(x, operand)


def test_byte_order_and_layout_of_numpy_operands() -> None:
    f = remote(ScriptedHandle(lambda m: m.carriers))
    for array in (
        np.arange(6, dtype=">f4"),
        np.arange(24, dtype="f4").reshape(2, 3, 4).transpose(2, 0, 1)[::-1],
    ):
        assert np.array_equal(f(array), array) and np.array_equal(jax.jit(lambda a=array: f(a))(), array)


def test_results_of_any_layout() -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    answers = [
        base.transpose(2, 0, 1),
        base[::-1],
        base[:, ::2],
        np.broadcast_to(base[0], (5, 3, 4)),
        np.asfortranarray(base),
    ]
    for answer in answers:
        f = remote(ScriptedHandle(lambda m, a=answer: [a], lambda _, a=answer: like(a)))
        for run in (f, jax.jit(f)):
            assert np.array_equal(run(jnp.ones(1)), answer)


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_r10_any_byte_but_zero_is_true(mode: str) -> None:
    mask = np.array([0, 1, 2, 255], np.uint8)
    f = remote(ScriptedHandle(lambda m: [Carrier(mask.view(bool), BOOL)], lambda _: [Aval((4,), BOOL)]))
    got = (jax.jit(f) if mode == "jit" else f)(jnp.ones(1))
    assert np.asarray(got).view(np.uint8).tolist() == [0, 1, 1, 1]


def test_r16_operands_and_results_are_nobody_elses() -> None:
    """At sizes where JAX aliases: results stay, and what the worker's memory becomes later does not matter."""
    memory = np.zeros(100_000, np.float32)

    def answer(message: Message) -> list[Any]:
        memory[:] = message.arrays[0]
        return [memory]

    f = remote(ScriptedHandle(answer))
    compiled = jax.jit(f)
    first, second = f(jnp.ones(100_000)), compiled(jnp.full(100_000, 2.0))
    for i in range(20):
        compiled(jnp.full(100_000, 3.0 + i)), f(jnp.full(100_000, 3.0 + i))
    assert (first == 1).all() and (second == 2).all()


# ---- What arrives is what was announced ----------------------------------------------------------------------------


def announced(message: str, answer: Answer, **double: Any) -> None:
    handle = ScriptedHandle(answer, **double)
    for run in (remote(handle), jax.jit(remote(handle)), jax.grad(lambda x: remote(handle)(x).sum())):
        with pytest.raises(Exception, match=message):
            run(jnp.ones(3))
    assert not handle.kept


def test_other_shapes_dtypes_or_numbers_of_results_are_errors() -> None:
    announced(
        r"announced as float32\[3\].*float32\[2\] arrived.*out_spec", lambda m: [np.ones(2, np.float32)]
    )
    announced(r"announced as float32\[3\].*float64\[3\] arrived", lambda m: [np.ones(3)])
    one = flatten([Leaf(0)], lambda x: type(x) is Leaf)[0]
    announced("2 results arrived where 1 were announced", lambda m: [m.arrays[0]] * 2, structure=one)
    announced("nothing arrived", lambda m: [None])


def test_another_result_tree_is_an_error() -> None:
    trees = iter([[Leaf(0), n] for n in range(99)])
    handle = ScriptedHandle(lambda m: m.carriers)
    handle._structure = lambda _: flatten(next(trees), lambda x: type(x) is Leaf)[0]  # type: ignore[method-assign]
    for run in (remote(handle), jax.jit(lambda x: remote(handle)(x)[0])):
        with pytest.raises(Exception, match="the result tree differs from the one this call was traced with"):
            run(jnp.ones(3))


def test_r35_shapes_that_only_the_call_can_tell() -> None:
    """Eager calls work; compiled ones raise what `spec` says."""

    def announce(_: Any) -> Any:
        raise UsageError("the shape depends on values: give out_spec")

    f = remote(ScriptedHandle(lambda m: [m.arrays[0][m.arrays[0] > 0]], announce))
    assert f(jnp.array([1.0, -1.0, 2.0])).tolist() == [1, 2]
    for run in (
        jax.jit(f),
        jax.grad(lambda x: f(x).sum()),
        jax.vmap(f),
        jax.jit(lambda _: f(np.ones(3, "f4"))),
    ):
        with pytest.raises(UsageError, match="out_spec"):
            run(jnp.ones((3, 3)))


def test_a_call_without_results() -> None:
    handle = ScriptedHandle(lambda m: [], lambda _: [], flatten(None, lambda x: False)[0])
    assert remote(handle)(jnp.ones(3)) is None
    assert jax.jit(lambda x: (remote(handle, stateful=True)(x), x)[1])(jnp.ones(3)).shape == (3,)
    gradwire.jax.barrier()
    assert len(handle.messages) == 2


# ---- Errors --------------------------------------------------------------------------------------------------------

TRACEBACK = 'Traceback (most recent call last):\n  File "/remote/models.py", line 7, in f\nValueError: bad 42'


def failing_if(broken: dict[str, bool]) -> Answer:
    def answer(message: Message) -> list[Any]:
        if broken.get(message.verb):
            raise remote_error("ValueError", "bad 42", TRACEBACK, "torch")
        return twice(message)

    return answer


@pytest.mark.parametrize("stateful", [False, True], ids=["pure", "stateful"])
@pytest.mark.parametrize("verb", ["forward", "T"])
def test_r36_remote_errors(verb: str, stateful: bool) -> None:
    broken: dict[str, bool] = {}
    f = remote(ScriptedHandle(failing_if(broken)), stateful=stateful)
    eager = jax.value_and_grad(lambda x: f(x).sum())
    compiled = jax.jit(eager)
    x = jnp.ones(3)
    for _ in range(2):
        broken[verb] = True
        with pytest.raises(ValueError, match="bad 42") as caught:
            eager(x)
        assert isinstance(caught.value, RemoteError) and "models.py" in str(caught.value)
        with pytest.raises(
            Exception, match=r'ValueError: bad 42 in worker(.|\n)*"/remote/models.py", line 7'
        ) as caught:
            jax.block_until_ready(compiled(x))
        assert ("the pullback of scripted" if verb == "T" else "scripted/double.py:f failed") in str(
            caught.value
        )
        broken.clear()
        assert eager(x)[1].tolist() == compiled(x)[1].tolist() == [2, 2, 2]
        gradwire.jax.barrier()


def test_errors_keep_their_type_and_attributes() -> None:
    def answer(_: Message) -> list[Any]:
        raise WorkerDiedError("the worker is gone", signal="SIGKILL")

    with pytest.raises(WorkerDiedError, match="gone") as caught:
        remote(ScriptedHandle(answer))(jnp.ones(3))
    assert caught.value.signal == "SIGKILL"


def interrupt_soon() -> threading.Timer:
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("run", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())], ids=["call", "grad"])
def test_ctrl_c(run: Any) -> None:
    interrupted = threading.Event()

    def answer(message: Message) -> list[Any]:
        if not interrupted.is_set():
            interrupted.set()
            timers.append(interrupt_soon())
            time.sleep(600)
        return twice(message)

    timers: list[threading.Timer] = []
    f = run(remote(ScriptedHandle(answer)))
    with pytest.raises(KeyboardInterrupt):
        f(jnp.ones(3))
    timers[0].join()
    assert f(jnp.ones(3)).tolist() == [2, 2, 2]


# ---- Order and failures of calls that move state, across programs --------------------------------------------------


def pending() -> jax.Array:
    """An array that is still being computed: what depends on it runs on a thread of XLA's."""
    slow = jax.jit(lambda b: (b @ b)[0, :3] * 0 + 1)
    return slow(jnp.ones((1000, 1000)))


def test_a_failure_on_a_thread_of_xla() -> None:
    """JAX hands the failed token on to all later ordered programs of this thread; `barrier` ends that."""
    broken: dict[str, bool] = {}
    f = jax.jit(remote(ScriptedHandle(failing_if(broken)), stateful=True))
    jax.block_until_ready(f(pending()))
    broken["forward"] = True
    with pytest.raises(Exception, match="bad 42") as caught:
        jax.block_until_ready(f(pending()))
    assert "gradwire.jax.barrier()" in str(caught.value)
    broken.clear()
    try:
        jax.block_until_ready(f(jnp.ones(3)))  # works from the jax on that cures it
    except Exception as error:
        assert "bad 42" in str(error)
        with pytest.raises(ValueError, match="bad 42") as original:
            gradwire.jax.barrier()
        assert isinstance(original.value, RemoteError)
    gradwire.jax.barrier()
    assert f(jnp.ones(3)).tolist() == f(pending()).tolist() == [2, 2, 2]


def test_an_eager_call_is_a_barrier_too() -> None:
    broken: dict[str, bool] = {}
    fails, has_failed = failing_if(broken), threading.Event()

    def answer(message: Message) -> Sequence[Any]:
        try:
            return fails(message)
        except RemoteError:
            has_failed.set()
            raise

    f = remote(ScriptedHandle(answer), stateful=True)
    compiled = jax.jit(f)
    jax.block_until_ready(compiled(pending()))
    broken["forward"] = True
    with pytest.raises(Exception, match="bad 42"):
        lost = compiled(pending())  # early jax waits here
        assert has_failed.wait(60)
        broken.clear()
        with pytest.raises(RemoteError, match="bad 42"):
            f(jnp.ones(3))
        jax.block_until_ready(lost)
    broken.clear()
    assert f(jnp.ones(3)).tolist() == [2, 2, 2]


def test_a_pure_failure_that_its_results_carry_is_no_failure_of_the_barrier() -> None:
    broken: dict[str, bool] = {}
    f = jax.jit(remote(ScriptedHandle(failing_if(broken))))
    jax.block_until_ready(f(pending()))
    broken["forward"] = True
    with pytest.raises(Exception, match="bad 42"):
        jax.block_until_ready(f(pending()))
    gradwire.jax.barrier()


# ---- Threads and resources -----------------------------------------------------------------------------------------


def resources() -> tuple[int, int, int]:
    threads = os.listdir("/proc/self/task")
    return len(threads), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_ten_thousand_compiled_calls_leave_nothing() -> None:
    handle = ScriptedHandle(lambda m: m.carriers)
    f = jax.jit(lambda x: remote(handle)(x) + 1)
    x = jnp.ones(3)

    def calls(count: int) -> None:
        y = x
        for i in range(count):
            y = f(y if i % 10 else pending() if i % 1000 == 0 else x)
            handle.messages.clear()
        jax.block_until_ready(y)

    calls(500)
    before = resources()
    calls(10_000)
    after = resources()
    assert all(a <= b + 2 for a, b in zip(after, before, strict=True)), (before, after)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_two_threads(compiled: bool) -> None:
    f = remote(ScriptedHandle(lambda m: m.carriers))
    f = jax.jit(f) if compiled else f
    wrong: list[Any] = []

    def work(value: float) -> None:
        try:
            x = jnp.full(1000, value)
            wrong.extend(i for i in range(200) if not (np.asarray(f(x)) == value).all())
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_errors_of_two_threads_do_not_mix() -> None:
    def answer(message: Message) -> list[Any]:
        time.sleep(0.001)
        raise remote_error("ValueError", f"bad {message.arrays[0][0]}", "", "w")

    f = remote(ScriptedHandle(answer))
    met: dict[int, set[str]] = {0: set(), 1: set()}

    def work(i: int) -> None:
        for _ in range(50):
            try:
                f(jnp.full(3, float(i)))
            except GradwireError as error:
                met[i].add(str(error).partition(" in ")[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in met]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert met == {0: {"ValueError: bad 0.0"}, 1: {"ValueError: bad 1.0"}}
