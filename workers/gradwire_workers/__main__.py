"""The life of a worker's process: ``main`` is called by `gradwire_wire.spawn.BOOT`.

Order matters. First it makes sure not to outlive its broker; then it settles what it inherited; then it looks
for the packages it needs, so that what is missing is named; then it imports the framework and the packages, and only then do
the user's folders join ``sys.path``, so that a ``torch.py`` or ``msgpack.py`` of theirs never stands in for these.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import sys
import traceback
from typing import Any

from gradwire_wire import process
from gradwire_wire.errors import GradwireError
from gradwire_wire.lifeline import (
    ANOTHER_GRADWIRE,
    CouldNot,
    Doing,
    HasThreads,
    Leave,
    Lifeline,
    LifelineEnded,
    Report,
    Served,
    Share,
    WorkerConfig,
    WorkerReady,
)
from gradwire_workers.installation import how_to_install

NEEDED = {"zmq": "pyzmq", "msgpack": "msgpack", "numpy": "numpy"}  # module → what pip calls it
OLDEST_MSGPACK = (1, 0)
"""Earlier ones pack texts as bytes by default, so the two ends would not read the same messages."""
FRAMEWORK_PACKAGES = {"tensorflow": "tensorflow-cpu"}
STDERR = 2  # its descriptor: what the environment's own sitecustomize has made of sys.stderr may be anything
MOST_TEXT = 60_000  # characters of one message; a packet holds about 200 kB


class CannotStart(Exception):
    """Why there will be no worker; the message is for the user."""


def main(lifeline_fd: int) -> int:
    """Serve calls until the broker says that it is enough. Returns the exit code."""
    process.die_with_parent()
    process.reset_signals()
    lifeline = Lifeline.inherited(lifeline_fd)
    config = lifeline.receive_config()
    assert isinstance(config, WorkerConfig)
    own_umask = os.umask(config.umask)
    try:
        desk, engine = _start(config, lifeline, own_umask)
        lifeline.send_nowait(WorkerReady(_info(engine), desk.far_endpoint))
    except Exception as error:  # of any kind: where sys.stderr is closed nobody would read of it
        why = str(error) if isinstance(error, CannotStart) else _told(error)
        lifeline.send_nowait(CouldNot(why.encode("utf-8", "backslashreplace").decode()[-MOST_TEXT:]))
        return 1
    try:
        desk.serve(lifeline.fileno(), lambda: _heed(lifeline, desk, engine))
    except BaseException as error:  # user code's threads and exit functions would keep it, serving nobody
        from gradwire_workers.interrupts import leave

        leave(error)
    lifeline.close()
    return 0


def _heed(lifeline: Lifeline, desk: Any, engine: Any) -> bool:
    """The lifeline is readable: do what it says. Returns whether the worker should go on."""
    try:
        message = lifeline.receive_nowait()
        if isinstance(message, Share) and not desk.loaded.was_used:
            lifeline.send_nowait(HasThreads(engine.resize(message.threads)))
        elif isinstance(message, Report):
            lifeline.send_nowait(Served(desk.calls))
        return not isinstance(message, Leave)
    except LifelineEnded:
        return False


def _start(config: WorkerConfig, lifeline: Lifeline, own_umask: int) -> tuple[Any, Any]:
    """The desk, listening, and the framework's engine. ``own_umask``: of the sockets; all else is the user's."""
    if os.getppid() != config.broker_pid:
        raise CannotStart(
            f"{sys.executable} was not started by the broker itself: if the interpreter that you named is a script, "
            'let it end with: exec .../bin/python "$@"'
        )
    process.raise_descriptor_limit()
    _settle_output()
    faulthandler.enable(STDERR)
    faulthandler.register(process.DUMP_STACK, STDERR)
    sys.argv[:] = ["gradwire_workers"]
    _check_needed()
    engine = _import_framework(config, lifeline)
    make_desk = _import_desk()
    sys.path[:0] = [folder for folder in config.path if folder not in sys.path]
    lifeline.send_nowait(Doing("opening its sockets"))
    os.umask(own_umask)
    desk = _open_desk(make_desk, config, engine)
    os.umask(config.umask)
    _load_named(config, desk, lifeline)
    faulthandler.unregister(process.DUMP_STACK)
    return desk, engine


def _settle_output() -> None:
    """Lines appear when they are written, Python's and C's, and none fails for want of an encoding."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)  # 1 is _IOLBF
    except (ImportError, OSError, ValueError, AttributeError):
        pass


def _check_needed() -> None:
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " and ".join(missing)
        raise CannotStart(
            f"{sys.executable} has no {names}. Install with: {how_to_install(' '.join(missing))}"
        )
    import msgpack

    if msgpack.version < OLDEST_MSGPACK:
        has, needs = (".".join(map(str, version)) for version in (msgpack.version, OLDEST_MSGPACK))
        raise CannotStart(
            f"{sys.executable} has msgpack {has}, and {needs} or newer is needed. "
            f"Install with: {how_to_install(f'msgpack>={needs}')}"
        )


def _import_framework(config: WorkerConfig, lifeline: Lifeline) -> Any:
    """The engine: `gradwire_workers.<framework>`, which imports the framework; then it is prepared."""
    name = config.framework
    lifeline.send_nowait(Doing(f"importing {name}"))
    gc.disable()  # what is imported stays: to look through it again and again is a tenth of the time that it takes
    try:
        engine = importlib.import_module(f"gradwire_workers.{name}")
    except Exception as error:
        raise CannotStart(_not_imported(name, error)) from error
    finally:
        gc.enable()
    lifeline.send_nowait(Doing(f"preparing {name}"))
    try:
        engine.prepare(config.threads, config.x64, config.device)
    except Exception as error:
        raise CannotStart(f"{name} could not be set up: {_told(error)}") from error
    return engine


def _not_imported(framework: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == framework:
        packages = FRAMEWORK_PACKAGES.get(framework, framework)
        return f"{sys.executable} has no {framework}. Install with: {how_to_install(packages)}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = (
            f"\nThat environment lacks {error.name}; perhaps: {how_to_install(error.name.partition('.')[0])}"
        )
        return f"importing {framework} failed: {_told(error)}{remedy}"
    return f"importing {framework} failed: {_told(error)}"


def _told(error: Exception) -> str:
    """The error with its traceback."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return f"{type(error).__name__}: {error}\n{''.join(lines)}".rstrip()


def _import_desk() -> Any:
    try:
        from gradwire_workers.desk import Desk

        return Desk
    except Exception as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("gradwire_"):
            raise CannotStart(f"gradwire itself does not load: {error}. {ANOTHER_GRADWIRE}") from error
        raise CannotStart(f"importing {', '.join(NEEDED.values())} failed: {_told(error)}") from error


def _open_desk(make_desk: Any, config: WorkerConfig, engine: Any) -> Any:
    from gradwire_wire.machine import shared_limit

    try:
        return make_desk(
            name=config.name,
            incarnation=bytes.fromhex(config.incarnation),
            token=bytes.fromhex(config.token),
            endpoint=config.endpoint,
            tether_path=config.tether_path,
            engine=engine,
            max_shared_bytes=shared_limit(),
            allow=config.allow,
            listen=config.listen,
            keys=config.keys,
        )
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; set XDG_RUNTIME_DIR to a folder of yours that has room" if full else ""
        raise CannotStart(f"it could not open its sockets{remedy}: {_told(error)}") from error


def _load_named(config: WorkerConfig, desk: Any, lifeline: Lifeline) -> None:
    """What is to be loaded at the start, in the order it was written."""
    for name, load in config.loads.items():
        lifeline.send_nowait(Doing(f"loading {name}"))
        try:
            desk.load_named(name, load["kind"], load["target"], load["args"], load["kwargs"])
        except GradwireError as error:
            raise CannotStart(f"loading {name!r} failed: {error}") from error
        except Exception as error:
            raise CannotStart(f"loading {name!r} ({load['target']}) failed: {_told(error)}") from error


def _info(engine: Any) -> dict[str, Any]:
    return {
        "executable": sys.executable,
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        **engine.facts(),
    }


if __name__ == "__main__":
    sys.exit("gradwire_workers is started by gradwire's broker: use gradwire.connect().worker(...)")
