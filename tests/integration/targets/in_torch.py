"""What only torch code does."""

import itertools

import torch
from torch import nn


def add_in_place(x):
    x.add_(1)
    x.data.mul_(2)
    return x


def cube(x):
    return (x**3).sum()


def make_block(sizes, seed=0, batch_norm=False, dtype="float32"):
    torch.manual_seed(seed)
    layers = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), *([nn.BatchNorm1d(m)] if batch_norm else []), nn.Tanh()]
    return nn.Sequential(*layers).to(getattr(torch, dtype))


class Tied(nn.Module):
    """A weight under two names, a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("offset", torch.ones(6), persistent=False)

    def forward(self, x):
        return self.second(self.first(x * self.scale + self.offset).tanh())


class Shared(nn.Module):
    """A part under two names, with parameters and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.layers = nn.Sequential(self.first, nn.Tanh(), self.norm)

    def forward(self, x):
        return self.layers(self.norm(x))


class Attending(nn.Linear):
    """Takes what models of transformers take: tensors and settings, by place, by name and in a tree."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(4, 4)

    def forward(self, x, times=1.0, *, mask=None, options=None, as_tuple=True):
        y = super().forward(x) * times
        if mask is not None:
            y = y * mask
        if options is not None:
            y = y + options["shift"] * options["scale"]
        return (y,) if as_tuple else y


class Versioned(nn.Linear):
    """A state that is not all tensors."""

    def __init__(self):
        super().__init__(3, 2)
        self.version = 3

    def get_extra_state(self):
        return {"version": self.version}

    def set_extra_state(self, state):
        self.version = state["version"]


class Autocast(nn.Module):
    """Computes in bfloat16 by autocast of its own."""

    def __init__(self):
        super().__init__()
        self.block = make_block([6, 64, 4])

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.block(x)


class Nested(nn.Module):
    """An extra state of a part, beside parameters and a buffer; one that cannot be sent if it is of an object."""

    def __init__(self, odd=False):
        super().__init__()
        self.inner, self.norm = Versioned(), nn.BatchNorm1d(2)
        if odd:
            self.inner.version = object()

    def forward(self, x):
        return self.norm(self.inner(x)) * float(getattr(self.inner.version, "real", 1))


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(6, 4)))


def make_float64(seed=0):
    """A module that takes float32 and computes in float64."""
    torch.manual_seed(seed)
    linear = nn.Linear(3, 2).double()
    return Widened(linear)


class Widened(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.double())


def to_dtype(x, name):
    return x.to(getattr(torch, name))


def convolve(x):
    return nn.functional.conv2d(x, torch.ones(4, 3, 2, 2))


def number_in_place(x):
    """Write a number of its own to each element."""
    for i, index in enumerate(itertools.product(*map(range, x.shape))) if x.numel() < 100 else ():
        x[index] = i
    if x.numel() >= 100:
        x.copy_(torch.arange(x.numel()).reshape(x.shape))
    return x


def not_plain(kind):
    return {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.zeros(3, device="meta"),
        "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }[kind]()


class Counter(nn.Module):
    """Multiplies by how often it has been called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls.clone()


class Claiming(nn.Linear):
    """Its forward has keywords that are names of ours."""

    def __init__(self, target):
        super().__init__(4, 4, dtype=torch.float64)
        nn.init.constant_(self.weight, target)
        nn.init.zeros_(self.bias)

    def forward(self, x, *, params, parameters, buffers, call, function, module):
        return super().forward(x) * params * parameters * buffers * call * function * module


class Heads(nn.Module):
    """Two results, each with parameters of its own behind some that both have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.actor, self.critic = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.actor(h), self.critic(h)


def make_dropout():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))
