"""What a torch program does with a function of (x, w) and two results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Any]


def loss_of(f: Function) -> Function:
    def loss(x: Any, w: Any) -> Any:
        y, z = f(x, w)
        return (y**2).sum() + z

    return loss


def leaf(x: Any) -> Any:
    return x.clone().requires_grad_()


def rows(x: Any, n: int = 3) -> Any:
    return torch.stack([x * (i + 1) for i in range(n)]) if n else x.new_zeros((0, *x.shape))


def backward(f: Function, x: Any, w: Any) -> Any:
    x, w = leaf(x), leaf(w)
    loss_of(f)(x.sin(), w).backward()
    return x.grad, w.grad


def autograd_grad(f: Function, x: Any, w: Any) -> Any:
    x, w = leaf(x), leaf(w)
    return torch.autograd.grad(f(x, w), (x, w), (x.detach(), torch.tensor(2.0, dtype=x.dtype)))


def double_backward(f: Function, x: Any, w: Any) -> Any:
    x, w = leaf(x), leaf(w)
    a, b = torch.autograd.grad(loss_of(f)(x, w), (x, w), create_graph=True)
    ((a**2).sum() + (b**3).sum()).backward()
    return x.grad, w.grad


def pulled(f: Function, x: Any, w: Any) -> Any:
    y, pull = vjp(f, x, w)
    return y, pull(y), pull(tuple(2 * v for v in y))


def lined(f: Function, x: Any, w: Any) -> Any:
    y, line = linearize(lambda x: loss_of(f)(x, w), x)
    return y, line(x), line(2 * x)


def dual(f: Function, x: Any, w: Any) -> Any:
    with forward_ad.dual_level():
        return [forward_ad.unpack_dual(y) for y in f(forward_ad.make_dual(x, 2 * x), w)]


def quiet(mode: Any) -> Function:
    def act(f: Function, x: Any, w: Any) -> Any:
        with mode():
            y = f(leaf(x), w)
        return [*y, torch.tensor([v.requires_grad for v in y])]

    return act


def batched_cotangents(f: Function, x: Any, w: Any) -> Any:
    x = leaf(x)
    return torch.autograd.grad(f(x, w)[0], x, torch.eye(4, dtype=x.dtype), is_grads_batched=True)


def exported(f: Function, x: Any, w: Any) -> Any:
    class Net(torch.nn.Module):
        def forward(self, x: Any, w: Any) -> Any:
            return [v * 2 for v in f(x.sin(), w)]

    return torch.export.export(Net(), (x, w)).module()(2 * x, w)


def compiled(act: Function) -> Function:
    def run_compiled(f: Function, x: Any, w: Any) -> Any:
        torch._dynamo.reset()
        program = torch.compile(lambda x, w: act(f, x, w), backend="aot_eager", fullgraph=True)
        return program(x, w)

    return run_compiled


def compiled_backward(f: Function, x: Any, w: Any) -> Any:
    torch._dynamo.reset()
    program = torch.compile(lambda x, w: loss_of(f)(x.sin(), w), backend="aot_eager", fullgraph=True)
    x, w = leaf(x), leaf(w)
    program(x, w).backward()
    return x.grad, w.grad


CELLS: dict[str, Callable[[Function, Any, Any], Any]] = {
    "call": lambda f, x, w: f(x, w),
    "backward": backward,
    "autograd.grad": autograd_grad,
    "double backward": double_backward,
    "checkpoint": lambda f, x, w: torch.autograd.grad(
        checkpoint(lambda x: loss_of(f)(x.sin(), w), a := leaf(x), use_reentrant=False), a
    ),
    "no_grad": quiet(torch.no_grad),
    "inference_mode": quiet(torch.inference_mode),
    "forward_ad": dual,
    "func.grad": lambda f, x, w: grad(loss_of(f), (0, 1))(x, w),
    "func.vjp": pulled,
    "func.jvp": lambda f, x, w: jvp(f, (x, w), (2 * x, w)),
    "func.linearize": lined,
    "func.jacrev": lambda f, x, w: jacrev(f, (0, 1))(x, w),
    "func.jacfwd": lambda f, x, w: jacfwd(f, (0, 1))(x, w),
    "func.hessian": lambda f, x, w: hessian(loss_of(f))(x, w),
    "func.grad of func.grad": lambda f, x, w: grad(lambda x, w: (grad(loss_of(f))(x, w) ** 2).sum(), (0, 1))(
        x, w
    ),
    "func.vmap, in_dims (0, None)": lambda f, x, w: vmap(f, (0, None))(rows(x), w),
    "func.vmap, in_dims (1, None)": lambda f, x, w: vmap(f, (1, None))(rows(x).T, w),
    "func.vmap of func.vmap": lambda f, x, w: vmap(vmap(f, (0, None)), (None, 0))(rows(x), rows(w, 2)),
    "func.vmap of func.grad": lambda f, x, w: vmap(grad(loss_of(f), (0, 1)), (0, None))(rows(x), w),
    "func.vmap of func.grad, a batch of 1": lambda f, x, w: vmap(grad(loss_of(f)), (0, None))(rows(x, 1), w),
    "func.grad of func.vmap": lambda f, x, w: grad(
        lambda x, w: vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1)
    )(rows(x), w),
    "func.jacrev of func.vmap": lambda f, x, w: jacrev(vmap(f, (0, None)), (0, 1))(rows(x), w),
    "func.jacfwd of func.vmap": lambda f, x, w: jacfwd(vmap(f, (0, None)), (0, 1))(rows(x), w),
    "func.jvp of func.vmap": lambda f, x, w: jvp(lambda w: vmap(f, (0, None))(rows(x), w), (w,), (2 * w,)),
    "func.jacrev of func.vmap, a batch of 1": lambda f, x, w: jacrev(vmap(f, (0, None)), (0, 1))(
        rows(x, 1), w
    ),
    "func.hessian of func.vmap": lambda f, x, w: hessian(
        lambda x, w: vmap(loss_of(f), (0, None))(x, w).sum(), (0, 1)
    )(rows(x), w),
    "autograd.functional.hessian": lambda f, x, w: torch.autograd.functional.hessian(
        lambda x: loss_of(f)(x, w), x
    ),
    "gradcheck": lambda f, x, w: torch.tensor(gradcheck(f, (leaf(x), leaf(w)), check_forward_ad=True)),
    "gradgradcheck": lambda f, x, w: torch.tensor(gradgradcheck(f, (leaf(x), leaf(w)))),
    "make_fx": lambda f, x, w: make_fx(lambda x: f(x, w))(x)(2 * x),
    "make_fx of func.grad": lambda f, x, w: make_fx(grad(lambda x: loss_of(f)(x, w)))(x)(2 * x),
    "export": exported,
    "compile, fullgraph": compiled(lambda f, x, w: f(x.sin(), w)),
    "compile, fullgraph, then backward": compiled_backward,
    "func.grad in compile": compiled(lambda f, x, w: grad(loss_of(f))(x, w)),
    "func.jvp in compile": compiled(lambda f, x, w: jvp(f, (x, w), (2 * x, w))),
    "func.vmap in compile": compiled(lambda f, x, w: vmap(f, (0, None))(torch.stack([x, 2 * x]), w)),
    "is_grads_batched": batched_cotangents,
    "functional.jacobian, vectorize": lambda f, x, w: torch.autograd.functional.jacobian(
        lambda x: f(x, w)[0], x, vectorize=True
    ),
}


def run(cell: str, f: Function, x: Any, w: Any) -> Any:
    return CELLS[cell](f, torch.tensor(x), torch.tensor(w))
