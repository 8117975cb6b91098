"""What workers print, shown on this program's stderr with the worker's name in front.

The stream is whatever `sys.stderr` is at that moment, so that notebooks and test runners see it. A stream that
nobody reads must not stop the thread that shows it, so a file is only written to when it takes more.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
from collections import deque

from gradwire_wire.control import Output

__all__ = ["Labeller", "Screen"]

PIECE = 4096  # bytes that a pipe which is ready to be written to takes without blocking (PIPE_BUF)


class Labeller:
    """Puts ``[name]`` in front of every line, lines that a progress bar rewrites included. Pure."""

    def __init__(self) -> None:
        self._open = ""  # whose line the cursor is in, "" at the start of a line

    def labelled(self, output: Output) -> str:
        """What to write for it, after all that was written before."""
        lines = []
        if output.dropped:
            lines.append(self._start_line() + f"[{output.name}] … {output.dropped:,} characters dropped …\n")
        for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n|$)", output.text):
            if line:
                lines.append(self._label(output.name, line))
        return "".join(lines)

    def _label(self, name: str, line: str) -> str:
        before = "" if self._open == name else f"{self._start_line()}[{name}] "
        self._open = "" if line.endswith(("\r", "\n")) else name
        return before + line

    def _start_line(self) -> str:
        started, self._open = self._open, ""
        return "\n" if started else ""


class Screen:
    """`sys.stderr`, without waiting for whatever reads it. Used by one thread."""

    def __init__(self) -> None:
        self._labeller = Labeller()
        self._waiting: deque[tuple[str, int]] = deque()

    def show(self, output: Output) -> None:
        """Write it as soon as `pour` can."""
        text = self._labeller.labelled(output)
        pieces = [text[i : i + PIECE // 4] for i in range(0, len(text), PIECE // 4)] or [""]
        self._waiting.extend((piece, 0) for piece in pieces[:-1])
        self._waiting.append((pieces[-1], output.cost))

    @property
    def waiting(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._waiting)

    def pour(self) -> int:
        """Write what can be written now; returns the cost of the outputs that are through."""
        shown = 0
        while self._waiting and _takes_more():
            text, cost = self._waiting.popleft()
            _write(text)
            shown += cost
        return shown


def _takes_more() -> bool:
    """Whether stderr can be written to without blocking, as far as anyone can tell."""
    try:
        fd = sys.stderr.fileno()
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        return bool(poller.poll(0))
    except BaseException:  # no descriptor, none at all, or closed: writing does not block then
        return True


def _write(text: str) -> None:
    stream = sys.stderr
    # Whatever is wrong with the user's stream (closed, a broken pipe, none), it is not the worker's fault. Some are code of
    # the user's, of which a window's "stop" makes a SystemExit: it would end this thread, and with it all news of the workers.
    with contextlib.suppress(BaseException):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
