"""gradwire with stand-ins for the desk and the framework: processes start and end as they really do, calls are left out.

Used by the tests of this folder, and by the programs that they start, which find it on their PYTHONPATH. The
worker's framework is "numpy"; while it is imported it runs the code in the variable IMPORTING, and once the
worker is ready, on its main thread, the code in SERVING.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gradwire.private_broker
from gradwire.broker_link import BrokerLink
from gradwire.worker_records import WorkerFacts, WorkerSpec

ENGINE = """
import os
prepared = None
def prepare(*settings):
    global prepared
    prepared = settings
def resize(threads):
    return threads
def facts():
    return {"framework": "numpy", "threads": prepared[0], "environ": dict(os.environ)}
exec(os.environ.get("IMPORTING", ""))
"""

DESK = """
import os, select, signal, sys, threading
class Desk:
    far_endpoint = ""
    calls = 0
    def __init__(self, **facts):
        self.facts = facts
        self.loaded, self.was_used = self, False
    def serve(self, control, on_control):
        poller = select.poll()
        poller.register(control, select.POLLIN)
        exec(os.environ.get("SERVING", ""), {})
        while True:
            poller.poll()
            if not on_control():
                return
"""


def make(folder: Path) -> Path:
    """A gradwire_workers whose desk and engine are the stand-ins."""
    made = folder / "gradwire_workers"
    shutil.copytree(
        gradwire.private_broker.lent_packages()["gradwire_workers"],
        made,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.rmtree(made / "numpy", ignore_errors=True)
    (made / "numpy.py").write_text(ENGINE)
    (made / "desk.py").write_text(DESK)
    return made


def lend(made: Path) -> None:
    """Brokers that are started from now on lend these workers."""
    real = gradwire.private_broker.lent_packages

    def packages() -> dict[str, str]:
        return {**real(), "gradwire_workers": str(made)}

    gradwire.private_broker.lent_packages = packages


def link() -> BrokerLink:
    return BrokerLink.start_private(30.0)


def spec(
    *, importing: str = "", serving: str = "", env: dict[str, Any] | None = None, **other: Any
) -> WorkerSpec:
    return WorkerSpec("numpy", env={"IMPORTING": importing, "SERVING": serving, **(env or {})}, **other)


def worker(link: BrokerLink, **what: Any) -> WorkerFacts:
    return link.start_worker(spec(**what))


if "GRADWIRE_STAND_IN" in os.environ:
    lend(Path(os.environ["GRADWIRE_STAND_IN"]))
