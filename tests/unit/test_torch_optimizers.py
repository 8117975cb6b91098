"""The torch worker's optimizers and frozen parts, asked as the desk asks: the oracle is torch itself."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwire_wire.errors import UsageError
from gradwire_wire.structures import fill, flatten, positional
from gradwire_wire.tensors import torch as tensors
from gradwire_workers import torch as engine
from gradwire_workers.program import WorkerSite
from gradwire_workers.state import State
from gradwire_workers.torch.optimizers import _bare_step as bare_step

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
STEP = "torch.optim.lr_scheduler:StepLR"


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Pair:
    """A module under management, and the same one beside it."""

    def __init__(self, net: nn.Module | None = None) -> None:
        self.net = net or mlp()
        self.local = copy.deepcopy(self.net)
        self.program = engine.program(self.net, is_module=True)
        self.state = State(engine, lambda program: 0)

    def act(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self.state.act(self.program, verb, list(args), kwargs)

    def accumulate(self, scale: float = 1.0) -> None:
        """A gradient for both."""
        result, residual = self.program.keep(WorkerSite(positional(1), accumulate=True), (), [X])
        residual.derive(
            ("T", (0,), 1), [scale * torch.ones_like(result.tensors[0])], keep=False, accumulate=True
        )
        self.local(X).backward(scale * torch.ones(5, 3))

    def assert_same(self) -> None:
        for a, b in zip(self.net.parameters(), self.local.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def carried(tree: Any) -> Any:
    """A tree of tensors as it arrives in a worker."""
    structure, leaves = flatten(tree, tensors.is_tensor)
    return fill(structure, [tensors.export(x) for x in leaves])


def test_clipping_groups_and_schedules_are_torchs_own() -> None:
    pair = Pair()
    groups = [{"names": ["0"], "lr": 0.1}, {"names": ["2.bias", "2.weight"], "weight_decay": 0.5}]
    number = pair.act("optimizer", "torch.optim:SGD", {"lr": 0.01, "momentum": 0.9}, groups=groups)
    a, b = pair.local[0], pair.local[2]
    optimizer = torch.optim.SGD(
        [{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "weight_decay": 0.5}],
        lr=0.01,
        momentum=0.9,
    )
    pair.act("schedule", number, STEP, {"step_size": 2, "gamma": 0.5})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for i in range(5):
        optimizer.zero_grad()
        pair.accumulate(10.0)
        norm = torch.nn.utils.clip_grad_norm_(pair.local.parameters(), 0.5)
        assert pair.act("step", number, 0.5, True) == norm.item() > 0.5
        optimizer.step()
        schedule.step()
        assert pair.program.generation == i + 1
    pair.assert_same()


def test_new_options_hold_from_the_next_step_on() -> None:
    pair = Pair()
    number = pair.act("optimizer", "torch.optim:Adam", {"lr": 0.01})
    optimizer = torch.optim.Adam(pair.local.parameters(), lr=0.01)
    computed = [np.float32(0.25), carried(torch.tensor(0.3, dtype=torch.float64))]  # as schedules give them
    for given, lr in zip((0.01, 0.2, *computed), (0.01, 0.2, 0.25, 0.3), strict=True):
        pair.act("set", number, {"lr": given})
        optimizer.param_groups[0]["lr"] = lr
        pair.accumulate()
        assert pair.act("step", number) is None
        optimizer.step()
    pair.assert_same()


def warm_up_then_milestones(optimizer: Any) -> Any:
    """A schedule of schedules, one of which counts its milestones in a Counter."""
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.1), schedules.MultiStepLR(optimizer, [1, 1, 2])]
    return schedules.SequentialLR(optimizer, parts, milestones=[1])


SCHEDULES: list[Any] = [
    (STEP, {"step_size": 1, "gamma": 0.5}, torch.optim.lr_scheduler.StepLR),
    (f"{__name__}:warm_up_then_milestones", {}, warm_up_then_milestones),
]


@pytest.mark.parametrize(("target", "kwargs", "make"), SCHEDULES)
def test_an_optimizer_goes_on_from_its_state(target: str, kwargs: Any, make: Any) -> None:
    pair = Pair()
    first = pair.act("optimizer", "torch.optim:Adam", {"lr": 0.01})
    pair.act("schedule", first, target, kwargs)
    optimizer = torch.optim.Adam(pair.local.parameters(), lr=0.01)
    schedule = make(optimizer, **kwargs)

    def step(number: int) -> None:
        pair.accumulate()
        pair.act("step", number)
        optimizer.step()
        schedule.step()

    step(first)
    saved = carried(pair.act("optimizer_state", first))
    second = pair.act("optimizer", "torch.optim:Adam", {"lr": 7.0})
    pair.act("schedule", second, target, kwargs)
    pair.act("load_optimizer_state", second, saved)
    for x in flatten(saved, lambda x: hasattr(x, "array"))[1]:
        x.array.fill(0)  # whoever lent it writes it again
    for _ in range(2):
        step(second)
        pair.assert_same()
    third = pair.act("optimizer", "torch.optim:Adam", {"lr": 7.0})
    pair.act("schedule", third, target, kwargs)
    pair.act("load_optimizer_state", third, carried(as_from_a_file(pair.act("optimizer_state", second))))
    for _ in range(3):
        step(third)
        pair.assert_same()


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_moments_from_a_file_lie_as_their_parameters_do(options: dict[str, Any]) -> None:
    """Files of numpy's lay them in C's order, and a fused step takes memory as it lies."""
    net = mlp()
    net[0].weight = nn.Parameter(net[0].weight.detach().t().contiguous().t())
    pair = Pair(net)
    numbers = [pair.act("optimizer", "torch.optim:Adam", {"lr": 0.1, **options}) for _ in range(2)]
    optimizer = torch.optim.Adam(pair.local.parameters(), lr=0.1, **options)
    pair.accumulate()
    for number in numbers[:1] * 2:
        pair.act("step", number)
        optimizer.step()
    structure, leaves = flatten(pair.act("optimizer_state", numbers[0]), tensors.is_tensor)
    in_order = [x.clone(memory_format=torch.contiguous_format) for x in leaves]
    pair.act("load_optimizer_state", numbers[1], carried(fill(structure, in_order)))
    pair.act("step", numbers[1])
    optimizer.step()
    pair.assert_same()


def as_from_a_file(tree: Any) -> Any:
    """What formats that know texts as keys, lists and arrays alone make of a tree; torch itself would lose all moments then."""
    if isinstance(tree, dict):
        return {str(name): as_from_a_file(x) for name, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        return list(map(as_from_a_file, tree))
    return torch.tensor(tree, dtype=torch.float64) if type(tree) in (int, float) else tree


def test_a_frozen_part_gets_no_gradient_and_does_not_move() -> None:
    pair = Pair()
    number = pair.act("optimizer", "torch.optim:SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    pair.accumulate()
    pair.act("step", number)
    before = {name: x.clone() for name, x in pair.act("parameters").items()}
    pair.act("requires_grad", False, ["0"])
    assert pair.act("frozen") == ["0.weight", "0.bias"]
    assert pair.act("grads")["0.weight"] is None and pair.act("grads")["2.weight"] is not None
    pair.accumulate()
    pair.act("step", number)
    after = pair.act("parameters")
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"2.weight", "2.bias"}
    pair.act("requires_grad", True)
    pair.accumulate()
    assert pair.act("frozen") == [] and pair.act("grads")["0.weight"].abs().sum() > 0


OPTIMIZER = "torch.optim:SGD"


@pytest.mark.parametrize(
    ("target", "kwargs", "groups", "message"),
    [
        (OPTIMIZER, {"lr": -1}, None, "Invalid learning rate"),
        (OPTIMIZER, {"lr": 1, "speed": 2}, None, "unexpected keyword argument 'speed'"),
        (
            OPTIMIZER,
            {"lr": 1},
            [{"names": ["0"], "speed": 2}],
            r"no option speed \(in parameters\[0\]\); there are lr",
        ),
        (
            OPTIMIZER,
            {"lr": 1},
            [{"names": ["0"]}, {"names": ["0.bias"]}],
            "0.bias is in parameters.0. and in parameters.1.",
        ),
        (OPTIMIZER, {"lr": 1}, [{"names": ["nowhere"]}], "'nowhere' names no parameter"),
        (OPTIMIZER, {"lr": 1}, [{"lr": 1}], "must be a dict with the names"),
        (OPTIMIZER, {"lr": 1}, [], "no parameter in it"),
        (OPTIMIZER, {"lr": 1}, [{"names": ["0"], "params": 1}], "would be the tensors themselves"),
        ("torch.optim:adam", {}, None, "did you mean 'Adam'"),
        ("torch.optim.Adam", {}, None, "did you mean 'torch.optim:Adam'"),
        ("torch.nn:ParameterList", {}, None, "does not make a torch optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be(target: str, kwargs: Any, groups: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Pair().act("optimizer", target, kwargs, groups=groups)


def forgotten(optimizer: torch.optim.Optimizer) -> None:
    """It writes into the optimizer's groups (initial_lr) and is not returned."""
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("verb", "args", "message"),
    [
        ("step", (), "no gradient was accumulated"),
        ("set", ({"speed": 3},), r"no option speed \(in set\(\)\); there are lr, momentum"),
        ("set", ({"lr": -3},), "Invalid learning rate"),
        ("set", ({"lr": "high"},), "lr='high'"),
        ("schedule", (STEP, {}), "step_size"),
        ("schedule", ("torch.optim.lr_scheduler:ReduceLROnPlateau", {}), "follows a metric"),
        ("schedule", ("collections:OrderedDict", {}), "OrderedDict"),
        ("schedule", (f"{__name__}:forgotten", {}), "makes no schedule"),
        ("load_optimizer_state", ({"a": 1},), "is what its state_dict"),
        ("load_optimizer_state", ({"state": {}, "param_groups": [], "schedules": []},), "nothing was loaded"),
        (
            "load_optimizer_state",
            ({"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}]},),
            "0 schedules and .* 1",
        ),
        (
            "load_optimizer_state",
            ({"state": {"7": {}}, "param_groups": [{"params": [0, 1, 2, 3]}]},),
            "moments of parameter 7",
        ),
        ("load_optimizer_state", ({"state": {}, "param_groups": [{}]},), "what its state_dict"),
        (
            "load_optimizer_state",
            ({"state": {}, "param_groups": [{"params": ["weight"]}]},),
            "nothing was loaded, for this is no optimizer's state",
        ),
        (
            "load_optimizer_state",
            ({**torch.optim.Adam(mlp().parameters()).state_dict(), "schedules": []},),
            "of another optimizer or module. It has no option dampening, momentum",
        ),
    ],
)
def test_what_is_refused_changes_nothing(verb: str, args: Any, message: str) -> None:
    pair = Pair()
    number = pair.act("optimizer", OPTIMIZER, {"lr": 0.1, "momentum": 0.9})
    if "schedules and" in message:
        pair.act("schedule", number, STEP, {"step_size": 1})
    before = repr(pair.act("optimizer_state", number))
    with pytest.raises(UsageError, match=message):
        pair.act(verb, number, *args)
    assert repr(pair.act("optimizer_state", number)) == before
    pair.assert_same()
    assert pair.program.generation == 0


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, True, "much", float("nan")])
def test_a_norm_that_is_none(clip_norm: Any) -> None:
    pair = Pair()
    number = pair.act("optimizer", OPTIMIZER, {"lr": 0.1})
    pair.accumulate()
    with pytest.raises(UsageError, match="must be a positive number"):
        pair.act("step", number, clip_norm)
    pair.assert_same()


def test_sparse_gradients_are_not_clipped_and_lazy_parameters_have_no_values() -> None:
    net = nn.Embedding(5, 3, sparse=True)
    program, state = engine.program(net, is_module=True), State(engine, lambda program: 0)
    number = state.act(program, "optimizer", [OPTIMIZER, {"lr": 0.1}], {})
    net(torch.tensor([1, 1])).sum().backward()
    before = net.weight.detach().clone()
    with pytest.raises(UsageError, match=r"is sparse .*torch clips no such ones"):
        state.act(program, "step", [number, 1.0], {})
    assert torch.equal(net.weight, before)
    lazy = engine.program(nn.LazyLinear(2), is_module=True)
    for verb in ("parameters", "state_dict"):
        with pytest.raises(UsageError, match="weight has no shape yet: call the module once"):
            state.act(lazy, verb, [], {})


def test_moments_of_another_shape_are_refused() -> None:
    pair = Pair()
    number = pair.act("optimizer", "torch.optim:Adam", {"lr": 0.1})
    pair.accumulate()
    pair.act("step", number)
    state = carried(pair.act("optimizer_state", number))
    first = state["state"][0]["exp_avg"]
    state["state"][0]["exp_avg"] = first._replace(array=np.zeros((2, 2), np.float32))
    with pytest.raises(
        UsageError, match=r"exp_avg of parameter 0 has shape \(2, 2\), the parameter \(8, 4\)"
    ):
        pair.act("load_optimizer_state", number, state)


def test_a_schedule_that_ends_says_so() -> None:
    pair = Pair()
    number = pair.act("optimizer", OPTIMIZER, {"lr": 0.1, "momentum": 0.9})
    pair.act("schedule", number, "torch.optim.lr_scheduler:OneCycleLR", {"max_lr": 1.0, "total_steps": 2})
    pair.accumulate()
    pair.act("step", number)
    pair.act("step", number)
    with pytest.raises(UsageError, match="the parameters were moved, and there the schedule ended"):
        pair.act("step", number)


def test_an_optimizer_of_another_life_or_module_is_refused() -> None:
    one, two = Pair(), Pair()
    number = one.act("optimizer", OPTIMIZER, {"lr": 0.1})
    two.act("optimizer", OPTIMIZER, {"lr": 0.1})
    for pair, other in ((two, number), (one, number + 1)):
        with pytest.raises(UsageError, match="former life"):
            pair.act("zero_grad", other)
    with pytest.raises(UsageError, match="former life"):
        one.state.act(two.program, "zero_grad", [number], {})


# ---- What is left out where nobody would see it ----------------------------------------------------------------------


class _Careful(torch.optim.SGD):
    """Has a `zero_grad` of its own, and a step."""

    zeroed = stepped = 0

    def step(self, closure: Any = None) -> Any:
        self.stepped += 1
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


def _stepped(pair: Pair, number: int, zero_grad: bool = False) -> None:
    pair.accumulate()
    pair.act("step", number, None, zero_grad)


@pytest.mark.parametrize("kind", ["pre", "post", "both", "global"])
def test_hooks_of_an_optimizer_are_called_whenever_they_came(kind: str) -> None:
    from torch.optim import optimizer as everywhere

    pair, seen = Pair(), []
    number = pair.act("optimizer", "torch.optim:SGD", {"lr": 0.1})
    own = pair.state._optimizers[number].optimizer._optimizer
    _stepped(pair, number)

    def hook(*args: Any) -> None:
        seen.append(args[0])

    places = {
        "pre": [own.register_step_pre_hook],
        "post": [own.register_step_post_hook],
        "both": [own.register_step_pre_hook, own.register_step_post_hook],
        "global": [everywhere.register_optimizer_step_pre_hook, everywhere.register_optimizer_step_post_hook],
    }[kind]
    handles = [register(hook) for register in places]
    try:
        _stepped(pair, number)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [own] * len(places)
    _stepped(pair, number)
    assert len(seen) == len(places)


def test_what_an_optimizer_does_itself_is_done() -> None:
    pair = Pair()
    number = pair.act("optimizer", f"{__name__}:_Careful", {"lr": 0.1})
    own = pair.state._optimizers[number].optimizer._optimizer
    _stepped(pair, number, zero_grad=True)
    assert (own.stepped, own.zeroed) == (1, 1)
    assert all(p.grad is None for p in pair.net.parameters())
    calls: list[str] = []
    own.zero_grad = lambda set_to_none=True: calls.append("zero_grad")
    own.step = lambda closure=None: calls.append("step")
    _stepped(pair, number, zero_grad=True)
    assert calls == ["step", "zero_grad"] and (own.stepped, own.zeroed) == (1, 1)


def test_a_profiler_sees_steps() -> None:
    pair = Pair()
    number = pair.act("optimizer", "torch.optim:SGD", {"lr": 0.1})
    _stepped(pair, number)
    with torch.autograd.profiler.profile() as profile:
        _stepped(pair, number, zero_grad=True)
    names = {event.name for event in profile.function_events}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names


def test_the_bare_step_is_that_of_torchs_optimizers_alone() -> None:
    parameters = list(mlp().parameters())
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.Adagrad,
    ):  # (Dynamo wraps a few of the others)
        optimizer = kind(parameters)
        assert bare_step(optimizer) != optimizer.step
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # which notes each step
    assert bare_step(optimizer) == optimizer.step
    unhooked = type("Unhooked", (), {"step": lambda self: None})()
    assert bare_step(unhooked) == unhooked.step
