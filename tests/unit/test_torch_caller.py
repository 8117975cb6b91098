"""The torch caller: every derivative equals what torch itself computes without gradwire in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from gradwire.torch import anchors
from gradwire_wire.errors import RemoteError, ResidualLostError, UsageError
from gradwire_wire.structures import flatten, positional
from tests.doubles.torch_remote import TorchRemote as Remote
from tests.doubles.torch_remote import double, equal, f, loss_of, remotes

# torch loads scripted code of its own when it first differentiates forwards.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")

Function = Callable[..., Any]
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    with remotes() as make:
        yield make


# ---- Derivatives, each written once and applied to the remote function and to the function itself --------------------


def backward(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_(), w.requires_grad_()
    loss_of(f)(x, w).backward()
    return x.grad, w.grad


def one_input(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.autograd.grad(loss_of(f)(x.requires_grad_(), w), x)


def one_output(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.autograd.grad(f(x.requires_grad_(), w)[1], x)


def through_local(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    y, z = f(x.sin(), w.exp())
    return torch.autograd.grad(y.cos().sum() * z, x)


def twice_the_same(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    return torch.autograd.grad((f(x, w)[0] * f(x, w)[0]).sum(), x)


def same_argument_twice(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    w.requires_grad_()
    return torch.autograd.grad(f(w, w)[0].sum(), w)


def broadcast_cotangent(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    return torch.autograd.grad(f(x, w)[0], x, torch.tensor(2.0, dtype=x.dtype).expand(4))


def strided_cotangent(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    return torch.autograd.grad(f(x, w)[0], x, double(8)[::2])


def double_backward(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_(), w.requires_grad_()
    a, b = torch.autograd.grad(loss_of(f)(x, w), (x, w), create_graph=True)
    return torch.autograd.grad((a**2).sum() + (b**3).sum(), (x, w))


def triple_backward(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x.requires_grad_()
    (a,) = torch.autograd.grad(loss_of(f)(x, w), x, create_graph=True)
    (b,) = torch.autograd.grad((a**2).sum(), x, create_graph=True)
    return torch.autograd.grad((b**2).sum(), x)


def vjp_twice(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    y, pull = vjp(f, x, w)
    return pull(y), pull(tuple(2 * v for v in y))


def saved_elsewhere(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    """What is saved becomes something else (a file, half precision), and the kept forward is there all the same."""
    x.requires_grad_()
    pack, unpack = torch.Tensor.tolist, lambda t: torch.tensor(t, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        (a,) = torch.autograd.grad(loss_of(f)(x, w), x, create_graph=True)
        return torch.autograd.grad((a**2).sum(), x)


def dual_level(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(y).tangent for y in f(forward_ad.make_dual(x, x), w)]


def backward_through_vmap(f: Function, x: torch.Tensor, w: torch.Tensor) -> Any:
    x, w = torch.stack([x, 2 * x]).requires_grad_(), w.requires_grad_()
    return torch.autograd.grad(vmap(loss_of(f), (0, None))(x, w).sum(), (x, w))


def stacked(x: torch.Tensor, n: int = 3) -> torch.Tensor:
    return torch.stack([x * (i + 1) for i in range(n)])


def squares(f: Function) -> Function:
    return lambda *a: (f(*a) ** 2).sum()


CELLS: dict[str, Function] = {
    "backward": backward,
    "one input": one_input,
    "one output": one_output,
    "through local operations": through_local,
    "twice the same call": twice_the_same,
    "same argument twice": same_argument_twice,
    "broadcast cotangent": broadcast_cotangent,
    "strided cotangent": strided_cotangent,
    "double backward": double_backward,
    "triple backward": triple_backward,
    "checkpoint": lambda f, x, w: torch.autograd.grad(
        checkpoint(lambda x: loss_of(f)(x.sin(), w), x.requires_grad_(), use_reentrant=False), x
    ),
    "saved_tensors_hooks": saved_elsewhere,
    "functional.hessian": lambda f, x, w: torch.autograd.functional.hessian(lambda x: loss_of(f)(x, w), x),
    "functional.jacobian": lambda f, x, w: torch.autograd.functional.jacobian(lambda x: f(x, w), x),
    "dual_level": dual_level,
    "func.grad": lambda f, x, w: grad(loss_of(f), (0, 1))(x, w),
    "func.vjp twice": vjp_twice,
    "func.jvp": lambda f, x, w: jvp(f, (x, w), (x, 2 * w)),
    "func.jvp one argument": lambda f, x, w: jvp(lambda x: f(x, w), (x,), (x,)),
    "vmap": lambda f, x, w: vmap(f, (0, None))(stacked(x), w),
    "vmap second axis": lambda f, x, w: vmap(f, (1, None))(stacked(x).T, w),
    "vmap batch of 1": lambda f, x, w: vmap(f, (0, None))(stacked(x, 1), w),
    "vmap nested": lambda f, x, w: vmap(vmap(f, (0, None)), (None, 0))(stacked(x), stacked(w)),
    "vmap out_dims": lambda f, x, w: vmap(lambda x, w: f(x, w)[0], (0, None), 1)(stacked(x), w),
    "vmap of grad": lambda f, x, w: vmap(grad(loss_of(f), (0, 1)), (0, None))(stacked(x), w),
    "vmap of jvp": lambda f, x, w: vmap(lambda x: jvp(lambda x: f(x, w), (x,), (x,)))(stacked(x)),
    "vmap of grad of grad": lambda f, x, w: vmap(grad(squares(grad(loss_of(f))), (0, 1)), (0, None))(
        stacked(x), w
    ),
    "vmap of vmap of grad": lambda f, x, w: vmap(vmap(grad(loss_of(f), (0, 1)), (0, None)), (None, 0))(
        stacked(x), stacked(w)
    ),
    "grad of vmap": lambda f, x, w: grad(lambda x, w: vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1))(
        stacked(x), w
    ),
    "backward through vmap": backward_through_vmap,
    "jacrev of vmap": lambda f, x, w: jacrev(vmap(f, (0, None)), (0, 1))(stacked(x), w),
    "jacfwd of vmap": lambda f, x, w: jacfwd(vmap(f, (0, None)), (0, 1))(stacked(x), w),
    "jvp of vmap": lambda f, x, w: jvp(vmap(f, (0, None)), (stacked(x), w), (stacked(x), 2 * w)),
    "hessian of vmap": lambda f, x, w: hessian(lambda x, w: vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1))(
        stacked(x), w
    ),
    "jacrev": lambda f, x, w: jacrev(f, (0, 1))(x, w),
    "jacrev in chunks": lambda f, x, w: jacrev(f, (0, 1), chunk_size=1)(x, w),
    "jacfwd": lambda f, x, w: jacfwd(f, (0, 1))(x, w),
    "hessian": lambda f, x, w: hessian(loss_of(f))(x, w),
    "jacrev of jacrev": lambda f, x, w: jacrev(jacrev(loss_of(f)))(x, w),
    "jacfwd of jacfwd": lambda f, x, w: jacfwd(jacfwd(loss_of(f)))(x, w),
    "jacrev of jacfwd": lambda f, x, w: jacrev(jacfwd(loss_of(f)))(x, w),
    "grad of grad": lambda f, x, w: grad(squares(grad(loss_of(f))), (0, 1))(x, w),
    "jvp of grad": lambda f, x, w: jvp(lambda x: grad(loss_of(f))(x, w), (x,), (x,)),
    "grad of jvp": lambda f, x, w: grad(
        lambda x: jvp(lambda x: loss_of(f)(x, w), (x,), (torch.ones_like(x),))[1]
    )(x),
    "grad of vmap of grad": lambda f, x, w: grad(
        lambda w: squares(vmap(grad(loss_of(f)), (0, None)))(stacked(x), w)
    )(w),
    "linearize": lambda f, x, w: linearize(lambda x: loss_of(f)(x, w), x)[1](x),
    "make_fx": lambda f, x, w: make_fx(lambda x: f(x, w))(x)(2 * x),
    "make_fx of grad": lambda f, x, w: make_fx(grad(lambda x: loss_of(f)(x, w)))(x)(2 * x),
    "make_fx of jvp": lambda f, x, w: make_fx(lambda x: jvp(lambda x: f(x, w), (x,), (x,)))(x)(2 * x),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize's own
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch_alone(cell: str, remote: Callable[..., Remote]) -> None:
    x, w = double(4), double(4, 4, seed=1)
    got = CELLS[cell](remote(f), x.clone(), w.clone())
    expected = CELLS[cell](f, x.clone(), w.clone())
    equal(got, expected, **CLOSE)


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        equal(double(3), double(3) + 1e-9, **CLOSE)
    with pytest.raises(AssertionError):
        equal((None,), (double(3),), **CLOSE)


@pytest.mark.parametrize(
    "cell, expected",
    {
        "backward": {"message": 2, "keep": 1, "pull": 1},
        "double backward": {"message": 4, "keep": 1, "pull": 3},
        "func.grad": {"message": 2, "keep": 1, "pull": 1},
        "func.jvp": {"message": 2, "keep": 1, "push": 1},
        "dual_level": {"message": 2, "keep": 1, "push": 1},
        "grad of grad": {"message": 4, "keep": 1, "pull": 3},
        "vmap": {"message": 1, "recompute": 1},
        "vmap of grad": {"message": 2, "keep_rows": 1, "pull_rows": 1},
        "vmap of jvp": {"message": 2, "keep_rows": 1, "push_rows": 1},
        "grad of vmap": {"message": 2, "keep_rows": 1, "pull": 1},
        "backward through vmap": {"message": 2, "keep_rows": 1, "pull": 1},
        "jvp of vmap": {"message": 2, "keep_rows": 1, "push": 1},
        "jacrev": {"message": 2, "keep": 1, "recompute": 1},
    }.items(),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_messages(cell: str, expected: dict[str, int], remote: Callable[..., Remote]) -> None:
    r = remote(f)
    CELLS[cell](r, double(4), double(4, 4))
    assert r.counts == expected


@pytest.mark.parametrize("cell", [c for c in CELLS if "vmap" in c or "jac" in c])
def test_row_by_row(cell: str, remote: Callable[..., Remote]) -> None:
    x, w = double(4), double(4, 4, seed=1)
    r = remote(f, vmap="sequential")
    equal(CELLS[cell](r, x.clone(), w.clone()), CELLS[cell](f, x.clone(), w.clone()), **CLOSE)
    assert not any(kind.endswith("rows") for kind in r.counts)


@pytest.mark.parametrize("how", ["batch", "sequential"])
def test_empty_batch(how: str, remote: Callable[..., Remote]) -> None:
    g = lambda x, w: ((x * w).sin(), (x**3).sum())  # noqa: E731
    r, x, w = remote(g, vmap=how), double(0, 4), double(4)
    equal(vmap(r, (0, None))(x, w), vmap(g, (0, None))(x, w))
    each = lambda g: vmap(grad(loss_of(g), (0, 1)), (0, None))(x, w)  # noqa: E731
    equal(each(r), each(g))


@pytest.mark.parametrize("options", [{}, {"check_forward_ad": True}], ids=["reverse", "forward"])
def test_gradcheck(options: dict[str, bool], remote: Callable[..., Remote]) -> None:
    x, w = double(4).requires_grad_(), double(4, 4).requires_grad_()
    assert torch.autograd.gradcheck(remote(f), (x, w), **options)


@pytest.mark.parametrize(
    "options", [{}, {"check_fwd_over_rev": True}], ids=["reverse", "forward over reverse"]
)
def test_gradgradcheck(options: dict[str, bool], remote: Callable[..., Remote]) -> None:
    x, w = double(3).requires_grad_(), double(3, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(remote(f), (x, w), **options)


# ---- How long tokens live ---------------------------------------------------------------------------------------------


def test_backward_gives_the_token_back(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    y, z = r(x, double(4, 4))
    assert r.alive == 1
    z.backward()
    assert r.alive == 0
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_dropped_graph_gives_the_token_back(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    y, z = r(x, double(4, 4))
    del y
    assert r.alive == 1
    del z
    assert r.alive == 0


def test_a_retained_graph_keeps_the_token(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    loss = loss_of(r)(x, double(4, 4))
    loss.backward(retain_graph=True)
    assert r.alive == 1
    first = x.grad.clone()
    loss.backward()
    assert r.alive == 0
    equal(x.grad, 2 * first, **EXACT)


def test_second_order_tokens(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    (g,) = torch.autograd.grad(loss_of(r)(x, double(4, 4)), x, create_graph=True)
    assert r.alive == 2
    del g
    assert r.alive == 0


def test_nothing_is_kept_where_nobody_differentiates(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(f), double(4), double(4, 4)
    expected = f(x, w)
    equal(r(x, w), expected, **EXACT)
    x.requires_grad_()
    with torch.no_grad():
        equal(r(x, w), expected, **EXACT)
    with torch.inference_mode():
        equal(r(x, w), expected, **EXACT)
    equal(r(x.detach(), w), expected, **EXACT)
    assert r.counts == {"message": 4, "plain": 4}


def test_recompute_keeps_nothing(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(f, residuals="recompute"), double(4), double(4, 4)
    equal(double_backward(r, x.clone(), w.clone()), double_backward(f, x, w), **CLOSE)
    assert r.counts == {"message": 4, "plain": 1, "recompute": 3}


# ---- Arguments and results of every kind ------------------------------------------------------------------------------


def test_integer_arguments_and_results(remote: Callable[..., Remote]) -> None:
    def g(w: torch.Tensor, i: torch.Tensor) -> Any:
        return {"y": (w[i] ** 2).sum(), "i": (i * 2, None, "s", 3)}

    r, w, i = remote(g), double(4).requires_grad_(), torch.tensor([0, 2, 2])
    out = r(w, i)
    assert out["i"][1:] == (None, "s", 3)
    assert out["i"][0].dtype == torch.int64 and not out["i"][0].requires_grad
    out["y"].backward()
    equal(w.grad, torch.autograd.grad(g(w, i)["y"], w)[0], **EXACT)
    assert i.grad is None


def test_top_k(remote: Callable[..., Remote]) -> None:
    r, x = remote(lambda x: tuple(torch.topk(x, 2))), double(5).requires_grad_()
    values, places = r(x)
    assert not places.requires_grad
    (g,) = torch.autograd.grad(values.sum(), x)
    assert sorted(places.tolist()) == g.nonzero().flatten().tolist()


def test_unused_arguments_have_no_gradient(remote: Callable[..., Remote]) -> None:
    r, a, b = remote(lambda a, b: 2 * a), double(3).requires_grad_(), double(3).requires_grad_()
    assert torch.autograd.grad(r(a, b).sum(), (a, b), allow_unused=True)[1] is None
    r(a, b).sum().backward()
    assert b.grad is None
    ga, gb = grad(lambda a, b: r(a, b).sum(), (0, 1))(a.detach(), b.detach())
    equal((ga, gb), (torch.full_like(a, 2), torch.zeros_like(b)), **EXACT)


def test_second_order_of_a_gradient_with_unused_arguments(remote: Callable[..., Remote]) -> None:
    def second(function: Function) -> Any:
        a, b, c = (
            double(3).requires_grad_(),
            double(3, seed=1).requires_grad_(),
            double(3, seed=2).requires_grad_(),
        )
        ga, gb, gc = torch.autograd.grad(
            function(a, b, c).sum(), (a, b, c), create_graph=True, allow_unused=True
        )
        assert gb is None
        return torch.autograd.grad((ga * gc).sum(), (a, b, c), allow_unused=True)

    g = lambda a, b, c: a**3 * c  # noqa: E731
    equal(second(remote(g)), second(g), **CLOSE)


def test_detached_result(remote: Callable[..., Remote]) -> None:
    def g(x: torch.Tensor) -> Any:
        return x**2, (x**2).detach()

    r, x = remote(g), double(3).requires_grad_()
    y, _ = r(x)
    (g1,) = torch.autograd.grad(y.sum(), x)
    equal(g1, 2 * x.detach(), **EXACT)


@pytest.mark.parametrize(
    "make",
    {
        "transposed": lambda x: x.T,
        "sliced": lambda x: x[::2, 1:],
        "negative": lambda x: torch.view_as_complex(torch.stack([x, x], -1)).conj().imag,
        "expanded": lambda x: x[:1].expand(5, 6),
        "channels last": lambda x: x.reshape(1, 2, 3, 6).to(memory_format=torch.channels_last),
        "empty": lambda x: x[:0],
        "scalar": lambda x: x[0, 0],
        "parameter": lambda x: torch.nn.Parameter(x),
    }.values(),
)
def test_layouts(make: Function, remote: Callable[..., Remote]) -> None:
    r = remote(lambda x: (x * x.abs()).exp())
    x = make(double(6, 6)).detach()
    leaf = x.clone() if x.is_neg() else x
    got, expected = leaf.requires_grad_(), leaf.detach().clone().requires_grad_()
    y, z = r(got), (expected * expected.abs()).exp()
    equal(y, z, **EXACT)
    equal(torch.autograd.grad(y.sum(), got), torch.autograd.grad(z.sum(), expected), **CLOSE)


def test_lazy_bits(remote: Callable[..., Remote]) -> None:
    z = torch.complex(double(3), double(3, seed=1))
    r = remote(lambda z: z * 2)
    equal(r(z.conj()), z.conj() * 2, **EXACT)
    equal(r(z.conj().imag), z.conj().imag * 2, **EXACT)


@pytest.mark.parametrize(
    "g",
    {
        "square of the modulus": lambda z: (z * z.conj()).real.sum(),
        "square": lambda z: (z**2 * (1 + 2j)).sum().abs() ** 2,
        "real to complex": lambda z: torch.complex(z.real, z.imag * 3).prod().imag,
    }.values(),
)
def test_complex(g: Function, remote: Callable[..., Remote]) -> None:
    z = torch.complex(double(3), double(3, seed=1)).requires_grad_()
    r = remote(g)
    equal(torch.autograd.grad(r(z), z), torch.autograd.grad(g(z), z), **CLOSE)
    assert torch.autograd.gradcheck(r, (z,))
    assert torch.autograd.gradgradcheck(r, (z,))


def test_complex_convention(remote: Callable[..., Remote]) -> None:
    z = torch.tensor(3 + 4j, requires_grad=True)
    remote(lambda z: (z * z.conj()).real)(z).backward()
    assert z.grad.item() == 6 + 8j


def test_float32_and_mixed(remote: Callable[..., Remote]) -> None:
    x, w = torch.randn(4, requires_grad=True), double(4, 4).requires_grad_()
    g = lambda x, w: (x.double() @ w).sum()  # noqa: E731
    got, expected = torch.autograd.grad(remote(g)(x, w), (x, w)), torch.autograd.grad(g(x, w), (x, w))
    equal(got, expected, rtol=1e-6, atol=1e-6)


def test_bfloat16(remote: Callable[..., Remote]) -> None:
    x = torch.randn(100).bfloat16().requires_grad_()
    g = lambda x: x.sin() * 3  # noqa: E731
    r = remote(g)
    equal(r(x), g(x), **EXACT)
    equal(torch.autograd.grad(r(x).sum(), x), torch.autograd.grad(g(x).sum(), x), **EXACT)


def test_keywords_and_trees(remote: Callable[..., Remote]) -> None:
    def g(x: torch.Tensor, *, scale: float, weights: dict[str, torch.Tensor], mask: Any = None) -> Any:
        return {"y": x * scale + weights["b"], "aux": (x.sum(), None, [weights["b"]])}

    r, x, b = remote(g), double(3).requires_grad_(), double(3, seed=1).requires_grad_()
    out = r(x, scale=2.0, weights={"b": b})
    equal(out, g(x, scale=2.0, weights={"b": b}), **EXACT)
    equal(torch.autograd.grad(out["y"].sum(), (x, b)), (torch.full_like(x, 2), torch.ones_like(b)), **EXACT)


def test_numpy_arguments_are_constants(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(f), double(4).requires_grad_(), double(4, 4).numpy()
    w.flags.writeable = False
    expected = torch.autograd.grad(loss_of(f)(x, double(4, 4)), x)
    equal(torch.autograd.grad(loss_of(r)(x, w), x), expected, **EXACT)


def test_a_numpy_argument_refilled_before_a_recomputed_pullback(remote: Callable[..., Remote]) -> None:
    r, x, w = remote(f, residuals="recompute"), double(4).requires_grad_(), double(4, 4).numpy().copy()
    loss = loss_of(r)(x, w)
    expected = torch.autograd.grad(loss_of(f)(x, torch.from_numpy(w.copy())), x)
    w[:] = 0
    equal(torch.autograd.grad(loss, x), expected, **CLOSE)


def test_results_are_the_callers_own(remote: Callable[..., Remote]) -> None:
    r, x = remote(lambda x: x * 1), double(3)
    y = r(x)
    y += 1
    equal(x, double(3), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_may_be_changed_in_place(dtype: torch.dtype, remote: Callable[..., Remote]) -> None:
    r, x = remote(lambda x: (x * 2, x * 3)), torch.ones(3, dtype=dtype, requires_grad=True)
    y, _ = r(x)
    y.add_(1).relu_().sum().backward()
    equal(x.grad, torch.full_like(x, 2), **EXACT)


def test_a_changed_operand_is_an_error_not_a_wrong_gradient(remote: Callable[..., Remote]) -> None:
    r, x = remote(lambda x: x**2), double(3).requires_grad_()
    z = x * 1
    y = r(z).sum()
    z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- Modules whose parameters the worker owns ---------------------------------------------------------------------------


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def gradients(net: torch.nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in net.parameters()]


def test_r44_the_first_stage_trains(remote: Callable[..., Remote]) -> None:
    images, head = double(5, 4), double(2).requires_grad_()
    there, here = module(), module()
    r = remote(there, accumulate=True, stateful=True, training=True)
    (r(images) @ head).pow(2).sum().backward()
    (here(images) @ head.detach()).pow(2).sum().backward()
    equal(gradients(there), gradients(here), **EXACT)
    assert head.grad is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("around", ["grad", "vmap", "fake", "meta"])
def test_r44_a_first_call_inside_of_something_leaves_later_ones_alone(
    remote: Callable[..., Remote], around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is made once, at the first call, is not of the transform or mode that is around it."""
    monkeypatch.setattr("gradwire.torch.anchor", cache(anchors.anchor.__wrapped__))
    there, here, x = module(), module(), double(5, 4)
    r = remote(there, accumulate=True, vmap="sequential")
    if around == "grad":
        grad(lambda x: r(x).sum())(x)
    elif around == "vmap":
        vmap(r)(x)
    elif around == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            r(x)
    else:
        with torch.device("meta"):
            r(x)
    for net in (r, here):
        net(x).pow(2).sum().backward()
    equal(gradients(there), gradients(here), **EXACT)


def test_a_middle_stage_accumulates_over_calls(remote: Callable[..., Remote]) -> None:
    there, here = module(), module()
    r = remote(there, accumulate=True, stateful=True, training=True)
    x = double(5, 4).requires_grad_()
    found = []
    for net in (r, here):
        x.grad = None
        for _ in range(2):
            net(x.sin()).pow(2).sum().backward()
        found.append(x.grad)
    equal(found[0], found[1], **CLOSE)
    equal(gradients(there), gradients(here), **CLOSE)


@pytest.mark.parametrize("how", ["grad", "backward inputs", "func.grad"])
def test_asking_for_an_input_alone_leaves_the_parameters_alone(
    how: str, remote: Callable[..., Remote]
) -> None:
    there, here = module(), module()
    r = remote(there, accumulate=True, vmap="sequential")
    x = double(5, 4).requires_grad_()
    for net in (r, here):
        if how == "grad":
            torch.autograd.grad(net(x).sum(), x)
        elif how == "func.grad":
            grad(lambda x, net=net: net(x).sum())(x.detach())
        else:
            net(x).sum().backward(inputs=[x])
    equal(gradients(there), gradients(here), **EXACT)
    assert gradients(here)[0] is None


def test_gradient_penalty_reaches_the_parameters(remote: Callable[..., Remote]) -> None:
    there, here = module(), module()
    r = remote(there, accumulate=True, vmap="sequential")
    for net in (r, here):
        x = double(5, 4).requires_grad_()
        (g,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
        (g**2).sum().backward()
    equal(gradients(there), gradients(here), **CLOSE)


def test_no_grad_leaves_the_anchor_away(remote: Callable[..., Remote]) -> None:
    r = remote(module(), accumulate=True)
    with torch.no_grad():
        assert not r(double(5, 4)).requires_grad
    assert r.counts == {"message": 1, "plain": 1}


def _in_dual_level(r: Function, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        return r(forward_ad.make_dual(x, x))


@pytest.mark.parametrize(
    ("call", "is_alone"),
    [
        (lambda r, x: r(x), True),
        (lambda r, x: r.options(family="torch")(x.numpy()), True),
        (lambda r, x: r(x.requires_grad_()), False),
        (lambda r, x: r(x.requires_grad_() * 2), False),
        (_in_dual_level, False),
        (lambda r, x: grad(lambda x: r(x).sum())(x), False),
        (lambda r, x: vmap(r.options(vmap="sequential"))(x), False),
    ],
)
def test_a_call_says_that_nothing_but_the_anchor_is_differentiated(
    call: Function, is_alone: bool, remote: Callable[..., Remote]
) -> None:
    r = remote(module(), accumulate=True)
    call(r, double(5, 4))
    assert ("alone" in r.counts) is is_alone and "message" in r.counts


# ---- Dispatch modes -----------------------------------------------------------------------------------------------------


def test_fake_tensors_ask_for_the_spec_alone(remote: Callable[..., Remote]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    r = remote(f)
    with FakeTensorMode() as mode:
        y, z = r(mode.from_tensor(double(4)), mode.from_tensor(double(4, 4)))
    assert (y.shape, z.shape, y.dtype) == ((4,), (), torch.float64)
    assert "message" not in r.counts


def test_flop_counter(remote: Callable[..., Remote]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        equal(backward(remote(f), double(4), double(4, 4)), backward(f, double(4), double(4, 4)), **CLOSE)


# ---- Refused by a sentence, and errors ------------------------------------------------------------------------------------


def test_batched_cotangents_are_refused(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    with pytest.raises(UsageError, match="is_grads_batched"):
        torch.autograd.grad(r(x, double(4, 4))[0], x, torch.eye(4).double(), is_grads_batched=True)
    with pytest.raises(UsageError, match=r"torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda x: r(x, double(4, 4))[0], x, vectorize=True)
    w = double(4, 4)
    with pytest.raises(UsageError, match="vectorize=True"):
        torch.autograd.functional.jacobian(
            lambda x: r(x, w)[0], x.detach(), vectorize=True, strategy="forward-mode"
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
def test_jit_trace_is_refused(remote: Callable[..., Remote]) -> None:
    r = remote(f)
    with pytest.raises(UsageError, match="as a constant"):
        torch.jit.trace(lambda x: r(x, x)[0], (double(4),), check_trace=False)


def test_a_stateful_forward_is_never_repeated(remote: Callable[..., Remote]) -> None:
    r = remote(f, stateful=True)
    x, w = stacked(double(4)), stacked(double(4, 4))
    with pytest.raises(UsageError, match="training mode"):
        vmap(vmap(grad(loss_of(r), (0, 1)), (0, None)), (None, 0))(x, w)


def test_remote_errors_arrive_as_themselves(remote: Callable[..., Remote]) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("bad 42")
        x.register_hook(_bad_gradient)
        return x**2

    r, x = remote(g), torch.ones(3, requires_grad=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad 42") as caught:
            r(x)
        assert isinstance(caught.value, RemoteError) and "test_torch_caller.py" in str(caught.value)
    y = r(-x)
    with pytest.raises(ValueError, match="bad 43"):
        y.sum().backward()
    assert r.alive == 1
    del y, caught
    equal(remote(f)(x, x), f(x, x), rtol=1e-6, atol=1e-6)


def _bad_gradient(g: torch.Tensor) -> torch.Tensor:
    raise ValueError("bad 43")


def test_a_token_that_is_gone(remote: Callable[..., Remote]) -> None:
    r, x = remote(f, stateful=True), double(4).requires_grad_()
    loss = loss_of(r)(x, double(4, 4))
    r.handle.kept.clear()
    with pytest.raises(ResidualLostError):
        loss.backward()


def test_positional_structure_is_what_flatten_makes() -> None:
    assert flatten([[double(1), double(1)], {}], lambda x: isinstance(x, torch.Tensor))[0] == positional(2)
