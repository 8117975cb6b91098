"""What a recording tells of calls that are under way when it ends."""

from __future__ import annotations

from gradwire.notes import Invocation, Message, Recorded, face_call, until
from gradwire.trace_events import document
from gradwire.worker_records import WorkerFacts

STOPPED = 7_000


FACTS = WorkerFacts("w", b"i", 1, "", "", b"", {})


def invoked() -> Invocation:
    with face_call():
        made = Invocation("f", lambda _, invocation: Message(FACTS, invocation))
    assert made.face is not None
    made.face.entered, made.invoked, made.face.left = 1_000, 2_000, 0
    return made


def message(invocation: Invocation, **steps: int) -> Message:
    made = Message(FACTS, invocation)
    made.note_call((), [], 0, 0)
    made.note_lent_short(1)
    made.began, made.lent, made.sent = 3_000, 4_000, 5_000
    for step, at in steps.items():
        setattr(made, step, at)
    return made


def test_steps_after_the_end_were_not_reached() -> None:
    invocation = invoked()
    assert invocation.face is not None
    live = message(invocation, received=STOPPED + 1, answered=STOPPED + 2)
    invocation.face.left = STOPPED + 3
    (then,) = until(STOPPED, [live])
    assert then.invocation is not None and then.invocation.face is not None
    assert (then.sent, then.received, then.answered) == (5_000, 0, 0)
    assert then.invocation.face.left == 0
    assert live.received == STOPPED + 1, "the call goes on noting"


def test_messages_after_the_end_are_left_out_and_what_they_share_stays_shared() -> None:
    invocation = invoked()
    first, second, late = (message(invocation, began=at) for at in (3_000, 3_500, STOPPED + 1))
    kept = until(STOPPED, [first, second, late])
    assert [noted.began for noted in kept] == [3_000, 3_500]
    assert kept[0].invocation is kept[1].invocation is not invocation


def test_no_span_of_a_call_under_way_leaves_the_one_around_it() -> None:
    live = message(invoked())
    recorded = Recorded(0, STOPPED, until(STOPPED, [live]), {}, {}, {}, {}, {})
    live.received = live.answered = STOPPED + 6_000  # while the file is being made
    ends = [e["ts"] + e["dur"] for e in document(recorded, 1)["traceEvents"] if e["ph"] == "X"]
    assert len(ends) >= 4 and max(ends) <= STOPPED / 1000
