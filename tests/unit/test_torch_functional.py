"""A torch module as a function of its parameters, in the worker: the oracle is a second module that has them as its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire_wire.errors import ResidualLostError, UsageError
from gradwire_wire.structures import flatten, positional
from gradwire_wire.tensors.torch import aval, is_tensor
from gradwire_workers import torch as engine
from gradwire_workers.program import WorkerSite

torch.manual_seed(7)
X = torch.randn(5, 4, dtype=torch.float64)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).tanh())


class Checkpointed(nn.Module):
    """Its first half is computed again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4)
        )
        self.outer, self.reentrant = nn.Linear(4, 2), reentrant

    def forward(self, x: Any) -> Any:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Assigned(nn.Module):
    """A buffer that is assigned, not written into."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.lin(x - self.mean)


class Hidden(nn.Module):
    """Reaches its parameter past the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.found = [self.lin.weight]

    def forward(self, x: Any) -> Any:
        return self.lin(x) + (self.found[0] ** 2).sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0]


def parametrized() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.utils.parametrizations.weight_norm(net[0])
    nn.utils.parametrizations.orthogonal(net[1])
    return net


def shared() -> nn.Module:
    lin = nn.Linear(4, 4)
    return nn.Sequential(lin, nn.Tanh(), lin)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


class Pair:
    """A module in the worker, and one beside it whose own parameters are those that will be given."""

    def __init__(self, make: Callable[[], nn.Module], buffers: bool = False) -> None:
        torch.manual_seed(0)
        self.net = make().double()
        self.local = copy.deepcopy(self.net)
        with torch.no_grad():
            for p in self.local.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.before = {name: x.clone() for name, x in self.net.state_dict().items()}
        self.program = engine.program(self.net, is_module=True).functional(buffers)
        self.given = {name: p.detach().clone() for name, p in self.local.named_parameters()}

    def site(self, *args: Any, given: Any = None, **kw: Any) -> tuple[WorkerSite, list[Any]]:
        tree = [[self.given if given is None else given, *args], {}]
        structure, leaves = flatten(tree, is_tensor)
        return WorkerSite(structure, self.net.training, **kw), leaves

    def gradients(self, *, seed: int | None = None, given: Any = None) -> tuple[list[Any], list[Any]]:
        site, leaves = self.site(X, given=given, seed=seed)
        result, kept = self.program.keep(site, (), leaves)
        op = ("T", tuple(range(len(leaves))), 1)
        found, _ = kept.derive(op, [torch.ones_like(result.tensors[0])], keep=False, accumulate=False)
        return list(result.tensors), found

    def local_gradients(self, *, seed: int | None = None) -> tuple[list[Any], list[Any]]:
        x = X.clone().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            y = self.local(x)
        return [y.detach()], list(torch.autograd.grad(y.sum(), [*self.local.parameters(), x]))

    def assert_untouched(self) -> None:
        after = self.net.state_dict()
        assert after.keys() == self.before.keys()
        for name, x in self.before.items():
            assert torch.equal(x, after[name]), name
        assert all(isinstance(p, nn.Parameter) and p.grad is None for p in self.net.parameters())


def assert_equal(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [Tied, shared, parametrized, Recurrent, Checkpointed, norm])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_gradients_are_those_of_the_parameters_given(make: Callable[[], nn.Module], mode: str) -> None:
    pair = Pair(make)
    pair.net.train(mode == "train")
    pair.local.train(mode == "train")
    found, wanted = pair.gradients(seed=3), pair.local_gradients(seed=3)
    assert_equal(found[0], wanted[0])
    assert_equal(found[1], wanted[1])
    if mode == "eval":
        pair.assert_untouched()
    for a, b in zip(pair.net.buffers(), pair.local.buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_is_computed_again_with_the_parameters_given() -> None:
    """In every way to a pullback: kept, evaluated at once, of the second order, as a tangent."""
    pair = Pair(Checkpointed)
    pair.net.eval()
    pair.local.eval()
    site, leaves = pair.site(X)
    op = ("T", tuple(range(len(leaves))), 1)
    cotangent = torch.randn(5, 2, dtype=torch.float64)
    at_once = pair.program.run(site, (op,), [*leaves, cotangent]).tensors
    _, kept = pair.program.keep(site, (), leaves)
    first, further = kept.derive(op, [cotangent], keep=True, accumulate=False)

    def local(*values: Any) -> Any:
        *parameters, x = values
        named = dict(zip(pair.given, parameters, strict=True))
        inner = {name[6:]: p for name, p in named.items() if name.startswith("inner.")}
        outer = {name[6:]: p for name, p in named.items() if name.startswith("outer.")}
        buffers = dict(pair.local.inner.named_buffers())  # type: ignore[union-attr, operator]
        y = torch.func.functional_call(pair.local.inner, {**inner, **buffers}, (x,))  # type: ignore[arg-type]
        return torch.func.functional_call(pair.local.outer, outer, (y,))  # type: ignore[arg-type]

    values = [x.clone().requires_grad_() for x in leaves]
    wanted = torch.autograd.grad(local(*values), values, cotangent, create_graph=True)
    assert_equal(at_once, [g.detach() for g in wanted])
    assert_equal(first, [g.detach() for g in wanted])
    direction = [torch.randn_like(x) for x in leaves]
    second, _ = further.derive(
        ("T", (0, len(leaves) - 1), len(leaves)), direction, keep=False, accumulate=False
    )
    linear = [(g, d) for g, d in zip(wanted, direction, strict=True) if g.requires_grad]
    gs, ds = zip(*linear, strict=True)
    assert_equal(second, torch.autograd.grad(gs, [values[0], values[-1]], ds))
    tangent, _ = kept.derive(("J", tuple(range(len(leaves)))), direction, keep=False, accumulate=False)
    _, expected = torch.autograd.functional.jvp(local, tuple(leaves), tuple(direction))
    assert_equal(tangent, [expected])
    pair.assert_untouched()


def test_r40_a_checkpoint_is_not_computed_again_to_measure_what_it_keeps() -> None:
    calls = []

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return checkpoint(self.counted, x, use_reentrant=False)

        def counted(self, x: Any) -> Any:
            calls.append(1)
            return self.lin(x.tanh()).tanh()

    program = engine.program(Counted().double(), is_module=True)
    structure, leaves = flatten([[X], {}], is_tensor)
    _, kept = program.keep(WorkerSite(structure), (), leaves)
    assert len(calls) == 1 and kept.settle() > 0
    kept.derive(("T", (0,), 1), [torch.ones(5, 4, dtype=torch.float64)], keep=False, accumulate=True)
    assert len(calls) == 2


def test_a_checkpoint_is_not_computed_again_with_other_parameters() -> None:
    net = Checkpointed().double()
    program = engine.program(net, is_module=True)
    structure, leaves = flatten([[X], {}], is_tensor)
    _, kept = program.keep(WorkerSite(structure, True), (), leaves)
    program.load_state_dict(
        {name: 2 * x.detach().numpy() for name, x in net.named_parameters()}, strict=False
    )
    with pytest.raises(ResidualLostError, match="computed again with the new ones"):
        kept.derive(("T", (0,), 1), [torch.ones(5, 2, dtype=torch.float64)], keep=False, accumulate=True)


def test_a_reentrant_checkpoint_is_refused_by_torch_itself() -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        Pair(lambda: Checkpointed(reentrant=True)).gradients()


def test_what_is_not_given_is_the_modules_own() -> None:
    pair = Pair(Tied)
    own = pair.given.pop("a.bias")
    with torch.no_grad():
        pair.net.get_parameter("a.bias").copy_(own)
    (y,), found = pair.gradients()
    (wanted,), gradients = pair.local_gradients()
    assert torch.equal(y, wanted)
    names = [name for name, _ in pair.local.named_parameters()]
    kept = [g for name, g in zip([*names, "x"], gradients, strict=True) if name != "a.bias"]
    assert_equal(found, kept)
    assert all(p.grad is None for p in pair.net.parameters())


@pytest.mark.parametrize("make", [norm, Assigned, Checkpointed])
def test_explicit_buffers_come_and_go(make: Callable[[], nn.Module]) -> None:
    pair = Pair(make, buffers=True)
    buffers = {name: x.clone() for name, x in pair.local.named_buffers()}
    site, leaves = pair.site(buffers, X, seed=5)
    result, kept = pair.program.keep(site, (), leaves)
    inexact = [y for y in result.tensors if y.is_floating_point()]
    cotangents = [torch.ones_like(inexact[0]), *(torch.zeros_like(y) for y in inexact[1:])]
    op = ("T", tuple(i for i, x in enumerate(leaves) if x.is_floating_point()), len(inexact))
    found, _ = kept.derive(op, cotangents, keep=False, accumulate=False)
    (wanted,), gradients = pair.local_gradients(seed=5)
    assert torch.equal(result.tensors[0], wanted)
    moved = {name: x.detach().clone() for name, x in pair.local.named_buffers()}
    assert_equal([found[i] for i in range(len(pair.given))], gradients[:-1])
    assert all(g is None for g in found[len(pair.given) : -1])
    assert_equal(found[-1:], gradients[-1:])
    if make is not Checkpointed:  # there the oracle's move a second time, in its backward
        assert_equal(result.tensors[1:], list(moved.values()))
    pair.assert_untouched()
    assert all(torch.equal(a, b) for a, b in zip(leaves[len(pair.given) :], buffers.values(), strict=False))


def test_what_moves_a_module_is_known() -> None:
    """Where a forward would be computed again, or a caller has no parameter of what a call has made."""
    base = engine.program(Pair(norm).net, is_module=True)
    forms = [base, base.functional(False), base.functional(True)]
    for mode in (False, True):
        base.train(mode)
        base.run(WorkerSite(positional(1), mode), (), [X])
        assert [form.has_moved() for form in forms] == [mode, mode, False]
    net = nn.Linear(4, 4).double()
    plain = engine.program(net, is_module=True)
    plain.run(WorkerSite(positional(1), True), (), [X])
    assert not plain.has_moved()
    with torch.no_grad():
        net.weight.mul_(2)  # as a function of the user's may do, or another module that has it
    assert plain.has_moved()


class Late(nn.Linear):
    """Makes a parameter when it is called."""

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(4).double())
        return super().forward(x) * self.late


def test_a_parameter_that_a_call_makes_is_refused() -> None:
    pair = Pair(lambda: Late(4, 4))
    with pytest.raises(UsageError, match=r"'late' was made by a call.* Call the module once first"):
        pair.gradients()


def test_r40_its_spec_and_an_error_leave_the_module_alone() -> None:
    pair = Pair(norm)
    site, leaves = pair.site(X)
    avals, _ = pair.program.spec(site, [aval(x) for x in leaves])
    assert [tuple(a.shape) for a in avals] == [(5, 4)]
    pair.assert_untouched()
    site, leaves = pair.site(X[:, :2])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pair.program.run(site, (), leaves)
    pair.assert_untouched()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weigth": torch.zeros(4, 4)}, "no parameter 'a.weigth'; there are a.weight, a.bias, b.bias"),
        ({"a.bias": torch.zeros(1)}, r"'a.bias' must have shape \(4,\), as in the module, not \(1,\)"),
    ],
)
def test_parameters_that_do_not_fit(change: Any, message: str) -> None:
    pair = Pair(Tied)
    site, leaves = pair.site(X, given={**pair.given, **change})
    with pytest.raises(UsageError, match=message):
        pair.program.run(site, (), leaves)
    pair.assert_untouched()


def test_a_parameter_that_is_reached_in_another_way_is_refused() -> None:
    with pytest.raises(UsageError, match=r"uses its parameter 'lin.weight' from elsewhere"):
        Pair(Hidden).gradients()


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.w.clamp_(-1.0, 1.0)
        return x * self.w


class Replaced(Clamped):
    def forward(self, x: Any) -> Any:
        self.w = nn.Parameter(self.w.detach().clamp(-1.0, 1.0))
        return x * self.w


class ClampedData(Clamped):
    def forward(self, x: Any) -> Any:
        self.w.data.clamp_(-1.0, 1.0)
        return x * self.w


class ClampedView(Clamped):
    def forward(self, x: Any) -> Any:
        self.w.view(2, 2)[1].data.clamp_(-1.0, 1.0)
        return x * self.w


class SwappedData(Clamped):
    def forward(self, x: Any) -> Any:
        self.w.data = self.w.data.clamp(-1.0, 1.0)
        return x * self.w


class ClampedByNumpy(Clamped):
    def forward(self, x: Any) -> Any:
        array = self.w.detach().numpy()
        array.clip(-1.0, 1.0, out=array)
        return x * self.w


class Quantised(Clamped):
    """Reads ``.data``, puts other values there for the time of its computation, and writes to the data of what is none of ours."""

    def forward(self, x: Any) -> Any:
        before, self.w.data = self.w.data, self.w.data.round()
        y = x * self.w + 0 * self.w.data.norm()
        y.data.mul_(2)
        self.w.data = before
        return y


def test_reading_data_and_what_is_put_back_are_as_in_one_process() -> None:
    pair = Pair(Quantised)
    for _ in range(5):
        for found, wanted in zip(pair.gradients(), pair.local_gradients(), strict=True):
            assert_equal(found, wanted)


def test_a_write_past_the_version_counters_is_met_at_whatever_call_it_comes() -> None:
    pair = Pair(ClampedData)
    net, late = pair.net, ClampedData.forward
    for forward in [Quantised.forward] * 5 + [late]:
        pair.net.__class__ = type("Late", (ClampedData,), {"forward": forward})
        if forward is not late:
            pair.gradients()
    assert net is pair.net
    with pytest.raises(UsageError, match="writes to its parameter 'w'"):
        pair.gradients()


@pytest.mark.parametrize("make", [Clamped, Replaced, ClampedData, ClampedView, SwappedData])
def test_a_module_that_writes_to_its_parameter_is_refused_and_the_given_one_is_left(make: Any) -> None:
    """In one process the write stays; here it would end with the call, and training would go another way."""
    pair = Pair(make)
    with pytest.raises(UsageError, match="writes to its parameter 'w'"):
        pair.gradients()
    site, leaves = pair.site(X)
    with pytest.raises(UsageError, match="writes to its parameter 'w'"):
        pair.program.run(site, (), leaves)
    pair.assert_untouched()


def test_a_write_by_numpy_is_met_in_the_first_calls() -> None:
    for call in (
        lambda pair, site, leaves: pair.program.run(site, (), leaves),
        lambda pair, *_: pair.gradients(),
    ):
        pair = Pair(ClampedByNumpy)
        with pytest.raises(UsageError, match="writes to its parameter 'w'"):
            call(pair, *pair.site(X))
        pair.assert_untouched()


def test_an_embedding_that_renormalises_is_refused() -> None:
    pair = Pair(lambda: nn.Embedding(5, 3, max_norm=0.1))
    site, leaves = pair.site(torch.tensor([0, 4]))
    with pytest.raises(UsageError, match="writes to its parameter 'weight'"):
        pair.program.keep(site, (), leaves)


class Cached(nn.Module):
    """Computes its weight at the first call and keeps it, with its graph."""

    def __init__(self, detach: bool = False) -> None:
        super().__init__()
        self.w, self.cached, self.detach = nn.Parameter(torch.rand(4)), None, detach

    def forward(self, x: Any) -> Any:
        before = 0.0 if self.cached is None else self.cached
        now = x * self.w + before
        self.cached = now.detach() if self.detach else now
        return now


def test_a_graph_that_is_kept_from_call_to_call_is_refused() -> None:
    """Its part of the gradient belongs to what was given to an earlier call, and reached nobody."""
    pair = Pair(Cached)
    pair.gradients()
    with pytest.raises(UsageError, match="depends on 'w' as it was given to an earlier call"):
        pair.gradients()


def test_a_value_that_is_kept_from_call_to_call_is_as_in_one_process() -> None:
    pair = Pair(lambda: Cached(detach=True))
    for _ in range(4):
        (y, found), (wanted_y, wanted) = pair.gradients(), pair.local_gradients()
        assert_equal([*y, *found], [*wanted_y, *wanted])


def hooked() -> nn.Module:
    net = nn.Linear(4, 4)
    net.weight.register_hook(lambda g: 0.5 * g)
    return net


def tied_by_memory() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data.t()
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hooked, "weight has a hook"),
        (tied_by_memory, "0.weight and 1.weight are two tensors in the same memory"),
        (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4))), "compiled by TorchScript"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), "copies its parameters to devices"),
    ],
)
def test_modules_that_cannot(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.program(make(), is_module=True).functional(False)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # Dynamo looks at the inputs, which are no leaves
def test_a_compiled_module_and_a_batch() -> None:
    pair = Pair(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    pair.program = engine.program(torch.compile(pair.net, backend="eager"), is_module=True).functional(False)
    given = {f"_orig_mod.{name}": x for name, x in pair.given.items()}
    assert_equal(pair.gradients(given=given)[1], pair.local_gradients()[1])
    pair = Pair(Tied)
    site, leaves = pair.site(X)
    axes = (False,) * (len(leaves) - 1) + (True,)
    result, kept = pair.program.keep_rows(site, (("V", axes),), leaves)
    assert_equal(result.tensors, [pair.local(X).detach()])
    rows = kept.derive_rows(
        ("T", (0,), 1), (*axes, True), [torch.ones(5, 4, dtype=torch.float64)], torch.arange(5).numpy()
    )
    assert_equal([rows[0].sum(0)], pair.local_gradients()[1][:1])


def test_a_mode_of_its_own_also_where_the_pullback_runs_the_forward_again() -> None:
    net = Checkpointed().double()
    net.outer.eval()
    local = copy.deepcopy(net).eval()
    modes = {name: part.training for name, part in net.named_modules()}
    base = engine.program(net, is_module=True)
    functional = base.functional(False, False)
    structure, leaves = flatten([[base.parameters(), X], {}], is_tensor)
    result, kept = functional.keep(WorkerSite(structure, training=False), (), leaves)
    assert functional.training is False and {n: p.training for n, p in net.named_modules()} == modes
    wrt = tuple(range(len(leaves) - 1))
    found, _ = kept.derive(("T", wrt, 1), [torch.ones_like(result.tensors[0])], keep=False, accumulate=False)
    expected = local(X)
    wanted = torch.autograd.grad(expected.sum(), list(local.parameters()))
    torch.testing.assert_close(result.tensors[0], expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(found), list(wanted), rtol=1e-12, atol=1e-12)
    assert {n: p.training for n, p in net.named_modules()} == modes
    assert base.training is True and base.buffers()["inner.1.num_batches_tracked"] == 0
