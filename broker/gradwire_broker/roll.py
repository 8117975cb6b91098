"""Which workers there are, for whoever asks: each idle one is asked how many calls it has served first.

A worker that is in a call answers when that is done, so nobody waits for it: after `LOOK_S` it is called busy, and
its figure is the one it reported last. The broker's loop calls in; nothing here blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gradwire_broker.clients import is_far
from gradwire_broker.worker import Worker
from gradwire_wire import control

__all__ = ["Roll"]

LOOK_S = 0.1


@dataclass
class _Question:
    client: bytes
    request: int
    workers: list[Worker]
    until: float


class Roll:
    """The questions that are not answered yet. ``send``: to a client."""

    def __init__(self, send: Callable[[bytes, Any], None]) -> None:
        self._send = send
        self._questions: list[_Question] = []

    def ask(self, client: bytes, request: int, workers: Iterable[Worker], now: float) -> None:
        """A client's Look; ``workers``: all there are."""
        question = _Question(client, request, list(workers), now + LOOK_S)
        for worker in question.workers:
            worker.ask()
        self._questions.append(question)
        self.advance(now)

    def due(self) -> float:
        """When `advance` must be called next."""
        return min((question.until for question in self._questions), default=math.inf)

    def advance(self, now: float) -> None:
        """Answer what can be answered: everybody has reported, or the time is up."""
        for question in list(self._questions):
            if now >= question.until or all(worker.state != "busy" for worker in question.workers):
                self._questions.remove(question)
                self._answer(question)

    def _answer(self, question: _Question) -> None:
        for worker in question.workers:
            self._send(question.client, _present(question.request, worker, is_far(question.client)))
        self._send(question.client, control.Looked(question.request))


def _present(request: int, worker: Worker, to_far: bool) -> control.Present:
    place, is_ready = worker.place, worker.ready is not None and worker.end is None
    endpoint = worker.far_endpoint if to_far else place.endpoint
    return control.Present(
        request=request,
        name=place.name,
        framework=worker.order.framework,
        state=worker.state,
        doing=str(worker.end) if worker.end is not None else worker.doing,
        incarnation=place.incarnation,
        pid=worker.pid,
        endpoint=endpoint if is_ready else "",
        tether_path=place.tether_path if is_ready and not to_far else "",
        token=place.token if is_ready else b"",
        info=worker.info,
        loads=list(worker.order.loads),
        restart=worker.order.restart,
        calls=worker.calls,
        memory_bytes=worker.memory_bytes if worker.end is None else 0,
        age_s=worker.age_s,
    )
