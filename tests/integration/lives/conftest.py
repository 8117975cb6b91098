"""Real processes and real kills; what a test starts carries a mark of its own, by which it is found and counted."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gradwire.private_broker

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of that name, and its workers made (`standin.folder`)."""
    found = importlib.util.spec_from_file_location("standin", HERE / "standin.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.folder = module.make(tmp_path_factory.mktemp("standin"))  # type: ignore[attr-defined]
    return module


@pytest.fixture
def link(standin: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A link to a private broker that lends the stand-ins."""
    monkeypatch.setattr(gradwire.private_broker, "lent_packages", gradwire.private_broker.lent_packages)
    standin.lend(standin.folder)
    link = standin.link()
    yield link
    link.close()


@pytest.fixture
def worker(standin: Any, link: Any) -> Callable[..., Any]:
    """Start a worker of that link: worker(importing=code, serving=code, env=..., ...)."""
    return lambda **what: standin.worker(link, **what)


class Program:
    """A program of its own that uses gradwire with the stand-ins, and all that descends from it."""

    def __init__(self, standin: Any, folder: Path, code: str, *, how: str = "file", **popen: Any) -> None:
        self.mark = uuid.uuid4().hex
        code = "import os, signal, sys, time\nimport standin\n" + textwrap.dedent(code)
        environment = {
            **os.environ,
            "LIVES": self.mark,
            "PYTHONPATH": str(HERE),
            "GRADWIRE_STAND_IN": str(standin.folder),
            **popen.pop("env", {}),
        }
        options = popen.pop("options", [])
        path = folder / f"{self.mark}.py"  # of its own: another one may be about to read its file
        path.write_text(code)
        arguments = {"file": [str(path)], "-c": ["-c", code], "stdin": ["-"]}[how]
        stdin = open(path) if how == "stdin" else subprocess.DEVNULL  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *options, *arguments],
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            **{"stderr": subprocess.PIPE, **popen},
            text=True,
        )
        if how == "stdin":
            stdin.close()  # type: ignore[union-attr]

    def line(self) -> str:
        """The next line it prints; at its end, the test fails with what it wrote to stderr."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=60)[1]
        return line.strip()

    def end(self, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr once it has ended."""
        output, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output, errors

    def left(self) -> dict[int, str]:
        """Its processes that live: pid → command line. Zombies are dead."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"LIVES={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marked and state not in "ZX":
                found[int(folder.name)] = command[:120]
        return found

    def pids(self, title: str) -> list[int]:
        """Its processes whose command line has this."""
        return [pid for pid, command in self.left().items() if title in command]

    def wait_gone(
        self, timeout_s: float = 60.0, *, but: Collection[int] = (), only: Collection[int] | None = None
    ) -> dict[int, str]:
        """What of it (or of some of its processes) is still there, once nothing is or the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.process.poll()
            left = {p: c for p, c in self.left().items() if p not in but and (only is None or p in only)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def sweep(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait(60)


@pytest.fixture
def program(standin: Any, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """program(code, how="file" | "-c" | "stdin"): the code after ``import standin`` and a few more."""
    started: list[Program] = []

    def start(code: str, **other: Any) -> Program:
        started.append(Program(standin, tmp_path, code, **other))
        return started[-1]

    yield start
    for one in started:
        one.sweep()


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The condition's first true value; the test fails if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


@pytest.fixture
def until() -> Callable[..., Any]:
    """`wait_until`."""
    return wait_until
