"""Environments from requirements, as far as nothing is installed: what is asked for, keys, settings, progress, cache."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.environments import installers, read_requirements
from gradwire.environments.cache import MANIFEST, Cache
from gradwire.environments.children import run
from gradwire.environments.identity import interpreter_of
from gradwire.environments.locks import AlreadyLocked, locked
from gradwire.environments.manifest import Interpreter, Manifest, key_of, name_of
from gradwire.environments.pip_settings import config_files, flags_for_uv, pip_settings, variables_for_uv
from gradwire.environments.progress import Progress
from gradwire.environments.requirements import BadRequirement, normalized
from gradwire_wire.errors import UsageError, WorkerStartError

PYTHON = Interpreter("cpython", "3.11.7", "linux-x86_64", "cpython-311", "/usr/bin/python3.11")

# ---- What is asked for ---------------------------------------------------------------------------------------------


def test_the_workers_needs_are_added_unless_they_are_named() -> None:
    assert normalized([]).packages == ("msgpack>=1.0", "numpy", "pyzmq>=25")
    assert normalized(["NumPy <1.24", "PyZMQ"]).packages == ("msgpack>=1.0", "numpy<1.24", "pyzmq")


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("torch == 2.13.0", "torch==2.13.0"),
        ("Torch==2.13.0   # why", "torch==2.13.0"),
        ("a (>=1, <2)", "a<2,>=1"),
        ("Foo_bar.baz[ Y,x ] >=1", "foo-bar-baz[x,y]>=1"),
        ('a;   python_version  <  "3.9"', 'a; python_version < "3.9"'),
        ("a @https://h/a.whl#sha256=0", "a @ https://h/a.whl#sha256=0"),
        ("a==1 --hash=sha256:b --hash=sha256:a", "a==1 --hash=sha256:a --hash=sha256:b"),
    ],
)
def test_equal_wishes_are_equal_texts(line: str, same: str) -> None:
    assert normalized([line]) == normalized([same])
    assert same in normalized([line]).packages


def test_options_keep_their_order_and_short_ones_are_written_out() -> None:
    made = normalized(["-f /w", "torch", "-i https://a/simple", "--extra-index-url=https://b", "--no-index"])
    assert made.options == (
        *("--find-links /w", "--index-url https://a/simple", "--extra-index-url https://b"),
        "--no-index",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-e .", "names what lies on this machine"),
        ("./wheels/a.whl", "names what lies on this machine"),
        ("/src/project", "names what lies on this machine"),
        ("project/sub", "names what lies on this machine"),
        ("a @ file:///src/a", "names what lies on this machine"),
        ("file:///src/a", "names what lies on this machine"),
        ("git+https://host/a", "write 'NAME @ git"),
        ("-c constraints.txt", "of options there may be"),
        ("-r more.txt", "gradwire env build -r"),
        ("--find-links wheels", "absolute path"),
        ("torch 2.13.0", "write it like"),
        ("torch=2.13.0", "write it like"),
        ("a\nb", "without line breaks"),
        (3, "write it as text"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_do(line: str, said: str) -> None:
    with pytest.raises(BadRequirement, match=said):
        normalized([line])


@given(
    st.lists(st.sampled_from(["torch==2.13.0", "numpy<2", "six", "Six ", "jax[cpu]>=0.4"]), max_size=8),
    st.randoms(),
)
def test_order_and_repetition_do_not_matter(lines: list[str], random: object) -> None:
    shuffled = [*lines, *lines[:1]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert key_of(normalized(lines), PYTHON) == key_of(normalized(shuffled), PYTHON)


def test_files_name_files(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "r.txt").write_text("# head\n\ntorch==2.13.0 \\\n  --hash=sha256:0\n-r more/m.txt  # too\n")
    (tmp_path / "more" / "m.txt").write_text("six\n")
    assert read_requirements(tmp_path / "r.txt") == ["torch==2.13.0    --hash=sha256:0", "six"]
    (tmp_path / "more" / "m.txt").write_text("--requirement=r.txt")
    with pytest.raises(UsageError, match="without end"):
        read_requirements(tmp_path / "r.txt")


# ---- Keys and manifests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", Interpreter._fields)
def test_another_interpreter_is_another_environment(field: str) -> None:
    six = normalized(["six"])
    assert key_of(six, PYTHON) != key_of(six, PYTHON._replace(**{field: "3.12.1"}))
    assert key_of(six, PYTHON) != key_of(normalized(["six>1"]), PYTHON)


def test_names_are_for_people() -> None:
    asked = normalized(["tensorflow-cpu==2.8.4", "protobuf<3.21", "numpy<1.24", "wheel"])
    name = name_of(asked, PYTHON)
    assert name == f"py3.11-protobuf-tensorflow-cpu-{key_of(asked, PYTHON)[:12]}"
    assert len(name_of(normalized(["a" * 300]), PYTHON)) < 80


def test_a_manifest_is_read_back_and_half_of_it_is_none() -> None:
    made = Manifest("k", ["six"], PYTHON, "uv 1", 1.5, 2.5, 7)
    text = made.to_text()
    assert Manifest.from_text(text) == made
    assert all(Manifest.from_text(text[:n]) is None for n in range(len(text) - 2))
    assert Manifest.from_text(text.replace('"format": 1', '"format": 2')) is None
    assert Manifest.from_text('["k"]') is None


def test_an_interpreter_says_what_it_is(tmp_path: Path) -> None:
    mine = interpreter_of(None, os.environ)
    assert mine.version == "{}.{}.{}".format(*sys.version_info[:3])
    assert mine.executable == os.path.realpath(sys.executable)
    (tmp_path / "python").symlink_to(sys.executable)
    assert interpreter_of(f"{tmp_path}/python", os.environ) == mine
    with pytest.raises(
        WorkerStartError, match=r"no environment can be built: .*/bin/true is no Python interpreter"
    ):
        interpreter_of("/bin/true", os.environ)
    with pytest.raises(WorkerStartError, match=r"no environment can be built: no Python 3\.99 was found"):
        interpreter_of("3.99", os.environ)


# ---- Installers and their settings ---------------------------------------------------------------------------------

GLOBAL = "[global]\nindex-url = https://a/simple\nextra-index-url = https://b\n    https://c\n[list]\nfind-links=/x\n"


def test_what_pip_is_told_uv_is_told() -> None:
    settings = pip_settings(
        {"PIP_CERT": "/ca.pem", "PIP_NO_INDEX": "1"}, [GLOBAL, "[install]\nindex_url = https://d"]
    )
    assert variables_for_uv(settings, {}) == {
        "UV_DEFAULT_INDEX": "https://d",
        "UV_INDEX": "https://b https://c",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/ca.pem",
    }
    assert flags_for_uv(settings) == ["--no-index"]
    assert flags_for_uv({"no-index": ["0"]}) == []


def test_what_uv_is_told_itself_wins() -> None:
    settings = pip_settings({}, [GLOBAL])
    assert variables_for_uv(settings, {"UV_INDEX_URL": "u", "UV_EXTRA_INDEX_URL": "v"}) == {}


def test_pips_files_in_pips_order() -> None:
    variables = {"XDG_CONFIG_DIRS": "/x:/y", "PIP_CONFIG_FILE": "/mine"}
    assert list(config_files(variables, "/h")) == [
        *(
            "/y/pip/pip.conf",
            "/x/pip/pip.conf",
            "/etc/pip.conf",
            "/h/.pip/pip.conf",
            "/h/.config/pip/pip.conf",
        ),
        "/mine",
    ]
    assert list(config_files({"PIP_CONFIG_FILE": os.devnull}, "/h")) == []


def test_nothing_is_sent_elsewhere_and_no_python_is_fetched() -> None:
    base = {
        "PATH": "",
        "HOME": "/none",
        "PIP_TARGET": "/t",
        "PIP_INDEX_URL": "i",
        "UV_PYTHON": "3.8",
        "PIP_USER": "1",
    }
    pip, uv = installers.Pip(base).environment, installers.Uv("uv", "1", base).environment
    assert (pip["PIP_INDEX_URL"], pip["PIP_USER"], pip.get("PIP_TARGET")) == ("i", "0", None)
    assert (uv["UV_PYTHON_DOWNLOADS"], uv.get("UV_PYTHON"), uv["UV_DEFAULT_INDEX"]) == ("never", None, "i")


def test_the_installer_is_chosen_by_a_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no" / "python"))
    base = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/none"}
    assert installers.find_installer(base).name == "venv and pip"
    uv = tmp_path / "uv"
    for script, name in (
        ("echo uv 9.8.7", "uv 9.8.7"),
        ("exit 1", "venv and pip"),
        ("echo what", "venv and pip"),
    ):
        uv.write_text(f"#!/bin/sh\n{script}\n")
        uv.chmod(0o755)
        assert installers.find_installer(base).name == name
    with pytest.raises(UsageError, match="none on PATH that runs"):
        installers.find_installer({**base, "GRADWIRE_INSTALLER": "uv"})
    uv.write_text("#!/bin/sh\necho uv 9.8.7\n")
    assert installers.find_installer({**base, "GRADWIRE_INSTALLER": "pip"}).name == "venv and pip"
    with pytest.raises(UsageError, match="set it to uv or pip"):
        installers.find_installer({**base, "GRADWIRE_INSTALLER": "conda"})


# ---- Progress ------------------------------------------------------------------------------------------------------


def test_progress_is_said_at_most_once_an_interval() -> None:
    said: list[str] = []
    now = [0.0]
    progress = Progress("environment e", said.append, 5.0, lambda: now[0])
    progress.begin("building")
    for second in range(12):
        now[0] = float(second)
        progress.doing(f"line {second}")
        progress.doing("")
    assert said == ["building", "environment e: line 5 (5 s)", "environment e: line 10 (10 s)"]
    now[0] = 20.0
    progress.doing("x" * 500)
    assert len(said[-1]) < 200


# ---- Running an installer ------------------------------------------------------------------------------------------


def test_lines_come_as_they_are_written_and_the_last_are_kept(tmp_path: Path) -> None:
    code = "import sys; [print(n) for n in range(100)]; sys.stderr.write('half\\rlast'); sys.exit(3)"
    seen: list[str] = []
    ended = run(
        [sys.executable, "-c", code], environment=os.environ, cwd=tmp_path, mark="m", on_line=seen.append
    )
    assert ended.code == 3
    assert ended.tail[-3:] == ["99", "half", "last"]
    assert len(ended.tail) <= 41
    assert [line for line in seen if line][:100] == [str(n) for n in range(100)]


def test_what_is_raised_meanwhile_ends_the_command_and_its_children(tmp_path: Path) -> None:
    script = "import os, time\nif not os.fork(): print(os.getpid(), flush=True)\ntime.sleep(600)"

    class Enough(Exception):
        pass

    pids: list[int] = []

    def on_line(line: str) -> None:
        if line:
            pids.append(int(line))
            raise Enough

    with pytest.raises(Enough):
        run([sys.executable, "-c", script], environment=os.environ, cwd=tmp_path, mark="m", on_line=on_line)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pids[0]}/cmdline").exists() and Path(f"/proc/{pids[0]}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- The cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "root"),
    [
        ({"GRADWIRE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/gradwire"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/gradwire"),
        ({"HOME": "/h"}, "/h/.cache/gradwire"),
    ],
)
def test_where_it_is(variables: dict[str, str], root: str) -> None:
    assert str(Cache.of(variables).root) == root


def test_it_is_the_users_own(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "cache")
    cache.make()
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "deep" / "cache").chmod(0o770)
    with pytest.raises(UsageError, match="others may change what is in"):
        cache.make()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="set GRADWIRE_CACHE to a folder of yours"):
        Cache(tmp_path / "file").make()


def put(cache: Cache, name: str) -> Path:
    folder = cache.place(name)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    cache.finish(folder, Manifest(f"key-{name}", ["six"], PYTHON, "uv 1", 1.0, 2.0, 7))
    return folder


def test_finished_are_found_and_leftovers_are_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.make()
    assert cache.find("e", "key-e") is None
    folder = put(cache, "e")
    found = cache.find("e", "key-e")
    assert found is not None and found.python == f"{folder}/bin/python"
    assert cache.find("e", "another key") is None
    os.utime(folder / MANIFEST, (5.0, 5.0))
    assert cache.listed()[0].last_use == 5.0
    cache.used(found)
    assert cache.listed()[0].last_use > 5.0
    (folder / "bin" / "python").unlink()
    (folder / "bin" / "python").symlink_to("/gone/python")
    assert cache.find("e", "key-e") is None
    (folder / MANIFEST).unlink()
    assert [(one.name, one.manifest) for one in cache.listed()] == [("e", None)]


def test_one_that_is_locked_is_not_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.make()
    folder = put(cache, "e")
    with locked(cache.lock_of("e")):
        with pytest.raises(UsageError, match=f"being built or removed by process {os.getpid()}"):
            cache.remove("e")
    assert folder.exists()
    cache.remove("e")
    assert not folder.exists() and not cache.lock_of("e").exists()


def test_a_lock_is_one_persons_also_when_its_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    order: list[str] = []

    def wait() -> None:
        with locked(path, lambda: order.append("waits")):
            order.append("second")

    with locked(path):
        with pytest.raises(AlreadyLocked), locked(path):
            raise AssertionError("it had it twice")
        thread = threading.Thread(target=wait)
        thread.start()
        while not order:
            time.sleep(0.01)
        order.append("first")
        path.unlink()
    thread.join(60)
    assert order[-1] == "second" and order.index("first") < order.index("second")
    assert path.exists()
