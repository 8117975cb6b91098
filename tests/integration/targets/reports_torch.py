"""The functions of R31 to R42, in torch."""

import collections
import dataclasses

import torch
from torch import nn

Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Box:
    inside: object
    label: str


def gather(w, index, mask):
    return (w[index] * mask).sum()


def top_two(x):
    values, indices = torch.topk(x, 2)
    return values, indices


def squared_norm(z):
    return (z * z.conj()).real


def square(z):
    return z * z


def turn(x):
    return torch.complex(torch.cos(x), torch.sin(x))


def first_only(a, b):
    return 2 * a


def apart(a, b):
    return 2 * a, 3 * b


def beside_a_cusp(x):
    return x**2, torch.sqrt(0 * x)


def detached(a, b):
    return 2 * a, (a * b).detach()


def by_numpy(x):
    return torch.from_numpy(x.detach().numpy() ** 2)


def some_leaves(state):
    return (state["a"] ** 2).sum() * state["b"][1]


def cube(x):
    return x**3


def perceptron(x, w, v):
    return torch.tanh(torch.tanh(x @ w) @ v)


def positive(x):
    return x[x > 0]


def tree(x, *, scale=2.0, mode="a", mask=None):
    y = x * scale if mask is None else x * scale * mask
    return {"y": y, "aux": (x * x, None, mode, 3)}


def containers(pair, box, ordered, numbered):
    total = pair.a * 2 + pair.b * box.inside + numbered[3]
    return Pair(total, Box(pair.a * 1, box.label)), collections.OrderedDict(
        (k, v) for k, v in ordered.items()
    )


OwnPair = collections.namedtuple("OwnPair", "twice nothing")


@dataclasses.dataclass
class OwnBox:
    twice: object
    nothing: object = None


@dataclasses.dataclass
class OwnOutput(collections.OrderedDict):
    """As the results of transformers are: what is not None is an item as well."""

    twice: object
    nothing: object = None

    def __post_init__(self):
        for name in ("twice", "nothing"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


def pair_of_its_own(x):
    return OwnPair(x * 2, x.sum())


def box_of_its_own(x):
    return OwnBox(x * 2)


def output_of_its_own(x):
    return OwnOutput(x * 2)


def largest(x):
    return torch.max(x * 2, 0)


def sparse_among(x):
    return {"y": x * 2, "matrix": x.outer(x).to_sparse()}


class Counter(nn.Module):
    """Says how many calls there were before this one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float32))

    def forward(self, x):
        before = self.calls.clone()
        self.calls += 1
        return x + before


class Log(nn.Module):
    """Remembers the first element of each argument, in order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().reshape(-1)[:1]])
        return x * 1


def make_noisy():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5))


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, c):
        return c.clamp(-1, 1)


def clipped(x):
    return _Clipped.apply(x)
