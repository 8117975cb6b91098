"""A shared broker whose folder was removed: nobody can find it, so it stays only as long as somebody uses it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire_broker import broker as broker_module
from gradwire_broker.broker import Broker
from gradwire_broker.clients import NEAR
from gradwire_wire import control, sockets
from gradwire_wire.lifeline import BrokerConfig

CONFIG = BrokerConfig(os.getpid(), "aa" * 16, {}, 0, "bb" * 16, "tests-lost", "gradwire.toml", None, "", "")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "g"


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(broker_module, "LOOK_S", 0.01)
    folder.mkdir()
    (folder / "broker.json").touch()
    made = Broker(f"ipc://{folder}/z", folder, CONFIG, 0o022)
    yield made
    made._clients._routers[NEAR].close()


def turns(broker: Broker, count: int) -> None:
    for _ in range(count):
        broker._loop.turn(broker._wait_ms())
        broker._keep_time()


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_it_stays_while_it_can_be_found(made: Broker) -> None:
    turns(made, 20)
    assert not made._over


def test_it_ends_when_nobody_can_find_it(made: Broker, folder: Path) -> None:
    remove(folder)
    made.serve()


def test_it_stays_for_those_who_have_found_it(made: Broker, folder: Path) -> None:
    dealer = sockets.connect_dealer(f"ipc://{folder}/z", b"me", 60_000)
    try:
        sockets.send_nowait(
            dealer, [control.pack(control.Attach(control.PROTOCOL, b"\xaa" * 16, os.getpid()))]
        )
        while not len(made._clients):
            turns(made, 1)
        remove(folder)
        turns(made, 20)
        assert not made._over
        sockets.send_nowait(dealer, [control.pack(control.Detach())])
        made.serve()
    finally:
        dealer.close()


def test_a_private_one_ends_with_its_owner_and_one_at_tcp_can_be_found_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    monkeypatch.setattr(Broker, "_listen_far", lambda *_: "tcp://127.0.0.1")
    for config in (CONFIG._replace(name=""), CONFIG._replace(listen="tcp://127.0.0.1:5555")):
        other = Broker(f"ipc://{folder}/z{config.name}", folder, config, 0o022)
        assert other._next_look == math.inf and other._wait_ms() is None
        other._clients._routers[NEAR].close()
