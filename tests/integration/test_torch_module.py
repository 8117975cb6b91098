"""gw.torch.Module: a remote module as a torch module, trained by its caller. The oracle is the same module in this process."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import pathlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import gradwire as gw

TARGETS = pathlib.Path(__file__).parent / "targets"
SIZES = [
    6,
    64,
    64,
    4,
]  # the second weight and no other lies in shared memory: the rest travels in the message
torch.manual_seed(0)
X = torch.randn(16, 6, dtype=torch.float64)
Workers = Callable[[str], gw.Worker]


class Pair(NamedTuple):
    """A module over a remote, and the same module here with the same values."""

    worker: gw.Worker
    net: Any
    local: Any
    remote: gw.Remote

    def assert_same(self, rtol: float = 1e-9) -> None:
        ours, theirs = self.net.state_dict(), self.local.state_dict()
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            torch.testing.assert_close(ours[name], x, rtol=rtol, atol=rtol, msg=name)

    def copied(self, call: Callable[[], Any]) -> int:
        """Bytes of this call that were copied on their way to the worker."""
        before = self.worker.stats()["copied_bytes"]
        call()
        return int(self.worker.stats()["copied_bytes"] - before)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's own targets, in this process."""
    monkeypatch.syspath_prepend(str(TARGETS))
    sys.modules.pop("in_torch", None)
    import in_torch

    yield in_torch
    sys.modules.pop("in_torch", None)


@pytest.fixture
def pair(worker_of: Workers, in_torch: Any) -> Callable[..., Pair]:
    def make(sizes: list[int] = SIZES, buffers: str = "worker", **kw: Any) -> Pair:
        kw = {"dtype": "float64", **kw}
        remote = worker_of("torch").module("in_torch:make_block", sizes, **kw)
        return Pair(
            worker_of("torch"),
            gw.torch.Module(remote, buffers=buffers),
            in_torch.make_block(sizes, **kw),
            remote,
        )

    return make


def train(model: Any, optimizer: Any, steps: int = 6) -> None:
    """Two batches a step, as gradient accumulation has it."""
    data = torch.utils.data.TensorDataset(X, X[:, :4].tanh())
    batches = itertools.cycle(torch.utils.data.DataLoader(data, batch_size=8))
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in itertools.islice(batches, 2):
            (model(x) - y).pow(2).mean().backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "for each its own": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_trained_by_every_optimizer_as_locally(pair: Any, optimizer: str) -> None:
    p = pair()
    own = p.remote.parameters()
    for net in (p.net, p.local):
        model = nn.Sequential(nn.Identity(), net)
        train(model, OPTIMIZERS[optimizer](model.parameters()))
    p.assert_same()
    for name, x in p.remote.parameters().items():
        assert (x == own[name]).all()  # the worker's own are not touched


@pytest.mark.parametrize("owner", ["caller", "worker"])
def test_r33_heads_that_take_turns(worker_of: Workers, in_torch: Any, owner: str) -> None:
    """What the loss does not reach has no gradient, rather than zeros, which AdamW would act on."""
    local, remote = in_torch.Heads(), worker_of("torch").module("in_torch:Heads")
    settings: Any = {"lr": 0.1, "weight_decay": 0.5}
    net = gw.torch.Module(remote) if owner == "caller" else remote
    ours = (
        torch.optim.AdamW(net.parameters(), **settings)
        if owner == "caller"
        else remote.optimizer("torch.optim:AdamW", **settings)
    )
    for model, optimizer in ((local, torch.optim.AdamW(local.parameters(), **settings)), (net, ours)):
        for i in range(6):
            optimizer.zero_grad()
            model(X)[i % 3 == 0].square().sum().backward()
            optimizer.step()
    found = remote.options(family="torch").parameters() if owner == "worker" else net.state_dict()
    for name, x in local.state_dict().items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-9, msg=name)


def test_what_the_worker_owns_is_a_part_of_a_model(pair: Any) -> None:
    p = pair(batch_norm=True)
    model, local = (nn.Sequential(net, nn.Linear(4, 4).double()) for net in (p.net, p.local))
    model[0] = gw.torch.Module(p.remote, owner="worker")
    local[1].load_state_dict(model[1].state_dict())
    theirs = p.remote.optimizer("torch.optim:Adam", lr=0.01)
    ours, all_of_it = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (model, local))
    for _ in range(4):
        for net, optimizers in ((model, (ours, theirs)), (local, (all_of_it,))):
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(X).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    state = local.state_dict()
    assert list(model.state_dict()) == list(state)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, state[name], rtol=1e-9, atol=1e-9, msg=name)
    assert len(list(model.parameters())) == 2
    torch.testing.assert_close(model.eval()(X), local.eval()(X), rtol=1e-9, atol=1e-9)
    assert p.remote.training is False and p.remote.train().training
    torch.testing.assert_close(
        model(X), local(X), rtol=1e-9, atol=1e-9
    )  # the mode of the model is that of its calls
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), local(X), rtol=1e-9, atol=1e-9)
    model[0].requires_grad_(False)
    assert p.remote._change("frozen") == list(p.remote.parameters())
    fresh = {name: torch.zeros_like(x) for name, x in state.items()}
    model.load_state_dict(fresh)
    assert not any(x.any() for x in p.remote.state_dict().values())
    with pytest.raises(RuntimeError, match=r'Unexpected.*"0.more"'):
        model.load_state_dict({**fresh, "0.more": X})
    with pytest.raises(RuntimeError, match=r'Missing.*"0.0.weight"'):
        model.load_state_dict({name: x for name, x in fresh.items() if name != "0.0.weight"})


@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_r40_statistics_move_once_for_each_forward(pair: Any, buffers: str) -> None:
    p = pair(buffers=buffers, batch_norm=True)
    for net in (p.net, p.local):
        train(net, OPTIMIZERS["sgd"](net.parameters()))
    p.assert_same()
    there = p.remote.buffers()["1.num_batches_tracked"]
    assert there == (12 if buffers == "worker" else 0)
    assert len(list(p.net.buffers())) == (0 if buffers == "worker" else 9)
    torch.testing.assert_close(p.net.eval()(X), p.local.eval()(X))


@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_names_values_and_loading_are_torchs(pair: Any, tmp_path: pathlib.Path, buffers: str) -> None:
    p = pair(batch_norm=True, buffers=buffers)
    assert [n for n, _ in p.net.named_parameters()] == [n for n, _ in p.local.named_parameters()]
    for net in (
        (lambda x: x),
        (lambda x: nn.Sequential(x, nn.Linear(4, 2))),
    ):  # who averages states may zip their values
        assert list(net(p.net).state_dict()) == list(net(p.local).state_dict())
    p.assert_same(0)
    train(p.local, OPTIMIZERS["sgd"](p.local.parameters()))
    p.net.load_state_dict(p.local.state_dict())
    p.assert_same(0)
    torch.save(nn.Sequential(p.net).state_dict(), tmp_path / "saved.pt")
    other = nn.Sequential(pair(batch_norm=True, seed=1).net)
    other.load_state_dict(torch.load(tmp_path / "saved.pt"))
    for a, b in zip(other.state_dict().values(), p.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.bias"), r'Missing key.* "0.bias"'),
        (lambda s: s.pop("1.running_mean"), r'Missing key.* "1.running_mean"'),
        (lambda s: s.update({"9.weight": X}), r'Unexpected key.* "9.weight"'),
        (lambda s: s.update({"0.weight": X}), r"size mismatch for 0.weight"),
        (lambda s: s.update({"1.running_mean": X}), r"size mismatch for 1.running_mean"),
    ],
)
def test_a_state_that_does_not_fit(pair: Any, change: Callable[[Any], Any], message: str) -> None:
    p = pair(batch_norm=True)
    state = p.local.state_dict()
    change(state)
    with pytest.raises(RuntimeError, match=message):
        p.net.load_state_dict(state)


def test_autocast_of_the_caller_does_nothing_there_and_that_of_the_worker_what_it_does_here(
    worker_of: Workers, in_torch: Any
) -> None:
    worker, x = worker_of("torch"), X.float()
    remote = worker.module("in_torch:make_block", SIZES)
    for net in (remote, gw.torch.Module(remote)):
        wanted = net(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = net(x)
            assert y.dtype == torch.float32 and torch.equal(y, wanted)
            y.sum().backward()
            half = x.clone() @ torch.eye(6)
            with pytest.raises(RuntimeError, match="same dtype") as met:
                net(half)
        assert half.dtype == torch.bfloat16 and "autocast is on here" in met.value.__notes__[0]
    remote = worker.module("in_torch:Autocast")
    for net in (remote, gw.torch.Module(remote)):
        local, mine, theirs = in_torch.Autocast(), x.clone().requires_grad_(), x.clone().requires_grad_()
        y, wanted = net(mine), local(theirs)
        assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)
        y.float().square().sum().backward()
        wanted.float().square().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
        found = (
            remote.options(family="torch").grads()
            if net is remote
            else {n: p.grad for n, p in net.named_parameters()}
        )
        for name, p in local.named_parameters():
            torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_extra_states_are_part_of_the_state(worker_of: Workers, in_torch: Any, buffers: Any) -> None:
    local, worker = in_torch.Nested(), worker_of("torch")
    net = gw.torch.Module(worker.module("in_torch:Nested"), buffers=buffers)
    local.inner.version = 5
    assert net.state_dict()["inner._extra_state"] == {"version": 3}
    assert net.state_dict().keys() == local.state_dict().keys()
    net.load_state_dict(local.state_dict())
    wrapped = nn.Sequential(net)
    assert wrapped.state_dict()["0.inner._extra_state"] == {"version": 5}
    x = torch.randn(4, 3)
    for module in (net, local):
        module.eval()
    torch.testing.assert_close(net(x), local(x))
    missing = {name: value for name, value in local.state_dict().items() if "extra" not in name}
    with pytest.raises(RuntimeError, match=r'Missing key.*"inner\._extra_state"'):
        net.load_state_dict(missing)
    odd = gw.torch.Module(worker.module("in_torch:Nested", odd=True), buffers=buffers)
    with pytest.raises(gw.UsageError, match="cannot be sent"):
        odd.state_dict()
    assert len(list(odd.parameters())) == 4


def test_ensembles_of_stacked_parameters(worker_of: Workers, in_torch: Any) -> None:
    worker, seeds = worker_of("torch"), range(3)
    remotes = [gw.torch.Module(worker.module("in_torch:make_block", SIZES, seed=i)).eval() for i in seeds]
    locals_ = [in_torch.make_block(SIZES, seed=i).eval() for i in seeds]
    found = []
    for nets in (remotes, locals_):
        stacked, buffers = torch.func.stack_module_state(nets)

        def loss(parameters: Any, net: Any = nets[0], buffers: Any = buffers) -> Any:
            def one(parameters: Any, buffers: Any) -> Any:
                return torch.func.functional_call(net, (parameters, buffers), (X.float(),))

            return torch.vmap(one)(parameters, buffers).square().sum()

        value, bars = loss(stacked), torch.func.grad(loss)(stacked)  # a graph is recorded below both
        value.backward()
        found.append([value, *(bars[n] for n in stacked), *(x.grad for x in stacked.values())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_weight_tied_between_two_remotes_and_a_layer_here(worker_of: Workers, in_torch: Any) -> None:
    worker = worker_of("torch")
    nets = [gw.torch.Module(worker.module("in_torch:make_block", [64, 64], seed=i)) for i in (0, 1)]
    theirs = [in_torch.make_block([64, 64], seed=i) for i in (0, 1)]
    heads = [nn.Linear(64, 64), nn.Linear(64, 64)]
    heads[1].load_state_dict(heads[0].state_dict())
    models, x = [], torch.randn(3, 64)
    for (first, second), head in zip((nets, theirs), heads, strict=True):
        part = first.get_submodule("0")
        second.get_submodule("0").weight = head.weight = part.weight
        models.append(nn.Sequential(first, second, head))
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        assert len(list(model.parameters())) == 4
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for (name, ours), local in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, local, rtol=1e-5, atol=1e-5, msg=name)


def test_tied_parameters_and_buffers_that_are_not_saved(worker_of: Workers, in_torch: Any) -> None:
    remote = worker_of("torch").module("in_torch:Tied")
    x = X.float()
    remote.requires_grad_(False, "second")  # and with it the weight, which has the name of the first
    learns = {name: p.requires_grad for name, p in gw.torch.Module(remote).named_parameters()}
    assert learns == {"first.weight": False, "first.bias": True, "second.bias": False}
    with pytest.raises(gw.UsageError, match=r"first.weight is in parameters\[0\] and in parameters\[1\]"):
        remote.optimizer("torch.optim:SGD", [{"names": "first"}, {"names": "second"}], lr=0.1)
    remote.requires_grad_(True)
    for buffers in ("worker", "explicit"):
        net, local = gw.torch.Module(remote, buffers=buffers), in_torch.Tied()
        assert net.state_dict().keys() == local.state_dict().keys()
        assert net.get_parameter("second.weight") is net.get_parameter("first.weight")
        for each in (net, local):
            train_once(each, x)
        torch.testing.assert_close(dict(net.named_parameters()), dict(local.named_parameters()))


@pytest.mark.parametrize("kind", [{}, {"buffers": "explicit"}, {"owner": "worker"}])
def test_a_part_under_two_names_has_its_statistics_under_both(
    worker_of: Workers, in_torch: Any, kind: dict[str, str]
) -> None:
    remote = worker_of("torch").module("in_torch:Shared")
    net, local, x = gw.torch.Module(remote.train(), **kind), in_torch.Shared(), X.float()
    agree = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    if "buffers" in kind:
        net = copy.deepcopy(net).double().float()  # which puts other tensors in the places of its buffers
    for _ in range(2):
        for each in (net, local):
            each(x)
        agree(dict(net.state_dict()), dict(local.state_dict()))
        assert list(net.state_dict()) == list(local.state_dict())
    state = {name: v + 1 for name, v in local.state_dict().items()}
    for each in (net, local):
        each.load_state_dict(state)
        each.eval()
    agree(net(x), local(x))


def put_another(net: Any) -> None:
    net.get_submodule("second").weight = nn.Parameter(torch.eye(6))


def load_by_assigning(net: Any) -> None:
    state = {name: x.clone() for name, x in net.state_dict().items()}
    net.load_state_dict(state, assign=True)


def double_the_first(net: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, x: Any) -> Any:
            return 2 * x

    nn.utils.parametrize.register_parametrization(net.get_submodule("first"), "weight", Doubled())


@pytest.mark.parametrize("undo", [put_another, load_by_assigning, double_the_first])
def test_a_tie_that_the_caller_undoes(worker_of: Workers, in_torch: Any, undo: Callable[[Any], None]) -> None:
    net, local = gw.torch.Module(worker_of("torch").module("in_torch:Tied")), in_torch.Tied()
    x = X.float()
    for each in (net, local):
        train_once(each, x)  # tied as yet
        undo(each)
        train_once(each, x)
        train_once(each, x)
    ours, theirs = dict(net.named_parameters()), dict(local.named_parameters())
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close({n: p.grad for n, p in ours.items()}, {n: p.grad for n, p in theirs.items()})
    assert all(p.grad is not None for p in ours.values())


def test_two_parameters_for_a_part_under_two_names(worker_of: Workers) -> None:
    net = gw.torch.Module(worker_of("torch").module("in_torch:Shared"))
    net.get_submodule("layers.0").weight = nn.Parameter(torch.eye(6))
    with pytest.raises(gw.UsageError, match=r"'first.weight' and 'layers.0.weight' are one parameter"):
        net(X.float())
    net.get_submodule("first").weight = net.get_submodule("layers.0").weight
    net(X.float())


def test_a_copy_of_a_module_and_its_optimizer_goes_on_as_they_do(worker_of: Workers) -> None:
    """Also where its parameters do not lie in C's order: a fused step takes moments as they lie."""
    net = gw.torch.Module(worker_of("torch").module("torch.nn:Conv2d", 3, 4, 3))
    net.to(memory_format=torch.channels_last)
    pair = net, torch.optim.Adam(net.parameters(), lr=0.1, fused=True)
    x = torch.randn(2, 3, 5, 5)

    def step(net: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        (net(x) ** 2).mean().backward()
        optimizer.step()

    step(*pair)
    copied = copy.deepcopy(pair)
    for each in (pair, copied):
        step(*each)
    torch.testing.assert_close(dict(copied[0].named_parameters()), dict(net.named_parameters()))


def train_once(net: Any, x: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(x).pow(2).mean().backward()
    optimizer.step()


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_parameters_lie_in_shared_memory_and_are_not_copied(pair: Any) -> None:
    p = pair([6, 256, 256, 4])  # of a size that no short frame carries
    with torch.no_grad():
        assert p.copied(lambda: p.net(X)) == 0
    # what is kept for a pullback is copied by the worker, not here
    assert p.copied(lambda: p.net(X).sum().backward()) == 0
    train(p.net, OPTIMIZERS["fused"](p.net.parameters()), steps=1)
    copied = copy.deepcopy(p.net)
    with torch.no_grad():
        assert p.copied(lambda: p.net(X)) == 0 and p.copied(lambda: copied(X)) == 0
        p.net.get_parameter("2.weight").data = torch.zeros(256, 256, dtype=torch.float64)
        assert p.copied(lambda: p.net(X)) == 256 * 256 * 8


def swap_data(net: Any) -> None:
    net.get_parameter("2.weight").data = torch.full((64, 64), 0.01, dtype=torch.float64)


def write_through_numpy(net: Any) -> None:
    net.get_parameter("2.weight").detach().numpy()[:] = 0.02


def write_by_data(net: Any) -> None:
    net.get_parameter("2.weight").data.copy_(torch.full((64, 64), 0.03, dtype=torch.float64))


def write_a_view(net: Any) -> None:
    with torch.no_grad():
        net.get_parameter("2.weight").view(-1)[5:9] = 0.5


def assign(net: Any) -> None:
    net.load_state_dict({n: x * 0.5 for n, x in net.state_dict().items()}, assign=True)


def replace(net: Any) -> None:
    net.get_submodule("2").weight = nn.Parameter(torch.eye(64, dtype=torch.float64))


def narrow_and_widen(net: Any) -> None:
    net.half().double()


def transpose(net: Any) -> None:
    net.get_parameter("2.weight").data = net.get_parameter("2.weight").data.T


def load(net: Any) -> None:
    net.load_state_dict({n: x * 0.5 for n, x in net.state_dict().items()})


def fused_step(net: Any) -> None:
    train(net, torch.optim.Adam(net.parameters(), lr=0.1, fused=True), steps=1)


CHANGES = [
    swap_data,
    write_through_numpy,
    write_by_data,
    write_a_view,
    assign,
    replace,
    narrow_and_widen,
    transpose,
    load,
    fused_step,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_never_missed(pair: Any, change: Callable[[Any], None]) -> None:
    p = pair()
    before = p.net(X)
    for net in (p.net, p.local):
        change(net)
    after = p.net(X)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, p.local(X), rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(net(X).sum(), list(net.parameters())) for net in (p.net, p.local)]
    torch.testing.assert_close(*gradients)


def test_another_type_is_the_modules_own_type(pair: Any) -> None:
    p = pair()
    p.net.bfloat16(), p.local.bfloat16()
    assert p.net(X.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(p.net(X.bfloat16()), p.local(X.bfloat16()))
    with pytest.raises(RuntimeError, match="dtype"):
        p.net(X)


# ---- Copies and modes ------------------------------------------------------------------------------------------------


def test_a_deep_copy_has_parameters_and_a_mode_of_its_own(pair: Any) -> None:
    p = pair(batch_norm=True)
    average = torch.optim.swa_utils.AveragedModel(p.net)
    average.eval()
    y = p.net(X)  # in training mode still
    torch.testing.assert_close(y, p.local(X))
    with torch.no_grad():
        for x in p.net.parameters():
            x.zero_()
    assert average(X).abs().sum() > 0 and p.remote.training is True  # whose mode is another matter
    train_once(p.net, X)
    average.update_parameters(p.net)
    p.net.eval()
    assert p.net(X).shape == (16, 4)


def test_modes_of_copies_are_independent_in_threads(worker_of: Workers) -> None:
    """One trains while the other evaluates: no call is refused, and only training forwards are counted."""
    remote = worker_of("torch").module("keras_torch:make_block", "float64", 0.5)
    net, x, steps, failures = gw.torch.Module(remote), X[:, :5], 40, []
    evaluated = copy.deepcopy(net).eval()

    def train_it() -> None:
        try:
            for _ in range(steps):
                net(x).pow(2).sum().backward()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=train_it)
    thread.start()
    for _ in range(steps):
        evaluated(x)
    thread.join()
    assert not failures and (net(x) != net(x)).any() and (evaluated(x) == evaluated(x)).all()
    assert net.state_dict()["1.num_batches_tracked"] == steps + 2


def test_a_pullback_after_a_change_of_mode(pair: Any) -> None:
    p = pair(batch_norm=True)
    gradients = []
    for net in (p.net, p.local):
        y = net(X)
        net.eval()
        net(X)
        gradients.append(torch.autograd.grad(y.pow(2).sum(), list(net.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_frozen_parts_stay(pair: Any) -> None:
    p = pair()
    p.remote.requires_grad_(False, "0")
    net = gw.torch.Module(p.remote)
    assert [n for n, x in net.named_parameters() if not x.requires_grad] == ["0.weight", "0.bias"]
    p.local[0].requires_grad_(False)
    for each in (net, p.local):
        train(each, OPTIMIZERS["sgd"](each.parameters()))
    p._replace(net=net).assert_same()
    net.requires_grad_(False)
    assert not net(X).requires_grad


# ---- Transformations -------------------------------------------------------------------------------------------------


def test_derivatives_of_every_kind(pair: Any) -> None:
    p = pair([3, 4, 2])
    p.net.eval()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    named = {n: v.detach().clone().requires_grad_() for n, v in p.net.named_parameters()}

    def call(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(p.net, dict(zip(named, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *named.values()))
    assert torch.autograd.gradgradcheck(call, (x, *named.values()))

    def loss(net: Any, values: Any, x: Any) -> Any:
        return torch.func.functional_call(net, values, (x,)).pow(2).sum()

    each = [
        torch.func.vmap(torch.func.grad(lambda v, x, net=net: loss(net, v, x)), (None, 0))(named, x)
        for net in (p.net, p.local)
    ]
    torch.testing.assert_close(*each)


@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_compiled_as_one_graph(pair: Any, buffers: str) -> None:
    p = pair(buffers=buffers, batch_norm=True)
    compiled = torch.compile(p.net, fullgraph=True, backend="aot_eager")
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in (p.net, p.local)]
    for model, optimizer in zip((compiled, p.local), optimizers, strict=True):
        train(model, optimizer, 3)
    p.assert_same()
    p.net.eval(), p.local.eval()
    torch.testing.assert_close(compiled(X), p.local(X))


# ---- What cannot be --------------------------------------------------------------------------------------------------


def test_what_cannot_be(pair: Any, worker_of: Workers) -> None:
    p = pair()
    for attempt in (
        lambda: pickle.dumps(p.net),
        lambda: torch.save(p.net, io.BytesIO()),
        lambda: copy.copy(p.net),
    ):
        with pytest.raises(gw.UsageError, match=r"cannot be copied or pickled. Save its values: torch.save"):
            attempt()
    for proxy in (p.remote, p.remote.optimizer("torch.optim:SGD", lr=0.1), p.remote.vjp(X)[1]):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(gw.UsageError, match="cannot be copied or pickled"):
                attempt(proxy)
    torch_w = worker_of("torch")
    with pytest.raises(gw.UsageError, match=r"is a function and has no parameters. Load a module"):
        gw.torch.Module(torch_w.function("in_torch:cube"))
    for wrong, says in {
        ("caller", "mine"): "buffers 'worker' or 'explicit'",
        ("me", "worker"): "owner is 'caller' or 'worker'",
        ("worker", "explicit"): "buffers='explicit' needs owner='caller'",
    }.items():
        with pytest.raises(gw.UsageError, match=says):
            gw.torch.Module(p.remote, owner=wrong[0], buffers=wrong[1])
    part = gw.torch.Module(p.remote, owner="worker")
    with pytest.raises(gw.UsageError, match="a copy would train the same ones"):
        copy.deepcopy(part)
    with pytest.raises(
        gw.UsageError, match=r"0.weight, .* would stay float64, for the state of this module is in the worker"
    ):
        part.float()
    with pytest.raises(gw.UsageError, match="compiled by TorchScript"):
        gw.torch.Module(torch_w.module("in_torch:scripted"))


def test_a_hook_that_would_never_be_called_is_refused(pair: Any) -> None:
    """Silence would be a feature extractor without features, or a pruned weight that no longer follows its parameter."""
    net = pair().net
    part = net.get_submodule("0")
    for attempt in (
        lambda: part.register_forward_hook(lambda *_: None),
        lambda: part.register_forward_pre_hook(lambda *_: None),
        lambda: part.register_full_backward_hook(lambda *_: None),
    ):
        with pytest.raises(gw.UsageError, match="a hook here would never be called"):
            attempt()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(gw.UsageError, match="has no parameter 'weight_orig' in the worker"):
        prune.l1_unstructured(part, "weight", 0.5)
    assert net.state_dict().keys() == before.keys()
    torch.nn.utils.parametrizations.orthogonal(part)
    net(X).sum().backward()
    torch.nn.utils.parametrize.remove_parametrizations(part, "weight")
    assert net.state_dict().keys() == before.keys()
    seen: list[Any] = []
    net.register_forward_hook(lambda module, given, result: seen.append(result))
    y = net(X)
    assert seen == [y]


@pytest.mark.parametrize("copied", [False, True])
def test_a_mode_of_a_part_alone_is_refused(pair: Any, copied: bool) -> None:
    """``net.encoder.eval()`` would go unheard: its BatchNorm would move and its dropout drop."""
    net = pair(batch_norm=True).net
    net = copy.deepcopy(net) if copied else net
    net.get_submodule("1").eval()
    with pytest.raises(gw.UsageError, match="part of this module is in evaluation mode and the whole is not"):
        net(X)
    net.eval()
    y = net(X)
    torch.testing.assert_close(net(X), y, rtol=0, atol=0)


def test_what_would_leave_the_workers_module_behind_is_refused_whole(pair: Any) -> None:
    """A new head that is never called, a parameter taken away, statistics that stay in the old dtype."""
    net = pair(batch_norm=True).net
    for each in (net, copy.deepcopy(net)):
        before, part = each.state_dict(), each.get_submodule("0")
        for attempt, message in (
            (
                lambda each=each: setattr(each, "3", nn.Linear(64, 10)),
                "would never be called. Replace the part in the factory",
            ),
            (lambda each=each: each.add_module("3", nn.Linear(64, 10)), "would never be called"),
            (lambda part=part: setattr(part, "bias", None), "'bias' of a gradwire module cannot be None"),
            (lambda part=part: part.register_parameter("bias", None), "'bias' .* cannot be None"),
            (
                lambda each=each: nn.Sequential(each).float(),
                r"1.running_mean.* would stay float64.*buffers='explicit'",
            ),
        ):
            with pytest.raises(gw.UsageError, match=message):
                attempt()
        assert all(torch.equal(x, before[name]) for name, x in each.to("cpu").double().state_dict().items())
        each.head = nn.Linear(4, 2)  # whoever makes a class of it may have parts of its own
        assert each(X).dtype == torch.float64
    narrow = pair(batch_norm=True, buffers="explicit").net.float()
    assert narrow(X.float()).dtype == torch.float32


def test_reprs(pair: Any) -> None:
    p = pair()
    assert "torch/in_torch:make_block" in repr(p.net) and "weight=(64, 64)" in repr(p.net)
    assert repr(p.remote.optimizer("torch.optim:SGD", lr=0.1)) == (
        "<gradwire.Optimizer torch.optim:SGD of torch/in_torch:make_block>"
    )
    _, pullback = p.remote.vjp(X)
    assert repr(pullback) == "<gradwire.Pullback of torch/in_torch:make_block for args[0]>"
    pullback.release()
    assert repr(pullback).endswith("args[0], released>")


# ---- Modules of other frameworks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "target", "shape"),
    [("jax", "jax_modules:make_linen", (8, 3)), ("tensorflow", "keras_models:make_dense", (8, 5, 4))],
)
@pytest.mark.parametrize("buffers", ["worker", "explicit"])
def test_a_module_of_another_framework(
    worker_of: Workers, framework: str, target: str, shape: tuple[int, ...], buffers: str
) -> None:
    """Its gradients are those that the worker accumulates for itself; it learns, and its state comes and goes."""
    remote, x = worker_of(framework).module(target), torch.randn(shape)
    net = gw.torch.Module(remote, buffers=buffers)
    names = [*remote.parameters(), *remote.buffers()]
    assert (
        list(net.state_dict()) == names and dict(net.named_parameters()).keys() == remote.parameters().keys()
    )
    net.eval(), remote.eval()
    for model in (net, remote):
        model(x).pow(2).sum().backward()
    for name, g in remote.options(family="torch").grads().items():
        torch.testing.assert_close(net.get_parameter(name).grad, g, msg=name)
    net.train()
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.05), []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(net(x).pow(2).mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    net.eval()
    other = gw.torch.Module(worker_of(framework).module(target, seed=1), buffers=buffers).eval()
    assert not torch.allclose(other(x), net(x))
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other(x), net(x))


def test_buffers_of_the_caller_that_become_wider(worker_of: Workers) -> None:
    net, x = (
        gw.torch.Module(worker_of("jax").module("jax_modules:make_widening"), buffers="explicit"),
        X[:, :3],
    )
    assert next(net.buffers()).dtype == torch.float32
    for _ in range(2):
        net(x)
    torch.testing.assert_close(next(net.buffers()), 2 * x.mean(0), rtol=1e-12, atol=1e-12)


SHARDED = """
import sys
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
import gradwire as gw, in_torch

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
x = torch.linspace(-1, 1, 48).reshape(8, 6)
with gw.connect() as bridge:
    remote = bridge.worker("torch", python=sys.argv[1], path=[sys.argv[2]], threads=1).module("in_torch:make_block", [6, 64, 64, 4])
    after = []
    for net in (gw.torch.Module(remote), in_torch.make_block([6, 64, 64, 4])):
        model = fully_shard(torch.nn.Sequential(net, torch.nn.Identity()), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            optimizer.step()
        after.append({name: p.full_tensor().detach() for name, p in model.named_parameters()})
    for name, p in after[1].items():
        torch.testing.assert_close(after[0][name], p, msg=name)
    try:
        gw.torch.Module(remote)(distribute_tensor(x, mesh, [Replicate()]))
    except gw.UnsupportedTensorError as error:
        print(error)
dist.destroy_process_group()
"""


def test_its_parameters_may_be_sharded(torch_python: str) -> None:
    """FSDP gathers them for each forward, and frees them behind it: `fully_shard`, here over one process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED, torch_python, str(TARGETS)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert "a DTensor is spread over several processes" in done.stdout, done.stderr
