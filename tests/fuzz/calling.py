"""A client that calls a worker which lies:  python calling.py FOLDER SECONDS

Every error must be gradwire's own, every call must end in time. Ends with exit code 0 after so many seconds; anything
else is a finding. Prints how many calls it made and what they raised.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import guards

from gradwire.background import Background
from gradwire.broker_link import BrokerLink
from gradwire.connection import Connection
from gradwire.functional import Functional
from gradwire.handle import Handle
from gradwire.remote import Remote
from gradwire.specs import ShapeDtype
from gradwire.worker_records import WorkerFacts
from gradwire_wire.errors import GradwireError
from gradwire_wire.exchange import Memory
from gradwire_wire.structures import positional

lives = itertools.count()
MOST_S = 40.0  # of one call with its timeout of 0.5 s, the handshake and a reconnection on a busy machine
LEAST = 100  # calls, on however slow a machine
HANDSHAKE_S = 4.0


def main(folder: str, seconds: float) -> None:
    guards.install()
    warnings.simplefilter("ignore", RuntimeWarning)  # sums of arbitrary bytes overflow
    link = BrokerLink.start_private(30.0)
    end = time.monotonic() + seconds
    met: collections.Counter[str] = collections.Counter()
    while not is_over(end, met):
        memory = Memory()
        try:
            one_life(link, memory, folder, end, met)
        except GradwireError as error:
            met[type(error).__name__] += 1
        memory.close()
    print(dict(met), flush=True)
    link.close()


def is_over(end: float, met: collections.Counter[str]) -> bool:
    """Whether the time is up, and something was shown."""
    return time.monotonic() > end and met.total() >= LEAST and met["answered"] > 0


def one_life(link: BrokerLink, memory: Memory, folder: str, end: float, met: Any) -> None:
    facts = WorkerFacts("liar", b"i" * 16, os.getpid(), f"ipc://{folder}/z", f"{folder}/t", b"t" * 16, {})
    connection = Connection(link, facts, memory, 2.0)
    try:
        kind = "module" if next(lives) % 3 == 0 else "function"
        with hung_up_on(connection):
            handle = Handle(lambda: connection, kind, "a:b", positional(0), [])
        remote = Remote(handle, Background("fuzz")).options(timeout=0.5)
        for i in range(100):
            if is_over(end, met) or not connection.life.is_there:
                return
            start = time.monotonic()
            faulthandler.dump_traceback_later(2 * MOST_S, exit=True)
            try:
                use(remote, i)
                met["answered"] += 1
            except GradwireError as error:
                met[type(error).__name__] += 1
            assert time.monotonic() - start < MOST_S, f"a call took {time.monotonic() - start:.1f} s"
    finally:
        connection.close()
        connection.bury()


@contextlib.contextmanager
def hung_up_on(connection: Connection) -> Iterator[None]:
    """Loading has no deadline, and a liar may be silent."""
    watchdog = threading.Timer(HANDSHAKE_S, connection.close)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def use(remote: Remote, i: int) -> None:
    """Calls of every kind; what comes back is read to the last byte."""
    x = np.ones((2000, 3, 3, 4000)[i % 4])
    if remote.handle.is_module and i % 3 == 2:
        use_state(remote, i)
    elif i % 8 == 7:
        for future in [remote.submit(x) for _ in range(3)]:
            read(future.result())
    elif i % 5 == 3:
        remote.spec(ShapeDtype((2,), "float32"))
    elif i % 5 == 4:
        out, pullback = remote.vjp(x)
        read(out)
        read(pullback(out))
    else:
        read(remote(x))


def use_state(remote: Remote, i: int) -> None:
    """A module's verbs."""
    if i % 4 == 0:
        read(remote.state_dict())
    elif i % 4 == 1:
        optimizer = remote.optimizer("a:b")
        optimizer.step(1.0)
        read(optimizer.minimize(np.ones(3, np.float32)))
    elif i % 4 == 2:
        with hung_up_on(remote.handle._connect()):
            Functional(remote).frozen()
    else:
        remote.train()
        read(remote.grads())


def read(tree: Any) -> None:
    if isinstance(tree, np.ndarray):
        tree.astype("f8").sum()
        tree.tobytes()
    elif isinstance(tree, dict):
        for item in tree.values():
            read(item)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            read(item)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
