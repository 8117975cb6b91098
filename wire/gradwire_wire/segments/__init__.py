"""The one place that touches shared memory: segments, views with a lease, private pages.

Theory of operation
-------------------
A *segment* is a nameless memfd. Its owner maps it shared and writes; the descriptor crosses a
tether; everybody else maps it ``MAP_PRIVATE``, readable and writable::

    owner (MAP_SHARED)          memfd, sealed against shrinking         borrower (MAP_PRIVATE)
    writes slot, then sends  ─►  pages of the file  ◄─ reads; a write makes a private copy of the page
    the header

Two rules keep that right.

1. *A slot is rewritten only after its last view is gone.* Every view is an ndarray over a `_Span`, an
   object that exports the mapping's buffer. numpy, torch and JAX keep the exporter of a buffer alive
   until their last alias dies; then ``Lease.__del__`` stores 1 into the lease's byte of the *ledger*,
   a small shared page of bytes. The owner looks there before it reuses the slot. No message and no
   lock: a finalizer runs in any thread, in the middle of anything.
2. *A private copy must not outlive its lease*, or it would hide the next tenant's data. Before the
   byte is stored, ``/proc/self/pagemap`` tells whether pages of the slot were privately copied (2-3 µs; of large
   slots, whose pages are many, only if this process had a page fault since: every private copy begins with one);
   they are dropped with MADV_DONTNEED. Slots are whole pages, so no two leases share one.

Order of memory: the borrower's loads of the tensor come before its store of the byte in program
order, with a system call between them; the owner loads the byte, then stores. x86 keeps that order by
itself, elsewhere the system call is the barrier. In the other direction the owner's stores precede
the ZeroMQ send, whose locks are barriers.

Where there is no memfd (forbidden, another kernel), segments are *files*: nameless ones (O_TMPFILE, or unlinked as soon as they are
open) in the runtime folder of mode 0700. A file cannot be sealed: whoever has its descriptor can truncate it under a mapping,
which is a SIGBUS for whoever reads there. So nobody maps a file of another process: a borrower *reads* its tensors (``pread``, one more copy;
too short a file is a short read and an error), and the loan is over at once; a ledger that is a file is read and written
with ``pread`` and ``pwrite``. Only the owner maps its own file. A peer could truncate that, on purpose: it is a process of the same user
(SO_PEERCRED), and could as well kill this one. Where no file can be had either, tensors travel inside the messages.

``fork``: parent and child would share leases, and the first to drop a view would end it for both.
A before-fork hook therefore copies every leased page privately (the child inherits the copies, which
no owner can change), and a lease is ended only by the process that took it. What a process shares itself stays its own: a child's
mappings of it become private, so what the child writes (into an array of `Bridge.empty`, a parameter) is not seen by its parent, as with all
other memory. What the parent writes later is seen in the child where that has written nothing: to copy it all at each fork would cost too much.

``own`` and ``borrowed`` have the two kinds of segments, ``ledger`` what passes between them, ``shared_page`` the one memory that both
ends write (of a lane), ``private`` memory that is nobody else's and is kept like theirs; below these are ``files`` (memory files), ``exporters`` (what arrays keep alive), ``private_copies`` and ``system``.
"""

from __future__ import annotations

from gradwire_wire.segments.borrowed import ForeignSegment, Lease
from gradwire_wire.segments.exporters import holder_of
from gradwire_wire.segments.files import SharingUnavailableError, take_memory, why_only_short_files
from gradwire_wire.segments.ledger import Ledger
from gradwire_wire.segments.own import OwnSegment
from gradwire_wire.segments.private import PrivateSegment
from gradwire_wire.segments.shared_page import SharedPage

__all__ = [
    "ForeignSegment",
    "Lease",
    "Ledger",
    "OwnSegment",
    "PrivateSegment",
    "SharedPage",
    "SharingUnavailableError",
    "holder_of",
    "take_memory",
    "why_only_short_files",
]
