"""`import gradwire` imports no framework (DESIGN §3), and the test of it can fail."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

import gradwire as gw

FRAMEWORKS = ("torch", "jax", "jaxlib", "tensorflow", "keras", "ml_dtypes")


def printed_by(code: str, *arguments: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def frameworks_loaded_by(statement: str) -> list[str]:
    """Which frameworks a fresh interpreter has loaded after the statement."""
    return printed_by(f"import sys\n{statement}\nprint(*[m for m in {FRAMEWORKS!r} if m in sys.modules])")


@pytest.mark.parametrize("package", ["gradwire", "gradwire_broker", "gradwire_workers", "gradwire_wire"])
def test_importing_loads_no_framework(package: str) -> None:
    assert frameworks_loaded_by(f"import {package}") == []


def test_the_test_can_fail() -> None:
    assert frameworks_loaded_by("import ml_dtypes") == ["ml_dtypes"]


def test_connecting_leaves_what_only_some_programs_need() -> None:
    """The first bridge is to cost little more than numpy, zmq and msgpack do (benchmarks/start.py measures that)."""
    heavy = {
        "asyncio",
        "concurrent.futures",
        "logging",
        "multiprocessing",
        "subprocess",
        "tempfile",
        "tomllib",
    }
    had = "import numpy, zmq, msgpack, sys; had = set(sys.modules); import gradwire as gw; gw.Bridge, gw.to_jax; "
    assert printed_by(f"{had} print(*({heavy!r} & (set(sys.modules) - had)))") == []


def test_importing_gradwire_leaves_all_that_a_bridge_needs() -> None:
    needs = {"numpy", "zmq", "msgpack", "gradwire.bridge", "gradwire_wire.messages"}
    loaded = f"print(*({needs!r} & set(sys.modules)))"
    assert printed_by(f"import sys, gradwire; dir(gradwire); {loaded}") == []
    assert set(printed_by(f"import sys, gradwire; gradwire.connect; {loaded}")) == needs


def test_every_public_name_is_there_and_only_those() -> None:
    assert {name for name in gw.__all__ if getattr(gw, name).__name__ != name} == set()
    assert {name for name in dir(gw) if not name.startswith("__")} - set(gw._FACES) == set(gw.__all__)
    assert set(gw._HOMES) <= set(gw.__all__)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        gw.conect


HINTS = """
import gradwire as gw, inspect, re, sys, typing
module = getattr(gw, sys.argv[1]) if sys.argv[1:] else gw
functions = {}
for x in [getattr(module, name) for name in module.__all__]:
    for cls in x.__mro__ if inspect.isclass(x) else ():
        if cls.__module__.startswith("gradwire"):
            typing.get_type_hints(cls)
            found = [getattr(f, "fget", None) or getattr(f, "__func__", f) for name, f in vars(cls).items() if re.match("__|[^_]", name)]
            functions.update({f.__qualname__: f for f in found if inspect.isfunction(f)})
    if inspect.isfunction(x):
        functions[x.__qualname__] = x
for name, function in functions.items():
    assert typing.get_type_hints(function).keys() == inspect.get_annotations(function).keys(), name
print(len(functions))
"""


@pytest.mark.parametrize("face", ["", "torch", "jax", "tensorflow", "keras"])
def test_tools_find_the_hints_of_all_that_is_public(face: str) -> None:
    """As beartype, pydantic and sphinx look for them: in the names that the function's module has."""
    assert int(printed_by(HINTS, *[face] * bool(face))[0]) > (0 if face else 50)


def test_a_face_whose_framework_is_not_here() -> None:
    code = "import sys, gradwire\nsys.modules['torch'] = None\ntry: gradwire.torch\nexcept ModuleNotFoundError as error: print(error)"
    assert "for programs that have torch" in " ".join(printed_by(code))


def test_a_framework_that_a_program_has_forbidden_itself_is_left_alone() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "tensorflow", "jax"]))
import gradwire as gw
with gw.connect() as bridge:
    double = bridge.worker("numpy").function("operator:mul")
    print(double(2.0, 3), double.submit(2.0, 3).result(60), double.options(seed=3)(2.0, 3))
"""
    assert " ".join(printed_by(code)) == "6.0 6.0 6.0"


def test_threads_may_look_for_the_first_names_at_once() -> None:
    code = """
import sys, threading
import gradwire as gw
sys.setswitchinterval(1e-5)
barrier, names = threading.Barrier(8), ["connect", "Remote", "to_jax", "Worker"] * 2
found = []
def look(name):
    barrier.wait()
    found.append(getattr(gw, name).__name__)
threads = [threading.Thread(target=look, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*sorted(set(found)))
"""
    assert printed_by(code) == ["Remote", "Worker", "connect", "to_jax"]


def test_what_no_descriptor_is_left_to_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a program may need a module of ours, and find that the program has opened all files it may."""
    from gradwire import MemoryExhaustedError, loading

    def full(name: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files", name)

    monkeypatch.setattr(loading.importlib, "import_module", full)
    with pytest.raises(
        MemoryExhaustedError, match=r"to load 'gradwire\.nothing': close some, or raise the limit"
    ):
        loading.needed("gradwire.nothing")
