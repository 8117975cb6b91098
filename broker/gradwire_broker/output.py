"""What workers print: the last lines for reports, and what still has to go to each client. Pure.

Nobody who does not read may hold up a worker, so both are bounded, and both say what they lost.
"""

from __future__ import annotations

from collections import deque

from gradwire_wire.control import Output

__all__ = ["Outlet", "Tail"]

MESSAGE = 1 << 15  # characters: beyond these, pieces are no longer put together


class Tail:
    """The end of a text that is written piece by piece: at most so many lines and characters of it."""

    def __init__(self, max_lines: int = 100, max_characters: int = 16_000) -> None:
        self._max_lines = max_lines
        self._max_characters = max_characters
        self._pieces: deque[str] = deque()
        self._held = 0
        self._written = 0

    def write(self, piece: str) -> None:
        """Keep what may be needed of it; the rest is forgotten when twice too much is held."""
        self._pieces.append(piece)
        self._held += len(piece)
        self._written += len(piece)
        if self._held > 2 * self._max_characters:
            kept = "".join(self._pieces)[-self._max_characters :]
            self._pieces = deque([kept])
            self._held = len(kept)

    def text(self, max_lines: int | None = None, max_characters: int | None = None) -> str:
        """The last lines, or fewer of them; where some are missing, the first line says how much."""
        kept = "".join(self._pieces)[-(max_characters or self._max_characters) :]
        lines = kept.splitlines(keepends=True)[-(max_lines or self._max_lines) :]
        kept = "".join(lines).rstrip("\n")
        lost = self._written - len("".join(lines))
        return f"[{lost:,} characters before this are not shown]\n{kept}" if lost else kept


class Outlet:
    """One client's queue: at most a ``window`` is under way, at most ``bound`` characters wait, the oldest are lost."""

    def __init__(self, window: int = 1 << 18, bound: int = 16 << 20) -> None:
        self._room = window
        self._bound = bound
        self._waiting: deque[Output] = deque()
        self._held = 0
        self._dropped = 0

    def write(self, name: str, text: str) -> None:
        """Queue what the worker of that name has written, together with what already waits of it."""
        if self._waiting and self._waiting[-1].name == name and len(self._waiting[-1].text) < MESSAGE:
            self._waiting.append(Output(name, self._waiting.pop().text + text, 0))
        else:
            self._waiting.append(Output(name, text, 0))
        self._held += len(text)
        while self._held > self._bound and len(self._waiting) > 1:
            lost = self._waiting.popleft()
            self._held -= len(lost.text)
            self._dropped += len(lost.text)

    def heard(self, cost: int) -> None:
        """The client has shown so much more of what it was sent."""
        self._room += cost

    def take(self) -> list[Output]:
        """What may be sent now."""
        taken = []
        while self._waiting and self._room > 0:
            name, text, _ = self._waiting.popleft()
            taken.append(Output(name, text, self._dropped))
            self._dropped = 0
            self._held -= len(text)
            self._room -= taken[-1].cost
        return taken
