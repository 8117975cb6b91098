"""The short way down from XLA: which programs take it, what it keeps, and what it refuses.

That what goes through it is right is shown by the suites that have the fixture `xla_way`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradwire.jax
from gradwire.jax import express
from gradwire.site import Site
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import positional
from tests.doubles.patience import soon
from tests.doubles.scripted_handle import ScriptedHandle

pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
x = jnp.ones(3)


def remote(handle: ScriptedHandle, **site: Any) -> Any:
    return lambda x: gradwire.jax.call(handle, Site(positional(1), **site), [x])[0]


def takes_it(function: Any, *args: Any) -> bool:
    """Whether the compiled program reaches its call the short way."""
    return f"@{express.TARGET}(" in jax.jit(function).lower(*args).as_text()


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(express.VARIABLE, "on")


@pytest.fixture
def echo() -> ScriptedHandle:
    return ScriptedHandle(lambda m: m.carriers)


def test_pure_calls_take_it_and_those_that_move_state_do_not(echo: ScriptedHandle) -> None:
    assert takes_it(remote(echo), x)
    assert not takes_it(remote(echo, stateful=True), x)
    assert takes_it(jax.vmap(remote(echo)), jnp.ones((2, 3)))


def test_the_switch(echo: ScriptedHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in ("on", "off"):
        monkeypatch.setenv(express.VARIABLE, setting)
        assert takes_it(remote(echo), x) == (setting == "on")
    monkeypatch.setenv(express.VARIABLE, "fast")
    with pytest.raises(UsageError, match="'fast': it may be auto, on or off"):
        takes_it(remote(echo), x)


def test_dtypes(echo: ScriptedHandle) -> None:
    """All but three, which jax-tvm-ffi does not know; `test_every_dtype_both_ways` has the bits."""
    with jax.enable_x64(True):
        known = [name for name in BY_NAME if hasattr(jnp, "bool_" if name == "bool" else name)]
        refused = {name for name in known if not takes_it(remote(echo), jax.ShapeDtypeStruct((3,), name))}
    assert refused == {"complex64", "complex128", "float8_e3m4"} & set(known)


def test_not_into_the_persistent_cache(echo: ScriptedHandle, tmp_path: Path) -> None:
    """Its number differs in every process: what is stored would never be met again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert not takes_it(remote(echo), x)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_a_program_cannot_be_exported(echo: ScriptedHandle) -> None:
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        jax.export.export(jax.jit(remote(echo)))(x)


def test_a_number_of_another_process_is_an_error() -> None:
    foreign = jax.jit(lambda x: jax.ffi.ffi_call(express.TARGET, x)(x, number=np.int64(7)))
    with pytest.raises(Exception, match="compiled in another process"):
        foreign(x).block_until_ready()


# ---- What is kept --------------------------------------------------------------------------------------------------


def test_a_dropped_program_leaves_nothing_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_dropped", type(express._dropped)(maxlen=2))
    seen = [use_and_drop(lambda f: jax.jit(f).lower(x).compile()(x)) for _ in range(5)]
    jax.clear_caches()
    gc.collect()
    assert soon(lambda: sum(ref() is not None for ref in seen) <= 2)
    monkeypatch.setattr(express, "UNUSED_S", -1.0)
    use_and_drop(lambda f: jax.jit(f).lower(x).compile())
    gc.collect()
    assert soon(lambda: sum(ref() is not None for ref in seen) == 0), "not used for so long"


def test_whatever_was_unused_for_so_long_goes_with_the_next_that_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(express, "LOOKS", 2)
    monkeypatch.setattr(express, "_dropped", type(express._dropped)(maxlen=express.DROPPED))
    seen = [use_and_drop(lambda f: jax.jit(f).lower(x).compile()(x)) for _ in range(9)]
    jax.clear_caches()
    gc.collect()
    assert soon(lambda: len(express._dropped) == len(seen), gc.collect)
    monkeypatch.setattr(express, "UNUSED_S", -1.0)
    express._let_go()
    assert soon(lambda: not any(ref() for ref in seen), gc.collect)


def test_what_is_called_at_once_goes_with_its_last_proxy() -> None:
    gc.disable()
    try:
        for use in (lambda f: f(x), lambda f: jax.grad(lambda x: f(x).sum())(x)):
            seen = use_and_drop(use)
            assert soon(lambda seen=seen: seen() is None, call_jax), "no table and no cycle holds it"
    finally:
        gc.enable()


def call_jax() -> None:
    (jnp.asarray(x) + 1).block_until_ready()


def use_and_drop(use: Callable[[Any], Any]) -> weakref.ref[ScriptedHandle]:
    handle = ScriptedHandle(lambda m: m.carriers[-1:])
    held = handle.share_caches()  # as its proxies do
    jax.block_until_ready(use(remote(handle)))  # what runs holds it
    del held
    return weakref.ref(handle)


@pytest.mark.parametrize("kept", [0, 2])
def test_a_program_dropped_while_it_runs(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA executes it on, after JAX has forgotten it; the test fails where nothing is kept."""
    monkeypatch.setattr(express, "_dropped", type(express._dropped)(maxlen=kept))
    go_on = threading.Event()

    def answer(message: Any) -> Any:
        go_on.wait(60)
        return message.carriers

    slow = jax.jit(lambda b: (b @ b)[0, :3] * 0 + 1)
    f = remote(ScriptedHandle(answer))
    compiled = jax.jit(lambda x: f(f(x)) + 1).lower(x).compile()
    result = compiled(slow(jnp.ones((1500, 1500))))
    del compiled
    gc.collect()
    go_on.set()
    if kept:
        assert result.tolist() == [2, 2, 2]
    else:
        with pytest.raises(Exception, match="dropped while it ran"):
            result.block_until_ready()


# ---- Isolation -----------------------------------------------------------------------------------------------------

PROGRAM = textwrap.dedent(
    """
    import sys, jax, jax.numpy as jnp
    import gradwire.jax
    from gradwire.jax import express
    from gradwire.site import Site
    from gradwire_wire.structures import positional
    from tests.doubles.scripted_handle import ScriptedHandle
    handle = ScriptedHandle(lambda m: m.carriers)
    f = jax.jit(lambda x: gradwire.jax.call(handle, Site(positional(1)), [x])[0])
    assert f(jnp.ones(3)).tolist() == [1, 1, 1]
    print("torch" in sys.modules, "tvm_ffi" in sys.modules)
    """
)


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_torch_is_not_brought_in_unasked(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax-tvm-ffi imports torch where it is installed, as it is here."""
    pytest.importorskip("torch")
    monkeypatch.setenv(express.VARIABLE, setting)
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True" if setting == "on" else "False"] * 2


def test_r54_threads_register_the_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_is_registered", None)
    calls: list[bool] = []
    other = threading.Thread(target=express._registered)

    def register() -> bool:
        calls.append(True)
        if len(calls) == 1:
            other.start()
            other.join(0.1)  # it waits for this to return
        return True

    monkeypatch.setattr(express, "_register", register)
    assert express._registered()
    other.join()
    assert len(calls) == 1


@pytest.mark.parametrize("setting", ["auto", "on"])
def test_a_package_that_fails_to_import_is_done_without_unless_it_was_asked_for(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jax_tvm_ffi.py").write_text("raise AttributeError('of another torch')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax_tvm_ffi", raising=False)
    monkeypatch.setenv(express.VARIABLE, setting)
    if setting == "on":
        with pytest.raises(AttributeError, match="of another torch"):
            express._register()
    else:
        with pytest.warns(RuntimeWarning, match="fails to import.*of another torch.*GRADWIRE_JAX_FFI=off"):
            assert not express._register()
