"""The lender's book: what is lent comes back once, whatever the borrower does with the ledger."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gradwire_wire.leases import Loans
from gradwire_wire.segments import Ledger


class SmallLedger:
    """A ledger of few entries, so that it gets full."""

    LOANS = 12

    def __init__(self) -> None:
        self.marks = bytearray(self.LOANS + 8)

    def mark(self, loan: int) -> None:
        self.marks[loan] = 1

    def clear(self, loan: int) -> None:
        self.marks[loan] = 0

    def first_marked(self, start: int, stop: int) -> int:
        return self.marks.find(b"\1", start, stop)


class LoansMachine(RuleBasedStateMachine):
    """Lender and borrower at random; a faulty borrower marks what it does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SmallLedger()
        self.loans = Loans(self.ledger)
        self.lent: dict[int, object] = {}  # and not yet marked
        self.marked: list[object] = []  # and not yet settled

    @rule()
    def lend(self) -> None:
        thing = object()
        loan = self.loans.lend(thing)
        if loan:
            assert 0 < loan < SmallLedger.LOANS and loan not in self.lent
            assert self.ledger.marks[loan] == 0
            self.lent[loan] = thing
        else:
            assert len(self.lent) + len(self.marked) == SmallLedger.LOANS - 1

    @rule(which=st.integers(0, 100), by_lender=st.booleans())
    def end_one(self, which: int, by_lender: bool) -> None:
        if self.lent:
            loan = sorted(self.lent)[which % len(self.lent)]
            self.marked.append(self.lent.pop(loan))
            (self.loans.mark_returned if by_lender else self.ledger.mark)(loan)

    @rule(entry=st.integers(1, SmallLedger.LOANS - 1))
    def faulty_mark(self, entry: int) -> None:
        if entry not in self.loans._lent:
            self.ledger.mark(entry)

    @rule()
    def settle(self) -> None:
        returned = self.loans.settle()
        assert sorted(map(id, returned)) == sorted(map(id, self.marked))
        self.marked.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert len(self.loans) == len(self.lent) + len(self.marked)
        assert len(self.loans) + len(self.loans._free) == SmallLedger.LOANS - 1


LoansMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoans = LoansMachine.TestCase


def test_end_returns_everything_and_lends_nothing_more() -> None:
    loans = Loans(SmallLedger())
    things = [object(), object()]
    for thing in things:
        loans.lend(thing)
    assert loans.end() == things and len(loans) == 0
    assert loans.lend(object()) == 0


def test_a_full_book_says_zero() -> None:
    loans = Loans(Ledger())
    numbers = [loans.lend(i) for i in range(Ledger.LOANS + 5)]
    assert sorted(numbers)[:6] == [0] * 6 and max(numbers) == Ledger.LOANS - 1


def test_loans_and_cancelled_calls_do_not_touch() -> None:
    ledger = Ledger()
    loans = Loans(ledger)
    for call_id in range(1, 200):
        ledger.cancel(call_id)
    loans.lend("thing")
    assert loans.settle() == []
    for loan in range(1, Ledger.LOANS):
        ledger.mark(loan)
    assert all(ledger.is_cancelled(call_id) for call_id in range(200 - Ledger.CANCELLED, 200))
    assert loans.settle() == ["thing"]
