"""What only numpy code does."""

import os
import time

import numpy as np


def add_in_place(x):
    x += 1
    return x


def describe(x):
    """Every element as the worker reads it, and how it lies in memory."""
    return np.array([x[i] for i in np.ndindex(x.shape)]), x.strides, bool(x.flags.writeable)


def nap(seconds):
    time.sleep(seconds)
    return np.ones(3)


def count_open_files():
    return len(os.listdir("/proc/self/fd"))


def nap_in_c(seconds):
    """Sleeps on, whoever interrupts: like a loop in C."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            time.sleep(deadline - time.monotonic())
        except KeyboardInterrupt:
            pass
    return np.ones(3)


def fail_at_length(text):
    raise KeyError(text)


def objects():
    return np.array([None, 1])


def number_in_place(x):
    """Write a number of its own to each element."""
    x[...] = np.arange(x.size).reshape(x.shape)
    return x


def run_out(x):
    return next(iter(()))


def square(x):
    return x * x


square.vjp = lambda x: (x * x, lambda bar: (2 * x * bar,))
square.jvp = lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0])
square.spec = lambda x: x


def vary(n):
    """Results of a shape, a layout, a tree that depend on a value."""
    n = int(n)
    if n == -1:
        return {"nothing": None}
    if n == -2:
        return np.arange(6).reshape(2, 3).T
    if n == -3:
        return [np.zeros(2), np.arange(3)]
    return np.arange(n, dtype="f4")


def bad_at(x):
    if x == 1:
        raise ValueError("bad 1")
    return x


def nap_for(x):
    """Sleeps on, whoever interrupts, and gives its argument."""
    nap_in_c(float(x))
    return x


def lose_the_next_call():
    """What only a fault in gradwire does: the message after this one is read, and forgotten."""
    from gradwire_workers.desk import Desk

    serve = Desk._serve

    def forget(*_):
        Desk._serve = serve

    Desk._serve = forget


def double(x):
    return x * 2


double.spec = lambda x: x
double.vjp = lambda x: (double(x), lambda y_bar: (2 * y_bar,))


class Mean:
    """A model of no framework: it has methods, and learns in a way of its own."""

    def __init__(self):
        self.mean = np.zeros(())

    def __call__(self, method, *args):
        return getattr(self, method)(*args)

    def fit(self, x):
        self.mean = x.mean(0)

    def predict(self, x):
        return x - self.mean
