"""Headers by hypothesis, borrowed between guard pages:  python borrowing.py EXAMPLES SEED

Every header is refused with one of gradwire's errors, or its tensor can be read from the first byte to the last.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

import guards

from gradwire_wire import messages
from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import GradwireError
from gradwire_wire.exchange import Exchange, Memory
from gradwire_wire.segments import Ledger, OwnSegment
from gradwire_wire.tether import Tether

guards.install()

NBYTES = 5 * 4096


def borrower() -> tuple[Exchange, list[Any]]:
    """A side that knows segment 1 of NBYTES, and what must be kept alive for it."""
    ends = [Tether(s) for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    exchange = Exchange(Memory(), ends[0], Ledger(), Ledger())
    segment = OwnSegment(1, NBYTES)
    ends[1].send(messages.Segment(1, NBYTES), [segment.fd])
    return exchange, [ends, segment]


EXCHANGE, KEPT = borrower()

NUMBERS = st.one_of(
    st.integers(0, 70),
    st.sampled_from(
        [
            NBYTES,
            NBYTES // 2,
            NBYTES // 8,
            NBYTES - 1,
            4096,
            65023,
            65024,
            2**31,
            2**32,
            2**46,
            2**63,
            2**64 - 1,
        ]
    ),
    st.integers(-2, 2**64 - 1),
)
SHAPES = st.lists(NUMBERS, max_size=5) | st.lists(st.integers(0, 60), max_size=4)
DTYPES = st.sampled_from([[d.code, d.bits, d.lanes] for d in BY_NAME.values()]) | st.lists(
    NUMBERS, min_size=3, max_size=3
)
HEADERS = st.tuples(
    st.just(1) | NUMBERS | st.binary(max_size=64) | st.lists(NUMBERS, max_size=1),
    NUMBERS,
    st.integers(1, 65023) | NUMBERS,
    SHAPES,
    st.none() | SHAPES,
    DTYPES,
    st.just([1, 0]) | st.lists(NUMBERS, max_size=3),
    st.integers(0, 3) | NUMBERS,
).map(list)


# Right ones, that lie within the segment or just past its end, and each of these with one field of the above.
RIGHT = st.tuples(
    st.just(1),
    st.integers(0, 10).map(lambda n: n * 2048),
    st.integers(1, 65023),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.none(),
    st.sampled_from([[d.code, d.bits, d.lanes] for d in BY_NAME.values()]),
    st.just([1, 0]),
    st.integers(0, 3),
).map(list)


@st.composite
def nearly_right(draw: Any) -> list[Any]:
    header, other, at = draw(RIGHT), draw(HEADERS), draw(st.integers(0, 15))
    return [*header[:at], *other[at : at + 1], *header[at + 1 :]]  # past the last field: as it is


@given(HEADERS | nearly_right(), st.lists(st.binary(max_size=5000), max_size=2))
def every_header_is_refused_or_readable(header: list[Any], frames: list[bytes]) -> None:
    try:
        carrier: Carrier = EXCHANGE.borrow(header, frames)
    except GradwireError:
        return
    counted["accepted"] += 1
    carrier.array.tobytes()
    if carrier.array.size:
        np.copyto(carrier.array, carrier.array[(0,) * carrier.array.ndim])  # writing reaches as far


counted = {"accepted": 0}

if __name__ == "__main__":
    examples = int(sys.argv[1])
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    chosen = settings(
        max_examples=examples, deadline=None, database=None, derandomize=False, suppress_health_check=checks
    )
    with np.errstate(all="ignore"):
        seed(int(sys.argv[2]))(chosen(every_header_is_refused_or_readable))()
    print(counted["accepted"])
