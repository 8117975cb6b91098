"""The raw pyzmq ping-pong that calls are measured against: an echo server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

MESSAGE = b"x" * 200


def serve(address: str) -> None:
    """Echo until told to stop."""
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(address)
    print("ready", flush=True)
    while True:
        identity, message = router.recv_multipart()
        if message == b"stop":
            return
        router.send_multipart((identity, message))


@contextmanager
def ping_pong() -> Iterator[Callable[[], object]]:
    """A function that sends 200 bytes to the echo server and waits for them to come back."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/echo"
        server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(address)

        def once() -> object:
            dealer.send(MESSAGE)
            return dealer.recv()

        try:
            yield once
        finally:
            dealer.send(b"stop")
            server.wait(5)
            dealer.close()


if __name__ == "__main__":
    serve(sys.argv[1])
