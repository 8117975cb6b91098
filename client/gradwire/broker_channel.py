"""The conversation with the broker: messages to it and from it, and the ends of both.

Theory of operation. The DEALER belongs to the link's thread (see `gradwire.link_thread`). What the broker says is
news (`gradwire.broker_news`) for whatever waits for it, or output, which goes to the screen and never holds up news.

Ends. `close` asks the broker to end and waits for that within bounds; at the interpreter's exit all channels are
closed, within a second. A program that is killed needs none of this: the broker sees its end. A killed broker takes
its workers along; what those had started is found by a mark in its environment and ended here. After a fork the child
owns nothing of this.
"""

from __future__ import annotations

import contextlib
import os
import queue
from typing import TYPE_CHECKING, Any

from gradwire.broker_news import BrokerNews
from gradwire.exits import end_daemon, open_channels
from gradwire.link_thread import LinkThread, print_error
from gradwire.orphans import end_orphans
from gradwire.worker_output import Screen
from gradwire_wire import control, sockets
from gradwire_wire.errors import ClosedError, ConnectError, ForkedError

if TYPE_CHECKING:
    from gradwire.far_broker import FarBroker
    from gradwire.private_broker import PrivateBroker
    from gradwire.shared_broker import SharedBroker

    Broker = PrivateBroker | SharedBroker | FarBroker

__all__ = ["CLOSE_S", "Broker", "BrokerChannel"]

CLOSE_S = 5.0
LAST_MESSAGES_MS = 20  # what the broker said before it ended may still be on its way


class BrokerChannel:
    """``news`` and ``thread`` are there for others to wait for, and to have things done in. Any thread may use it."""

    def __init__(self, broker: Broker) -> None:
        """Takes the broker over. Does not wait: whether it answers is news."""
        self._broker = broker
        self._leaves_broker = not broker.ends_with_us
        self._pid = os.getpid()
        self._closed = False
        self._screen = Screen()
        self._outputs: queue.SimpleQueue[control.Output] | None = None
        self.news = BrokerNews(broker.ending, broker.revival)
        self.thread = LinkThread(self._leave)
        self._dealer: Any = None
        try:
            self._dealer = sockets.connect_dealer(
                broker.address, os.urandom(16), keys=broker.keys, before=self._watch_broker
            )
            self.thread.listen(self._dealer, self._hear_all)
            self._send(control.Attach(control.PROTOCOL, broker.token, self._pid))
            self.thread.start()
        except BaseException:  # no thread, no descriptor
            self._leave()
            self.thread.close()
            raise
        open_channels.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has opened it, and not one that it was forked from."""
        return os.getpid() == self._pid

    def send_soon(self, message: Any) -> None:
        """Does not wait; what a broker that is gone would have got is dropped. UsageError for what cannot be said."""
        packed = control.pack(message)
        self.thread.call_soon(lambda: self._send_packed(packed))

    def follow(self) -> queue.SimpleQueue[control.Output]:
        """From now on what workers print comes here and not on the screen; who takes it says Heard."""
        outputs = self._outputs = queue.SimpleQueue()
        return outputs

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_process(self) -> None:
        """Raises ForkedError in a forked child."""
        if not self.is_ours:
            raise ForkedError("this bridge belongs to the parent process; open one of your own in the child")

    def check_usable(self) -> None:
        """Raises ForkedError, ClosedError, or ConnectError where the broker is gone."""
        self.check_process()
        if self._closed:
            end_daemon()
            raise ClosedError("the bridge is closed; connect anew")
        if not self.news.broker_alive:
            raise ConnectError(self.news.broker_gone("nothing can be asked of it"))

    def close(self) -> None:
        """End the broker and all its workers; leave a shared one. Bounded, idempotent; nothing in a forked child."""
        if self._closed or not self.is_ours:
            return
        self.ask_to_end(CLOSE_S)
        self.wait_ended(CLOSE_S)
        if self.news.broker_alive and not self._leaves_broker:
            self._broker.kill()

    def ask_to_end(self, timeout_s: float) -> None:
        """Does not wait; nothing is open after it."""
        self._closed = True
        open_channels.discard(self)
        self.send_soon(control.Detach() if self._leaves_broker else control.ShutDown(0.6 * timeout_s))
        if not self._leaves_broker:
            self._broker.resume()

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the broker's end and end the thread; only the latter where this is that thread."""
        if not self._leaves_broker and not self.thread.is_current:
            self.news.wait_broker_ended(timeout_s)
        self.thread.end()

    # ---- In the thread ----

    def _watch_broker(self, dealer: Any) -> None:
        self._end = self._broker.watch(dealer)
        self.thread.listen(self._end, self._broker_perhaps_ended)

    def _send(self, message: Any) -> None:
        self._send_packed(control.pack(message))

    def _send_packed(self, packed: bytes) -> None:
        if self.news.broker_alive:
            with contextlib.suppress(sockets.Unreachable):
                sockets.send_nowait(self._dealer, [packed])

    def _hear_all(self) -> None:
        try:
            while (frames := sockets.receive_nowait(self._dealer)) is not None:
                self._hear(control.unpack(frames[0]))
        except Exception:  # the next message may be one again: this socket is not given up
            print_error()

    def _hear(self, message: Any) -> None:
        if not isinstance(message, control.Output):
            self.news.learn(message)
        elif self._outputs is not None:
            self._outputs.put(message)
        else:
            self._screen.show(message)
            self._pour()

    def _pour(self) -> None:
        cost = self._screen.pour()
        if cost:
            self._send(control.Heard(cost))
        if self._screen.waiting:  # stderr takes no more for now
            self.thread.again_soon(self._pour)

    def _broker_perhaps_ended(self) -> None:
        if self._broker.has_ended():
            self._broker_ended()

    def _broker_ended(self) -> None:
        self._dealer.poll(LAST_MESSAGES_MS)
        self._hear_all()
        self.thread.unlisten(self._end)
        self._broker.wait_ended(0.0)
        if self._broker.keys is not None:  # on another machine it has not ended, for all that is known
            self.news.note_broker_lost(self._broker.last_words())
            return
        orphaned = self.news.note_broker_ended(self._broker.last_words())
        import shutil  # which the broker's start has loaded: there is nothing to read at the interpreter's exit

        shutil.rmtree(self._broker.folder, ignore_errors=True)
        end_orphans(orphaned)

    def _leave(self) -> None:
        """The thread's last act: nobody waits for it any more, and the broker takes the closed lifeline for the end."""
        self.news.note_link_ended()
        self._broker.close()
        if self._dealer is not None:
            self._dealer.close(LAST_MESSAGES_MS if self._leaves_broker else 0)
