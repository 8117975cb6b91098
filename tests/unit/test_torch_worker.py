"""The torch worker's programs, in process: the oracle is torch itself."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, ResidualLostError, UsageError
from gradwire_wire.structures import fill, flatten, positional
from gradwire_wire.tensors.torch import aval, is_tensor
from gradwire_workers import torch as engine
from gradwire_workers.program import WorkerSite
from gradwire_workers.torch import kept, state

Word = tuple[Any, ...]
f64 = functools.partial(torch.randn, dtype=torch.float64)


def site(count: int, **kw: Any) -> WorkerSite:
    return WorkerSite(positional(count), **kw)


def program(target: Any) -> Any:
    return engine.program(target, is_module=isinstance(target, nn.Module))


def assert_close(found: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-12) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, check_stride=False)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.detach().contiguous().numpy().tobytes() == b.detach().contiguous().numpy().tobytes()


def test_the_comparisons_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_close([torch.ones(2)], [torch.zeros(2)])
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor(0.0), torch.tensor(-0.0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


# ---- Calls -----------------------------------------------------------------------------------------------------------


def test_a_call_equals_the_same_call_here_bit_for_bit() -> None:
    net, x = mlp(), torch.randn(5, 4)
    p = program(net)
    result = p.run(site(1), (), [x])
    assert_same_bits(result.tensors[0], net(x))
    assert not result.tensors[0].requires_grad
    result, residual = p.keep(site(1), (), [x])
    assert_same_bits(result.tensors[0], net(x))
    assert residual.settle() > 0 and p.is_module and p.training is True


def test_a_sparse_gradient_of_an_argument_is_refused() -> None:
    rows = lambda w, i: torch.nn.functional.embedding(i, w, sparse=True)  # noqa: E731
    _, residual = program(rows).keep(site(2), (), [f64(5, 3), torch.tensor([0, 2])])
    with pytest.raises(UsageError, match=r"embedding with sparse=True.*Say sparse=False"):
        residual.derive(("T", (0,), 1), [f64(2, 3)], keep=False, accumulate=False)


class Graph(nn.Module):
    """A layer over the edges of a graph."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(2), nn.Linear(2, 2)
        edges = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
        self.register_buffer("edges", edges.to_sparse(), persistent=persistent)

    def forward(self, x: Any) -> Any:
        return torch.sparse.mm(self.edges, self.linear(self.norm(x)))


def test_a_module_with_a_sparse_buffer_is_differentiated_and_its_state_is_what_is_dense() -> None:
    net, x = Graph(False), torch.randn(3, 2)
    p = program(net)
    _, residual = p.keep(site(1, training=True), (), [x])
    assert residual.settle() > 0
    (x_bar,), _ = residual.derive(("T", (0,), 1), [torch.ones(3, 2)], keep=False, accumulate=True)
    x.requires_grad_()
    assert_close([x_bar], torch.autograd.grad(net(x).sum(), x), rtol=1e-6)
    assert net.linear.weight.grad is not None
    assert [*p.buffers()] == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    p.load_state_dict({name: x.numpy() for name, x in p.state_dict().items()})
    for state_of in (program(Graph(True)).buffers, program(Graph(True)).state_dict):
        with pytest.raises(UsageError, match=r"edges is of layout sparse_coo.*persistent=False"):
            state_of()


def test_R38_trees_keywords_and_numpy_results() -> None:
    def f(x: Any, *, scale: float = 2.0, mask: Any = None) -> Any:
        return {"y": x * scale, "aux": (x.sum(), None, "s", 3, np.arange(3, dtype=">i4"))}

    x = f64(3)
    structure, leaves = flatten([[x], {"scale": 3.0, "mask": None}], is_tensor)
    result = program(f).run(WorkerSite(structure), (), leaves)
    tree = fill(result.structure, list(result.tensors))
    assert_close(
        [tree["y"], tree["aux"][0], tree["aux"][4]], [x * 3, x.sum(), torch.arange(3, dtype=torch.int32)]
    )
    assert tree["aux"][1:4] == (None, "s", 3)


def test_user_errors_come_out_as_they_are() -> None:
    def bad(x: Any) -> Any:
        raise ValueError("bad 42")

    for call in (program(bad).run, program(bad).keep, program(bad).keep_rows):
        with pytest.raises(ValueError, match="bad 42"):
            call(site(1), (("V", (True,)),) if call.__name__ == "keep_rows" else (), [f64(2, 2)])
    with pytest.raises(UsageError, match="cannot be called"):
        program(3)
    with pytest.raises(UsageError, match=r"torch\.compile"):
        program(mlp()).run(site(1, compile=True), (), [torch.ones(4)])


def test_inference_mode_that_is_never_left_takes_no_gradient_away() -> None:
    """A generator that holds it open between two calls, say: the gradient was missing, and nobody was told."""

    held = []

    def enter(x: torch.Tensor) -> torch.Tensor:
        held.append(torch.inference_mode())
        held[0].__enter__()
        return x * 2

    x = f64(3)
    with torch.inference_mode(False):
        program(enter).run(site(1), (), [x])
        assert torch.is_inference_mode_enabled()
        _, residual = program(lambda x: (x**2).sum()).keep(site(1), (), [x.clone()])
        (bar,), _ = residual.derive(
            ("T", (0,), 1), [torch.ones((), dtype=torch.float64)], keep=False, accumulate=False
        )
        assert_close([bar], [2 * x])
    assert not torch.is_inference_mode_enabled()


def test_seeds_reproduce_a_call_and_leave_the_rest_alone() -> None:
    drop = program(nn.Dropout(0.5))
    x = torch.ones(100)
    torch.manual_seed(7)
    wanted = nn.functional.dropout(x, 0.5)
    before = torch.get_rng_state()
    assert_same_bits(drop.run(site(1, seed=7), (), [x]).tensors[0], wanted)
    assert_same_bits(drop.keep(site(1, seed=7), (), [x])[0].tensors[0], wanted)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(drop.run(site(1), (), [x]).tensors[0], drop.run(site(1), (), [x]).tensors[0])


# ---- Derivatives -----------------------------------------------------------------------------------------------------


def smooth(x: Any, w: Any, i: Any) -> Any:
    y = torch.tanh(x @ w)
    return y * y.sum(), i + 1, torch.sin(x) * w.sum(1)


@pytest.fixture(scope="module", autouse=True)
def forward_mode_of_torch() -> None:
    """It warns about torch itself when it is first used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(1),), (torch.ones(1),))


def by_transforms(f: Callable[..., Any], word: Word) -> Callable[..., Any]:
    """The derived function by torch.func alone."""
    for op in word:
        f = _transformed(f, op)
    return f


def _inexact(ys: Any) -> tuple[Any, ...]:
    return tuple(y for y in ys if y.is_floating_point() or y.is_complex())


def _transformed(f: Callable[..., Any], op: Any) -> Callable[..., Any]:
    if op[0] == "V":
        return torch.func.vmap(f, in_dims=tuple(0 if m else None for m in op[1]))

    def of_some(xs: Sequence[Any]) -> Callable[..., Any]:
        def at(*moved: Any) -> Any:
            all_ = list(xs)
            for i, v in zip(op[1], moved, strict=True):
                all_[i] = v
            return _inexact(f(*all_))

        return at

    def derived(*operands: Any) -> Any:
        count = len(operands) - (len(op[1]) if op[0] == "J" else op[2])
        xs, linear = operands[:count], operands[count:]
        wrt = tuple(xs[i] for i in op[1])
        if op[0] == "J":
            return tuple(torch.func.jvp(of_some(xs), wrt, tuple(linear))[1])
        return tuple(torch.func.vjp(of_some(xs), *wrt)[1](tuple(linear)))

    return derived


X, W, N = (5,), (5, 3), (2,)
CT = [(3,), (5,)]
T01, T0, J01, J1 = ("T", (0, 1), 2), ("T", (0,), 2), ("J", (0, 1)), ("J", (1,))
B = 4


def _batched(shapes: list[Any], axes: tuple[bool, ...], size: int = B) -> list[Any]:
    return [(size, *s) if m else s for s, m in zip(shapes, axes, strict=True)]


WORDS: dict[str, tuple[Word, list[Any]]] = {
    "T": ((T01,), [X, W, N, *CT]),
    "J": ((J01,), [X, W, N, X, W]),
    "TT": ((T01, ("T", (0, 1, 3), 2)), [X, W, N, *CT, X, W]),
    "TJ": ((T01, ("J", (0, 4))), [X, W, N, *CT, X, (5,)]),
    "JT": ((J01, ("T", (0, 3), 2)), [X, W, N, X, W, *CT]),
    "JJ": ((J1, ("J", (0, 1))), [X, W, N, W, X, W]),
    "TTT": ((T0, ("T", (0, 1), 1), ("T", (1,), 2)), [X, W, N, *CT, X, X, W]),
    "V": ((("V", (True, False, False)),), _batched([X, W, N], (True, False, False))),
    "TV": (
        (T01, ("V", (True, False, False, True, False))),
        _batched([X, W, N, *CT], (True, False, False, True, False)),
    ),
    "TV cotangents only": (
        (T01, ("V", (False, False, False, True, True))),
        _batched([X, W, N, *CT], (False, False, False, True, True)),
    ),
    "JV": (
        (J01, ("V", (False, True, True, False, True))),
        _batched([X, W, N, X, W], (False, True, True, False, True)),
    ),
    "VT": ((("V", (True, False, True)), T01), [(B, *X), W, (B, *N), (B, 3), (B, 5)]),
    "VJ": ((("V", (False, True, False)), J01), [X, (B, *W), N, X, (B, *W)]),
    "TVT": (
        (T01, ("V", (True, False, False, True, False)), ("T", (0, 1, 4), 2)),
        [(B, *X), W, N, (B, 3), (5,), (B, *X), (B, *W)],
    ),
    "TVV": (
        (T01, ("V", (True, False, False, False, False)), ("V", (False, True, False, True, False))),
        [(B, *X), (2, *W), N, (2, 3), (5,)],
    ),
    "VTV": (
        (("V", (True, False, False)), T01, ("V", (False, True, False, True, False))),
        [(B, *X), (2, *W), N, (2, B, 3), (B, 5)],
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    word, shapes = WORDS[name]
    torch.manual_seed(0)
    operands = [f64(s) if i != 2 else torch.ones(s, dtype=torch.int64) for i, s in enumerate(shapes)]
    wanted = by_transforms(smooth, word)(*operands)
    p, at = program(smooth), site(3)
    assert_close(p.run(at, word, operands).tensors, wanted)
    result, _ = p.keep(at, word, operands)
    assert_close(result.tensors, wanted)
    if word[-1][0] in "TJ":  # the last operation from a kept forward of the others, twice
        count = len(word[-1][1]) if word[-1][0] == "J" else word[-1][2]
        _, residual = p.keep(at, word[:-1], operands[:-count])
        for _ in range(2):
            assert_close(
                residual.derive(word[-1], operands[-count:], keep=False, accumulate=False)[0], wanted
            )
        results, second = residual.derive(word[-1], operands[-count:], keep=True, accumulate=False)
        assert_close(results, wanted)
        op = ("T", (0, 1), len(wanted))
        cotangents = [torch.randn_like(y) for y in wanted]
        deeper = by_transforms(smooth, (*word, op))(*operands, *cotangents)
        assert_close(second.derive(op, cotangents, keep=False, accumulate=False)[0], deeper)


def test_R33_unused_detached_and_exact() -> None:
    def f(a: Any, b: Any, c: Any, i: Any) -> Any:
        return 2 * a, b.detach(), i

    operands = [f64(3), f64(3), f64(3), torch.arange(3)]
    for word in ((("T", (0, 1, 2), 2),),):
        ct = [torch.ones(3, dtype=torch.float64)] * 2
        found = program(f).run(site(4), word, [*operands, *ct]).tensors
        assert found[0].tolist() == [2, 2, 2] and found[1] is None and found[2] is None
    _, residual = program(f).keep(site(4), (), operands)
    assert residual.derive(("T", (2, 1), 2), ct, keep=False, accumulate=False)[0] == [None, None]
    tangents, _ = residual.derive(("J", (0, 1)), ct, keep=False, accumulate=False)
    assert [t.tolist() for t in tangents] == [[2, 2, 2], [0, 0, 0]]
    _, kept = residual.derive(("T", (2, 0), 2), ct, keep=True, accumulate=False)
    again = [torch.ones(3, dtype=torch.float64)] * 2
    found, _ = kept.derive(("T", (4,), 2), again, keep=False, accumulate=False)
    assert found[0].tolist() == [2, 2, 2]


def test_nothing_differentiable_gives_nones() -> None:
    p = program(lambda x: (x.detach(), 3))
    _, residual = p.keep(site(1), (), [f64(2)])
    assert residual.derive(("T", (0,), 1), [f64(2)], keep=False, accumulate=True)[0] == [None]
    _, residual = program(lambda: 3).keep(site(0), (), [])
    assert residual.derive(("T", (), 0), [], keep=False, accumulate=False)[0] == []


def test_R32_complex_is_the_adjoint() -> None:
    p = program(lambda z: (z.abs() ** 2, z * z))
    z = torch.tensor([3 + 4j], dtype=torch.complex128)
    _, residual = p.keep(site(1), (), [z])
    ct = torch.tensor([1.0], dtype=torch.float64), torch.tensor([0j], dtype=torch.complex128)
    grads = residual.derive(("T", (0,), 2), ct, keep=False, accumulate=False)[0]
    assert_close(grads, [torch.tensor([6 + 8j], dtype=torch.complex128)])
    ct = torch.zeros(1, dtype=torch.float64), torch.tensor([1 + 1j], dtype=torch.complex128)
    assert residual.derive(("T", (0,), 2), ct, keep=False, accumulate=False)[0][0].tolist() == [
        (1 + 1j) * (2 * (3 - 4j))
    ]
    d = torch.tensor([1 - 2j], dtype=torch.complex128)
    tangents, _ = residual.derive(("J", (0,)), [d], keep=False, accumulate=False)
    assert_close(tangents, torch.func.jvp(lambda z: (z.abs() ** 2, z * z), (z,), (d,))[1])


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3),
        torch.randn(3, 2).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
    ],
    ids=lambda x: f"{tuple(x.shape)}{x.stride()}",
)
def test_in_place_first_layers_and_strides(x: torch.Tensor) -> None:
    strides = []

    def f(a: Any) -> Any:
        strides.append(a.stride())
        return a.relu_() * a

    start, stride = x.clone(), x.stride()
    result, residual = program(f).keep(site(1), (), [x])
    assert strides == [stride]
    assert_close(result.tensors, [start.relu() ** 2])
    grad = residual.derive(("T", (0,), 1), [torch.ones_like(x)], keep=False, accumulate=False)[0]
    assert_close(grad, [2 * start.relu()])


def test_R34_rows() -> None:
    torch.manual_seed(0)
    p, axes = program(smooth), (True, False, False)
    operands = [f64(B, 5), f64(5, 3), torch.ones(2, dtype=torch.int64)]
    result, residual = p.keep_rows(site(3), (("V", axes),), operands)
    assert_close(result.tensors, by_transforms(smooth, (("V", axes),))(*operands))
    rows = np.stack([np.full(B, 9, np.uint32), np.arange(B, dtype=np.uint32)], 1)
    cts = [f64(B, 3), f64(5)]
    found = residual.derive_rows(T01, (*axes, True, False), cts, rows)
    assert_close(found, by_transforms(smooth, (T01, ("V", (*axes, True, False))))(*operands, *cts))
    tangents = [f64(5), f64(B, 5, 3)]
    found = residual.derive_rows(J01, (*axes, False, True), tangents, rows)
    assert_close(found, by_transforms(smooth, (J01, ("V", (*axes, False, True))))(*operands, *tangents))
    assert residual.derive_rows(T01, (*axes, True, False), cts, rows[::-1]) is None
    whole = residual.derive(T01, [f64(B, 3), f64(B, 5)], keep=False, accumulate=False)[0]
    assert [g.shape for g in whole] == [(B, 5), (5, 3)], "the batch's own pullback sums over it"
    plain = p.keep(site(3), (), [f64(5), f64(5, 3), operands[2]])[1]
    assert plain.derive_rows(T01, (*axes, True, False), cts, rows) is None
    for size in (0, 1):
        operands[0] = f64(size, 5)
        result, residual = p.keep_rows(site(3), (("V", axes),), operands)
        assert [y.shape[0] for y in result.tensors] == [size] * 3
        found = residual.derive_rows(T01, (*axes, True, False), [f64(size, 3), f64(5)], rows[:size])
        assert [g.shape for g in found] == [(size, 5), (size, 5, 3)]


def test_what_vmap_cannot_do_says_so() -> None:
    p = program(lambda x: x * x.sum().item())
    with pytest.raises(UsageError, match="sequential"):
        p.run(site(1), (("V", (True,)),), [f64(3, 2)])
    with pytest.raises(UsageError, match=r"Batching rule not implemented.*sequential"):
        program(nn.LSTM(2, 3).double()).run(site(1), (("V", (True,)),), [f64(3, 5, 2)])


def test_backward_hooks_are_not_lost_in_a_batch() -> None:
    """torch leaves those of modules out under vmap, without a word; those of tensors it cannot register."""
    doubled = nn.Tanh()
    doubled.register_full_backward_hook(lambda module, bars, _: tuple(2 * bar for bar in bars))

    def registers(x: Any) -> Any:
        y = x.sin()
        y.register_hook(lambda bar: 2 * bar)
        return y

    x, batch = f64(3, 2), (("T", (0,), 1), ("V", (True, True)))
    for target in (doubled, registers):
        p = program(target)
        with pytest.raises(UsageError, match="sequential"):
            p.run(site(1), batch, [x, x])
        row = p.run(site(1), batch[:1], [x[0], x[0]]).tensors[0]
        plain = (1 - x[0].tanh() ** 2 if target is doubled else x[0].cos()) * x[0]
        torch.testing.assert_close(row, 2 * plain)
    assert program(doubled).run(site(1), (("V", (True,)),), [x]).tensors[0].shape == (3, 2)


def test_a_transform_of_the_users_inside() -> None:
    """What forward mode leaves in the graph has no memory of its own that could be measured."""
    x, w = f64(3), f64(3)
    p = program(lambda x, w: torch.func.jvp(lambda a: torch.sin(a * w), (x,), (w,)))
    _, residual = p.keep(site(2), (), [x, w])
    found = residual.derive(("T", (0,), 2), [torch.ones_like(x), w], keep=False, accumulate=False)[0][0]
    torch.testing.assert_close(found, w * torch.cos(x * w) - w**4 * torch.sin(x * w))


def test_the_anchor_is_ignored_and_gets_zero() -> None:
    net, x = mlp(), torch.randn(5, 4)
    p, at = program(net), site(1, anchored=True, accumulate=True)
    anchor = torch.tensor(1.0)
    result, residual = p.keep(at, (), [anchor, x])
    assert_same_bits(result.tensors[0], net(x))
    grads, _ = residual.derive(("T", (0,), 1), [torch.ones(5, 3)], keep=False, accumulate=True)
    assert grads[0].array.shape == () and grads[0].array == 0
    assert all(p.grad is not None for p in net.parameters()), "R44"
    assert p.run(at, (("T", (0, 1), 1),), [anchor, x, torch.ones(5, 3)]).tensors[0].array == 0


def test_a_part_that_is_frozen_between_forward_and_pullback_gets_no_gradient() -> None:
    net, anchor = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(())
    _, residual = program(net).keep(site(1, anchored=True, accumulate=True), (), [anchor, torch.randn(5, 4)])
    residual.settle()
    net[0].requires_grad_(False)
    residual.derive(("T", (0,), 1), [torch.ones(5, 2)], keep=False, accumulate=True)
    assert net[0].weight.grad is None and net[1].weight.grad is not None


class _Scaling(nn.Linear):
    """Writes to what it is given, and notes whether it is differentiated."""

    is_differentiated = True

    def forward(self, x: Any) -> Any:
        self.is_differentiated = x.requires_grad
        return super().forward(x.mul_(2)).sin()


@pytest.mark.parametrize("alone", [False, True])
def test_an_anchor_alone_leaves_the_operands_as_they_are(alone: bool) -> None:
    net, local = _Scaling(4, 3), _Scaling(4, 3)
    local.load_state_dict(net.state_dict())
    x, ct, anchor = torch.randn(5, 4), torch.randn(5, 3), torch.zeros(())
    at = site(1, anchored=True, accumulate=True, alone=alone)
    result, residual = program(net).keep(at, (), [anchor, x.clone()])
    assert net.is_differentiated is not alone
    y = local(x.clone())
    assert_same_bits(result.tensors[0], y)
    pull = ("T", (0,), 1)
    for keep in (False, True):
        assert residual.derive(pull, [ct], keep=keep, accumulate=True)[0][0].array == 0
    y.backward(ct, retain_graph=True)
    y.backward(ct)
    for p, q in zip(net.parameters(), local.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)
    _, second = residual.derive(pull, [ct], keep=True, accumulate=True)
    cases = [(residual, ("T", (0, 1), 1), ct), (residual, ("J", (1,)), x), (second, ("T", (1,), 1), anchor)]
    for kept_one, op, linear in cases:
        with pytest.raises(ResidualLostError, match=r"requires_grad_\(\)") if alone else nullcontext():
            kept_one.derive(op, [linear], keep=False, accumulate=False)


def test_R37_third_order_of_a_cube() -> None:
    p = program(lambda x: x**3)
    x, one = torch.tensor([2.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    word = (("T", (0,), 1), ("T", (0,), 1), ("T", (0,), 1))
    assert p.run(site(1), word, [x, one, one, one]).tensors[0].item() == 6


def test_forward_mode_never_gives_a_silent_zero() -> None:
    class Detaching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return torch.from_numpy(grad.detach().numpy() * 2)

    p, x = program(lambda x: Detaching.apply(x)), f64(3)
    _, residual = p.keep(site(1), (), [x])
    assert_close(residual.derive(("T", (0,), 1), [x], keep=False, accumulate=False)[0], [2 * x])
    with pytest.raises(UsageError, match=r"autograd\.Function"):
        residual.derive(("J", (0,)), [x], keep=False, accumulate=False)


def test_forces_user_code_that_calls_autograd() -> None:
    def energy(x: Any) -> Any:
        return (x**4).sum()

    def forces(x: Any) -> Any:
        x = x.requires_grad_()
        return -torch.autograd.grad(energy(x), x, create_graph=True)[0]

    class Forces(nn.Module):
        calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return forces(x)

    x = f64(3)
    for target in (forces, Forces().train(), Forces().eval()):
        p = program(target)
        for _ in range(2):
            assert_close(p.run(site(1), (), [x.clone()]).tensors, [-4 * x**3])
        result, residual = p.keep(site(1), (), [x.clone()])
        assert_close(result.tensors, [-4 * x**3])
        grad = residual.derive(("T", (0,), 1), [torch.ones_like(x)], keep=False, accumulate=False)[0]
        assert_close(grad, [-12 * x**2])
        found, _ = p.spec(site(1), [aval(x)])
        assert found == [aval(x)]


# ---- Modules that learn ----------------------------------------------------------------------------------------------


def test_R40_batchnorm_moves_once_and_masks_agree() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double().train()
    p, x = program(net), f64(6, 4)
    result, residual = p.keep(site(1), (), [x])
    y = result.tensors[0]
    tangent = residual.derive(("J", (0,)), [f64(6, 4)], keep=False, accumulate=False)[0][0]
    assert bool(((tangent == 0) == (y == 0)).all())
    for keep in (False, True):
        residual.derive(("T", (0,), 1), [y], keep=keep, accumulate=True)
    p.spec(site(1), [aval(x)])
    assert int(net[1].num_batches_tracked) == 1


def _accumulated(net: nn.Module, run: Callable[[], Any]) -> list[Any]:
    net.zero_grad()
    run()
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def test_pullbacks_accumulate_like_backward() -> None:
    net = mlp().double()
    next(net.parameters()).requires_grad_(False)
    p, x, ct = program(net), f64(5, 4), f64(5, 3)

    def locally() -> Any:
        a = x.clone().requires_grad_()
        for _ in range(2):
            net(a).backward(ct)
        return a.grad

    wanted = _accumulated(net, locally)
    assert wanted[0] is None
    at, op = site(1, accumulate=True), ("T", (0,), 1)

    def kept_twice() -> None:
        _, residual = p.keep(at, (), [x])
        for _ in range(2):
            residual.derive(op, [ct], keep=False, accumulate=True)

    def kept_deeper() -> None:
        _, residual = p.keep(at, (), [x])
        for _ in range(2):
            residual.derive(op, [ct], keep=True, accumulate=True)

    def recomputed() -> None:
        for _ in range(2):
            p.run(at, (op,), [x, ct])

    def not_accumulating() -> None:
        p.keep(at, (), [x])[1].derive(op, [ct], keep=False, accumulate=False)

    for run in (kept_twice, kept_deeper, recomputed):
        found = _accumulated(net, run)
        assert found[0] is None
        assert_close(found[1:], wanted[1:])
    assert _accumulated(net, not_accumulating) == [None] * 4


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ct", [torch.ones(5), torch.ones(1, 3), torch.ones(5, 3, dtype=torch.complex64)])
def test_a_cotangent_that_is_not_like_the_result_is_refused(ct: Any, accumulate: bool) -> None:
    """The engine itself would broadcast it, or sum over it."""
    net = mlp()
    _, residual = program(net).keep(site(1, accumulate=True), (), [torch.ones(5, 4)])
    with pytest.raises(RuntimeError, match="Mismatch"):
        residual.derive(("T", (0,), 1), [ct], keep=False, accumulate=accumulate)
    assert all(p.grad is None for p in net.parameters())


class _Named(nn.Linear):
    """Says which parameters it has."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return [("weight", self.weight)]


class _Apart(nn.Sequential):
    """Hides its parts from whoever walks through it."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        yield prefix, self


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ParameterList([torch.ones(2)]))
    net[1].weight = net[0].weight
    net.again = net[1]
    net.register_module("nothing", None)
    net.register_parameter("none", None)
    return net


def _hidden() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].named_modules = lambda *args, **kwargs: []
    return net


@pytest.mark.parametrize(
    "make",
    [
        mlp,
        _tied,
        _hidden,
        lambda: _Named(3, 3),
        lambda: nn.Sequential(nn.Sequential(_Named(3, 3)), _Apart(nn.Linear(2, 2))),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3))),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_parameters_are_those_that_the_module_names(make: Callable[[], nn.Module]) -> None:
    net = make()
    assert {id(p) for p in state.parameters(net)} == {id(p) for p in net.parameters()}
    assert len(state.parameters(net)) == len(list(net.parameters()))
    if type(net) is nn.Sequential:
        net.append(nn.Linear(1, 1))
        net[0].requires_grad_(False)
        assert {id(p) for p in state.parameters(net)} == {id(p) for p in net.parameters()}
        assert {id(p) for p in program(net).trainable()} == {
            id(p) for p in net.parameters() if p.requires_grad
        }


def test_gradients_never_alias_the_cotangent() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(3)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return x + self.a + self.b

    net = Shift()
    p = program(net)
    for keep in (False, True):
        net.zero_grad()
        ct = torch.ones(3)
        _, residual = p.keep(site(1), (), [torch.zeros(3)])
        residual.derive(("T", (0,), 1), [ct], keep=keep, accumulate=True)
        ct.fill_(7)
        residual.derive(("T", (), 1), [torch.ones(3)], keep=False, accumulate=True)
        assert net.a.grad.tolist() == net.b.grad.tolist() == [2, 2, 2] and net.a.grad is not net.b.grad


def test_second_order_reaches_the_parameters() -> None:
    net, x = mlp().double(), f64(5, 4)

    def locally() -> None:
        a = x.clone().requires_grad_()
        g = torch.autograd.grad(net(a), a, torch.ones(5, 3, dtype=torch.float64), create_graph=True)[0]
        (g**2).sum().backward()

    wanted = _accumulated(net, locally)
    p = program(net)

    def remotely() -> None:
        _, residual = p.keep(site(1), (), [x])
        ct = torch.ones(5, 3, dtype=torch.float64)
        (g,), second = residual.derive(("T", (0,), 1), [ct], keep=True, accumulate=False)
        second.derive(("T", (0, 1), 1), [2 * g], keep=False, accumulate=True)

    found = _accumulated(net, remotely)
    assert_close([g for g in found if g is not None], [g for g in wanted if g is not None])


@pytest.mark.parametrize("kwargs", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_a_step_between_forward_and_pullback_is_noticed(kwargs: dict[str, Any]) -> None:
    net, x, ct = mlp(), torch.randn(5, 4), torch.ones(5, 3)
    p = program(net)
    optimizer = p.optimizer(torch.optim.Adam, {"lr": 0.1, **kwargs})
    _, residual = p.keep(site(1), (), [x])
    residual.derive(("T", (0,), 1), [ct], keep=False, accumulate=True)
    optimizer.step()
    assert p.generation == 1
    for accumulate in (False, True):
        with pytest.raises(ResidualLostError, match="Run the forward again"):
            residual.derive(("T", (0,), 1), [ct], keep=False, accumulate=accumulate)
    _, residual = p.keep(site(1), (), [x])
    assert residual.derive(("T", (0,), 1), [ct], keep=False, accumulate=False)[0][0] is not None


def test_in_place_changes_by_user_code_come_out_as_torch_says() -> None:
    w = torch.ones(3, requires_grad=True)

    def f(x: Any) -> Any:
        y = x * w
        with torch.no_grad():
            w.add_(1)
        return y

    _, residual = program(f).keep(site(1), (), [torch.ones(3)])
    with pytest.raises(RuntimeError, match="inplace operation"):
        residual.derive(("T", (0,), 1), [torch.ones(3)], keep=False, accumulate=False)


class Stateful(nn.Module):
    """A hidden state from call to call, of integers too; and a view of its weight that was made in the factory."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.embedding, self.cell, self.h, self.detach = nn.Embedding(7, 3), nn.GRUCell(3, 3), None, detach
        self.transposed = self.cell.weight_hh.t()

    def forward(self, x: Any) -> Any:
        self.h = self.cell(self.embedding(x), self.h) + 0 * self.transposed.sum()
        y = self.h
        self.h = y.detach() if self.detach else y
        return y


def test_a_hidden_state_with_its_graph_is_refused_as_torch_refuses_the_second_backward() -> None:
    x = torch.tensor([1, 4])
    local = Stateful(detach=False)
    local(x).sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        local(x).sum().backward()
    for first in ("keep", "run"):
        program = engine.program(Stateful(detach=False), is_module=True)
        structure, leaves = flatten([[x], {}], is_tensor)
        site = WorkerSite(structure, True, accumulate=True)
        getattr(program, first)(site, (), leaves)
        for _ in range(4):
            with pytest.raises(UsageError, match=r"depends on what an earlier call.*self\.h = h\.detach\(\)"):
                program.keep(site, (), leaves)


def test_a_module_is_not_taken_for_one_that_always_moves_by_the_names_of_its_attributes() -> None:
    """What a wrapped Keras layer says of its states was read from every module: two streams of a network made it stateful."""
    net = nn.Linear(2, 2)
    net.streams = nn.ModuleList([nn.Linear(2, 2)])
    net.moving_in_evaluation = frozenset({"h"})
    assert engine.program(net.eval(), is_module=True).moves_in_evaluation is False


def test_a_detached_hidden_state_trains_as_in_one_process() -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(Stateful(detach=True))
    net, local = nets
    program = engine.program(net, is_module=True)
    x = torch.tensor([1, 4])
    structure, leaves = flatten([[x], {}], is_tensor)
    site = WorkerSite(structure, True, accumulate=True)
    for _ in range(5):
        result, kept = program.keep(site, (), leaves)
        y = local(x)
        assert torch.equal(result.tensors[0], y)
        kept.derive(("T", (), 1), [torch.ones_like(y)], keep=False, accumulate=True)
        y.sum().backward()
    for mine, other in zip(net.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_optimizer() -> None:
    net, twin = mlp(), mlp()
    p, x, ct = program(net), torch.randn(5, 4), torch.ones(5, 3)
    optimizer = p.optimizer(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(UsageError, match="no gradient was accumulated"):
        optimizer.step()
    here = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        p.keep(site(1), (), [x])[1].derive(("T", (), 1), [ct], keep=False, accumulate=True)
        optimizer.step()
        here.zero_grad()
        twin(x).backward(ct)
        here.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert_same_bits(a, b)
    assert {k: v is not None for k, v in p.grads().items()} == dict.fromkeys(p.parameters(), True)
    optimizer.zero_grad()
    assert set(p.grads().values()) == {None} and p.generation == 3
    with pytest.raises(UsageError, match="no gradient"):
        optimizer.step()
    with pytest.raises(UsageError, match="speed"):
        p.optimizer(torch.optim.SGD, {"speed": 1})
    with pytest.raises(UsageError, match="learning rate"):
        p.optimizer(torch.optim.SGD, {"lr": -1.0})
    with pytest.raises(UsageError, match=r"torch\.optim:Adam"):
        p.optimizer(lambda parameters: [*parameters], {})
    p.keep(site(1), (), [x])[1].derive(("T", (), 1), [ct], keep=False, accumulate=True)
    with pytest.raises(UsageError, match="closure"):
        p.optimizer(torch.optim.LBFGS, {}).step()


def test_state_of_a_function_is_refused() -> None:
    p = program(smooth)
    assert p.training is None and not p.is_module and p.trainable() == []
    for use in (
        p.parameters,
        p.buffers,
        p.state_dict,
        p.grads,
        lambda: p.train(True),
        lambda: p.load_state_dict({}),
    ):
        with pytest.raises(UsageError, match=r"Worker\.module"):
            use()


def test_state_dict_round_trip_and_refusals() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    p = program(net)
    p.train(False)
    assert p.training is False
    assert list(p.parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(p.buffers()) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    state = {name: x.numpy() + 1 for name, x in p.state_dict().items()}
    p.load_state_dict(state)
    assert (
        all(np.array_equal(x.numpy(), state[name]) for name, x in p.state_dict().items())
        and p.generation == 1
    )
    wide = {**state, "0.bias": np.zeros(3, np.float16)}
    p.load_state_dict(wide)
    p.load_state_dict({"0.bias": state["0.bias"]}, strict=False)

    before = {name: x.clone() for name, x in p.state_dict().items()}
    zeros = {name: np.zeros_like(x) for name, x in state.items()}
    missing = {k: v for k, v in zeros.items() if k != "1.bias"}
    for bad, says in [
        (missing, 'Missing key.*"1.bias"'),
        ({**zeros, "more": np.zeros(1)}, 'Unexpected key.*"more"'),
        ({**zeros, "1.bias": np.zeros(4, np.float32)}, "size mismatch for 1.bias"),
        ({**zeros, "1.bias": np.zeros(3)}, "1.bias is float32 in the module and float64"),
        ({**zeros, "1.bias": np.zeros(3, np.int64)}, "1.bias is float32 in the module and int64"),
    ]:
        with pytest.raises(UsageError, match=f"(?s)nothing was loaded.*{says}") as caught:
            p.load_state_dict(bad)
        assert isinstance(caught.value, DtypeError) == (" is float32" in says)
        assert all(torch.equal(x, before[name]) for name, x in p.state_dict().items()) and p.generation == 3


def test_what_a_graph_keeps_is_counted() -> None:
    net = nn.Sequential(nn.Linear(4, 1000), nn.Tanh(), nn.Linear(1000, 1))
    _, residual = program(net).keep(site(1), (), [torch.zeros(100, 4)])
    tanh, rest = 100 * 1000 * 4, 100 * 4 * 4 + 100 * 4
    assert residual.settle() == tanh + rest
    _, second = residual.derive(("T", (0,), 1), [torch.zeros(100, 1)], keep=True, accumulate=False)
    assert second.nbytes > residual.nbytes


# ---- Shapes without running ------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Keeps whatever it sees, in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.n = 0
        self.seen: list[Any] = []
        self.last: dict[str, Any] = {"x": None}
        self.ring: Any = collections.deque(maxlen=2)
        self.scale = torch.ones(3)
        self.register_buffer("mean", torch.zeros(3))
        self.twice = [self.lin, self.lin]
        self.later = lambda: setattr(self, "n", self.n + 10)

    def forward(self, x: Any) -> Any:
        self.n += 1
        self.seen.append(x)
        self.ring.append(x)
        self.last["x"] = x
        self.cache = x
        self.scale += 1
        self.mean.mul_(2)
        self.mean = self.mean + self.twice[1](x).mean(0).detach()
        self.later()
        return self.lin(x) * self.scale


class Transformer(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, 16, batch_first=True)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


class First(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)[0]


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (6, 4)),
    "counting": (Counting, (6, 4)),
    "spectral_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))),
        (6, 4),
    ),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (6, 4)),
    "LSTM": (lambda: First(nn.LSTM(4, 3, batch_first=True)), (2, 5, 4)),
    "transformer": (Transformer, (2, 5, 4)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()),
        (2, 3, 8, 8),
    ),
}


def _fingerprint(net: nn.Module) -> Any:
    tensors = {name: (x, x.clone(), x._version) for name, x in net.state_dict().items()}
    return tensors, {id(m): {**m.__dict__} for m in net.modules()}


def _assert_untouched(net: nn.Module, before: Any) -> None:
    tensors, attributes = before
    for name, x in net.state_dict().items():
        old, values, version = tensors[name]
        assert x.data_ptr() == old.data_ptr() and torch.equal(x, values) and x._version == version, name
    for m in net.modules():
        assert m.__dict__.keys() == attributes[id(m)].keys()
        assert all(
            m.__dict__[k] is v or m.__dict__[k] == v for k, v in attributes[id(m)].items() if k != "scale"
        )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_R40_spec_leaves_the_module_untouched(name: str, mode: bool) -> None:
    make, shape = MODULES[name]
    net = make().train(mode)
    before = _fingerprint(net)
    x = torch.randn(shape)
    found, structure = program(net).spec(site(1), [aval(x)])
    _assert_untouched(net, before)
    if isinstance(net, Counting):
        assert net.n == 0 and net.seen == [] and net.last == {"x": None} and len(net.ring) == 0
        assert torch.equal(net.scale, torch.ones(3))
    y = net(x)
    assert found == [aval(y)] and fill(structure, [y]) is y


def test_the_untouched_check_can_fail() -> None:
    net = nn.BatchNorm1d(3)
    before = _fingerprint(net)
    net(torch.ones(2, 3))
    with pytest.raises(AssertionError):
        _assert_untouched(net, before)


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", [_scripted, _lazy])
def test_spec_of_strange_modules_is_right_or_names_out_spec(make: Callable[[], nn.Module]) -> None:
    net, x = make(), torch.randn(6, 4)
    lazy = make is _lazy
    before = None if lazy else {name: v.clone() for name, v in net.state_dict().items()}
    try:
        found, _ = program(net).spec(site(1), [aval(x)])
        assert found[0].shape == (6, 3)
    except UsageError as error:
        assert "out_spec" in str(error)
    if lazy:
        assert all(torch.nn.parameter.is_lazy(p) for p in net.parameters()) and type(net[0]) is nn.LazyLinear
    else:
        assert all(torch.equal(v, before[name]) for name, v in net.state_dict().items())
    assert net(x).shape == (6, 3)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.nonzero(),
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x[: int(x.abs().sum())],
        lambda x: torch.from_numpy(x.detach().numpy() * 2),
    ],
    ids=["nonzero", "branch", "item", "numpy"],
)
def test_R35_shapes_that_depend_on_values_name_out_spec(f: Any) -> None:
    with pytest.raises(UsageError, match="out_spec"):
        program(f).spec(site(1), [Aval((3,), BY_NAME["float32"])])


def test_R35_distributions_check_their_arguments_in_calls_and_not_in_specs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a scale is positive changes no shape."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # Dynamo leaves it off

    def log_density(loc: Any, scale: Any, x: Any) -> Any:
        return torch.distributions.Normal(loc, scale).log_prob(x).sum(-1)

    p = program(log_density)
    found, _ = p.spec(site(3), [Aval((3,), BY_NAME["float32"])] * 2 + [Aval((2, 3), BY_NAME["float32"])])
    assert found == [Aval((2,), BY_NAME["float32"])]
    with pytest.raises(ValueError, match="GreaterThan"):
        p.run(site(3), (), [torch.zeros(3), -torch.ones(3), torch.zeros(2, 3)])


def test_spec_of_functions() -> None:
    p = program(lambda x, w, i: {"y": x @ w, "i": [i.sum(), np.zeros(2)], "in place": x.relu_()})
    shapes = [
        Aval((2, 3), BY_NAME["float16"]),
        Aval((3, 5), BY_NAME["float16"]),
        Aval((4,), BY_NAME["uint8"]),
    ]
    found, structure = p.spec(site(3), shapes)
    assert found[0] == Aval((2, 5), BY_NAME["float16"]) and found[1] == Aval((), BY_NAME["int64"])
    assert found[2] == Aval((2,), BY_NAME["float64"]) and found[3] == shapes[0]
    assert list(fill(structure, found)) == ["y", "i", "in place"]
    anchored, _ = program(mlp()).spec(
        site(1, anchored=True), [Aval((), BY_NAME["float32"]), Aval((5, 4), BY_NAME["float32"])]
    )
    assert anchored == [Aval((5, 3), BY_NAME["float32"])]


def test_spec_refuses_writes_that_it_cannot_shadow_and_passes_errors_on() -> None:
    net = nn.BatchNorm1d(3)
    with pytest.raises(UsageError, match="out_spec"):
        program(lambda x: net(x)).spec(site(1), [Aval((2, 3), BY_NAME["float32"])])
    assert int(net.num_batches_tracked) == 0 and torch.equal(net.running_mean, torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"\[2, 3\] X \[4, 8\]"):
        program(mlp()).spec(site(1), [Aval((2, 3), BY_NAME["float32"])])


def test_spec_leaves_no_fake_tensors_in_caches() -> None:
    @functools.lru_cache
    def mask(n: int) -> Any:
        m = torch.zeros(n)
        m[1:] = 1
        return m + torch.rand(1) * 0

    p = program(lambda x: x * mask(x.shape[0]))
    before = torch.get_rng_state()
    assert p.spec(site(1), [Aval((3,), BY_NAME["float32"])])[0] == [Aval((3,), BY_NAME["float32"])]
    assert torch.equal(torch.get_rng_state(), before)
    assert mask.cache_info().currsize == 1
    assert p.run(site(1), (), [torch.ones(3)]).tensors[0].tolist() == [0, 1, 1]


def test_spec_knows_no_values_of_what_was_filled_with_fakes() -> None:
    def fill_in(x: Any) -> Any:
        out = torch.zeros(4, 2)
        out[:, 0] = x
        out += 1
        return out

    def branch(x: Any) -> Any:
        return x if fill_in(x).sum() > 0 else x[:2]

    x = Aval((4,), BY_NAME["float32"])
    assert program(fill_in).spec(site(1), [x])[0] == [Aval((4, 2), BY_NAME["float32"])]
    with pytest.raises(UsageError, match="out_spec"):
        program(branch).spec(site(1), [x])


# ---- The engine ------------------------------------------------------------------------------------------------------


def test_facts_and_prepare() -> None:
    threads = torch.get_num_threads()
    engine.prepare(1, True, "cpu")
    facts = engine.facts()
    assert facts["framework"] == "torch" and facts["version"] == torch.__version__ and facts["threads"] == 1
    assert "cpu" in facts["devices"]
    torch.set_num_threads(threads)
    with pytest.raises(UsageError, match="no device 'cuda:77'"):
        engine.prepare(None, None, "cuda:77")


def test_only_the_graph_is_kept() -> None:
    assert not hasattr(kept.Kept(program(smooth), [], [], False, 0), "__dict__")
