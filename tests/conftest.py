"""What every test may use, and what none may leave behind.

The session ends with an error if a process, a descriptor, a mapping or a runtime directory of gradwire
outlives the tests. The processes are found by a mark in their environment, which a worker inherits however
far it is removed from this process; what belongs to another session on the same machine is not counted.
`tests/unit/test_leak_check.py` shows that the check can fail.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from gradwire_broker.runtime import sweep

ROOT = Path(__file__).resolve().parents[1]

# A slow machine must not turn a property into a failure; what may not take long has a timeout of its own.
settings.register_profile("gradwire", deadline=None)
settings.load_profile("gradwire")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# XLA compiles thousands of programs here and each runs once or twice: it is to optimise none of them, in this process
# and in the workers alike. (The CPU seconds of the JAX tests fall to a third.) Programs as users run them, with XLA's
# own settings, are those of `users_environment`: the demo, the examples, and `test_jax_versions.py` for today's JAX too.
QUICK_XLA = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", QUICK_XLA)

# Its compiler would start processes that import torch, for a program or two.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def users_environment() -> dict[str, str]:
    """The environment of a program that is to run as users run it: without what is set above to save time.

    ``XLA_FLAGS`` stays, empty, so that this file leaves it alone where the program is pytest again.
    """
    return {**os.environ, "XLA_FLAGS": os.environ["XLA_FLAGS"].replace(QUICK_XLA, "")}


# The files that take longest, in that order, are begun first: a long one at the end would leave a core idle.
LONGEST = [
    "test_jax_versions",
    "test_soak",
    "test_field_reports_derivatives",
    "test_field_reports_processes",
    "test_keras_layer",
    "test_transforms",
    "test_tensorflow_worker",
    "test_fuzz",
    "test_table",
    "test_jax_caller",
    "test_keras",
    "test_jax_modules",
    "test_long_training",
    "test_leaving",
    "test_restarts",
    "test_lives",
    "test_jax_worker",
    "test_environments",
    "test_demo",
    "test_sentences",
    "test_living_together",
    "test_three_interpreters",
    "test_starts",
    "test_field_reports_tensors",
    "test_submit",
    "test_commands",
    "test_fallbacks",
    "test_deaths",
    "test_compiled",
    "test_examples",
    "test_bench",
    "test_training",
    "test_threads",
    "test_chain",
    "test_segments",
    "test_jax_callback",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first; pytest-xdist hands files out in this order (`--no-loadscope-reorder`)."""
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look through it again and again is a quarter of the time that collecting takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


# ---- Interpreters of the workers' environments ---------------------------------------------------------------------


def _environment_python(name: str) -> Path:
    python = ROOT / ".envs" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"the environment .envs/{name} is not built: run `make setup`")
    return python


@pytest.fixture(scope="session")
def torch_python() -> Path:
    """The interpreter of the environment that has PyTorch, and neither gradwire nor another framework."""
    return _environment_python("torch")


@pytest.fixture(scope="session")
def tensorflow_python() -> Path:
    """The interpreter of the environment that has TensorFlow and Keras, and nothing else of the three."""
    return _environment_python("tensorflow")


@pytest.fixture(scope="session")
def jax_python() -> Path:
    """The interpreter of the environment that has JAX, and nothing else of the three."""
    return _environment_python("jax")


@pytest.fixture(scope="session")
def sentences_python() -> Path:
    """The interpreter of the environment that has the sentence encoder of examples/sentences."""
    return _environment_python("sentences")


@pytest.fixture(scope="session")
def demo_python() -> Path:
    """The interpreter of the environment that has gradwire and JAX, for programs of users."""
    return _environment_python("demo")


# ---- Ways down from XLA --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param("express", marks=pytest.mark.slow), "callback"])
def xla_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How programs of JAX that are compiled from now on reach pure remote calls."""
    if request.param == "express":
        pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_JAX_FFI", "on" if request.param == "express" else "off")
        yield request.param


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """SIGINT is heard here, and by what is started meanwhile: a shell ignores it for what it puts into the background.

    So is SIGHUP by what is started, which nohup ignores.
    """
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}
    ignored = [number for number in heard if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, heard[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


# ---- What only the next broker can remove --------------------------------------------------------------------------


@pytest.fixture
def sweep_for_the_killed() -> Callable[[], None]:
    """Do as the next broker that starts: remove the runtime folder of a program and a broker that were both killed."""

    def sweep_once() -> None:
        deadline = time.monotonic() + 20.0
        while not sweep(Path(os.environ["XDG_RUNTIME_DIR"])) and time.monotonic() < deadline:
            time.sleep(0.02)  # the killed one has it locked until its last thread is gone

    return sweep_once


# ---- Collections ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """`gc.collect()` looks at what the module makes: with three frameworks, a look at everything takes half a second."""
    gc.collect()
    gc.freeze()


# ---- Nothing stays behind ------------------------------------------------------------------------------------------

LEAVING_S = 20.0  # DESIGN says 5, which benchmarks/endings.py holds; a busy machine may take longer
MARK = "GRADWIRE_TEST_SESSION"

# The kinds of descriptor that gradwire opens. (libzmq's context is never terminated and keeps its eventfds and
# epolls, and frameworks keep files of their own: these are not counted.)
_DESCRIPTORS = re.compile(r"socket:|pipe:|/memfd:gradwire|anon_inode:\[pidfd\]")


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the session if something that started during it is still there `LEAVING_S` after its last test."""
    if not Path("/proc/self/fd").is_dir():
        yield
        return
    mark = uuid.uuid4().hex
    # Short, for a socket's path must fit into 107 bytes; and private, for other sessions make directories too.
    runtime_root = Path(tempfile.mkdtemp(prefix="gwt-", dir="/tmp"))
    in_use = os.open(runtime_root, os.O_RDONLY)
    fcntl.flock(in_use, fcntl.LOCK_EX)  # so that it is not taken for something that is left (left_overs.py)
    before = _descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("XDG_RUNTIME_DIR", str(runtime_root))
        yield
    for item in request.session.items:  # the last one's fixtures are over, but pytest still has them
        (getattr(item, "funcargs", None) or {}).clear()
    gc.unfreeze()
    try:
        left = _wait_nothing_left(mark, runtime_root, before)
    finally:
        shutil.rmtree(runtime_root, ignore_errors=True)
        os.close(in_use)
    gc.freeze()  # pytest collects five times more at its end
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


def _wait_nothing_left(mark: str, runtime_root: Path, before: set[str]) -> list[str]:
    """What is left, once nothing is or the time is up."""
    deadline = time.monotonic() + LEAVING_S
    while True:
        gc.collect()
        left = [
            *(f"process {process}" for process in _processes(mark)),
            *(f"runtime directory {path}" for path in runtime_root.iterdir()),
            *(f"descriptor {name}" for name in sorted(_descriptors() - before)),
            *(f"mapping {line}" for line in _mappings()),
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _processes(mark: str) -> list[str]:
    """Processes that carry the mark, and children of this one that do not (a zombie has no environment)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # another user's, or gone by now
        if int(folder.name) != os.getpid() and (marked or int(parent) == os.getpid()):
            found.append(f"{folder.name} ({state}) {command[:200]}")
    return found


def _descriptors() -> set[str]:
    """Number and target of this process's descriptors of the kinds that gradwire opens."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if _DESCRIPTORS.match(target):
            found.add(f"{link.name} -> {target}")
    return found


def _mappings() -> list[str]:
    """Segments of gradwire that are still mapped into this process."""
    with open("/proc/self/maps") as maps:
        return [line.strip() for line in maps if "memfd:gradwire" in line]
