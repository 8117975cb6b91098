"""R66: environments from requirements, by real installers from a folder of tiny wheels.

Built once and found again, by several processes at once too; progress; what is said where it fails; nothing left
where it is interrupted or killed. Then the real thing: workers whose environments come from the registry.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gradwire import environments
from gradwire.commands import main
from gradwire.environments.cache import MANIFEST
from gradwire.environments.installers import find_installer
from gradwire_wire.errors import UsageError, WorkerStartError
from gradwire_wire.interpreters import cleaned
from gradwire_workers.installation import how_to_install

pytestmark = pytest.mark.integration

INSTALLERS = ("pip", "uv")


def wheels() -> Any:
    """The module beside this one."""
    found = importlib.util.spec_from_file_location("wheels", Path(__file__).parent / "wheels.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels for all tests here."""
    folder: Path = wheels().make_index(tmp_path_factory.mktemp("index") / "wheels", "torchlike", "other")
    return folder


@pytest.fixture
def place(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; installers know the folder of wheels only."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    for name, value in {**settings, "UV_CACHE_DIR": str(tmp_path / "uv"), "UV_NO_CONFIG": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def need_installer(name: str) -> None:
    variables = {**cleaned(os.environ, sys.executable), "GRADWIRE_INSTALLER": ""}
    if name == "uv" and find_installer(variables).name == "venv and pip":
        pytest.skip("uv is not installed")


@pytest.fixture
def pip(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache, and pip, which every Python brings along."""
    monkeypatch.setenv("GRADWIRE_INSTALLER", "pip")
    return place


def version_in(python: str, module: str) -> str:
    code = f"import {module}, sys; print({module}.__version__, sys.prefix)"
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()[0]


# ---- Built once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installer", INSTALLERS)
def test_r66_built_once_and_found_again(
    place: Path, installer: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need_installer(installer)
    monkeypatch.setenv("GRADWIRE_INSTALLER", installer)
    for name, value in {
        "PYTHONPATH": "/bogus",
        "VIRTUAL_ENV": "/bogus",
        "PIP_TARGET": str(place / "t"),
    }.items():
        monkeypatch.setenv(name, value)
    made = environments.build(["torchlike==99.0"])
    said = capfd.readouterr().err
    assert made.python.startswith(f"{place}/environments/py")
    assert version_in(made.python, "torchlike") == version_in(made.python, "msgpack") == "99.0"
    assert f"gradwire: building environment {made.name}" in said and "is ready" in said
    assert {"pip": "by venv and pip", "uv": "by uv "}[installer] in said
    again = environments.build(["torchlike == 99.0", "NumPy"])
    assert again.python == made.python
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in (place / "environments").iterdir()) == [
        made.name,
        f"{made.name}.lock",
    ]
    assert place.stat().st_mode & 0o777 == 0o700


def test_another_python_is_another_environment(place: Path) -> None:
    need_installer("uv")
    made = environments.build([])
    try:
        older = environments.build([], "3.9")
    except WorkerStartError as error:
        pytest.skip(str(error))
    assert older.name != made.name
    assert older.manifest is not None and older.manifest.interpreter.minor == "3.9"
    assert version_in(older.python, "numpy") == "99.0"


BUILD = "import sys; from gradwire import environments; print(environments.build(sys.argv[1:]).python)"


def builder(*requirements: str, before: str = "", **popen: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", before + BUILD, *requirements]
    return subprocess.Popen(command, text=True, **{**pipes, **popen})


def test_r66_processes_that_ask_at_once_build_it_once(place: Path) -> None:
    three = [builder("other") for _ in range(3)]
    results = [one.communicate(timeout=110) for one in three]
    assert [one.returncode for one in three] == [0, 0, 0], results
    assert len({output for output, _ in results}) == 1
    assert sum("building environment" in errors for _, errors in results) == 1
    assert version_in(results[0][0].strip(), "other") == "99.0"


def test_r66_threads_that_ask_at_once_build_it_once(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: environments.build(["torchlike"]), range(3)))
    assert len({one.python for one in made}) == 1
    assert capfd.readouterr().err.count("building environment") == 1
    assert version_in(made[0].python, "torchlike") == "99.0"


# ---- Slow, failing, interrupted, killed ----------------------------------------------------------------------------


@pytest.fixture
def slow(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[int]]]:
    """An uv that makes half an environment, starts a child that goes on writing into it, and takes its time.

    The function gives the pids of both, once they are there. Both end once there is a file "enough".
    """
    script = tmp_path / "tools" / "uv"
    script.parent.mkdir()
    script.write_text(f"""#!{sys.executable}
import os, sys, time
if sys.argv[1] == "--version":
    sys.exit(print("uv 0.0.1"))
folder = sys.argv[-1] if sys.argv[1] == "venv" else os.path.dirname(sys.argv[-1])
os.makedirs(folder + "/bin", exist_ok=True)
if sys.argv[1] == "venv":
    os.symlink({os.path.realpath(sys.executable)!r}, folder + "/bin/python")
    sys.exit(0)
child = os.fork()
who = "child" if not child else "itself"
print("Downloading something large", flush=True)
with open({str(tmp_path)!r} + "/" + who, "w") as note:
    note.write(str(os.getpid()))
end = time.time() + 600
while time.time() < end and not os.path.exists({str(tmp_path)!r} + "/enough"):
    os.makedirs(folder + "/lib", exist_ok=True)
    open(folder + "/lib/" + who, "a").close()
    time.sleep(0.05)
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")

    def pids() -> list[int]:
        notes = [tmp_path / "itself", tmp_path / "child"]
        until(lambda: all(note.exists() and note.read_text() for note in notes))
        return [int(note.read_text()) for note in notes]

    yield pids
    for note in (tmp_path / "itself", tmp_path / "child"):
        if note.exists() and alive(int(note.read_text())):
            os.kill(int(note.read_text()), signal.SIGKILL)


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def content(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "environments").iterdir() if path.is_dir())


def test_r66_progress_is_shown_while_it_takes_long(slow: Callable[[], list[int]], tmp_path: Path) -> None:
    said = [tmp_path / "said by one", tmp_path / "said by the other"]
    hasty = "from gradwire.environments import progress; progress.FILE_S = 0.5; "
    with said[0].open("w") as first, said[1].open("w") as second:
        one, other = (builder("other", before=hasty, stderr=stderr) for stderr in (first, second))
    slow()
    for shown in ("Downloading something large (", "waiting for process"):
        until(lambda shown=shown: any(shown in text.read_text() for text in said))
    (tmp_path / "enough").touch()
    for process in (one, other):
        process.communicate(timeout=60)
    results = [text.read_text() for text in said]
    built, waited = sorted(results, key=lambda said: "waiting for" in said)
    assert "Downloading something large (" in built, results
    assert f"waiting for process {one.pid if built == results[0] else other.pid}, which builds it (" in waited
    assert all("is ready" in said or "waiting" in said for said in results)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_r66_a_build_that_is_interrupted_leaves_nothing(
    place: Path, slow: Callable[[], list[int]], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"].partition(":")[2]
    one = builder("other", start_new_session=True)
    installer, child = slow()
    os.killpg(one.pid, number) if number == signal.SIGINT else one.send_signal(number)
    errors = one.communicate(timeout=60)[1]
    assert one.returncode in (-number, 130), errors
    until(lambda: not alive(installer))
    if number == signal.SIGINT:
        until(lambda: not alive(child))
        assert content(place) == []
    else:
        assert alive(child)  # nobody could end it; it goes on writing until somebody takes over
        assert [one.manifest for one in environments.listed()] == [None]
    monkeypatch.setenv("PATH", path)
    made = environments.build(["other"])
    assert not alive(child)
    assert version_in(made.python, "other") == "99.0"
    assert not list(made.folder.glob("lib/child"))


def test_r66_a_missing_requirement_is_said_by_the_installers_last_lines(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installer in INSTALLERS:
        need_installer(installer)
        monkeypatch.setenv("GRADWIRE_INSTALLER", installer)
        with pytest.raises(WorkerStartError) as caught:
            environments.build(["no-such-thing==1.2.3"])
        text = str(caught.value)
        assert "could not be built: installing failed; nothing of it was kept" in text
        assert "  command: " in text and "install" in text
        assert "exit code 1" in text
        assert "no-such-thing==1.2.3" in text.partition("last lines:")[2]
        assert "try: other versions in requirements=" in text
        assert content(place) == []
        assert list((place / "environments").iterdir()) == []


def test_r66_the_module_venv_may_be_missing(pip: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *venv*) echo "No module named venv" >&2; exit 1;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    from gradwire.environments import building

    interpreter = building.interpreter_of(None, os.environ)._replace(executable=str(python))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "interpreter_of", lambda *_: interpreter)
        with pytest.raises(
            WorkerStartError, match=r"(?s)making it failed.*No module named venv.*python3-venv on Debian"
        ):
            environments.build([])
    assert content(pip) == []


# ---- Listing and removing ------------------------------------------------------------------------------------------


WRONG = {  # what was written: what is said
    ("remove",): "give names, or --unused DAYS",
    ("remove", "--unused", "-1"): "'-1' is not a number from 0 up",
    ("build",): "give requirements, or a file of them with -r",
    ("build", "torch 2.1"): "'torch 2.1' is no requirement",
}


def test_the_command_builds_lists_and_removes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.txt").write_text("other  # comment\n")
    assert main(["env", "list"]) == 0
    assert "there are no environments" in capsys.readouterr().out
    assert main(["env", "build", "-r", str(tmp_path / "r.txt")]) == 0
    python = Path(capsys.readouterr().out.strip())
    name = python.parents[1].name
    assert version_in(str(python), "other") == "99.0"
    assert main(["env", "list"]) == 0
    listed = capsys.readouterr().out
    assert name in listed and "used within the hour: msgpack>=1.0 numpy other pyzmq>=25" in listed
    assert main(["env", "remove", "py9"]) == 1
    assert f"no environment is 'py9'; there are {name}" in capsys.readouterr().err
    for wrong, says in WRONG.items():
        with pytest.raises(SystemExit) as leaving:
            main(["env", *wrong])
        assert leaving.value.code == 2 and says in capsys.readouterr().err, wrong
    os.utime(python.parents[1] / MANIFEST, (time.time() - 5 * 86400,) * 2)
    assert main(["env", "remove", "--unused", "6"]) == 0
    assert python.exists()
    assert main(["env", "remove", "--unused", "4"]) == 0
    assert not python.exists()
    assert list((place / "environments").iterdir()) == []


def test_what_was_removed_from_an_environment_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "py3.11-x"))
    (tmp_path / "py3.11-x").mkdir()
    assert how_to_install("torch") == f"{sys.executable} -m pip install torch"
    manifest = {"requirements": ["msgpack>=1.0", "Flash_Attn[x]==2 ; sys_platform == 'linux'", "pyzmq"]}
    (tmp_path / "py3.11-x" / MANIFEST).write_text(json.dumps(manifest))
    assert how_to_install("torch numpy") == (
        "requirements=[…, 'torch', 'numpy'], of which this environment was built"
    )
    for lost in ("pyzmq", "numpy msgpack", "flash-attn"):
        assert how_to_install(lost).startswith("`gradwire env remove py3.11-x`, after which it is built anew")
    assert how_to_install("msgpack>=1.0").startswith("requirements="), "another version was asked for"
    (tmp_path / "py3.11-x" / MANIFEST).write_text("{")
    assert how_to_install("pyzmq").startswith("requirements=")


def test_one_in_use_is_not_removed_and_one_whose_interpreter_is_gone_is_built_anew(place: Path) -> None:
    made = environments.build([])
    user = subprocess.Popen([made.python, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(UsageError, match=f"in use by process {user.pid}: stop that first"):
            environments.remove([made])
        assert made.folder.exists()
    finally:
        user.communicate(b"\n", timeout=60)
    (made.folder / "bin" / "python").unlink()
    shutil.rmtree(made.folder / "lib")
    again = environments.build([])
    assert again.folder == made.folder
    assert version_in(again.python, "numpy") == "99.0"
    environments.remove([environments.named(made.manifest.key[:10] if made.manifest else "")])
    assert not made.folder.exists()
