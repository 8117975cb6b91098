"""Kept forwards: bounded by bytes, those already pulled go first, and nobody ends another's."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gradwire_workers import program, residuals
from gradwire_workers.calls import Calls
from gradwire_workers.residuals import OVERHEAD, TOKENS, Kept, Residuals

A, B = b"a" * 16, b"b" * 16


class Residual(program.Residual):
    """So many bytes, and nothing else."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def derive(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def kept(nbytes: int = 100, owner: bytes = A, remote: int = 1) -> Kept:
    return Kept(Residual(nbytes), remote, owner, 0)


def store(fits: int, nbytes: int = 1000) -> Residuals:
    """A store for so many residuals of so many bytes."""
    return Residuals(fits * (nbytes + OVERHEAD), 0)


def test_what_is_kept_is_found_until_it_is_released() -> None:
    s = store(10)
    token = s.add(kept())
    assert s.find(token, 1) is not None and s.find(token, 1) is s.find(token, 1)
    assert s.find(token, 2) is None, "another remote's"
    assert s.find(token + 1, 1) is None and s.find(0, 1) is None
    s.release([token], A)
    assert s.find(token, 1) is None and len(s) == 0 and s.nbytes == 0


def test_a_token_may_be_pulled_twice() -> None:
    s = store(10)
    token = s.add(kept(1000))
    for _ in range(3):
        s.note_pulled(token)
        assert s.find(token, 1) is not None
    assert s.nbytes == 1000 + OVERHEAD


def test_nobody_releases_what_is_anothers() -> None:
    s = store(10)
    a, b = s.add(kept(owner=A)), s.add(kept(owner=B))
    s.note_pulled(b)
    s.release([a, b, b, 12345], A)
    assert s.find(a, 1) is None and s.find(b, 1) is not None
    s.end(A)
    assert len(s) == 1
    s.end(B)
    assert len(s) == 0 and s.nbytes == 0


def test_those_already_pulled_go_first_then_the_least_recently_used() -> None:
    s = store(4, 1000)
    tokens = [s.add(kept(1000)) for _ in range(4)]
    s.note_pulled(tokens[2])
    s.find(tokens[0], 1)
    s.add(kept(1000))  # the pulled one goes
    assert list(s._fresh.kept)[:3] == [tokens[1], tokens[3], tokens[0]] and not s._pulled.kept
    s.find(tokens[1], 1)
    s.add(kept(1000))
    assert [s.find(t, 1) is not None for t in tokens] == [True, True, False, False]


def test_those_already_pulled_may_have_an_eighth() -> None:
    s = store(40, 1000)
    tokens = [s.add(kept(1000)) for _ in range(30)]
    for token in tokens:
        s.note_pulled(token)
    assert len(s) == 5 and [s.find(t, 1) is not None for t in tokens] == [False] * 25 + [True] * 5


def test_one_that_is_larger_than_the_limit_is_kept_alone() -> None:
    s = store(4, 1000)
    old = s.add(kept(1000))
    token = s.add(kept(10**9))
    assert s.find(token, 1) is not None and s.find(old, 1) is None
    s.note_pulled(token)
    assert s.find(token, 1) is not None, "second order, and compiled programs, pull it again"
    s.add(kept(1000))
    assert s.find(token, 1) is None


def test_a_scan_of_a_thousand_steps_is_kept() -> None:
    s = Residuals(512 << 20, 0)
    tokens = [s.add(kept(80_000)) for _ in range(1000)]
    assert all(s.find(t, 1) is not None for t in tokens)


@pytest.mark.parametrize("nbytes", [0, 100, 80_000])
def test_R42_ten_thousand_forwards_without_a_pullback_are_bounded(nbytes: int) -> None:
    s = Residuals(32 << 20, 0)
    for _ in range(10_000):
        s.add(kept(nbytes))
    assert s.nbytes <= 32 << 20 and len(s) <= (32 << 20) // (nbytes + OVERHEAD)


def test_a_graph_that_changes_its_size_does_not_upset_the_books() -> None:
    s = store(10)
    token, other = s.add(kept(1000)), s.add(kept(500))
    found = s.find(token, 1)
    assert found is not None
    found.residual.nbytes = 10**9
    s.note_pulled(token)
    s.release([token], A)
    assert s.nbytes == 500 + OVERHEAD
    s.release([other], A)
    assert s.nbytes == 0


def test_tokens_go_around_and_are_never_zero_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals, "TOKENS", 5)
    s = Residuals(1 << 30, 4)
    first = [s.add(kept()) for _ in range(3)]
    assert first == [5, 1, 2]
    s.release([1], A)
    assert [s.add(kept()) for _ in range(3)] == [3, 4, 1]
    assert len(s) == 5


def test_tokens_of_a_former_life_mean_nothing() -> None:
    assert Residuals(1 << 30, 1000).add(kept()) != Residuals(1 << 30, 2000).add(kept())
    for first in (0, TOKENS, 2**32 - 1, 2**32 - 2):
        assert 0 < Residuals(1 << 30, first).add(kept()) <= TOKENS


class ResidualsMachine(RuleBasedStateMachine):
    """Keeps, finds, pulls and releases at random."""

    LIMIT = 20 * OVERHEAD

    def __init__(self) -> None:
        super().__init__()
        self.store = Residuals(self.LIMIT, 7)
        self.tokens: dict[int, tuple[bytes, int]] = {}
        self.latest: int | None = None

    def some(self, which: int) -> int:
        return sorted(self.tokens)[which % len(self.tokens)] if self.tokens else 0

    @rule(nbytes=st.integers(0, 6 * OVERHEAD), owner=st.sampled_from([A, B]))
    def keep(self, nbytes: int, owner: bytes) -> None:
        self.latest = self.store.add(kept(nbytes, owner))
        assert self.latest not in self.tokens
        self.tokens[self.latest] = (owner, nbytes + OVERHEAD)
        assert self.store.find(self.latest, 1) is not None

    @rule(which=st.integers(0, 10**6))
    def pull(self, which: int) -> None:
        token = self.some(which)
        if self.store.find(token, 1) is not None:
            self.store.note_pulled(token)
            assert self.store.find(token, 1) is not None, "never lost by being used"

    @rule(which=st.lists(st.integers(0, 10**6), max_size=4), owner=st.sampled_from([A, B]))
    def release(self, which: list[int], owner: bytes) -> None:
        for token in {self.some(w) for w in which}:
            is_there = self.store.find(token, 1) is not None
            self.store.release([token], owner)
            is_mine = token in self.tokens and self.tokens[token][0] == owner
            assert (self.store.find(token, 1) is not None) == (is_there and not is_mine)

    @rule(owner=st.sampled_from([A, B]))
    def end(self, owner: bytes) -> None:
        self.store.end(owner)
        assert not any(self.store.find(t, 1) for t, (o, _) in self.tokens.items() if o == owner)

    @invariant()
    def the_books_are_right(self) -> None:
        there = [t for t in self.tokens if self.store.find(t, 1) is not None]
        assert len(self.store) == len(there)
        assert self.store.nbytes == sum(self.tokens[t][1] for t in there)
        assert self.store.nbytes <= self.LIMIT or len(there) == 1


ResidualsMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestResiduals = ResidualsMachine.TestCase


def test_what_cannot_be_kept_behind_an_answer_is_no_second_answer(capsys: pytest.CaptureFixture[str]) -> None:
    class Unmeasured(Residual):
        def settle(self) -> int:
            raise ValueError("no size")

    s, nothing = Residuals(1 << 30, 4), Mock()
    calls = Calls(
        "w",
        b"",
        loaded=nothing,
        operands=nothing,
        users_code=nothing,
        answers=nothing,
        residuals=s,
        held=nothing,
    )
    token = s.issue()
    calls._keep_behind_answer(token, Kept(Unmeasured(1), 1, A, 0))
    assert s.find(token, 1) is None and s.was_issued(token) and s.add(kept()) != token
    assert "no size" in capsys.readouterr().err


def test_the_store_lets_go() -> None:
    class Mark(Residual):
        alive = 0

        def __init__(self) -> None:
            type(self).alive += 1
            super().__init__(1000)

        def __del__(self) -> None:
            type(self).alive -= 1

    def mark() -> Kept:
        return Kept(Mark(), 1, A, 0)

    s = store(5, 1000)
    tokens = [s.add(mark()) for _ in range(8)]
    assert Mark.alive == 5
    s.release(tokens, A)
    assert Mark.alive == 0


def test_tokens_of_a_former_incarnation_are_told() -> None:
    for first in (0, 7, TOKENS - 1):
        s = Residuals(10_000, first)
        tokens = [s.add(kept()) for _ in range(3)]
        s.release(tokens, A)
        assert all(s.was_issued(t) for t in tokens)
        assert not s.was_issued(tokens[-1] % TOKENS + 1) and not s.was_issued((first + TOKENS // 2) % TOKENS)
    assert not Residuals(10_000, 7).was_issued(8)
