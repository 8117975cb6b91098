"""The life of a broker's process: ``main`` is called by `gradwire_wire.spawn.BOOT`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback

from gradwire_broker.broker import Broker
from gradwire_broker.runtime import NoRuntimeFolder, RuntimeFolder
from gradwire_wire import process
from gradwire_wire.errors import MemoryExhaustedError, UsageError
from gradwire_wire.lifeline import BrokerConfig, BrokerReady, CouldNot, Lifeline, LifelineEnded
from gradwire_wire.rendezvous import WORDS, Card, NamedAlike, check_alone, write_card
from gradwire_wire.sockets import SocketError

LAST_MESSAGES_S = 0.02  # ZeroMQ's own thread sends what was said last


def main(lifeline_fd: int) -> int:
    """Serve the program that started this process, until it ends. Returns the exit code."""
    process.reset_signals()
    process.raise_descriptor_limit()
    umask = os.umask(0o077)  # for its own files; workers keep what the user has
    lifeline = Lifeline.inherited(lifeline_fd)
    config = lifeline.receive_config()
    assert isinstance(config, BrokerConfig)
    try:
        folder = RuntimeFolder.make(os.environ)
    except NoRuntimeFolder as error:
        return _could_not(lifeline, str(error))
    try:
        return _serve(config, lifeline, folder, umask)
    finally:
        folder.remove()


def _serve(config: BrokerConfig, lifeline: Lifeline, folder: RuntimeFolder, umask: int) -> int:
    address = f"ipc://{folder.path}/broker.zmq"
    try:
        broker = Broker(address, folder.path, config, umask)
        broker.heed_signals()
        if not broker.belong_to(config.owner_pid, lifeline):
            return 0
        if config.name:
            _be_found(config, address, folder)
        lifeline.send_nowait(BrokerReady(address, str(folder.path)))
    except LifelineEnded:
        return 0
    except (UsageError, SocketError, MemoryExhaustedError) as error:
        why = f"it cannot listen at {config.listen or address}: {error}"
        return _could_not(
            lifeline, f"{why}; {process.RAISE_LIMIT}" if process.lacks_descriptors(error) else why
        )
    except NamedAlike as error:
        return _could_not(lifeline, str(error))
    except Exception as error:
        if process.lacks_descriptors(error):
            return _could_not(lifeline, f"{error}; {process.RAISE_LIMIT}")
        traceback.print_exc()
        return _could_not(lifeline, f"{type(error).__name__}: {error}")
    try:
        broker.serve()
    finally:
        broker.abandon()
        time.sleep(LAST_MESSAGES_S)
    return 0


def _be_found(config: BrokerConfig, address: str, folder: RuntimeFolder) -> None:
    """Leave a card for other programs, and write to a file of the folder: nobody keeps the program's own for us."""
    words = os.open(folder.path / WORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(words, standard)
    os.close(words)
    write_card(
        Card(config.name, address, config.token, os.getpid(), str(folder.path), config.file, config.listen)
    )
    check_alone(str(folder.path), os.environ)


def _could_not(lifeline: Lifeline, why: str) -> int:
    with contextlib.suppress(LifelineEnded):
        lifeline.send_nowait(CouldNot(why))
    return 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit("gradwire_broker is started by gradwire itself: use gradwire.connect()")
