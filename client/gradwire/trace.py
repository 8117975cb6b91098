"""`Bridge.trace`: the calls made meanwhile as Chrome trace events, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import os
from types import TracebackType

from gradwire.bridge import Bridge
from gradwire.notes import Recorded
from gradwire.recording import Recording
from gradwire.trace_events import document
from gradwire_wire.errors import UsageError

__all__ = ["Trace"]


class Trace:
    """Made by `Bridge.trace`: records between ``with`` and its end, and writes the file then.

    calls: how many messages the file is about. dropped: how many earlier ones it is not, for each process. lost: why a
    worker's part is missing, by its name. All of them once it is written.
    """

    def __init__(self, bridge: Bridge, path: str | os.PathLike[str], capacity: int) -> None:
        self.path, self._bridge, self._capacity = os.fspath(path), bridge, capacity
        self._recording: Recording | None = None
        self.calls = 0
        self.dropped: dict[str, int] = {}
        self.lost: dict[str, str] = {}

    def __enter__(self) -> Trace:
        if self._recording is not None:
            raise UsageError("this trace is being recorded already; make another one with bridge.trace(path)")
        recording = Recording(self._bridge, self._capacity)
        try:
            with open(self.path, "a"):  # what cannot be written is known before anything is recorded
                pass
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {self.path}: {error.strerror}") from error
        recording.start()
        self._recording = recording
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        recording, self._recording = self._recording, None
        if recording is None or recording.is_foreign:
            return
        self._write(recording.stop())

    def _write(self, recorded: Recorded) -> None:
        made = document(recorded, os.getpid())
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(made, file)
            file.write("\n")
        self.calls, self.dropped, self.lost = len(recorded.messages), recorded.dropped, recorded.lost

    def __repr__(self) -> str:
        state = "recording" if self._recording is not None else f"{self.calls} calls"
        return f"<gradwire.Trace {self.path} {state}>"
