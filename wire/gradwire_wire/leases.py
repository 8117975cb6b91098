"""The lender's book of what one peer has borrowed. Pure but for the ledger it is given.

A loan is an entry of the peer's ledger. The peer marks it when its last view is gone; `settle` finds
the marks and hands back what was lent. An entry is used again only after its mark was seen.
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Loans"]


class _Marks(Protocol):
    LOANS: int

    def clear(self, loan: int) -> None: ...
    def mark(self, loan: int) -> None: ...
    def first_marked(self, start: int, stop: int) -> int: ...


class Loans:
    """Loan 0 is "no loan"; so is what lies from the ledger's LOANS on."""

    def __init__(self, ledger: _Marks) -> None:
        self._ledger = ledger
        self._free = list(range(ledger.LOANS - 1, 0, -1))
        self._lent: dict[int, Any] = {}
        self._highest = 0

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, thing: Any) -> int:
        """Write a loan down; 0 where the book is full (then the bytes are sent instead)."""
        if not self._free:
            return 0
        loan = self._free.pop()
        self._ledger.clear(loan)  # the peer may have marked what it never had
        self._lent[loan] = thing
        self._highest = max(self._highest, loan)
        return loan

    def settle(self) -> list[Any]:
        """What has come back since the last look."""
        returned = []
        loan = self._ledger.first_marked(1, self._highest + 1)
        while loan > 0:
            self._ledger.clear(loan)
            thing = self._lent.pop(loan, None)
            if thing is not None:  # a mark without a loan is the peer's mistake, and harms nobody
                self._free.append(loan)
                returned.append(thing)
            loan = self._ledger.first_marked(loan + 1, self._highest + 1)
        return returned

    def mark_returned(self, loan: int) -> None:
        """The lender's own mark: this loan never reached the peer. Takes effect at the next `settle`."""
        self._ledger.mark(loan)

    def end(self) -> list[Any]:
        """The peer is gone: everything comes back."""
        returned = list(self._lent.values())
        self._lent.clear()
        self._free.clear()
        return returned
