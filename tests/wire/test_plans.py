"""Plans: layouts that both ends compute alike, frames that carry any tensors, and entries that lie."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire.carriers import Aval
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import ProtocolError
from gradwire_wire.exchange import NotShared
from gradwire_wire.plans import ALIGNMENT, ENTRY, HEAD, Frame, Place, avals_of, layout_of
from tests.wire.conftest import Side, carrier_of

ROOM = 64 << 10
F32 = BY_NAME["float32"]

dtypes = st.sampled_from(list(BY_NAME.values()))
shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
avals = st.lists(st.none() | st.builds(Aval, shapes, dtypes), max_size=12)


def nbytes_of(place: Place) -> int:
    return int(np.prod(place.aval.shape, dtype="u8")) * place.aval.dtype.itemsize


@given(avals, st.integers(0, 70_000), st.integers(0, ROOM))
def test_places_do_not_overlap_and_lie_inside(avals: list[Aval | None], inlined: int, room: int) -> None:
    layout = layout_of(avals, inlined, room)
    assert layout_of(list(avals), inlined, room) == layout
    if layout is None:
        assert room < HEAD + ENTRY.size * len(avals) + ALIGNMENT
        return
    assert [p and p.aval for p in layout.places] == avals and layout.nbytes <= room
    ends = HEAD
    for place in sorted(filter(None, layout.places), key=lambda p: (p.offset, nbytes_of(p))):
        assert place.offset >= ends and (place.is_lent or place.offset % ALIGNMENT == 0)
        assert place.is_lent or nbytes_of(place) <= inlined
        ends = place.offset + (ENTRY.size if place.is_lent else nbytes_of(place))
    assert layout.nbytes == ends


def test_what_fits_is_not_lent() -> None:
    layout = layout_of([Aval((1000,), F32)] * 3, 4000, HEAD + 3 * ENTRY.size + 56 + 2 * 4032)
    assert layout is not None and [p and p.is_lent for p in layout.places] == [False, False, True]


@pytest.mark.parametrize(
    "header", [[b"", 0, 0, [1, 1], [1, 1], F32, [1, 0], 2], [b"", 0, 0, [1] * 33, None, F32, [1, 0], 2]]
)
def test_what_is_not_plain_has_no_layout(header: list[Any]) -> None:
    assert avals_of([header]) is None and layout_of(avals_of([header]), 1, ROOM) is None


@pytest.mark.parametrize(
    "header",
    [
        7,
        [],
        [b""] * 7,
        *(
            [b"", 0, 0, wrong, None, [2, 32, 1], [1, 0], 2]
            for wrong in (3, [-1], [True], ["2"], [2**60], None)
        ),
        *([b"", 0, 0, [2], None, wrong, [1, 0], 2] for wrong in (3, [2, 32], ["x", 1, 1], None)),
    ],
)
def test_r57_no_layout_of_what_is_no_header(header: Any) -> None:
    """An answer that nobody waits for any more is not borrowed, and so nobody else looks at its headers."""
    with pytest.raises(ProtocolError):
        avals_of([header])


def frames(
    pair: tuple[Side, Side], *arrays: np.ndarray | None, inlined: int = 4096
) -> tuple[Frame, Frame, bytearray]:
    """The same layout at both ends, over one memory as if it had been sent."""
    carriers = [None if a is None else carrier_of(a) for a in arrays]
    layout = layout_of([c and Aval(c.array.shape, c.dtype) for c in carriers], inlined, ROOM)
    assert layout is not None
    memory = bytearray(ROOM)
    return Frame(layout, memory, pair[0].exchange), Frame(layout, memory, pair[1].exchange), memory


def test_there_and_back_again_and_again(pair: tuple[Side, Side]) -> None:
    small, large = np.arange(6, dtype="i2").reshape(2, 3), np.arange(5000, dtype="f8")
    sender, receiver, _ = frames(pair, small, None, large, np.zeros((), "?"), np.zeros((0, 3), "f4"))
    kept = []
    for i in range(20):
        arrays = [small + i, None, large * i, np.array(i % 2 == 0), np.zeros((0, 3), "f4")]
        loans = sender.put([None if a is None else carrier_of(a) for a in arrays])
        assert len(loans) == 1
        taken = receiver.take()
        for carrier, array in zip(taken, arrays, strict=True):
            assert (carrier is None) == (array is None)
            if carrier is not None:
                np.testing.assert_array_equal(carrier.array, array)
                assert carrier.array.dtype == array.dtype and carrier.array.flags.writeable and carrier.owned
        kept.append(taken[2])
    for i, carrier in enumerate(kept):  # what was taken before stays as it was
        np.testing.assert_array_equal(carrier.array, large * i)
    del taken, carrier, kept
    gc.collect()
    assert pair[0].settle() == 0


def test_what_the_receiver_writes_changes_nothing(pair: tuple[Side, Side]) -> None:
    x = np.ones(10_000, "f4")
    sender, receiver, memory = frames(pair, x, x[:10])
    sender.put([carrier_of(x), carrier_of(x[:10])])
    before = bytes(memory)
    for carrier in receiver.take():
        carrier.array[...] = 7
    assert bytes(memory) == before and (x == 1).all()
    again = receiver.take()
    assert (again[1].array == 1).all()


@pytest.mark.parametrize(
    "change",
    [
        {"segment": 99},
        {"offset": 1 << 45},
        {"offset": 1 << 63},
        {"offset": 2},
        {"loan": 0},
        {"loan": 65024},
        {"loan": 2**32 - 1},
        {"flags": 4},
        {"offset": (1 << 20) - 4},
    ],
)
def test_R57_an_entry_that_lies_is_refused_and_the_others_are_returned(
    change: dict[str, int], pair: tuple[Side, Side]
) -> None:
    x = np.ones(5000, "f4")
    sender, receiver, memory = frames(pair, x, x, x)
    loans = sender.put([carrier_of(x)] * 3)
    names = ("segment", "offset", "loan", "flags")
    entry = dict(zip(names, ENTRY.unpack_from(memory, HEAD + ENTRY.size), strict=True))
    ENTRY.pack_into(memory, HEAD + ENTRY.size, *{**entry, **change}.values())
    with pytest.raises(ProtocolError):
        receiver.take()
    gc.collect()
    pair[0].exchange.take_back_loans(loans[1:2])
    assert pair[0].settle() == 0


@pytest.mark.parametrize("inlined", [0, 4096])
def test_many_alike_are_taken_as_each_was_put(inlined: int, pair: tuple[Side, Side]) -> None:
    """Runs of equal tensors with others before, between and behind; every one is private and can be written."""
    arrays = [
        np.zeros((), "f8"),
        *[np.full((3, 5), i, "i2") for i in range(40)],
        *[np.arange(7, dtype="f8") * i for i in range(17)],
        np.zeros(0, "f4"),
        *[np.array([i, -i], "f4") for i in range(15)],
        *[np.array(i, "u1") for i in range(20)],
        *[np.zeros((0, 2), "f4") for _ in range(20)],
        *[np.full((2, 8), i, "f4") for i in range(16)],
    ]
    sender, receiver, memory = frames(pair, *arrays, inlined=inlined or 70_000)
    for step in range(3):
        sent = [np.asarray(x + np.asarray(step, x.dtype)) for x in arrays]
        assert list(sender.put([carrier_of(x) for x in sent])) == []
        taken, before = receiver.take(), bytes(memory)
        assert receiver.dtypes == [carrier.dtype for carrier in taken]
        found = [carrier.array for carrier in taken if carrier is not None]
        memory[HEAD:] = bytes(len(memory) - HEAD)  # what the peer writes later
        for x, y in zip(sent, found, strict=True):
            assert y.dtype == x.dtype and y.shape == x.shape and y.flags.writeable and y.flags.c_contiguous
            np.testing.assert_array_equal(y, x)
        memory[:] = before
        for number, y in enumerate(found):
            y[...] = number % 100
        assert bytes(memory) == before
        for number, y in enumerate(found):
            assert (y == number % 100).all()


def test_many_of_which_some_are_left_out_or_lent(pair: tuple[Side, Side]) -> None:
    arrays = [None if i % 20 == 19 else np.full(3000 if i == 30 else 10, i, "f4") for i in range(60)]
    sender, receiver, _ = frames(pair, *arrays)
    assert len(sender.put([None if x is None else carrier_of(x) for x in arrays])) == 1
    for x, carrier in zip(arrays, receiver.take(), strict=True):
        assert (x is None) == (carrier is None)
        if x is not None and carrier is not None:
            np.testing.assert_array_equal(carrier.array, x)


def test_declined_and_never_sent(pair: tuple[Side, Side]) -> None:
    x = np.ones(5000, "f4")
    sender, receiver, _ = frames(pair, x, x)
    sender.put([carrier_of(x)] * 2)
    receiver.decline()
    assert pair[0].settle() == 0
    pair[0].exchange.take_back_loans(sender.put([carrier_of(x)] * 2))
    assert pair[0].settle() == 0


def test_where_nothing_can_be_lent_nothing_is(pair: tuple[Side, Side]) -> None:
    x = np.ones(5000, "f4")
    sender, _, _ = frames(pair, x)
    pair[0].memory.is_shared = False
    with pytest.raises(NotShared):
        sender.put([carrier_of(x)])
    assert pair[0].settle() == 0
