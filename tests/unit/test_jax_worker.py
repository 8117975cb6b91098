"""The JAX worker's program against JAX in this process, and derived functions against each other.

The words are held to three facts, of which the last two do not depend on JAX's rules: the tangent of F is
`jax.jvp`'s, every tangent is the central difference of what it derives, and every pullback is the adjoint of the
tangent in Re<a, b>.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire_wire.carriers import Aval, Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, UnsupportedTensorError, UsageError
from gradwire_wire.structures import Leaf, fill, flatten, positional
from gradwire_workers import jax as engine
from gradwire_workers.program import WorkerSite
from tests.doubles.patience import soon

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def x64(request: pytest.FixtureRequest) -> Iterator[None]:
    """64-bit types, unless the test is marked otherwise by taking the fixture ``narrow``."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", "narrow" not in request.fixturenames)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """In each test, whichever ran before it; others than those of `CASES`."""
    RNG.bit_generator.state = np.random.default_rng(1).bit_generator.state


@pytest.fixture
def narrow() -> None:
    """JAX's default: no 64-bit types."""


def load(target: Callable[..., Any]) -> Any:
    return engine.program(target, is_module=False)


def site(count: int, **facts: Any) -> WorkerSite:
    return WorkerSite(positional(count), **facts)


def site_of(*args: Any, **kwargs: Any) -> tuple[WorkerSite, list[np.ndarray]]:
    structure, leaves = flatten([list(args), kwargs], lambda x: isinstance(x, np.ndarray))
    return WorkerSite(structure), leaves


def aval_of(x: np.ndarray) -> Aval:
    return Aval(x.shape, BY_NAME[x.dtype.name])


def tree_of(result: Any) -> Any:
    return fill(result.structure, [np.asarray(t) for t in result.tensors])


def close(a: Sequence[Any], b: Sequence[Any], tolerance: float = 1e-12) -> None:
    """Assert that two flat results agree in number, shape, dtype and value; None means zeros."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        x = np.zeros_like(y) if x is None else np.asarray(x)
        assert x.shape == np.shape(y)
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, np.asarray(y), rtol=tolerance, atol=tolerance)


def test_close_can_fail() -> None:
    for other in ([np.ones(2)], [np.zeros(2, "f4")], [np.zeros(3)], [np.zeros(2)] * 2):
        with pytest.raises(AssertionError):
            close([np.zeros(2)], other)


# ---- Words ---------------------------------------------------------------------------------------------------------


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def complex_normal(*shape: int) -> np.ndarray:
    return normal(*shape) + 1j * normal(*shape)


MATRIX = jnp.asarray(complex_normal(3, 3))


class Case(NamedTuple):
    function: Callable[..., Any]
    operands: list[np.ndarray]


CASES = {
    "mlp": Case(lambda x, w: jnp.tanh(x @ w), [normal(4, 5), normal(5, 3)]),
    "two results": Case(lambda x, y: (x * y, jnp.sin(x).sum()), [normal(3), normal(3)]),
    "gather": Case(lambda w, idx: (w[idx] ** 3, idx + 1), [normal(5, 2), np.array([0, 3, 3])]),
    "cubes": Case(lambda x: x**3, [normal()]),
    "empty": Case(lambda x: jnp.sin(x).sum(0), [normal(0, 3)]),
    "holomorphic": Case(lambda z: jnp.exp(MATRIX @ z) * z**2, [complex_normal(3)]),
    "conjugates": Case(lambda z: jnp.conj(z) * (MATRIX @ z) * jnp.abs(z) ** 2, [complex_normal(3)]),
    "to real": Case(lambda z: jnp.abs(MATRIX @ z) ** 2 + z.imag**3, [complex_normal(3)]),
    "from real": Case(lambda x: jnp.exp(1j * x) * (2 - 1j), [normal(3)]),
    "scan": Case(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=4), [normal(2)]),
    "inner grad": Case(lambda x: -jax.grad(lambda x: jnp.sum(x**4))(x), [normal(3)]),
    "numpy result": Case(lambda x: (x * 2, np.arange(3.0)), [normal(3)]),
}


def random_like(x: np.ndarray) -> np.ndarray:
    return complex_normal(*x.shape) if np.iscomplexobj(x) else normal(*x.shape)


def inexact(x: Any) -> bool:
    return np.issubdtype(x.dtype, np.inexact)


def extended(
    program: Any, word: tuple, operands: list[np.ndarray], letter: str
) -> tuple[tuple, list[np.ndarray]]:
    """The word with one more operation that moves every inexact operand, and operands to match."""
    here = site(base_count(word, len(operands)))
    if letter == "V":
        mapped = [i for i in range(len(operands)) if i != 1] or [0]
        axes = tuple(i in mapped for i in range(len(operands)))
        return (*word, ("V", axes)), [
            np.stack([x] * 2) if m else x for x, m in zip(operands, axes, strict=True)
        ]
    wrt = tuple(i for i, x in enumerate(operands) if inexact(x))
    if letter == "J":
        return (*word, ("J", wrt)), [*operands, *(random_like(operands[i]) for i in wrt)]
    results = [np.asarray(r) for r in program.run(here, word, operands).tensors if r is not None]
    cotangents = [random_like(r) for r in results if inexact(r)]
    return (*word, ("T", wrt, len(cotangents))), [*operands, *cotangents]


def base_count(word: tuple, count: int) -> int:
    for op in reversed(word):
        count -= len(op[1]) if op[0] == "J" else op[2] if op[0] == "T" else 0
    return count


def spelled(program: Any, letters: str, operands: list[np.ndarray]) -> tuple[tuple, list[np.ndarray]]:
    word: tuple = ()
    for letter in letters:
        word, operands = extended(program, word, operands, letter)
    return word, operands


def dot(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Re<a, b>."""
    return sum(np.vdot(x, y).real for x, y in zip(a, b, strict=True) if x is not None and y is not None)


@pytest.mark.parametrize("name", CASES)
def test_forward_is_jits_bit_for_bit(name: str) -> None:
    function, operands = CASES[name]
    made = load(function).run(site(len(operands)), (), operands)
    expected = jax.tree_util.tree_leaves(jax.jit(function)(*operands))
    for x, y in zip(made.tensors, expected, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_first_order_is_jaxs(name: str) -> None:
    function, operands = CASES[name]
    program = load(function)
    moving = [i for i, x in enumerate(operands) if inexact(x)]

    def moved(*values: Any) -> list[Any]:
        full = list(operands)
        for i, v in zip(moving, values, strict=True):
            full[i] = v
        return [r for r in jax.tree_util.tree_leaves(function(*full)) if inexact(r)]

    word, args = extended(program, (), operands, "J")
    primals = [operands[i] for i in moving]
    tangents = jax.jit(lambda p, t: jax.jvp(moved, p, t)[1])(primals, args[len(operands) :])
    close(program.run(site(len(operands)), word, args).tensors, tangents)
    word, args = extended(program, (), operands, "T")
    cotangents = [np.conj(c) for c in args[len(operands) :]]
    bars = jax.jit(lambda p, c: jax.vjp(moved, *p)[1](c))(primals, cotangents)
    close(program.run(site(len(operands)), word, args).tensors, [np.conj(b) for b in bars])


@pytest.mark.parametrize(
    ("name", "letters", "compile"),
    [
        *(("gather", word, None) for word in ("", "T")),
        *(("conjugates", word, None) for word in ("", "T", "TT")),
        pytest.param("conjugates", "T", False, marks=pytest.mark.slow),
        *(
            pytest.param("gather", w, None, marks=pytest.mark.slow)
            for w in ("J", "JJ", "JT", "TJ", "TT", "V", "VT", "TV")
        ),
        *(
            pytest.param("conjugates", w, None, marks=pytest.mark.slow)
            for w in ("J", "JJ", "JT", "TJ", "VT", "TV", "TTT", "VTV")
        ),
    ],
)
def test_r37_tangents_are_differences_and_pullbacks_their_adjoints(
    name: str, letters: str, compile: bool | None
) -> None:
    function, operands = CASES[name]
    program, here = load(function), site(len(operands), compile=compile)
    word, args = spelled(program, letters, operands)
    tangent, with_tangents = extended(program, word, args, "J")
    pullback, with_cotangents = extended(program, word, args, "T")
    directions, cotangents = with_tangents[len(args) :], with_cotangents[len(args) :]
    moved = [np.asarray(t) for t in program.run(here, tangent, with_tangents).tensors]
    bars = program.run(here, pullback, with_cotangents).tensors

    def stepped(h: float) -> list[np.ndarray]:
        steps = iter(directions)
        full = [x + h * next(steps) if inexact(x) else x for x in args]
        return [np.asarray(r) for r in program.run(here, word, full).tensors if r is not None and inexact(r)]

    differences = [(up - down) / 2e-5 for up, down in zip(stepped(1e-5), stepped(-1e-5), strict=True)]
    close(moved, differences, 1e-5)
    forwards, backwards = (
        dot(cotangents, moved),
        dot([None if b is None else np.asarray(b) for b in bars], directions),
    )
    assert forwards == pytest.approx(backwards, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(
    ("name", "letters", "compile"),
    [
        *((name, "", None) for name in CASES),
        *((name, "", False) for name in ("gather", "conjugates", "from real", "empty")),
        ("gather", "V", None),
        *(pytest.param(n, w, None, marks=pytest.mark.slow) for n in ("gather", "conjugates") for w in "JTV"),
    ],
)
def test_what_is_kept_gives_what_is_run(name: str, letters: str, compile: bool | None) -> None:
    function, operands = CASES[name]
    program, here = load(function), site(len(operands), compile=compile)
    word, args = spelled(program, letters, operands)
    made, residual = program.keep(here, word, args)
    agree(made.tensors, program.run(here, word, args).tensors)
    assert residual.nbytes >= sum(x.nbytes for x in args)
    for letter in "TJT":
        longer, more = extended(program, word, args, letter)
        derived, none = residual.derive(longer[-1], more[len(args) :], keep=False, accumulate=False)
        assert none is None
        agree(derived, program.run(here, longer, more).tensors)


@pytest.mark.parametrize(
    ("letters", "compile"),
    [
        ("TT", None),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("JT", None), ("TJ", None), ("TT", False))),
    ],
)
def test_r37_a_kept_derivative_is_derived_again(letters: str, compile: bool | None) -> None:
    function, operands = CASES["conjugates"]
    program, here = load(function), site(1, compile=compile)
    once, more = spelled(program, letters[0], operands)
    twice, most = extended(program, once, more, letters[1])
    _, residual = program.keep(here, (), operands)
    made, residual = residual.derive(once[-1], more[1:], keep=True, accumulate=False)
    agree(made, program.run(here, once, more).tensors)
    made, _ = residual.derive(twice[-1], most[len(more) :], keep=False, accumulate=False)
    agree(made, program.run(here, twice, most).tensors)


def agree(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Assert that two ways to the same results agree, None included (eager runs say zeros instead)."""
    assert len(a) == len(b)
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    close([x for x, _ in pairs], [np.asarray(y) for _, y in pairs])
    for x, y in zip(a, b, strict=True):
        if (x is None) != (y is None):
            assert not np.any(np.asarray(y if x is None else x))


def test_r32_the_wire_has_adjoints() -> None:
    program, z = load(lambda z: jnp.abs(z) ** 2), np.array(3 + 4j)
    _, residual = program.keep(site(1), (), [z])
    close(
        residual.derive(("T", (0,), 1), [np.array(1.0)], keep=False, accumulate=False)[0], [np.array(6 + 8j)]
    )


def test_r31_integer_operands_and_results() -> None:
    function, (w, idx) = CASES["gather"]
    program = load(function)
    made, residual = program.keep(site(2), (), [w, idx])
    assert [t.dtype.name for t in made.tensors] == ["float64", "int64"]
    bars, _ = residual.derive(("T", (0, 1), 1), [np.ones((3, 2))], keep=False, accumulate=False)
    assert bars[1] is None
    close(bars[:1], [jax.grad(lambda w: jnp.sum(w[idx] ** 3))(w)])
    made, residual = load(lambda n: n + 1).keep(site(1), (), [idx])
    assert residual.derive(("T", (0,), 0), [], keep=False, accumulate=False)[0] == [None]


def test_r33_an_unused_operand_has_no_cotangent() -> None:
    program = load(lambda a, b: 2 * a + 0 * b.shape[0])
    for bars in (
        program.run(site(2), (("T", (0, 1), 1),), [np.ones(3), np.ones(2), np.ones(3)]).tensors,
        program.keep(site(2), (), [np.ones(3), np.ones(2)])[1].derive(
            ("T", (0, 1), 1), [np.ones(3)], keep=False, accumulate=False
        )[0],
    ):
        close(bars[:1], [np.full(3, 2.0)])
        assert bars[1] is None


def test_the_anchor_is_an_operand_the_target_never_sees() -> None:
    program = load(lambda x: x**2)
    here = site(1, anchored=True, accumulate=True)
    made, residual = program.keep(here, (), [np.float32(0).reshape(()), np.ones(3)])
    close(made.tensors, [np.ones(3)])
    bars, _ = residual.derive(("T", (0, 1), 1), [np.ones(3)], keep=False, accumulate=True)
    assert bars[0] is None
    close(bars[1:], [np.full(3, 2.0)])


# ---- Rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "compile"),
    [
        (0, None),
        (3, None),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in ((0, False), (1, None), (3, False))),
    ],
)
def test_r34_a_batch_whose_rows_are_pulled_together(size: int, compile: bool | None) -> None:
    def f(x, w):
        return jnp.tanh(x @ w), jnp.exp(w)

    program, here = load(f), site(2, compile=compile)
    x, w, cx, cw = normal(size, 4), normal(4, 2), normal(size, 2), normal(4, 2)
    word = (("V", (True, False)),)
    made, residual = program.keep_rows(here, word, [x, w])
    close(made.tensors, jax.jit(jax.vmap(f, (0, None)))(x, w))
    op, axes, rows = ("T", (0, 1), 2), (True, False, True, False), np.arange(size)
    bars = residual.derive_rows(op, axes, [cx, cw], rows)
    expected = jax.jit(jax.vmap(lambda x, w, *c: jax.vjp(f, x, w)[1](c), (0, None, 0, None)))(x, w, cx, cw)
    close(bars, expected)
    close(program.run(here, (op, ("V", axes)), [x, w, cx, cw]).tensors, expected)
    pushed = residual.derive_rows(("J", (0,)), (True, False, True), [x], rows)
    close(pushed, jax.jit(jax.vmap(lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,))[1], (0, None)))(x, w))
    whole, _ = residual.derive(
        op, [cx, np.stack([cw] * size) if size else normal(0, 4, 2)], keep=False, accumulate=False
    )
    close([np.asarray(whole[0])], [expected[0]])


@pytest.mark.parametrize("f", [lambda x: 3 * x, lambda x: x, lambda x: x.sum(), lambda x: jnp.fft.rfft(x)])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_r34_rows_of_a_linear_function_under_one_cotangent(f: Any, size: int) -> None:
    """``vmap(grad(f))``: nothing of it depends on the row, neither what was kept nor what is pulled back."""
    x = normal(size, 4)
    made, residual = load(f).keep_rows(site(1), (("V", (True,)),), [x])
    y = jax.eval_shape(f, x[0] if size else normal(4))
    cotangent = np.asarray(normal(*y.shape), y.dtype)
    close(made.tensors, [jax.vmap(f)(x)])
    bars = residual.derive_rows(("T", (0,), 1), (True, False), [cotangent], np.arange(size))
    row = np.asarray(jax.vjp(f, normal(4))[1](jnp.asarray(cotangent).conj())[0])
    close(bars, [np.stack([row] * size) if size else normal(0, 4)])


def test_rows_in_another_order_are_left_to_the_desk() -> None:
    _, residual = load(jnp.sin).keep_rows(site(1), (("V", (True,)),), [normal(3)])
    assert residual.derive_rows(("T", (0,), 1), (True, True), [normal(3)], np.array([0, 2, 1])) is None
    assert residual.derive_rows(("T", (0,), 1), (True, True), [normal(2)], np.arange(2)) is None


def test_what_rows_share_is_not_kept_for_each() -> None:
    w = normal(50, 50)
    _, residual = load(lambda x, w: x @ w).keep_rows(site(2), (("V", (True, False)),), [normal(100, 50), w])
    assert residual.nbytes == w.nbytes + 100 * 50 * 8


# ---- Residuals -----------------------------------------------------------------------------------------------------


def test_weights_and_results_are_not_kept_twice() -> None:
    closed_over = jnp.asarray(normal(64, 64))

    def f(w, x):
        return jnp.exp((x @ w) @ closed_over)

    w, x = normal(64, 64), normal(2, 64)
    made, residual = load(f).keep(site(2), (), [w, x])
    assert residual.nbytes == w.nbytes + x.nbytes + made.tensors[0].nbytes


@pytest.mark.parametrize("compile", [None, False])
def test_r16_a_residual_does_not_see_the_next_tenant(compile: bool | None) -> None:
    program = load(lambda x: jnp.sum(jnp.sin(x) * x))
    values = aligned(512 * 512)
    for _ in range(10):
        values[:] = 0.5
        expected = np.sin(0.5) + 0.5 * np.cos(0.5)
        operand = engine.adopt(Carrier(values.copy(), BY_NAME["float64"]))
        _, residual = program.keep(site(1, compile=compile), (), [operand])
        bars, _ = residual.derive(("T", (0,), 1), [np.array(1.0)], keep=False, accumulate=False)
        np.testing.assert_allclose(bars[0], expected)
        made = program.run(
            site(1, compile=compile), (), [engine.adopt_operand(Carrier(values, BY_NAME["float64"]))]
        )
        values[:] = 3.0  # the slot's next tenant
        np.testing.assert_allclose(made.tensors[0], 512 * 512 * 0.5 * np.sin(0.5))


def aligned(count: int) -> np.ndarray:
    raw = np.zeros(count * 8 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 8].view(np.float64)


class Segment(ctypes.c_char * 800_064):
    alive = 0

    def __init__(self) -> None:
        Segment.alive += 1

    def __del__(self) -> None:
        Segment.alive -= 1


@pytest.mark.parametrize("compile", [None, False])
def test_a_residual_holds_its_operands_and_lets_them_go(compile: bool | None) -> None:
    program = load(jnp.sin)

    def keep() -> Any:
        segment = Segment()
        view = np.ndarray(100_000, np.float64, segment, -ctypes.addressof(segment) % 64)
        return program.keep(site(1, compile=compile), (), [view])[1]

    residual = keep()
    gc.collect()
    assert Segment.alive == 1
    del residual
    assert soon(lambda: Segment.alive == 0)


def test_numpy_memory_of_any_layout_is_read_right() -> None:
    program = load(lambda x: x * 1)
    base = normal(3, 4, 6)
    for x in (
        base.T,
        base[:, ::2],
        base[::-1],
        np.asfortranarray(base),
        np.broadcast_to(base[:1], base.shape),
    ):
        close(program.run(site(1), (), [x]).tensors, [np.ascontiguousarray(x)])


# ---- Tracing and eager ---------------------------------------------------------------------------------------------


def branch(x):
    return x**2 if x.sum() > 0 else -x


def by_numpy(x):
    return np.sin(np.asarray(x))


def select(x):
    return x[x > 0]


def count(x):
    return jnp.zeros(int(x[0])) + x[0]


def sized(x):
    return jnp.zeros(x[0].astype(int)) + x[0]


LOOKS_AT_VALUES = [branch, by_numpy, select, count, sized]


@pytest.mark.parametrize("function", LOOKS_AT_VALUES)
def test_r35_a_function_that_looks_at_values_runs_eagerly(function: Callable[..., Any]) -> None:
    program, x = load(function), np.array([2.0, -1.0, 3.0])
    for operand in (x, -x[::-1] + 3, x):
        close(program.run(site(1), (), [operand]).tensors, [np.asarray(function(jnp.asarray(operand)))])
    with pytest.raises(UsageError, match="out_spec"):
        program.spec(site(1), [aval_of(x)])
    with pytest.raises((jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError)):
        program.run(site(1, compile=True), (), [x])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_is_differentiated_on_the_side_that_was_taken(sign: int) -> None:
    program, x = load(branch), sign * np.array([2.0, 1.0])
    expected = jax.vjp(branch, jnp.asarray(x))[1](jnp.ones(2))
    made, residual = program.keep(site(1), (), [x])
    close(made.tensors, [branch(x)])
    close(residual.derive(("T", (0,), 1), [np.ones(2)], keep=False, accumulate=False)[0], expected)
    close(residual.derive(("J", (0,)), [np.ones(2)], keep=False, accumulate=False)[0], expected)
    close(program.run(site(1), (("T", (0,), 1),), [x, np.ones(2)]).tensors, expected)
    with pytest.raises(UsageError, match="sequential"):
        program.run(site(1), (("V", (True,)),), [np.stack([x, x])])


def test_numpy_inside_has_values_but_no_derivative() -> None:
    program, x = load(by_numpy), np.ones(2)
    made, residual = program.keep(site(1), (), [x])
    close(made.tensors, [np.sin(x)])
    for op in (("T", (0,), 1), ("J", (0,))):
        with pytest.raises(jax.errors.TracerArrayConversionError):
            residual.derive(op, [x], keep=False, accumulate=False)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return jnp.sin(x) * x


def test_the_targets_python_runs_once_for_a_signature() -> None:
    counting = Counting()
    program, here, x = load(counting), site(1), normal(3)
    program.spec(here, [aval_of(x)])
    for _ in range(2):
        program.run(here, (), [x])
        _, residual = program.keep(here, (), [x])
        for letters in ("T", "J", "V", "TT"):
            program.run(here, *spelled(program, letters, [x]))
        residual.derive(("T", (0,), 1), [x], keep=True, accumulate=False)
    assert counting.calls == 1
    program.run(here, (), [normal(4)])
    assert counting.calls == 2
    for _ in range(3):
        program.run(site(1, compile=False), (), [x])
    assert counting.calls == 5


def test_a_random_mask_is_the_same_in_forward_and_pullback() -> None:
    for compile in (None, False):
        here = site(1, compile=compile)
        program = load(lambda x: x * jnp.asarray(np.random.random(x.shape) < 0.5))
        made, residual = program.keep(here, (), [np.ones(100)])
        mask = np.asarray(made.tensors[0])
        assert 10 < mask.sum() < 90
        close(residual.derive(("T", (0,), 1), [np.ones(100)], keep=False, accumulate=False)[0], [mask])
        close(residual.derive(("J", (0,)), [np.ones(100)], keep=False, accumulate=False)[0], [mask])


def test_a_seed_makes_numpys_random_numbers_repeat() -> None:
    program = load(lambda x: x + np.random.random(x.shape))
    before = np.random.get_state()[1].copy()
    made = [
        np.asarray(program.run(site(1, seed=s, compile=c), (), [np.zeros(5)]).tensors[0])
        for s, c in ((1, False), (1, False), (1, None), (2, None))
    ]
    close(made[:1] * 2, made[1:3])
    assert not np.array_equal(made[2], made[3])
    assert np.array_equal(before, np.random.get_state()[1])


def test_a_thousand_seeds_compile_once_where_the_function_does_not_look_at_them() -> None:
    traces = []

    def scaled(x: Any, key: Any) -> Any:
        traces.append(1)
        return x * jax.random.normal(jax.random.wrap_key_data(key), x.shape)

    program, key = load(scaled), np.asarray(jax.random.key_data(jax.random.key(3)))
    operands = [np.ones(5, np.float64), key]
    made = program.run(site(2), (), operands).tensors[0]
    assert program.spec(site(2, seed=0), [aval_of(x) for x in operands])[0][0].shape == (5,)
    for seed in range(1000):
        result = program.run(site(2, seed=seed), (), operands)
        np.testing.assert_array_equal(result.tensors[0], made)
    for seed in range(10):
        _, residual = program.keep(site(2, seed=seed), (), operands)
        bar, _ = residual.derive(("T", (0,), 1), [np.ones(5)], keep=False, accumulate=False)
        np.testing.assert_array_equal(bar[0], made)
    assert len(traces) == 2, "one of them to see whether it draws from what is seeded"


def test_a_function_that_keeps_values_runs_eagerly() -> None:
    kept: list[Any] = []

    def remember(x):
        kept.append(x * 2)
        return x + 1

    program = load(remember)
    for i in range(3):
        program.run(site(1), (), [np.full(3, float(i))])
    assert [float(k[0]) for k in kept[1:]] == [0, 2, 4]  # the first entry is a tracer's


def test_a_function_that_uses_kept_values_is_refused_or_right() -> None:
    class Last:
        value: Any = 0.0

        def __call__(self, x):
            before, self.value = self.value, x
            return x + before

    with pytest.raises(UsageError, match="compile=False"):
        load(Last()).run(site(1), (), [np.ones(2)])
    program, here = load(Last()), site(1, compile=False)
    made = [np.asarray(program.run(here, (), [np.full(100_000, float(i))]).tensors[0])[0] for i in (1, 2, 3)]
    assert made == [1, 3, 5]


def test_the_users_error_comes_out_as_it_is() -> None:
    calls = []

    def bad(x):
        calls.append(1)
        raise ValueError("bad 42")

    program = load(bad)
    with pytest.raises(ValueError, match="bad 42"):
        program.run(site(1), (), [np.ones(2)])
    assert len(calls) == 1
    for ask in (program.keep, lambda *a: program.spec(site(1), [aval_of(np.ones(2))])):
        with pytest.raises(ValueError, match="bad 42"):
            ask(site(1), (), [np.ones(2)])


def test_only_the_pullback_that_is_asked_for_must_exist() -> None:
    def f(n, x):
        return jax.lax.while_loop(lambda c: c < n, lambda c: c * 2, x), jnp.sin(x)

    def loops(a, b):
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, a).sum() * 0 + jnp.sin(b)

    program, a = load(loops), np.ones(2)
    _, residual = program.keep(site(2), (), [a, a])
    close(residual.derive(("T", (1,), 1), [a], keep=False, accumulate=False)[0], [np.cos(a)])
    close(residual.derive(("J", (0, 1)), [a, a], keep=False, accumulate=False)[0], [np.cos(a)])
    with pytest.raises(ValueError, match="Reverse-mode"):
        residual.derive(("T", (0,), 1), [a], keep=False, accumulate=False)


def test_custom_rules_are_the_users() -> None:
    @jax.custom_vjp
    def clipped(x):
        return x**2

    clipped.defvjp(lambda x: (x**2, x), lambda x, c: (jnp.clip(2 * x * c, -1, 1),))
    program, x = load(clipped), np.array([0.1, 5.0])
    _, residual = program.keep(site(1), (), [x])
    close(
        residual.derive(("T", (0,), 1), [np.ones(2)], keep=False, accumulate=False)[0], [np.array([0.2, 1.0])]
    )
    with pytest.raises(TypeError, match="forward-mode"):
        residual.derive(("J", (0,)), [x], keep=False, accumulate=False)


def test_a_callback_has_happened_before_the_reply() -> None:
    seen = []

    def prints(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return x

    program = load(prints)
    for i in range(3):
        program.run(site(1), (), [np.full(2, float(i))])
        assert seen == [0.0, 2.0, 4.0][: i + 1]


# ---- Trees, dtypes, spec -------------------------------------------------------------------------------------------


def test_r38_trees_and_keywords() -> None:
    def f(x, *, scale=2.0, mode="a", mask=None):
        return {"y": x * scale, "aux": (x.sum(), None, mode, 3), 7: [np.float32(1.5)]}

    here, leaves = site_of(np.ones(2), scale=3, mode="b")
    program = load(f)
    result = program.run(here, (), leaves)
    tree = tree_of(result)
    assert list(tree) == ["y", "aux", 7]
    assert tree["aux"][1:] == (None, "b", 3)
    assert tree["aux"][0] == 2
    np.testing.assert_array_equal(tree["y"], [3, 3])
    avals, structure = program.spec(here, [aval_of(x) for x in leaves])
    assert structure == result.structure
    assert avals == [Aval((2,), BY_NAME["float64"]), Aval((), BY_NAME["float64"])]
    bars, _ = program.keep(here, (), leaves)[1].derive(
        ("T", (0,), 2), [np.ones(2), np.zeros(())], keep=False, accumulate=False
    )
    close(bars, [np.full(2, 3.0)])


def test_r20_python_scalars_promote_nothing() -> None:
    import ml_dtypes

    here, leaves = site_of(np.ones(3, np.float32), 2.0, 3, True, 10**20)
    x = engine.adopt_operand(Carrier(np.ones(3, ml_dtypes.bfloat16).view("u2"), BY_NAME["bfloat16"]))
    program = load(lambda x, a, b, c, d: x * a + b if c and d == 10**20 else None)
    assert program.run(here, (), [x]).tensors[0].dtype == jnp.bfloat16
    assert program.run(here, (), leaves).tensors[0].dtype == np.float32


def test_spec_runs_nothing_on_real_data() -> None:
    seen = []

    def watch(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return x[::2], x > 0

    for compile in (None, True, False):
        avals, structure = load(watch).spec(site(1, compile=compile), [Aval((10**9,), BY_NAME["float32"])])
        assert avals == [Aval((5 * 10**8,), BY_NAME["float32"]), Aval((10**9,), BY_NAME["bool"])]
        holes = fill(structure, [Leaf(0), Leaf(1)])
        assert isinstance(holes, tuple)
    assert seen == [True] * 3


def test_r17_nothing_is_narrowed(narrow: None) -> None:
    program = load(lambda x: (x, np.arange(3.0)))
    with pytest.raises(DtypeError, match=r"float64.*x64=True"):
        program.run(site(1), (), [np.ones(3, np.float32)])
    with pytest.raises(DtypeError, match=r"int64.*x64=True"):
        program.spec(site(1), [Aval((3,), BY_NAME["int64"])])
    for adopt in (engine.adopt, engine.adopt_operand):
        with pytest.raises(DtypeError, match="x64=True"):
            adopt(Carrier(np.ones(3), BY_NAME["float64"]))


def test_results_that_cannot_cross_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedTensorError, match="key_data"):
        load(lambda x: jax.random.key(0)).run(site(1), (), [np.ones(1)])
    with pytest.raises(UnsupportedTensorError, match="cannot be sent"):
        load(lambda x: jnp.sin).run(site(1), (), [np.ones(1)])


# ---- Programs without state, and the process -----------------------------------------------------------------------


def test_a_module_is_a_callable_without_state() -> None:
    class Scaled:
        def __init__(self, scale):
            self.scale = jnp.asarray(scale)

        def __call__(self, x):
            return x * self.scale

    program = engine.program(Scaled(3.0), is_module=True)
    assert (program.is_module, program.training, program.generation) == (True, None, 0)
    close(program.run(site(1), (), [np.ones(2)]).tensors, [np.full(2, 3.0)])
    for ask in ("parameters", "buffers", "state_dict", "grads"):
        with pytest.raises(UsageError, match="arguments"):
            getattr(program, ask)()
    for ask, args in (("train", [True]), ("load_state_dict", [{}]), ("optimizer", [None, {}])):
        with pytest.raises(UsageError, match="argument"):
            getattr(program, ask)(*args)
    with pytest.raises(UsageError, match="called"):
        engine.program(3, is_module=True)


PREPARED = """
import jax
from gradwire_workers import jax as engine
engine.prepare(%s)
print(engine.facts())
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [("1, True, 'cpu'", ["'threads': 1", "'x64': True"]), ("None, None, 'cpu:7'", ["UsageError", "cpu:7"])],
)
def test_a_process_is_prepared_before_jax_begins(arguments: str, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", PREPARED % arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    for word in words:
        assert word in done.stdout + done.stderr


GUARDED = """
import gc
import jax
import numpy as np
from gradwire_wire.structures import positional
from gradwire_workers import jax as engine
from gradwire_workers.program import WorkerSite

engine.prepare(None, None, None)
gc.collect()
program = engine.program(lambda x: 2 * x, is_module=False)
jax.config.update("jax_transfer_guard", "disallow")  # as the user's module may
for site in (WorkerSite(positional(1)), WorkerSite(positional(1), seed=3), WorkerSite(positional(1), compile=False)):
    result, residual = program.keep(site, (), [np.ones(3, np.float32)])
    print(np.asarray(result.tensors[0]), np.asarray(residual.derive(("T", (0,), 1), [np.ones(3, np.float32)], keep=False, accumulate=False)[0][0]))
"""


def test_a_transfer_guard_is_not_for_what_a_call_brings() -> None:
    environment = {
        **os.environ,
        "JAX_TRANSFER_GUARD": "disallow",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", GUARDED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split("\n")[:3] == ["[2. 2. 2.] [2. 2. 2.]"] * 3, done.stderr


def test_jaxprs_run_where_jax_has_the_names_for_it_in_its_older_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 0.4.31, whose successors need a newer Python than 3.9."""
    core = importlib.import_module("jax.extend.core")
    for name in ("ClosedJaxpr", "jaxpr_as_fun"):
        monkeypatch.setattr(jax.core, name, getattr(core, name), raising=False)
        monkeypatch.delattr(core, name)
    found = importlib.util.find_spec("gradwire_workers.jax.jaxprs")
    assert found is not None and found.loader is not None
    older = importlib.util.module_from_spec(found)
    found.loader.exec_module(older)
    closed = jax.make_jaxpr(lambda x: (x * RNG.standard_normal(3), x + 1))(jnp.ones(3))
    one, other = older.run(closed.jaxpr, closed.consts, [jnp.zeros(3)])
    assert (one == 0).all() and (other == 1).all()
