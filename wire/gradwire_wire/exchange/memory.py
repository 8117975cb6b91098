"""The shared memory that this process owns, and who of its peers holds how much of it."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections import deque
from typing import Any, Protocol

import numpy as np

from gradwire_wire.arena import Arena, Slot
from gradwire_wire.errors import MemoryExhaustedError, UnsupportedTensorError, UsageError
from gradwire_wire.leases import Loans
from gradwire_wire.segments import (
    Lease,
    Ledger,
    OwnSegment,
    SharingUnavailableError,
    take_memory,
    why_only_short_files,
)

__all__ = ["Memory", "SlotHolder"]

COLLECT_S = 0.25
"""How long peers may take to collect their garbage when memory is short."""


class Peer(Protocol):
    """What the memory asks of an `Exchange`, the lock held."""

    loans: Loans
    ours: Ledger

    def settle(self) -> None: ...
    def ask_to_collect(self) -> bool: ...
    def forget(self) -> None: ...


class Memory:
    """The shared memory that this process owns: one arena, one lock, one limit."""

    def __init__(self, limit: int | None = None, folder: str | None = None) -> None:
        """limit: bytes. ``folder``: of mode 0700, for files where there is no memfd."""
        self.lock = threading.RLock()
        self.limit, self.folder = limit, folder
        self.arena = Arena(self._make_segment, self._take_pages)
        self.is_shared = not why_only_short_files()
        self._peers: list[Peer] = []
        self._leaving: deque[Peer] = deque()
        self._orphans: list[Lease] = []  # what we had lent on to peers that died: it may be looked at still
        self._held: weakref.WeakValueDictionary[int, SlotHolder] = weakref.WeakValueDictionary()

    def _make_segment(self, number: int, nbytes: int, used: int) -> OwnSegment:
        return OwnSegment(number, nbytes, limit=self.limit, used=used, folder=self.folder)

    def _take_pages(self, slot: Slot, used: int) -> None:
        take_memory(slot.segment.fd, slot.offset, slot.nbytes, self.limit, used)

    def join(self, peer: Peer) -> None:
        """From now on this peer may hold slots."""
        with self.lock:
            self._peers.append(peer)

    def check_free(self) -> None:
        """Raises UsageError in whoever has interrupted this thread while it changes what the lock guards."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise UsageError(
                "a handler of signals, or a finalizer, makes a call while this very thread is about to lend or take memory for "
                "another one. Have it set a flag, or make its call in a thread of its own"
            )

    def leave(self, peer: Peer) -> None:
        """The peer is gone: its loans end. What it had not returned others may look at still, and is retired."""
        self._leaving.append(peer)
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            with self.lock:
                self._see_off()

    def _see_off(self) -> None:
        """Take leave of peers that are gone (lock held)."""
        while self._leaving:
            peer = self._leaving.popleft()
            if peer in self._peers:
                self._peers.remove(peer)
            peer.settle()
            self._orphans = [lease for lease in self._orphans if lease.ledger is not peer.ours]
            for thing in peer.loans.end():
                if type(thing) is Slot:
                    self.arena.retire(thing)
                elif type(thing) is Lease:
                    self._orphans.append(thing)
            peer.forget()

    def take(self, nbytes: int) -> Slot:
        """A slot; takes the lock. Where memory is short, what garbage holds here and at the peers is freed first.

        Raises MemoryExhaustedError, or SharingUnavailableError where no memory can be shared at all.
        """
        self.check_free()
        try:
            return self._take(nbytes)
        except MemoryExhaustedError:
            pass
        gc.collect()
        with self.lock:
            asked = [peer for peer in self._peers if peer.ask_to_collect()]
        deadline = time.monotonic() + (COLLECT_S if asked else 0)
        while True:
            try:
                return self._take(nbytes, is_short=True)
            except MemoryExhaustedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.005)

    def _take(self, nbytes: int, is_short: bool = False) -> Slot:
        """Looks for returned loans of every peer before it asks the system for more."""
        with self.lock:
            self._see_off()
            for peer in self._peers:
                peer.settle()
            if is_short:
                self.arena.give_back_idle()
            return self.arena.take(nbytes)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        """A numpy array that lies in shared memory already; its slot is free when its last view is gone.

        An ordinary array where memory cannot be shared. Like all shared memory it stays shared after ``fork``.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise UnsupportedTensorError(f"Python objects (dtype {dtype}) cannot lie in shared memory")
        shape = tuple(shape) if np.iterable(shape) else (shape,)
        nbytes = math.prod(shape) * dtype.itemsize
        if not self.is_shared or nbytes <= 0:
            return np.empty(shape, dtype)
        try:
            slot = self.take(nbytes)
        except SharingUnavailableError:
            self.is_shared = False
            return np.empty(shape, dtype)
        holder = SlotHolder(self.arena, slot)
        array = slot.segment.held_array(shape, dtype, slot.offset, holder)
        self._held[array.__array_interface__["data"][0]] = holder
        return array

    def held_at(self, array: np.ndarray) -> SlotHolder | None:
        """What keeps the memory at an array's beginning, where that is the beginning of an array of `empty`.

        A framework that took such an array shows its memory as its own.
        """
        if not self._held:
            return None
        holder = self._held.get(array.__array_interface__["data"][0])
        fits = holder is not None and array.nbytes <= holder.slot.nbytes and array.flags.c_contiguous
        return holder if fits else None

    def close(self) -> None:
        """Nothing is lent any more. Memory goes with its last view, here and at the peers."""
        with self.lock:
            self.is_shared = False
            self.arena.close()
            orphans, self._orphans = self._orphans, []
        del orphans


class SlotHolder:
    """Held by arrays of `Memory.empty`: the slot is theirs until the last alias is gone."""

    __slots__ = ("__weakref__", "arena", "slot")

    def __init__(self, arena: Arena, slot: Slot) -> None:
        self.arena, self.slot = arena, slot

    def __del__(self) -> None:
        self.arena.give_soon(self.slot)
