"""The ring of rows that both ends record into."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire.recordings import COLUMNS, Ring


@given(st.integers(1, 9), st.integers(0, 30))
def test_the_latest_rows_oldest_first_and_how_many_were_dropped(room: int, added: int) -> None:
    ring = Ring(room, 2)
    for i in range(added):
        ring.add((i, -i))
    kept = list(range(max(0, added - room), added))
    np.testing.assert_array_equal(ring.taken(), np.array([(i, -i) for i in kept], np.int64).reshape(-1, 2))
    assert ring.dropped == added - len(kept)


def test_what_was_taken_does_not_change_any_more() -> None:
    ring = Ring(2)
    ring.add(range(len(COLUMNS)))
    taken = ring.taken()
    ring.add([7] * len(COLUMNS))
    ring.add([8] * len(COLUMNS))
    assert taken.tolist() == [list(range(len(COLUMNS)))]
