"""Ledgers: the bytes by which a borrower returns what it was lent, and a caller tells what it does not wait for."""

from __future__ import annotations

import mmap
import os
from typing import Any, Sequence

from gradwire_wire.errors import ProtocolError
from gradwire_wire.interruption import came_from_system
from gradwire_wire.segments.files import (
    SharingUnavailableError,
    is_sealed_memory,
    memory_file,
    seal,
    why_only_short_files,
)
from gradwire_wire.segments.system import Descriptor

__all__ = ["Ledger"]


class _FileBytes(Descriptor):
    """A file as a ledger's bytes: read and written, never mapped, since it cannot be sealed. What was cut off reads as zeros."""

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor."""
        self.fd = fd

    def __setitem__(self, at: int | slice, value: int | bytes) -> None:
        start, data = (at, bytes([value])) if isinstance(at, int) else (at.start, value)  # type: ignore[list-item]
        os.pwrite(self.fd, data, start)  # type: ignore[arg-type]

    def __getitem__(self, at: slice) -> bytes:
        return os.pread(self.fd, at.stop - at.start, at.start)

    def find(self, wanted: bytes, start: int, stop: int) -> int:
        """As of bytes."""
        found = os.pread(self.fd, stop - start, start).find(wanted)
        return found if found < 0 else start + found


class Ledger(Descriptor):
    """A page of bytes shared by lender and borrower: entry n is 1 once loan n has been returned.

    The last `CANCELLED` of 8 bytes each hold ids of calls that nobody waits for any more, each id in the
    place it has modulo their number. Where memory cannot be shared, a ledger is this process's own: then
    nothing can be lent on it (``is_shared``) and cancelling has no effect.
    """

    ENTRIES = 1 << 16
    CANCELLED = 64
    LOANS = ENTRIES - 8 * CANCELLED
    """Loans are the entries 1 .. LOANS - 1."""

    def __init__(self, folder: str | None = None) -> None:
        """A new ledger, whose descriptor is to be passed on. ``why``: the reason where it is not shared memory."""
        self._map: Any = bytearray(self.ENTRIES)
        self.why = why_only_short_files()
        if self.why:
            return
        try:
            self.fd, self.why = memory_file("gradwire-ledger", self.ENTRIES, folder)
        except SharingUnavailableError as error:
            self.why = str(error)
            return
        if not self.why:
            seal(self.fd)
        self._share(not self.why)

    @classmethod
    def received(cls, descriptors: Sequence[int]) -> Ledger:
        """The ledger that came with a greeting (takes over the descriptor, if any); ProtocolError if unusable."""
        ledger = cls.__new__(cls)
        ledger._map, ledger.why = bytearray(cls.ENTRIES), ""
        if descriptors:
            (ledger.fd,) = descriptors
            try:
                sealed = is_sealed_memory(ledger.fd, cls.ENTRIES, "a ledger")
                if os.fstat(ledger.fd).st_size != cls.ENTRIES:
                    raise ProtocolError(f"a ledger must be a sealed memory file of {cls.ENTRIES} bytes")
                ledger._share(sealed)
            except OSError as error:
                if not came_from_system(error):
                    raise
                raise ProtocolError(f"a ledger cannot be mapped: {error}") from error
            finally:
                ledger.close()
        return ledger

    def _share(self, is_sealed: bool) -> None:
        self._map = mmap.mmap(self.fd, self.ENTRIES) if is_sealed else _FileBytes(os.dup(self.fd))

    @property
    def carrier(self) -> str:
        """What memory that its process lends is: ``"shared memory"``, ``"files"`` or, where none, ``"messages"``."""
        names = {mmap.mmap: "shared memory", _FileBytes: "files"}
        return names.get(type(self._map), "messages")

    def detach(self) -> None:
        """The other side is gone: marks go nowhere from now on, and the memory is unmapped."""
        self._map = bytearray(self.ENTRIES)

    @property
    def is_shared(self) -> bool:
        """Whether the other side sees what is marked here."""
        return type(self._map) is not bytearray

    @property
    def descriptors(self) -> list[int]:
        """What to pass on with the greeting: one descriptor, or none where memory cannot be shared."""
        return [self.fd] if self.fd >= 0 else []

    def mark(self, loan: int) -> None:
        """Borrower: this loan is over."""
        self._map[loan] = 1

    def clear(self, loan: int) -> None:
        """Lender: this entry is about to be used again."""
        self._map[loan] = 0

    def first_marked(self, start: int, stop: int) -> int:
        """Lender: the first marked entry in [start, stop), or -1."""
        found: int = self._map.find(b"\x01", start, stop)
        return found

    def cancel(self, call_id: int) -> None:
        """Caller: nobody waits for this call any more."""
        self._map[self._place_of(call_id)] = call_id.to_bytes(8, "little")

    def is_cancelled(self, call_id: int) -> bool:
        """Worker: whether nobody waits for this call any more."""
        start = self.LOANS + 8 * (call_id % self.CANCELLED)
        return bool(self._map[start : start + 8] == call_id.to_bytes(8, "little"))

    def _place_of(self, call_id: int) -> slice:
        start = self.LOANS + 8 * (call_id % self.CANCELLED)
        return slice(start, start + 8)
