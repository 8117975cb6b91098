"""torch.compile over the torch caller: one graph, right gradients, tokens given back; the rest is refused."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import gradwire.torch
from gradwire.site import Site, SpecResult
from gradwire.torch import operator
from gradwire_wire.errors import UnsupportedTensorError, UsageError
from gradwire_wire.structures import flatten, positional
from tests.doubles.torch_remote import TorchRemote as Remote
from tests.doubles.torch_remote import double, equal, f, loss_of, remotes

Function = Callable[..., Any]


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    torch._dynamo.reset()
    with remotes() as make:
        yield make
    torch._dynamo.reset()


def whole(function: Function, backend: Any = "aot_eager", **options: Any) -> Function:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def gradients(loss: Function) -> tuple[torch.Tensor, ...]:
    x, w = double(4).requires_grad_(), double(4, 4, seed=1).requires_grad_()
    return torch.autograd.grad(loss(x, w), (x, w))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_and_backward_in_one_graph(backend: str, remote: Callable[..., Remote]) -> None:
    r = remote(f)
    compiled = whole(loss_of(r), backend)
    for _ in range(2):
        equal(gradients(compiled), gradients(loss_of(f)))
    assert r.counts == {"message": 4, "keep": 2, "pull": 2}
    assert r.alive == 0


def test_a_graph_for_every_size_takes_none_of_ours_for_the_users(remote: Callable[..., Remote]) -> None:
    held: list[torch.Size] = []

    def backend(graph: Any, _: Any) -> Any:
        held.extend(node.meta["example_value"].shape for node in graph.graph.find_nodes(op="get_attr"))
        return graph.forward

    whole(remote(f), backend, dynamic=True)(double(2, 4), double(4, 4))
    assert [[type(n) for n in shape] for shape in held] == [[int]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
def test_inductor(remote: Callable[..., Remote]) -> None:
    r = remote(f)
    equal(gradients(whole(loss_of(r), "inductor")), gradients(loss_of(f)))
    assert r.counts == {"message": 2, "keep": 1, "pull": 1}


def test_nothing_is_kept_without_gradients(remote: Callable[..., Remote]) -> None:
    r, x = remote(f), double(4).requires_grad_()
    compiled = whole(r)
    with torch.no_grad():
        equal(compiled(x, double(4, 4)), f(x, double(4, 4)))
    assert r.counts == {"message": 1, "plain": 1}


def test_trees_and_keywords(remote: Callable[..., Remote]) -> None:
    def g(x: torch.Tensor, *, scale: float, more: dict[str, Any]) -> Any:
        return {"y": x * scale, "aux": (more["b"][0].sum(), None, "s", [3, x.argmax()])}

    r, x = remote(g), double(4)
    found = whole(lambda x: r(x, scale=2.0, more={"b": [x, "mean"]}))(x)
    total, *rest, (three, place) = found["aux"]
    assert (rest, three) == ([None, "s"], 3)
    equal((found["y"], total, place), (x * 2, x.sum(), x.argmax()))


Pair = namedtuple("Pair", "product total")


@dataclass
class Box:
    product: Any
    total: Any


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own
@pytest.mark.parametrize("kind", [Pair, Box, OrderedDict])
def test_r38_results_that_dynamo_does_not_make_break_the_graph(
    kind: Any, remote: Callable[..., Remote]
) -> None:
    g = lambda x, w: kind(product=(x @ w).sin(), total=x.sum())  # noqa: E731
    r, found = remote(g), []

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = r(x * 2, w)
        found.append(type(y))
        return ((y["product"] if kind is OrderedDict else y.product) ** 2).sum()

    wanted = lambda x, w: ((2 * x @ w).sin() ** 2).sum()  # noqa: E731
    for _ in range(2):
        equal(gradients(torch.compile(loss, backend="aot_eager")), gradients(wanted))
    assert set(found) == {kind}
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_rebuilt"):
        whole(r)(double(4), double(4, 4))


def test_one_graph_for_all_sizes(remote: Callable[..., Remote]) -> None:
    g = lambda x, w: (torch.cat([x, x, x[:1]]), x @ w, w.sum(), w.outer(w)[:, :3] if w.dim() == 1 else w)  # noqa: E731
    r, counter = remote(g), CompileCounter()
    compiled = whole(lambda x, w: r(x, w), counter, dynamic=True)
    for n, k in ((5, 3), (6, 4), (9, 7)):
        equal(compiled(double(n, k), double(k)), g(double(n, k), double(k)))
    assert counter.frame_count == 1


def test_sizes_that_do_not_follow_are_fixed(remote: Callable[..., Remote]) -> None:
    g = lambda x: x.reshape(2, -1)[:, : max(3, x.shape[0] // 4)]  # noqa: E731
    r = remote(g)
    compiled = whole(lambda x: r(x), dynamic=True)
    for n in (6, 8, 40):
        equal(compiled(double(n)), g(double(n)))


@pytest.mark.parametrize(
    "g",
    [
        lambda x: torch.nn.functional.pad(x, (0, -len(x) % 4)),  # 8, 16 and 32 stay what they are
        lambda x: x[:100] * 1,
        lambda x: x[: len(x) // 2] * 1,
    ],
    ids=["padded", "clipped", "halved"],
)
def test_sizes_that_seem_to_follow_are_fixed(remote: Callable[..., Remote], g: Function) -> None:
    r = remote(g)
    compiled = whole(lambda x: r(x) / r(x).shape[0], dynamic=True)
    for n in (8, 9, 200):
        equal(compiled(double(n)), g(double(n)) / g(double(n)).shape[0])


@pytest.mark.parametrize(
    "g",
    [
        lambda y: y.reshape(-1) * 1,
        lambda y: y.flatten(),
        lambda y: y.as_strided((2,), (1,)) + 0,
        lambda y: y.stride(),
    ],
    ids=["reshape", "flatten", "as_strided", "strides"],
)
def test_r13_results_have_the_strides_that_the_graph_was_told(
    g: Function, remote: Callable[..., Remote]
) -> None:
    """A pointwise target gives a transposed argument, or one with channels last, back as such a result."""
    r = remote(torch.exp)
    compiled = whole(lambda x: g(r(x)))
    for x in (double(2, 3).t(), double(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        expected = g(torch.exp(x).contiguous())
        equal(compiled(x), expected)
        if isinstance(expected, torch.Tensor):
            weights = double(*expected.shape, seed=1)
            found, wanted = x.clone().requires_grad_(), x.contiguous().requires_grad_()
            (compiled(found) * weights).sum().backward()
            (g(torch.exp(wanted)) * weights).sum().backward()
            equal(found.grad, wanted.grad)


def test_r13_recorded_programs_too(remote: Callable[..., Remote]) -> None:
    r = remote(torch.exp)
    recorded = make_fx(lambda x: r(x).reshape(-1) * 1, tracing_mode="fake")(double(2, 3).t())
    x = double(2, 3, seed=1).t()
    equal(recorded(x), torch.exp(x).reshape(-1))


def test_r35_what_a_graph_was_not_told_is_an_error(remote: Callable[..., Remote]) -> None:
    """It would misread the memory."""
    r, x = remote(lambda x: x.float() if x.sum() > 0 else x * 1), double(4).abs()
    one = flatten(x, torch.is_tensor)[0]
    r.handle.spec = lambda site, avals: SpecResult(avals, one)
    compiled = whole(lambda x: r(x) + 1)
    equal(compiled(-x), 1 - x)
    with pytest.raises(
        UsageError, match=r"announced as float64\[4\] when .* traced, and float32\[4\] arrived"
    ):
        compiled(x)


def test_calls_of_another_process_are_unknown(remote: Callable[..., Remote]) -> None:
    """torch keeps compiled graphs on disk, and a saved program can be loaded anywhere."""
    r, x = remote(f), double(4)
    whole(r)(x, double(4, 4))
    seen = {*operator._by_name}
    assert all(len(name) > 16 for name in seen)  # nobody else's
    with pytest.raises(UsageError, match="compiled or exported in another process"):
        torch.ops.gradwire.call("0", "()", 0, False, 0, True, None, [x, double(4, 4)])


def test_r54_threads_define_an_operator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    other = threading.Thread(target=operator.operator, args=(True,))

    def define(in_order: bool) -> bool:
        made.append(in_order)
        if len(made) == 1:
            other.start()
            other.join(0.1)  # it waits for this to return
        return in_order

    monkeypatch.setattr(operator, "_operators", {})
    monkeypatch.setattr(operator, "_define", define)
    operator.operator(True)
    other.join()
    assert made == [True]


def test_gradients_with_dynamic_sizes(remote: Callable[..., Remote]) -> None:
    g = lambda x, w: (torch.tanh(x @ w), (x**3).sum())  # noqa: E731
    r = remote(g)
    compiled = whole(loss_of(r), dynamic=True)
    w = double(4, 3).requires_grad_()
    for n in (2, 5, 6):
        x = double(n, 4).requires_grad_()
        equal(torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(loss_of(g)(x, w), (x, w)))


def test_stateful_calls_happen_as_often_and_in_the_order_written(remote: Callable[..., Remote]) -> None:
    log: list[float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        log.append(float(x))
        return x + 1

    r, x = remote(note, stateful=True), torch.tensor(1.0)
    r.handle.spec = lambda site, avals: SpecResult(avals, flatten(x, torch.is_tensor)[0])

    def run(x: torch.Tensor) -> torch.Tensor:
        r(x)  # the result is unused
        r(x + 1)
        y = r(x) + r(x)  # equal calls
        r(x + 5)
        return y

    whole(run)(x)
    assert log == [1, 2, 1, 1, 6]


def test_r44_the_first_stage_trains(remote: Callable[..., Remote]) -> None:
    there, here = (torch.nn.Linear(4, 2).double() for _ in range(2))
    here.load_state_dict(there.state_dict())
    r, images = remote(there, accumulate=True, stateful=True), double(5, 4)
    whole(lambda x: r(x).pow(2).sum())(images).backward()
    here(images).pow(2).sum().backward()
    equal([p.grad for p in there.parameters()], [p.grad for p in here.parameters()])


def test_another_mode_compiles_anew(remote: Callable[..., Remote]) -> None:
    r, seen = remote(f), []
    invoke = r.handle.invoke
    r.handle.invoke = lambda site, *a, **k: seen.append(site.training) or invoke(site, *a, **k)
    compiled = whole(r)
    for r.handle.training in (True, False):
        compiled(double(4), double(4, 4))
    assert seen == [True, False]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's own
def test_without_the_hook_the_graph_breaks_and_is_right(remote: Callable[..., Remote]) -> None:
    r, site = remote(f), Site(positional(2))
    run = lambda x, w: gradwire.torch.call(r.handle, site, [x.sin(), w])  # noqa: E731
    compiled = torch.compile(loss_of(run), backend="aot_eager")
    equal(gradients(compiled), gradients(loss_of(lambda x, w: f(x.sin(), w))))


@pytest.mark.parametrize(
    "transform",
    {
        "grad": lambda r, x: grad(lambda x: r(x, x)[1])(x),
        "jvp": lambda r, x: jvp(lambda x: r(x, x), (x,), (x,)),
        "vmap": lambda r, x: vmap(lambda x: r(x, x)[1])(x),
    }.values(),
)
def test_transforms_inside_are_refused(transform: Function, remote: Callable[..., Remote]) -> None:
    r = remote(f)
    with pytest.raises(Exception, match="inside a compiled function cannot pass through a remote call"):
        whole(lambda x: transform(r, x))(double(4, 4))
    assert not r.counts


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dual_numbers_into_a_compiled_function_are_refused(
    backend: str, remote: Callable[..., Remote]
) -> None:
    r, x, w = remote(f), double(4), double(4, 4)
    compiled = whole(r, backend)
    compiled(x, w)
    with forward_ad.dual_level(), pytest.raises(UsageError, match="forward_ad cannot pass"):
        compiled(forward_ad.make_dual(x, x), w)


def scaled(x: torch.Tensor, number: float) -> torch.Tensor:
    return x**2 * number


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo
@pytest.mark.parametrize("numbers", [(2, 3, 4, 5, 6), (0.5, 1.5, 2.5, 3.5, 4.5)], ids=["int", "float"])
def test_a_number_that_varies_ends_the_graph(
    numbers: tuple[float, ...], remote: Callable[..., Remote]
) -> None:
    """Dynamo makes it an input of the graphs before and behind, which then serve all numbers."""
    r, counter = remote(scaled), CompileCounter()
    compiled = torch.compile(lambda x, number: r(x.sin(), number).cos(), backend=counter)
    x, graphs = double(3).requires_grad_(), []
    for number in numbers:
        expected = scaled(x.sin(), number).cos()
        got = compiled(x, number)
        equal(got, expected)
        equal(torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x))
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[-2]


def test_so_does_the_size_of_an_argument(remote: Callable[..., Remote]) -> None:
    r = remote(scaled)
    compiled = torch.compile(lambda x: r(x, x.shape[0]), backend="aot_eager", dynamic=True)
    for n in (3, 4, 5):
        equal(compiled(double(n)), scaled(double(n), n))


@dataclass(frozen=True)
class Settings:
    factor: float


@pytest.mark.parametrize(
    ("argument", "factor"),
    [
        (np.float32(3), lambda n: n),
        (np.full(4, 3.0), lambda a: a),
        (Settings(3.0), lambda s: s.factor),
        (Pair(torch.tensor(3.0), 0), lambda p: p.product),
        ({"a": [Settings(3.0)]}, lambda d: d["a"][0].factor),
    ],
    ids=["numpy scalar", "numpy array", "dataclass", "namedtuple of a tensor", "inside"],
)
def test_r38_what_is_no_constant_ends_the_graph(
    argument: Any, factor: Function, remote: Callable[..., Remote]
) -> None:
    """Of its own accord: Dynamo would have a look at how such an argument is sent, and fail or warn of what it sees."""
    r = remote(lambda x, argument: x * factor(argument))
    compiled = torch.compile(lambda x: r(x, argument), backend="aot_eager")
    x = double(4).requires_grad_()
    compiled(x).sum().backward()
    equal(x.grad, torch.full((4,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("argument", [Pair(1, (2, 3.0)), OrderedDict(b=1, a="x")])
def test_r38_containers_of_constants_are_constants(argument: Any, remote: Callable[..., Remote]) -> None:
    r = remote(lambda x, argument: (x * 2, argument == (1, (2, 3.0)) or argument == {"b": 1, "a": "x"}))
    equal(whole(lambda x: r(x, argument))(double(4)), (double(4) * 2, True))


def test_a_recorded_program_says_that_a_size_is_an_argument(remote: Callable[..., Remote]) -> None:
    r = remote(scaled)
    with pytest.raises(UnsupportedTensorError, match=r"torch.SymInt cannot be sent.* send int\(x\)"):
        make_fx(lambda x: r(x, x.shape[0]), tracing_mode="symbolic")(double(3))
    recorded = make_fx(lambda x: r(x, int(x.shape[0])), tracing_mode="symbolic")(double(3))
    equal(recorded(double(3, seed=1)), scaled(double(3, seed=1), 3))


@pytest.mark.parametrize(
    "transform", [vmap, lambda f: vmap(grad(lambda x: f(x).sum()))], ids=["vmap", "vmap of grad"]
)
def test_r34_a_batch_is_recorded_with_a_size_that_is_a_symbol(
    transform: Function, remote: Callable[..., Remote]
) -> None:
    f = lambda x: x.sin() * x.sum()  # noqa: E731
    recorded = make_fx(transform(remote(f)), tracing_mode="symbolic")(double(3, 4))
    for rows in (3, 5, 1):
        x = double(rows, 4, seed=rows)
        equal(recorded(x), transform(f)(x))


def test_where_the_graph_may_not_end_the_error_says_what_to_do(remote: Callable[..., Remote]) -> None:
    compiled = whole(remote(scaled))
    equal(compiled(double(3), 2), scaled(double(3), 2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="such_an_argument_ends_the_graph__pass_tensors"):
        compiled(double(3), 3)
    for n in (3.0, 4.0):
        equal(compiled(double(3), torch.tensor(n)), scaled(double(3), n))


@pytest.mark.parametrize("transform", [grad, vmap], ids=["grad", "vmap"])
def test_dynamo_does_not_look_into_a_call_that_it_leaves_to_python(
    transform: Function, remote: Callable[..., Remote]
) -> None:
    """Under torch.func's transforms it compiles nothing, and would go through all that is called by then: with warnings of its own."""
    compiled = torch.compile(remote(lambda x: (x**3).sum()), backend="aot_eager")
    x = double(2, 3)
    equal(transform(compiled)(x), transform(lambda x: (x**3).sum())(x))
