"""What a recording tells of calls that are under way when it ends."""

from __future__ import annotations

from typing import Any

from gradwire.notes import FaceCall, Invocation, Message, Recorded, until
from gradwire.trace_events import document

STOPPED = 7_000


def message(face: FaceCall, invocation: Invocation, **steps: Any) -> Message:
    made = Message.__new__(Message)
    face.entered, invocation.invoked = 1_000, 2_000
    made.worker, made.incarnation, made.thread, made.invocation = "w", b"i", 1, invocation
    made.sent_as, made.by, made.kind, made.verb, made.error, made.word = "short", "page", "call", "", "", ()
    made.call_id, made.token, made.keep = 1, 0, 0
    made.began, made.lent, made.sent, made.received, made.answered = 3_000, 4_000, 5_000, 0, 0
    for step, at in steps.items():
        setattr(made, step, at)
    return made


def under_way(face: FaceCall | None = None, **steps: Any) -> Message:
    face = FaceCall() if face is None else face
    return message(face, Invocation("f", face), **steps)


def test_steps_after_the_end_were_not_reached() -> None:
    live = under_way(received=STOPPED + 1, answered=STOPPED + 2)
    assert live.invocation is not None and live.invocation.face is not None
    live.invocation.taken, live.invocation.face.left = STOPPED + 3, STOPPED + 4
    (then,) = until(STOPPED, [live])
    assert then.invocation is not None and then.invocation.face is not None
    assert (then.sent, then.received, then.answered) == (5_000, 0, 0)
    assert (then.invocation.taken, then.invocation.face.left) == (0, 0)
    assert live.received == STOPPED + 1, "the call goes on noting"


def test_messages_after_the_end_are_left_out_and_what_they_share_stays_shared() -> None:
    face = FaceCall()
    invocation = Invocation("f", face)
    first, second, late = (message(face, invocation, began=at) for at in (3_000, 3_500, STOPPED + 1))
    kept = until(STOPPED, [first, second, late])
    assert [noted.began for noted in kept] == [3_000, 3_500]
    assert kept[0].invocation is kept[1].invocation is not invocation


def test_no_span_of_a_call_under_way_leaves_the_one_around_it() -> None:
    live = under_way()
    recorded = Recorded(0, STOPPED, until(STOPPED, [live]), {}, {}, {}, {}, {})
    live.received = live.answered = STOPPED + 6_000  # while the file is being made
    ends = [e["ts"] + e["dur"] for e in document(recorded, 1)["traceEvents"] if e["ph"] == "X"]
    assert len(ends) >= 4 and max(ends) <= STOPPED / 1000
