"""Memory for large copies: nobody else's while a view of it lives, and used again after that."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from gradwire_workers.scratch import LARGE, Scratch

COUNT = LARGE // 8


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("nbytes", [LARGE, 5 * LARGE + 64, 40 * LARGE])
def test_memory_is_used_again_when_its_last_view_is_gone(nbytes: int) -> None:
    scratch, array = Scratch(), np.arange(nbytes // 8, dtype=np.float64).reshape(2, -1)
    copies = [scratch.copy(array) for _ in range(3)]
    assert len({address(copy) for copy in copies}) == 3
    for i, copy in enumerate(copies):
        copy += i
    for i, copy in enumerate(copies):
        np.testing.assert_array_equal(copy, array + i)
    column, where = copies[0][:, 1], {address(copy) for copy in copies}
    del copies, copy
    gc.collect()
    again = [scratch.copy(array + 7) for _ in range(3)]
    assert len({address(copy) for copy in again} & where) == 2
    np.testing.assert_array_equal(column, array[:, 1])
    for copy in again:
        np.testing.assert_array_equal(copy, array + 7)


def test_what_is_small_or_has_strides_keeps_its_axes() -> None:
    scratch = Scratch()
    for array in (np.arange(6.0).reshape(2, 3), np.ones((COUNT, 2)).T, np.ones(2 * COUNT)[::2]):
        copy = scratch.copy(array)
        np.testing.assert_array_equal(copy, array)
        assert copy.flags.owndata or copy.base.flags.owndata
        if array.strides[-1] != 16:
            assert copy.strides == array.strides


def test_what_lies_idle_is_bounded() -> None:
    scratch = Scratch()
    scratch._arena._idle_cap = 8 * LARGE
    array = np.ones(3 * COUNT)
    copies = [scratch.copy(array) for _ in range(10)]
    assert scratch._arena.resident_bytes >= 30 * LARGE
    del copies
    gc.collect()
    again = [scratch.copy(array), scratch.copy(array)]
    assert scratch._arena.idle_bytes <= 8 * LARGE
    for copy in again:
        np.testing.assert_array_equal(copy, array)


def test_more_than_there_is_says_so() -> None:
    from gradwire_wire.errors import MemoryExhaustedError

    with pytest.raises(MemoryExhaustedError, match="needed for a copy"):
        Scratch().copy(np.broadcast_to(np.zeros((1, 1)), (1, 1)).repeat(1).view(Huge))


class Huge(np.ndarray):
    """As far as its size goes."""

    @property
    def nbytes(self) -> int:
        return 1 << 62
