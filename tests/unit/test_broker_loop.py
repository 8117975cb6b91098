"""The broker's loop: what is readable is told to who listened when it was."""

from __future__ import annotations

import os

from gradwire_broker.loop import Loop


def test_a_number_that_is_used_again_in_the_same_turn_is_not_taken_for_readable() -> None:
    """As when the end of a worker closes its descriptors, all of them readable, and the one that follows it gets their numbers."""
    loop, called = Loop(), []
    (first, first_end), (second, second_end), (later, later_end) = os.pipe(), os.pipe(), os.pipe()

    def first_is_readable() -> None:
        called.append("first")
        for key in (first, second):
            loop.unlisten(key)
            os.close(key)
        os.dup2(later, second)
        loop.listen(second, lambda: called.append("later"))

    loop.listen(first, first_is_readable)
    loop.listen(second, lambda: called.append("second"))
    try:
        for end in (first_end, second_end):
            os.write(end, b"x")
        loop.turn(1000)
        assert called == ["first"]
        os.write(later_end, b"x")
        loop.turn(1000)
        assert called == ["first", "later"]
    finally:
        loop.unlisten(second)
        for end in (second, later, first_end, second_end, later_end):
            os.close(end)
