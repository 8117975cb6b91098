"""Tensors between processes: the same bits, nobody's data changed by another, nothing lost. Real memory throughout."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME, dtype_named
from gradwire_wire.errors import ClosedError, MemoryExhaustedError, ProtocolError, UnsupportedTensorError
from gradwire_wire.exchange import INLINE_BYTES, Ended, Exchange, Memory, dense_strides
from gradwire_wire.exchange import memory as memory_module
from gradwire_wire.messages import Hello, Segment, Welcome
from gradwire_wire.segments import Ledger
from gradwire_wire.tether import Tether, TetherClosedError

MIB = 1 << 20
PAGE = 4096
N = 100_000  # R16: small tensors hide what large ones show

Pair = Any  # of conftest.Side
Join = Callable[..., tuple[Any, Any]]
Same = Callable[[np.ndarray, np.ndarray], None]


def full(value: float, count: int = N) -> np.ndarray:
    return np.full(count, value, "f4")


def carrier_of(array: np.ndarray) -> Carrier:
    dtype = dtype_named(array.dtype.name)
    assert dtype is not None
    return Carrier(array, dtype)


# ---- There and back, bit for bit -------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.T,
    "axes swapped": lambda x: x.swapaxes(0, 1),
    "sliced": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1],
    "all backwards": lambda x: x[::-1, ::-1, ::-1],
    "order F": np.asfortranarray,
    "one row": lambda x: x[1],
    "a new axis": lambda x: x[:, None, ::3],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast along a new axis": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "channels last": lambda x: np.ascontiguousarray(x.transpose(1, 2, 0)).transpose(2, 0, 1),
    "empty": lambda x: x[:, :0],
    "no dimension": lambda x: x[1, 2, 3],
    "off by one element": lambda x: x.reshape(-1)[1:],
    "read-only": lambda x: (x.setflags(write=False), x)[1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (24, 40, 36)])
def test_R13_every_layout_arrives_element_by_element(
    layout: str, shape: tuple[int, ...], pair: Pair, same: Same
) -> None:
    base = np.random.default_rng(0).standard_normal(shape).astype("f4")
    before = base.copy()
    x = np.asarray(LAYOUTS[layout](base))
    (y,) = pair[0].send(x)
    same(y, x)
    (z,) = pair[1].send(y)  # and back again
    same(z, x)
    assert y.flags.writeable and y.flags.aligned and z.flags.writeable
    y[...] = 0
    z[...] = 0
    same(base, before)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("count", [0, 1, 7, 5003])
def test_every_dtype(name: str, count: int, pair: Pair, same: Same) -> None:
    dtype = BY_NAME[name]
    raw = np.random.default_rng(1).integers(0, 2 if name == "bool" else 256, count * dtype.itemsize, "u1")
    x = Carrier(raw.view(dtype.carrier), dtype)
    (y,) = pair[0].send_carriers(x)
    assert y.dtype == dtype and y.owned
    same(y.array, x.array)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (1, 8, 0, 128), (2**40, 0), (0, 2**40)])
def test_R14_zero_sizes(shape: tuple[int, ...], pair: Pair) -> None:
    (y,) = pair[0].send(np.empty(shape, "f8"))
    assert y.shape == shape and y.dtype == "f8" and not len(pair[0].exchange.loans)


@pytest.mark.parametrize("off", [1, 2, 4, 8, 16, 32])
def test_R12_wherever_they_come_from_tensors_arrive_aligned(off: int, pair: Pair, same: Same) -> None:
    raw = np.random.default_rng(2).integers(0, 256, 4 * N + 64, "u1")
    x = raw[off : off + 4 * N].view("f4")
    (y,) = pair[0].send(x)
    assert y.tobytes() == x.tobytes() and y.ctypes.data % 64 == 0


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    axes=st.randoms(use_true_random=False),
    steps=st.lists(st.sampled_from([1, 1, 2, -1, -2]), min_size=4, max_size=4),
    grow=st.integers(1, 40),
)
def test_random_strides(
    shape: list[int], axes: random.Random, steps: list[int], grow: int, pair: Pair, same: Same
) -> None:
    shape[0] *= grow
    order = list(range(len(shape)))
    axes.shuffle(order)
    x = np.arange(np.prod(shape), dtype="i8").reshape(shape).transpose(order)
    x = x[tuple(slice(None, None, s) for s in steps[: x.ndim])]
    (y,) = pair[0].send(x)
    same(y, x)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), max_size=5), st.randoms(use_true_random=False))
def test_a_dense_copy_keeps_the_order_of_axes(shape: list[int], chance: random.Random) -> None:
    order = list(range(len(shape)))
    chance.shuffle(order)
    x = np.zeros(shape).transpose(order)
    strides = dense_strides(x)
    if strides is None:
        strides = tuple(s // 8 for s in np.zeros(x.shape).strides)
    assert sorted(s for s, n in zip(strides, x.shape, strict=True) if n > 1) == sorted(
        s // 8 for s, n in zip(x.strides, x.shape, strict=True) if n > 1
    )
    assert all(a * 8 == b for a, b, n in zip(strides, x.strides, x.shape, strict=True) if n > 1)


def test_many_at_once_and_none_among_them(pair: Pair, same: Same) -> None:
    xs = [full(i, 10 + 3000 * (i % 3)) for i in range(60)]
    ys = pair[0].send_carriers(*(None if i % 7 == 0 else carrier_of(x) for i, x in enumerate(xs)))
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        assert (y is None) == (i % 7 == 0)
        if y is not None:
            same(y.array, x)


def test_the_same_array_twice(pair: Pair) -> None:
    x = full(1)
    for x in (full(1), fill(pair[0].memory.empty(N, "f4"), 1)):
        a, b = pair[0].send(x, x)
        a += 1
        assert (b == 1).all() and (x == 1).all() and (a == 2).all()
        del a
        b -= 1
        gc.collect()
        assert (b == 0).all() and (x == 1).all()


def fill(array: np.ndarray, value: float) -> np.ndarray:
    array[...] = value
    return array


def test_small_tensors_travel_inside_the_message(pair: Pair) -> None:
    headers = pair[0].exchange.lend([carrier_of(np.zeros(INLINE_BYTES, "u1"))], frames := [])
    assert type(headers[0][0]) is bytes and not frames and not len(pair[0].exchange.loans)
    headers = pair[0].exchange.lend([carrier_of(np.zeros(INLINE_BYTES + 1, "u1"))], frames)
    assert type(headers[0][0]) is int and not frames and len(pair[0].exchange.loans) == 1


def test_what_this_numpy_cannot_have_is_named(pair: Pair) -> None:
    raw = [b"\0\0\0\0", 0, 0, [1] * 64, None, [2, 32, 1], [1, 0], 2]
    try:
        pair[1].exchange.borrow(raw, [])
    except UnsupportedTensorError as error:  # numpy before 2.0
        assert "numpy" in str(error)


# ---- Slots and their tenants -------------------------------------------------------------------------------------------------


def test_a_slot_is_reused_when_its_last_view_is_gone(pair: Pair) -> None:
    one, _ = pair
    (y,) = one.send(full(1))
    address = y.ctypes.data
    alias = y[5:6]
    del y
    (z,) = one.send(full(2))
    assert z.ctypes.data != address and alias[0] == 1
    del alias
    gc.collect()
    (w,) = one.send(full(3))
    assert w.ctypes.data == address and (w == 3).all() and (z == 2).all()


def test_R16_the_trap_of_private_pages(pair: Pair) -> None:
    """A borrower writes, releases, the owner reuses the slot: the next tenant's data must be seen."""
    one, _ = pair
    addresses = set()
    for value in range(20):
        (y,) = one.send(full(value))
        assert (y == value).all()
        y[value * 1000 : value * 1000 + 1500] = -1  # some pages only
        addresses.add(y.ctypes.data)
    assert len(addresses) <= 2


def test_R16_a_result_stays_what_it_was_through_a_hundred_calls(pair: Pair) -> None:
    one, other = pair
    first = other.send(full(0.5))[0]
    kept = [first]
    for value in range(100):
        (y,) = one.send(full(value))
        (z,) = other.send(y * 2)
        z += 1
        kept = [*kept[-3:], z]
        assert (z == 2 * value + 1).all()
    assert (first == 0.5).all() and [k[0] for k in kept] == [193, 195, 197, 199]


def test_loans_come_back_with_views(pair: Pair) -> None:
    one, _ = pair
    views = one.send(*(full(i) for i in range(50)))
    assert one.settle() == 50
    del views[::2]
    assert one.settle() == 25
    views.clear()
    assert one.settle() == 0 and one.used_bytes() == 0


def test_a_full_ledger_sends_the_bytes(pair: Pair) -> None:
    one, _ = pair
    one.exchange.loans._free = one.exchange.loans._free[-3:]
    views = one.send(*(full(i) for i in range(6)))
    assert [v[0] for v in views] == list(range(6)) and one.settle() == 3
    views.clear()
    assert one.settle() == 0 and one.used_bytes() == 0
    (view,) = one.send(full(1))
    assert one.settle() == 1 and view[0] == 1


# ---- By reference ---------------------------------------------------------------------------------------------------------------


def test_an_array_of_the_arena_is_not_copied(pair: Pair) -> None:
    one, _ = pair
    x = fill(one.memory.empty((300, 400), "f4"), 3)
    before = one.exchange.copied_bytes
    (carrier,) = one.send_carriers(carrier_of(x))
    assert not carrier.owned and (carrier.array == 3).all() and one.exchange.copied_bytes == before
    x[0, 0] = 4  # by reference: this is seen
    assert carrier.array[0, 0] == 4
    carrier.array[1, 1] = 5  # and this is not
    assert x[1, 1] == 3


VIEWS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], bool]] = {
    "transposed": (lambda x: x.T, True),
    "rows": (lambda x: x[10:200], True),
    "columns": (lambda x: x[:, 3:390:2], True),
    "one element further": (lambda x: x.reshape(-1)[1:], True),
    "of wider elements": (lambda x: x.reshape(-1)[1:-1].view("c16"), False),
    "wider elements where they fit": (lambda x: x.reshape(-1)[2:].view("c16"), True),
    "backwards": (lambda x: x[::-1], False),
    "bytes between elements": (
        lambda x: x.view("u1").reshape(-1)[: 8 * 10_000].reshape(-1, 10)[:, 2:].copy(),
        False,
    ),
    "broadcast": (lambda x: np.broadcast_to(x[:1], (50, 400)), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_the_arena(name: str, pair: Pair, same: Same) -> None:
    one, _ = pair
    view, by_reference = VIEWS[name]
    x = one.memory.empty((300, 400), "f8")
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    v = view(x)
    (carrier,) = one.send_carriers(carrier_of(v))
    same(carrier.array, v)
    assert carrier.owned != by_reference and (one.exchange.copied_bytes == 0) == by_reference


def test_memory_lent_by_reference_is_copied_when_it_is_lent_again(pair: Pair) -> None:
    """Its private pages end with one loan, and would end the other's."""
    one, _ = pair
    x = fill(one.memory.empty(2 * N, "f4"), 1)
    (a,), (b,) = one.send(x[: N + 1]), one.send(x[N:])  # they share a page
    a[-1], b[0] = 10, 20
    del a
    gc.collect()
    assert b[0] == 20 and (b[1:] == 1).all() and (x == 1).all()
    del b
    gc.collect()
    assert one.settle() == 0
    copied = one.exchange.copied_bytes
    (c,) = one.send(x[N:])
    assert one.exchange.copied_bytes == copied and (c == 1).all()


def test_a_buffer_refilled_while_its_last_view_is_kept_and_written(pair: Pair) -> None:
    one, _ = pair
    x = fill(one.memory.empty(N, "f4"), 1)
    (kept,) = one.send(x)
    kept[...] = -5  # in place, and kept by user code
    x[...] = 2
    (new,) = one.send(x)
    assert (new == 2).all() and (kept == -5).all()


def test_the_slot_of_an_array_is_free_after_its_last_view_anywhere(pair: Pair) -> None:
    one, _ = pair
    x = one.memory.empty(N, "f4")
    (y,) = one.send(fill(x, 1)[5:])
    del x
    gc.collect()
    assert one.used_bytes() > 0 and (y == 1).all()
    one.send(full(9))
    assert (y == 1).all()
    del y
    gc.collect()
    assert one.settle() == 0 and one.used_bytes() == 0


@pytest.mark.parametrize("shape", [5, (5,), (), (0, 3), [300, 300], np.int64(7)])
def test_empty_takes_any_shape(shape: Any, pair: Pair) -> None:
    x = pair[0].memory.empty(shape, "f4")
    assert x.shape == np.empty(shape).shape and x.dtype == "f4"
    x[...] = 1


@pytest.mark.parametrize(
    ("shape", "dtype"), [((-1,), "f4"), ((-3, -3), "f4"), ((5000,), object), ((5000,), "i4,O")]
)
def test_empty_refuses_what_cannot_be(shape: Any, dtype: Any, pair: Pair) -> None:
    with pytest.raises((ValueError, UnsupportedTensorError)):
        pair[0].memory.empty(shape, dtype)
    gc.collect()
    assert pair[0].used_bytes() == 0


def test_empty_beyond_all_memory_is_an_exception(pair: Pair) -> None:
    for shape in [(2**40, 2**40), (2**62,), (2**31, 2**33)]:
        with pytest.raises(MemoryExhaustedError):
            pair[0].memory.empty(shape, "f4")


# ---- Passed on ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def chain(join: Join) -> tuple[Any, Any, Any, Any]:
    """A — B — C: B's memory is one. Returns A's side, B's to A, B's to C, C's."""
    b = Memory()
    ab, ba = join(Memory(), b)
    bc, cb = join(b, Memory())
    return ab, ba, bc, cb


def test_a_slot_of_A_is_lent_on_to_C_without_a_copy(chain: Any) -> None:
    a, _, b_to_c, _ = chain
    (y,) = a.send(full(7))
    (z,) = b_to_c.send_carriers(carrier_of(y[10:]))
    assert z.owned and (z.array == 7).all() and b_to_c.exchange.copied_bytes == 0
    del y
    gc.collect()
    assert a.settle() == 1  # C still looks at it
    a.send(full(8))
    assert (z.array == 7).all()
    z.array[...] = 9  # C's own business
    del z
    gc.collect()
    b_to_c.settle()
    assert a.settle() == 0
    (y,) = a.send(full(10))
    (z,) = b_to_c.send_carriers(carrier_of(y))
    assert (z.array == 10).all() and b_to_c.exchange.copied_bytes == 0


def test_what_was_written_here_is_copied_before_it_is_passed_on(chain: Any) -> None:
    a, _, b_to_c, _ = chain
    (y,) = a.send(full(7))
    y[N // 2] = 1
    (z,) = b_to_c.send(y)
    assert z[N // 2] == 1 and z[0] == 7 and b_to_c.exchange.copied_bytes == y.nbytes


def test_what_was_written_elsewhere_in_the_slot_is_copied_too(chain: Any) -> None:
    a, _, b_to_c, _ = chain
    (y,) = a.send(full(7))
    y[0] = 1
    (z,) = b_to_c.send(y[N // 2 :])
    assert (z == 7).all()


def test_what_came_by_reference_is_copied_before_it_is_passed_on(chain: Any) -> None:
    """Or its owner would change a result that somebody has been given as theirs."""
    a, b_to_a, b_to_c, _ = chain
    x = fill(a.memory.empty(N, "f4"), 1)
    (y,) = a.send(x)
    (at_c,), (back,) = b_to_c.send(y), b_to_a.send(y)
    x[...] = 2
    assert (at_c == 1).all() and (back == 1).all()


def test_a_result_passed_on_twice_and_written_in_between(chain: Any) -> None:
    a, _, b_to_c, _ = chain
    (y,) = a.send(full(1))
    (first,) = b_to_c.send(y)
    first[...] = -1
    (second,) = b_to_c.send(y)
    assert (second == 1).all() and (first == -1).all() and (y == 1).all()


def test_back_to_its_owner_without_a_copy(pair: Pair) -> None:
    one, other = pair
    (y,) = one.send(full(4))
    (z,) = other.send(y)
    assert (z == 4).all() and other.exchange.copied_bytes == 0
    z += 1
    assert (y == 4).all()
    del y
    gc.collect()
    assert one.settle() == 1
    del z
    gc.collect()
    other.settle()
    assert one.settle() == 0


def test_passing_back_ten_thousand_times_pins_nothing(pair: Pair) -> None:
    one, other = pair
    for value in range(2000):
        (y,) = one.send(full(value, 2000))
        (z,) = other.send(y)
        assert z[0] == z[-1] == value
    del y, z
    assert len(one.exchange.loans) <= 4 and one.memory.arena.resident_bytes <= MIB


def test_A_is_gone_and_C_still_looks(chain: Any) -> None:
    a, b_to_a, b_to_c, _ = chain
    (y,) = a.send(full(7))
    (z,) = b_to_c.send(y)
    a.tether.close()
    b_to_a.exchange.end()
    a.exchange.end()
    del y
    gc.collect()
    assert (z == 7).all()
    b_to_c.send(full(1), full(2))
    assert (z == 7).all()


# ---- Messages that are refused, declined, or never sent ---------------------------------------------------------------------------


def test_a_message_that_was_never_sent_is_taken_back(pair: Pair) -> None:
    one, _ = pair
    x = fill(one.memory.empty(N, "f4"), 1)
    headers = one.exchange.lend([carrier_of(full(1)), None, carrier_of(x), carrier_of(full(1, 3))], [])
    one.exchange.take_back(headers)
    assert one.settle() == 0
    (y,) = one.send(x)
    assert (y == 1).all() and one.exchange.copied_bytes == full(1).nbytes  # x can be lent again


def test_one_refused_tensor_returns_the_others(pair: Pair) -> None:
    one, other = pair
    for bad in range(5):
        headers = msgpack.unpackb(
            msgpack.packb(one.exchange.lend([carrier_of(full(i)) for i in range(5)], []))
        )
        headers[bad][3] = [2**40]
        with pytest.raises(ProtocolError):
            other.exchange.borrow_all(headers, [])
        gc.collect()
        assert one.settle() == 1, "only the loan of the bad header may be lost"
        with one.memory.lock:
            one.exchange.release(one.exchange.loans.end())
        one.exchange.loans.__init__(one.exchange.loans._ledger)  # type: ignore[misc]


def test_a_declined_message_returns_everything_unseen(pair: Pair) -> None:
    one, other = pair
    headers = one.exchange.lend([carrier_of(full(1)), None, carrier_of(full(2, 5)), carrier_of(full(3))], [])
    received = msgpack.unpackb(msgpack.packb(headers))
    other.exchange.decline(received)
    assert one.settle() == 0 and not other.exchange._theirs
    for nonsense in (
        [7],
        [[]],
        [[1] * 8],
        [[1, 2, -1, 4, 5, 6, 7, 8]],
        [[1, 2, 2**63, 4, 5, 6, 7, 8]],
        ["x" * 8],
    ):
        other.exchange.decline(nonsense)


def test_loans_and_segments_that_are_not_there(pair: Pair) -> None:
    one, other = pair
    good = msgpack.unpackb(msgpack.packb(one.exchange.lend([carrier_of(full(1))], [])))[0]
    for at, value in ((0, 99), (2, 0), (2, Ledger.LOANS), (2, 2**40), (1, good[1] + 64 * MIB)):
        bad = [*good]
        bad[at] = value
        with pytest.raises(ProtocolError):
            other.exchange.borrow(bad, [])
    assert (other.exchange.borrow(good, []).array == 1).all()


@pytest.mark.parametrize("frames", [[], [b"x" * 19_999], [b"x" * 20_001], [b""]])
def test_frames_that_do_not_fit(frames: list[bytes], pair: Pair) -> None:
    raw = [[0], 0, 0, [5000], None, [2, 32, 1], [1, 0], 2]
    with pytest.raises(ProtocolError):
        pair[1].exchange.borrow(raw, frames)
    assert pair[1].exchange.borrow(raw, [b"x" * 20_000]).array.shape == (5000,)


@pytest.mark.parametrize(
    "message",
    [
        Segment(1, 2),
        Hello(1, b"", bytes(16), 1),
        Welcome(1, bytes(16), 1, False, False),
        messages.Release([1]),
    ],
)
def test_R57_what_does_not_belong_on_the_tether(message: Any, pair: Pair) -> None:
    one, other = pair
    one.tether.send(message)
    with pytest.raises(ProtocolError):
        other.exchange.receive_segments()


def test_R57_a_segment_announced_twice_or_unsealed_is_refused(
    pair: Pair, footprint: Callable[[], tuple[int, int]]
) -> None:
    one, other = pair
    one.send(full(1))
    fd = os.memfd_create("gradwire-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    before = footprint()
    for number in (1, 2):
        one.tether.send(Segment(number, MIB), [fd])
        with pytest.raises(ProtocolError):
            other.exchange.receive_segments()
    assert footprint() == before
    os.close(fd)


def test_an_interrupt_during_the_copy_loses_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pair
    copyto = np.copyto
    copies = []

    def interrupted(*args: Any) -> None:
        copyto(*args)
        copies.append(1)
        if len(copies) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(np, "copyto", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.exchange.lend([carrier_of(full(i)) for i in range(5)], [])
    assert one.settle() == 0 and one.used_bytes() == 0


# ---- Too little memory --------------------------------------------------------------------------------------------------------------


def test_R50_a_limit_of_16_MiB_and_32_MiB_to_send(join: Join) -> None:
    one, _ = join(Memory(limit=16 * MIB))
    with pytest.raises(
        MemoryExhaustedError, match=rf"{32 * MIB} bytes .*needed, {16 * MIB} free \(GRADWIRE_MAX_SHARED_BYTES"
    ):
        one.send(np.zeros(32 * MIB, "u1"))
    (y,) = one.send(np.ones(MIB, "u1"))
    assert (y == 1).all() and one.settle() == 1
    kept = [y]
    with pytest.raises(MemoryExhaustedError):
        while True:
            kept += one.send(np.ones(MIB, "u1"))
    assert len(kept) >= 14
    kept.clear()
    del y
    gc.collect()
    (y,) = one.send(np.ones(14 * MIB, "u1"))  # what lay idle in small slots is given back for it
    assert y.all()


def test_R50_one_too_large_among_several_lends_nothing(join: Join) -> None:
    one, _ = join(Memory(limit=16 * MIB))
    with pytest.raises(MemoryExhaustedError):
        one.exchange.lend([carrier_of(np.ones(MIB, "u1")), carrier_of(np.ones(64 * MIB, "u1"))], [])
    assert one.settle() == 0 and one.used_bytes() == 0


def test_garbage_here_is_collected_before_memory_is_short(join: Join) -> None:
    one, _ = join(Memory(limit=4 * MIB))
    gc.disable()
    try:
        cycle: list = [one.memory.empty(3 * MIB, "u1")]
        cycle.append(cycle)
        del cycle
        assert one.send(np.ones(2 * MIB, "u1"))[0].all()
    finally:
        gc.enable()


def test_a_collection_is_asked_for_and_waited_for(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "COLLECT_S", 20.0)  # the machine may be busy
    one, other = join(Memory(limit=4 * MIB))
    gc.disable()
    try:
        (y,) = one.send(np.ones(3 * MIB, "u1"))
        cycle: list = [y]
        cycle.append(cycle)
        late = threading.Timer(0.05, other.exchange.receive_segments)
        late.start()
        collect = memory_module.gc.collect
        del y, cycle
        memory_module.gc.collect = lambda: threading.current_thread() is late and collect()  # type: ignore[assignment]
        (z,) = one.send(np.ones(2 * MIB, "u1"))
        assert z.all()
        late.join()
    finally:
        memory_module.gc.collect = collect  # type: ignore[assignment]
        gc.enable()


def test_the_limit_is_not_waited_for_when_nobody_has_anything(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = join(Memory(limit=MIB))
    monkeypatch.setattr(memory_module.gc, "collect", int)
    monkeypatch.setattr(memory_module, "COLLECT_S", 600.0)
    with pytest.raises(MemoryExhaustedError):
        one.send(np.ones(2 * MIB, "u1"))


# ---- Where memory cannot be shared ------------------------------------------------------------------------------------------------------


def test_R63_without_memfd_tensors_travel_in_frames(without_memfd: list[str], join: Join, same: Same) -> None:
    one, other = join()
    for x in (
        full(1),
        full(2, 3),
        np.asfortranarray(np.random.default_rng(0).standard_normal((200, 300))),
        full(0, 0),
    ):
        (y,) = one.send(x)
        (z,) = other.send(y)
        same(z, x)
        assert y.flags.writeable
        y[...] = 0
    assert not one.settle() and one.memory.arena.segments == []
    assert one.memory.empty((3, N), "f4").shape == (3, N)
    assert not one.memory.is_shared


def test_to_a_peer_that_cannot_say_what_it_returned_nothing_is_lent(join: Join, same: Same) -> None:
    one, _ = join()
    exchange = Exchange(one.memory, one.tether, Ledger.received([]), Ledger())
    frames: list[Any] = []
    headers = exchange.lend([carrier_of(full(5)), carrier_of(fill(one.memory.empty(N, "f4"), 6))], frames)
    assert [h[0] for h in headers] == [(0,), (1,)] and not len(exchange.loans)
    same(np.frombuffer(frames[1], "f4"), full(6))
    exchange.end()


def test_R63_memory_that_cannot_be_had_later_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("gradwire_wire.segments.files._create_memfd", refused)
    one, _ = pair
    (y,) = one.send(full(3))
    assert (y == 3).all() and not one.memory.is_shared and one.settle() == 0


def test_frames_have_a_bound(without_memfd: list[str], join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = join()
    monkeypatch.setattr(messages, "MAX_FRAME", 100_000)
    with pytest.raises(MemoryExhaustedError, match="smaller pieces"):
        one.send(full(1))


def test_a_full_tether_costs_a_copy_and_no_wait(pair: Pair) -> None:
    one, other = pair
    while one.tether.send_nowait(messages.Collect()):
        pass
    frames: list[Any] = []
    headers = one.exchange.lend([carrier_of(full(1))], frames)
    assert len(frames) == 1 and one.settle() == 0
    assert (other.exchange.borrow_all(msgpack.unpackb(msgpack.packb(headers)), frames)[0].array == 1).all()
    other.exchange.receive_segments()
    (y,) = one.send(full(2))
    assert (y == 2).all() and one.settle() == 1


# ---- Ends -----------------------------------------------------------------------------------------------------------------------------------


def test_a_dead_peer_is_lent_to_without_an_error(pair: Pair) -> None:
    """The send of the message will say that it is dead; lending is not the place."""
    one, other = pair
    other.tether.close()
    headers = one.exchange.lend([carrier_of(full(1))], frames := [])
    assert len(frames) == 1 and headers[0][0] == (0,)


def test_what_was_announced_before_the_end_is_still_seen(pair: Pair) -> None:
    one, other = pair
    headers = msgpack.unpackb(msgpack.packb(one.exchange.lend([carrier_of(full(6))], [])))
    one.tether.close()
    assert (other.exchange.borrow_all(headers, [])[0].array == 6).all()
    with pytest.raises(TetherClosedError):
        other.exchange.receive_segments()


def test_views_stay_valid_after_the_end(pair: Pair) -> None:
    one, other = pair
    y, z = one.send(full(1), fill(one.memory.empty(N, "f4"), 2))
    for side in pair:
        side.exchange.end()
        side.tether.close()
    one.memory.close()
    gc.collect()
    y += 1
    assert (y == 2).all() and (z == 2).all()
    with pytest.raises((ClosedError, ProtocolError)):
        other.exchange.borrow([1, 0, 1, [N], None, [2, 32, 1], [1, 0], 2], [])


def test_R16_results_are_read_after_the_connection_was_closed(pair: Pair) -> None:
    """The worker must not take back what a client that left still looks at."""
    client, worker = pair
    worker.memory.arena._idle_cap = 0  # or it would only happen with much memory
    (y,) = worker.send(full(3))
    client.exchange.leave()
    client.tether, kept = socket.socket(), client.tether  # as the connection, which forgets it
    del kept
    gc.collect()

    def worker_reads_its_tether() -> bool:
        try:
            worker.exchange.receive_segments()
        except TetherClosedError:
            worker.exchange.end()
            return True
        return False

    assert not worker_reads_its_tether()
    worker.exchange.lend([carrier_of(full(4))], [])
    assert (y == 3).all()
    del y
    gc.collect()
    assert worker_reads_its_tether()  # the last view was the last reason to stay
    assert client.exchange.lend([carrier_of(full(5))], frames := []) and len(frames) == 1


@pytest.mark.parametrize("end", [Exchange.leave, Exchange.end])
def test_a_reply_that_is_read_after_the_end_says_so(end: Callable[[Exchange], None], pair: Pair) -> None:
    client, worker = pair
    end(client.exchange)
    with pytest.raises(Ended):
        worker.send(full(7))


def test_what_a_peer_borrowed_stays_lent_until_it_is_gone(pair: Pair) -> None:
    client, _ = pair
    (y,) = client.send(full(3))
    client.exchange.leave()
    client.memory.take(4 * N)  # not y's slot
    assert (y == 3).all() and client.used_bytes() > 4 * N
    client.exchange.end()
    assert client.settle() == 0


def test_a_result_that_lies_in_our_own_memory_outlives_the_peer_that_returned_it(pair: Pair) -> None:
    """What came back without a copy is our own slot, seen through the peer: its death must not give it away."""
    client, worker = pair
    (there,) = client.send(full(3))
    (back,) = worker.send(there)
    del there
    client.exchange.end()  # the worker was killed
    for value in range(20):
        slot = client.memory.take(4 * N)
        slot.segment.array((N,), "f4", slot.offset)[...] = value
    assert (back == 3).all()


def test_what_C_returned_to_B_outlives_C_though_it_lies_in_A(chain: Any) -> None:
    a, _, b_to_c, c_to_b = chain
    (y,) = a.send(full(7))
    (z,) = b_to_c.send(y)
    (back,) = c_to_b.send(z)
    del y, z
    b_to_c.exchange.end()  # C was killed
    for value in range(20):
        a.send(full(value))
    assert (back == 7).all()
    a.peer.exchange.end()  # nor is it kept beyond A
    assert b_to_c.memory._orphans == []


def test_memory_that_a_dead_peer_has_not_returned_is_let_go(pair: Pair) -> None:
    client, _ = pair
    for i in range(50):
        (y,) = client.send(full(i))
    (y,) = client.send(full(3))
    used = client.used_bytes()
    assert used > 4 * N
    client.exchange.end()
    assert client.used_bytes() == 0 and (y == 3).all()


def test_closed_memory_is_not_lent(pair: Pair) -> None:
    one, _ = pair
    x = fill(one.memory.empty(N, "f4"), 1)
    one.memory.close()
    for array in (x, full(1)):
        (y,) = one.send(array)
        assert (y == 1).all() and one.settle() == 0
    assert one.memory.empty(3, "f4").shape == (3,)


def test_all_memory_goes_with_the_last_reference(
    footprint: Callable[[], tuple[int, int]], join: Join
) -> None:
    before = footprint()
    one, other = join()
    arrays = one.send(full(1), np.ones(20 * MIB, "u1"))
    arrays += other.send(arrays[0])
    arrays.append(one.memory.empty(N, "f4"))
    weak = [weakref.ref(s) for side in (one, other) for s in side.memory.arena.segments]
    assert weak
    one.close()
    other.close()
    arrays.clear()
    assert footprint() == before and not any(w() for w in weak)


# ---- Growth, threads, chance ----------------------------------------------------------------------------------------------------------------------


def test_ten_thousand_exchanges_grow_nothing(pair: Pair, footprint: Callable[[], tuple[int, int]]) -> None:
    one, other = pair
    x, small, buffer = full(1, 3000), full(2, 10), one.memory.empty(5000, "f4")

    def exchange(times: int) -> None:
        for _ in range(times):
            y, z, w = one.send(x, small, buffer)
            y += 1
            other.send(y, z, w)

    exchange(200)
    before = footprint(), one.memory.arena.resident_bytes, other.memory.arena.resident_bytes
    exchange(3200)  # 9,600 tensors there, 9,600 back
    assert (footprint(), one.memory.arena.resident_bytes, other.memory.arena.resident_bytes) == before


def test_R54_threads_at_once(pair: Pair) -> None:
    one, other = pair
    failures: list[Any] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        kept: list[tuple[float, np.ndarray]] = []
        try:
            for i in range(150):
                value = seed * 1000.0 + i
                (y,) = one.send(full(value, chance.choice([10, 3000, 40_000])))
                y[0] += 0.5
                (z,) = other.send(y)
                kept.append((value, z))
                kept = kept[-chance.randint(1, 6) :]
                for expected, array in kept:
                    assert array[0] == expected + 0.5 and (array[1:] == expected).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    other.settle()
    assert one.settle() == 0


class ExchangeMachine(RuleBasedStateMachine):
    """Three processes, A — B — C, do at random what user code may do; each array is what its owner thinks it is."""

    def __init__(self) -> None:
        super().__init__()
        self.memories = {name: Memory() for name in "abc"}
        for memory in self.memories.values():
            memory.arena._idle_cap = 0  # pages are given back as soon as they are free
        self.sides = {}
        for one, other in ("ab", "bc"):
            ends = [Tether(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
            ledgers = [Ledger(), Ledger()]
            received = [Ledger.received([os.dup(ledger.fd)]) for ledger in ledgers]
            self.sides[one + other] = Exchange(self.memories[one], ends[0], received[1], ledgers[0])
            self.sides[other + one] = Exchange(self.memories[other], ends[1], received[0], ledgers[1])
        self.arrays: list[tuple[str, np.ndarray, np.ndarray]] = []  # owner, array, what is in it
        self.counter = 0

    def teardown(self) -> None:
        self.arrays.clear()
        gc.collect(0)
        for side in self.sides.values():
            side.end()
        for memory in self.memories.values():
            memory.close()

    def values(self, count: int) -> np.ndarray:
        self.counter += 1
        return np.arange(count, dtype="i4") * 7 + self.counter

    @rule(
        owner=st.sampled_from("abc"),
        pages=st.integers(2, 9),
        more=st.integers(0, 1023),
        in_arena=st.booleans(),
    )
    def make(self, owner: str, pages: int, more: int, in_arena: bool) -> None:
        content = self.values(pages * 1024 + more)
        array = self.memories[owner].empty(content.shape, "i4") if in_arena else np.empty(content.shape, "i4")
        array[...] = content
        self.arrays.append((owner, array, content))

    @precondition(lambda self: self.arrays)
    @rule(which=st.integers(0, 10**6), to_c=st.booleans(), cut=st.integers(0, 1500), keep=st.booleans())
    def send(self, which: int, to_c: bool, cut: int, keep: bool) -> None:
        owner, array, content = self.arrays[which % len(self.arrays)]
        to = {"a": "b", "c": "b"}.get(owner, "c" if to_c else "a")
        frames: list[Any] = []
        headers = self.sides[owner + to].lend([carrier_of(array[cut:])], frames)
        received = msgpack.unpackb(msgpack.packb(headers))
        (carrier,) = self.sides[to + owner].borrow_all(received, frames)
        assert carrier is not None
        got = carrier.array if carrier.owned else carrier.array.copy()  # by reference: as for a kept forward
        assert np.array_equal(carrier.array, content[cut:])
        if keep:
            self.arrays.append((to, got, content[cut:].copy()))

    @precondition(lambda self: self.arrays)
    @rule(which=st.integers(0, 10**6), at=st.floats(0, 1, exclude_max=True))
    def write(self, which: int, at: float) -> None:
        _, array, content = self.arrays[which % len(self.arrays)]
        if len(array):
            start = int(at * len(array))
            array[start : start + 700] = content[start : start + 700] = self.values(700)[: len(array) - start]

    @precondition(lambda self: self.arrays)
    @rule(which=st.integers(0, 10**6), at=st.integers(0, 3000))
    def slice_away(self, which: int, at: int) -> None:
        owner, array, content = self.arrays.pop(which % len(self.arrays))
        self.arrays.append((owner, array[at:], content[at:].copy()))

    @precondition(lambda self: len(self.arrays) > 4)
    @rule(which=st.integers(0, 10**6))
    def drop(self, which: int) -> None:
        self.arrays.pop(which % len(self.arrays))

    @invariant()
    def everything_is_what_its_owner_thinks(self) -> None:
        for owner, array, content in self.arrays:
            assert np.array_equal(array, content), f"an array of {owner} was changed by another"


ExchangeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestExchange = ExchangeMachine.TestCase


# ---- Two real processes --------------------------------------------------------------------------------------------------------------------------------


class Process:
    """The peer of peer.py."""

    def __init__(self) -> None:
        tether, its_tether = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.talk, its_talk = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [its_tether.fileno(), its_talk.fileno()]
        command = [sys.executable, "-W", "error", str(Path(__file__).with_name("peer.py")), *map(str, fds)]
        self.process = subprocess.Popen(command, pass_fds=fds)
        its_tether.close()
        its_talk.close()
        self.memory, self.tether = Memory(), Tether(tether)
        ours = Ledger()
        self.tether.send(Hello(1, b"", bytes(16), os.getpid()), ours.descriptors)
        ours.close()
        answer, descriptors = self.tether.receive(30) or (None, [])
        assert type(answer) is Welcome and self.tether.peer_pid in (os.getpid(), self.process.pid)
        self.exchange = Exchange(self.memory, self.tether, Ledger.received(descriptors), ours)

    def ask(self, verb: str, *arrays: np.ndarray, argument: Any = None) -> tuple[Any, list[np.ndarray]]:
        frames: list[Any] = []
        headers = self.exchange.lend([carrier_of(a) for a in arrays], frames)
        self.talk.send(msgpack.packb([verb, argument, headers, frames]))
        error, value, headers, frames = msgpack.unpackb(self.talk.recv(1 << 20))
        if error is not None:
            raise RuntimeError(error)
        return value, [c.array for c in self.exchange.borrow_all(headers, frames) if c is not None]

    def close(self) -> None:
        self.talk.close()
        assert self.process.wait(60) == 0
        self.tether.close()
        self.exchange.end()
        self.memory.close()


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


def test_two_processes_bit_for_bit(process: Process, same: Same) -> None:
    chance = np.random.default_rng(0)
    for shape in [(1000, 1000), (7,), (33, 4, 55), (0, 3)]:
        x = chance.standard_normal(shape).astype("f4").view("u4").view("f4").T
        for verb in ("echo", "copy"):
            same(process.ask(verb, x)[1][0], x)


def test_two_processes_never_see_each_others_writes(process: Process) -> None:
    x, buffer = full(1), fill(process.memory.empty(N, "f4"), 2)
    for _ in range(10):
        _, (a, b) = process.ask("scribble", x, buffer, argument=9.0)
        assert (a == 9).all() and (b == 9).all() and (x == 1).all() and (buffer == 2).all()
        a[...] = b[...] = -1
    process.ask("keep", x, buffer)
    process.ask("scribble", argument=4.0)
    assert (x == 1).all() and (buffer == 2).all()
    buffer[...] = 3
    assert process.ask("sums_kept")[0] == [4.0 * N, 4.0 * N]


def test_R16_the_trap_between_two_processes(process: Process) -> None:
    for value in range(30):
        assert process.ask("sums", full(value))[0] == [value * N]
        process.ask("scribble", full(value + 0.5), argument=1e6)


def test_R16_kept_arguments_and_results_through_a_hundred_calls(process: Process) -> None:
    assert process.ask("keep", full(3))[0] == 1
    _, (first,) = process.ask("make", argument=[N, 5.0])
    for value in range(100):
        _, (y,) = process.ask("copy", full(value))
        assert (y == value).all()
    assert (first == 5).all() and process.ask("sums_kept")[0] == [3.0 * N]
    del y
    gc.collect()
    assert process.ask("loans")[0] == 1


def test_garbage_in_the_other_process_is_collected_when_memory_is_short(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.memory.limit = 40 * MIB
    for _ in range(4):
        process.ask("cycle", np.ones(9 * MIB, "u1"))
    assert len(process.exchange.loans) == 4
    with monkeypatch.context() as patched:
        patched.setattr(memory_module, "COLLECT_S", 60.0)  # the machine may be busy
        assert process.ask("sums", np.ones(30 * MIB, "u1"))[0] == [30.0 * MIB]
    process.ask("keep", np.ones(30 * MIB, "u1"))
    with pytest.raises(MemoryExhaustedError):
        process.ask("sums", np.ones(30 * MIB, "u1"))
    process.ask("drop")
    assert process.ask("sums", np.ones(30 * MIB, "u1"))[0] == [30.0 * MIB]


def test_R50_too_few_addresses_in_the_other_process(process: Process) -> None:
    process.ask("sums", full(1))
    process.ask("limit", argument=24 * MIB)
    with pytest.raises(RuntimeError, match=rf"MemoryExhaustedError: {64 * MIB} bytes .*needed .*, \d+ free"):
        process.ask("sums", np.ones(64 * MIB, "u1"))
    with pytest.raises(RuntimeError, match=r"MemoryExhaustedError|MemoryError"):
        process.ask("make", argument=[16 * MIB, 1.0])
    gc.collect()
    with process.memory.lock:
        process.exchange.settle()
    assert len(process.exchange.loans) == 0, "what could not be looked at was returned"
    assert process.ask("sums", np.ones(MIB, "u1"))[0] == [1.0 * MIB]
    _, (y,) = process.ask("copy", full(2, MIB // 4))
    assert (y == 2).all()
    process.ask("unlimit")
    assert process.ask("sums", np.ones(64 * MIB, "u1"))[0] == [64.0 * MIB]


R50 = """
import resource, sys, numpy as np
from gradwire_wire.exchange import Memory
from gradwire_wire.errors import MemoryExhaustedError
memory = Memory()
warm = memory.empty(100, "f4"); del warm
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (16 << 20), mapped + (16 << 20)))
try:
    memory.empty(32 << 20, "u1")
except MemoryExhaustedError as error:
    assert str(32 << 20) in str(error) and "free (RLIMIT_AS" in str(error), error
else:
    sys.exit("no exception")
kept = memory.empty(1 << 20, "u1"); kept[:] = 1; assert kept.all()
"""


def test_R50_too_few_addresses_here() -> None:
    done = subprocess.run(
        [sys.executable, "-c", R50], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_peer_that_is_killed_leaves_its_results(process: Process) -> None:
    _, (y,) = process.ask("make", argument=[N, 5.0])
    process.ask("keep", full(1))
    process.process.kill()
    process.process.wait()
    with pytest.raises(TetherClosedError):
        process.exchange.receive_segments()
    process.exchange.end()
    assert (y == 5).all() and len(process.exchange.loans) == 0
    y += 1
    assert (y == 6).all()
    process.close = lambda: (process.talk.close(), process.tether.close(), process.memory.close())  # type: ignore[method-assign]


FORK = """
import gc, os, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import conftest
from gradwire_wire.exchange import Memory
one, other = conftest.connect(Memory(), Memory())
N = 100_000
a, b = one.send(np.full(N, 1, "f4"), np.full(N, 2, "f4"))
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    os.write(ready[1], b"x")
    os.read(go[0], 1)
    ok = (a == 1).all() and (b == 2).all()
    a += 5; del b; gc.collect()
    os._exit(0 if ok and (a == 6).all() else 3)
os.read(ready[0], 1)
del a, b; gc.collect()
for i in range(20):                        # the parent goes on, in the very slots the child looks at
    c, d = one.send(np.full(N, 10 + i, "f4"), np.full(N, -i, "f4"))
    assert (c == 10 + i).all() and (d == -i).all()
os.write(go[1], b"x")
assert os.waitpid(pid, 0)[1] == 0
del c, d; gc.collect()
assert one.settle() == 0
"""


def test_R02_an_exchange_goes_on_in_the_parent_while_a_forked_child_looks_at_old_results() -> None:
    command = [sys.executable, "-c", FORK, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_an_exec_d_child_inherits_no_descriptor(pair: Pair) -> None:
    one, _ = pair
    (view,) = one.send(full(1))
    assert "memfd:gradwire" in os.readlink(f"/proc/self/fd/{one.memory.arena.segments[0].fd}")
    listing = ["ls", "-l", "/proc/self/fd"]
    done = subprocess.run(listing, close_fds=False, capture_output=True, text=True, timeout=60, check=True)
    assert "memfd:gradwire" not in done.stdout and (view == 1).all()


def test_an_interrupt_right_after_a_segment_was_announced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    send = Tether.send_nowait

    def interrupted(*args: Any) -> bool:
        send(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tether, "send_nowait", interrupted)
        one.exchange.lend([carrier_of(full(1))], [])
    assert one.settle() == 0 and one.used_bytes() == 0
    (y,) = one.send(full(2))
    other.exchange.receive_segments()
    assert (y == 2).all() and one.settle() == 1


@pytest.mark.parametrize("nbytes", [1 << 20, 16 << 20])
@pytest.mark.parametrize("places", [[0], [-1], [1234567 % (1 << 20)], []])
def test_what_was_written_to_much_memory_is_never_seen_again(
    nbytes: int, places: list[int], pair: Pair
) -> None:
    """Large loans are only looked at page by page where there was a page fault; each write makes one."""
    one, other = pair
    for round in range(6):
        x = np.full(nbytes, round, np.uint8)
        (y,) = one.send(x)
        assert (y == round).all()
        for place in places:
            y[place] = 255
        if round % 2:
            (back,) = other.send(y)  # passed on by reference only if it is as it was
            assert (back == y).all()
            del back
        del y
        gc.collect()
