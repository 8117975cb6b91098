"""The numpy worker's programs, in process: closed forms and finite differences are the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, flatten, positional
from gradwire_workers import numpy as engine
from gradwire_workers.program import WorkerSite

rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def the_same_numbers() -> None:
    """In each test, whichever ran before it."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


def site(count: int, **kw: Any) -> WorkerSite:
    return WorkerSite(positional(count), **kw)


def program(target: Any) -> Any:
    return engine.program(target, is_module=False)


class Product:
    """sum(x @ w) and a count: two arguments, a result that is exact, both derivatives."""

    __qualname__ = "Product"

    def __call__(self, x: Any, w: Any, i: Any) -> Any:
        return {"y": np.tanh(x) @ w, "n": i + 1}

    def vjp(self, x: Any, w: Any, i: Any) -> Any:
        h = np.tanh(x)

        def pullback(bar: Any) -> Any:
            assert bar["n"] is None
            return (1 - h**2) * (w @ bar["y"]), np.outer(h, bar["y"]), None

        return self(x, w, i), pullback

    def jvp(self, primals: Any, tangents: Any) -> Any:
        (x, w, i), (dx, dw, di) = primals, tangents
        assert di is None
        dy = ((1 - np.tanh(x) ** 2) * dx) @ w + np.tanh(x) @ dw
        return self(x, w, i), {"y": dy, "n": None}

    def spec(self, x: Any, w: Any, i: Any) -> Any:
        assert x.ndim == 1
        return {"y": engine.ShapeDtype(w.shape[1:], x.dtype), "n": i}


def operands(size: int | None = None) -> list[Any]:
    x = rng.normal(size=5) if size is None else rng.normal(size=(size, 5))
    return [x, rng.normal(size=(5, 3)), np.arange(2)]


T, J = ("T", (0, 1), 1), ("J", (0, 1))


def test_calls_and_scalars_of_numpy() -> None:
    x = rng.normal(size=4)
    result = program(lambda x: (x.sum(), 3, x * 2)).run(site(1), (), [x])
    assert [type(y) for y in result.tensors] == [np.ndarray] * 2
    tree = fill(result.structure, list(result.tensors))
    assert tree[0] == x.sum() and tree[1] == 3 and (tree[2] == 2 * x).all()
    half = np.ones(2, ml_dtypes.bfloat16)
    assert program(lambda x: x * 2).run(site(1), (), [half]).tensors[0].dtype == ml_dtypes.bfloat16
    with pytest.raises(ValueError, match="bad 42"):
        program(lambda x: int("bad 42")).run(site(1), (), [x])


def test_the_offered_derivatives_are_right() -> None:
    p, xs, ct = program(Product()), operands(), rng.normal(size=3)
    eps = 1e-6
    for i in (0, 1):
        d = rng.normal(size=xs[i].shape)
        plus, minus = ([*xs[:i], xs[i] + s * d, *xs[i + 1 :]] for s in (eps, -eps))
        difference = (Product()(*plus)["y"] - Product()(*minus)["y"]) / (2 * eps)
        bars = p.run(site(3), (T,), [*xs, ct]).tensors
        dots = p.run(site(3), (("J", (i,)),), [*xs, d]).tensors
        scale = (
            np.abs(xs[0]).sum() * np.abs(xs[1]).max() * np.abs(d).max()
        )  # differences cancel: their errors do not
        np.testing.assert_allclose(dots[0], difference, rtol=0, atol=1e-9 * scale)
        of_bars, of_difference = np.vdot(bars[i], d), np.vdot(ct, difference)
        np.testing.assert_allclose(of_bars, of_difference, rtol=0, atol=1e-9 * scale * np.abs(ct).sum())


def test_kept_calls_any_number_of_times() -> None:
    xs, ct, dx, dw = operands(), rng.normal(size=3), rng.normal(size=5), rng.normal(size=(5, 3))
    p = program(Product())
    wanted, dots = p.run(site(3), (T,), [*xs, ct]).tensors, p.run(site(3), (J,), [*xs, dx, dw]).tensors
    result, residual = p.keep(site(3), (), xs)
    assert fill(result.structure, list(result.tensors))["n"].tolist() == [1, 2] and residual.nbytes > 0
    for _ in range(2):
        found, further = residual.derive(T, [ct], keep=False, accumulate=False)
        assert further is None and all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert np.array_equal(residual.derive(J, [dx, dw], keep=False, accumulate=False)[0][0], dots[0])
    found, further = residual.derive(T, [ct], keep=True, accumulate=False)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(UsageError, match="first derivatives only"):
        further.derive(T, list(found), keep=False, accumulate=False)


def test_batches_row_by_row() -> None:
    p, size = program(Product()), 4
    axes, at = (True, False, False), site(3)
    xs, cts = operands(size), rng.normal(size=(size, 3))
    results = p.run(at, (("V", axes),), xs).tensors
    assert results[0].shape == (4, 3) and results[1].tolist() == [[1, 2]] * 4
    bars = [p.run(at, (T,), [x, *xs[1:], ct]).tensors for x, ct in zip(xs[0], cts, strict=True)]
    stacked = [np.stack(b) for b in zip(*bars, strict=True)]

    found = p.run(at, (T, ("V", (*axes, True))), [*xs, cts]).tensors
    np.testing.assert_allclose(found[0], stacked[0])
    np.testing.assert_allclose(found[1], stacked[1])
    found = p.run(at, (("V", axes), T), [*xs, cts]).tensors
    np.testing.assert_allclose(found[0], stacked[0])
    np.testing.assert_allclose(found[1], stacked[1].sum(0))

    _, residual = p.keep_rows(at, (("V", axes),), xs)
    rows = np.arange(size)
    for order in (rows, rows[::-1], rows[1:2]):
        found = residual.derive_rows(T, (*axes, True), [cts[order]], order)
        np.testing.assert_allclose(found[1], stacked[1][order])
    found = residual.derive_rows(T, (*axes, False), [cts[0]], np.stack([rows, rows], 1))
    np.testing.assert_allclose(found[1][0], stacked[1][0])
    np.testing.assert_allclose(
        residual.derive(T, [cts], keep=False, accumulate=False)[0][1], stacked[1].sum(0)
    )

    dx, dw = rng.normal(size=(size, 5)), rng.normal(size=(5, 3))
    dots = [p.run(at, (J,), [x, *xs[1:], d, dw]).tensors[0] for x, d in zip(xs[0], dx, strict=True)]
    for word in ((J, ("V", (*axes, True, False))), (("V", axes), J)):
        np.testing.assert_allclose(p.run(at, word, [*xs, dx, dw]).tensors[0], np.stack(dots))
    found = residual.derive_rows(J, (*axes, True, False), [dx, dw], rows)
    np.testing.assert_allclose(found[0], np.stack(dots))
    assert residual.derive_rows(J, (*axes, True, False), [dx[:1], dw], rows[1:2]) is None

    empty = operands(0)
    assert p.run(at, (("V", axes),), empty).tensors[0].shape == (0, 3)
    assert p.run(at, (("V", axes), T), [*empty, np.zeros((0, 3))]).tensors == [None, None]
    found = p.run(at, (T, ("V", (*axes, True))), [*empty, np.zeros((0, 3))]).tensors
    assert [x.shape for x in found] == [(0, 5), (0, 5, 3)]


@dataclasses.dataclass
class Point:
    x: Any
    label: str


def test_trees_keywords_and_unused_arguments() -> None:
    def f(p: Point, *, w: Any, n: int, unused: Any) -> Any:
        return (p.x * w["a"] * n).sum()

    def vjp(p: Point, *, w: Any, n: int, unused: Any) -> Any:
        def pullback(bar: Any, kwargs: bool = False) -> Any:
            assert kwargs
            return (Point(bar * w["a"] * n, ""),), {"w": {"a": bar * p.x * n}, "n": None, "unused": None}

        return f(p, w=w, n=n, unused=unused), pullback

    f.vjp = vjp  # type: ignore[attr-defined]
    args = [
        [Point(np.array([1.0, 2.0]), "p")],
        {"w": {"a": np.array([3.0, 4.0])}, "n": 2, "unused": np.ones(2)},
    ]
    structure, leaves = flatten(args, engine.is_tensor)
    at = WorkerSite(structure, anchored=True)
    found = (
        program(f)
        .run(at, (("T", (0, 1, 2, 3), 1),), [np.array(1, np.float32), *leaves, np.array(1.0)])
        .tensors
    )
    assert found[0] == 0 and found[0].dtype == np.float32
    assert found[1].tolist() == [6, 8] and found[2].tolist() == [2, 4] and found[3] is None


def test_what_is_not_offered_is_refused_by_name() -> None:
    def plain(x: Any) -> Any:
        return x * 2

    p, x = program(plain), np.ones(2)
    for ask in (
        lambda: p.keep(site(1), (), [x]),
        lambda: p.run(site(1), (("T", (0,), 1),), [x, x]),
        lambda: p.run(site(1), (("J", (0,)),), [x, x]),
    ):
        with pytest.raises(UsageError, match="plain is a numpy function without a derivative"):
            ask()
    with pytest.raises(UsageError, match="out_spec"):
        p.spec(site(1), [Aval((2,), BY_NAME["float64"])])
    with pytest.raises(UsageError, match="no parameters"):
        p.parameters()
    with pytest.raises(UsageError, match="compile"):
        p.run(site(1, compile=True), (), [x])
    plain.jvp = lambda primals, tangents: (primals[0] * 2, tangents[0] * 2)  # type: ignore[attr-defined]
    _, residual = p.keep(site(1), (), [x])
    assert residual.derive(("J", (0,)), [x], keep=False, accumulate=False)[0][0].tolist() == [2, 2]
    with pytest.raises(UsageError, match="reverse mode"):
        residual.derive(("T", (0,), 1), [x], keep=False, accumulate=False)


def test_wrong_cotangents_from_user_code_are_refused() -> None:
    def f(x: Any) -> Any:
        return x.sum()

    f.vjp = lambda x: (f(x), lambda bar: (bar,))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"float64\(\), and must be float64\(3,\)"):
        program(f).run(site(1), (("T", (0,), 1),), [np.ones(3), np.array(1.0)])
    f.vjp = lambda x: (f(x), lambda bar: (1j * bar * x,))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="complex128"):
        program(f).run(site(1), (("T", (0,), 1),), [np.ones(3), np.array(1.0)])


def test_tangents_after_user_code_wrote_to_its_argument() -> None:
    def f(x: Any) -> Any:
        x *= 0
        return x

    f.jvp = lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0])  # type: ignore[attr-defined]
    _, residual = program(f).keep(site(1), (), [np.full(2, 3.0)])
    assert residual.derive(("J", (0,)), [np.ones(2)], keep=False, accumulate=False)[0][0].tolist() == [6, 6]


@pytest.mark.parametrize("seed", [None, 3])
def test_tangents_are_of_the_random_numbers_of_the_call(seed: int | None) -> None:
    def f(x: Any) -> Any:
        return x * np.random.rand(*x.shape)

    def jvp(primals: Any, tangents: Any) -> Any:
        mask = np.random.rand(*primals[0].shape)
        return primals[0] * mask, tangents[0] * mask

    f.jvp = jvp  # type: ignore[attr-defined]
    x = ones = np.ones((3, 2))
    result, residual = program(f).keep(site(1, seed=seed), (), [x])
    for _ in range(2):
        assert (
            residual.derive(("J", (0,)), [ones], keep=False, accumulate=False)[0][0] == result.tensors[0]
        ).all()
    result, rows = program(f).keep_rows(site(1, seed=seed), (("V", (True,)),), [x])
    found = rows.derive_rows(("J", (0,)), (True, True), [ones], np.arange(3))
    assert (found[0] == result.tensors[0]).all()


def test_spec_by_the_function_itself() -> None:
    avals = [Aval((5,), BY_NAME["bfloat16"]), Aval((5, 3), BY_NAME["bfloat16"]), Aval((2,), BY_NAME["int64"])]
    found, structure = program(Product()).spec(site(3), avals)
    assert found == [Aval((3,), BY_NAME["bfloat16"]), avals[2]] and list(fill(structure, found)) == ["y", "n"]


def test_seeds() -> None:
    p, state = program(lambda x: x + np.random.rand()), np.random.get_state()[1].copy()
    a, b = (p.run(site(1, seed=7), (), [np.zeros(1)]).tensors[0] for _ in range(2))
    assert a == b == np.random.RandomState(7).rand() and (np.random.get_state()[1] == state).all()
    assert p.run(site(1, seed=1 << 40), (), [np.zeros(1)]).tensors[0] != a
    assert p.run(site(1), (), [np.zeros(1)]).tensors[0] != p.run(site(1), (), [np.zeros(1)]).tensors[0]


def test_the_engine() -> None:
    engine.prepare(1, None, None)
    assert engine.facts()["framework"] == "numpy" and engine.facts()["devices"] == ["cpu"]
    with pytest.raises(UsageError, match="cuda"):
        engine.prepare(None, None, "cuda")
    with pytest.raises(UsageError, match="cannot be called"):
        program(3)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda bar: bar, "not a ndarray"),
        (lambda bar: bar.sum(), "not a float64"),
        (lambda bar: None, "not a NoneType"),
        (lambda bar: (bar,), "not 1 items"),
        (lambda bar: (bar, bar, None), "not 3 items"),
    ],
)
def test_a_pullback_that_gives_no_cotangent_for_each_argument_is_told_how_many(given: Any, says: str) -> None:
    class Sum(Product):
        def __call__(self, x: Any, w: Any) -> Any:  # type: ignore[override]
            return x + w

        def vjp(self, x: Any, w: Any) -> Any:  # type: ignore[override]
            return x + w, given

    x = np.ones(2)
    _, kept = program(Sum()).keep(site(2), (), [x, x])
    with pytest.raises(UsageError, match=rf"a tuple of 2, a cotangent or None for each positional.*{says}"):
        kept.derive(("T", (0, 1), 1), [x], keep=False, accumulate=False)
