"""What a worker is started with: interpreter, environment variables, its share of the processors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gradwire_broker import processors
from gradwire_broker.environment import SPINS, THREADS, fair_share, worker_environment
from gradwire_wire.interpreters import NoInterpreter, find_interpreter

PLAIN = {"PATH": "/usr/bin:/bin", "HOME": "/home/me", "LANG": "C.UTF-8"}


def environment(
    base: dict[str, str], env: dict[str, str | None] | None = None, **other: object
) -> dict[str, str]:
    options: dict[str, object] = {"python": "/opt/python", "framework": "torch", "threads": 3, **other}
    return worker_environment({**PLAIN, **base}, env or {}, **options)  # type: ignore[arg-type]


# ---- Environment variables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PYTHONOPTIMIZE",
        "VIRTUAL_ENV",
        "VIRTUAL_ENV_PROMPT",
        "CONDA_PREFIX",
        "CONDA_DEFAULT_ENV",
        "_CONDA_EXE",
        "__PYVENV_LAUNCHER__",
        "PYENV_VERSION",
    ],
)
def test_r05_the_callers_interpreter_stays_with_the_caller(name: str) -> None:
    assert name not in environment({name: "/of/the/caller"})
    assert environment({name: "/of/the/caller"}, {name: "/mine"})[name] == "/mine"


def test_r05_other_variables_pass_and_the_user_overrides_them() -> None:
    base = {"LD_LIBRARY_PATH": "/bogus", "CUDA_VISIBLE_DEVICES": "1"}
    made = environment(base, {"LD_LIBRARY_PATH": "/right", "CUDA_VISIBLE_DEVICES": None})
    assert made["LD_LIBRARY_PATH"] == "/right"
    assert "CUDA_VISIBLE_DEVICES" not in made
    assert environment(base)["LD_LIBRARY_PATH"] == "/bogus"


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "numpy"])
def test_r39_keras_has_the_workers_own_backend(framework: str) -> None:
    caller = {"KERAS_BACKEND": "of the caller"}
    made = environment(caller, framework=framework)["KERAS_BACKEND"]
    assert made == ("of the caller" if framework == "numpy" else framework)
    assert environment(caller, {"KERAS_BACKEND": "mine"}, framework=framework)["KERAS_BACKEND"] == "mine"


def test_r03_memory_is_left_for_others() -> None:
    made = environment({})
    assert made["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert made["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert (
        environment({}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"})["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    )


def test_r04_every_library_is_told_how_many_threads() -> None:
    made = environment({"OMP_NUM_THREADS": "64"}, {"MKL_NUM_THREADS": "7"})
    assert {name: made[name] for name in THREADS} == {**dict.fromkeys(THREADS, "3"), "MKL_NUM_THREADS": "7"}


@pytest.mark.parametrize(
    ("own", "threads"),
    [("1", 1), ("2,1", 2), (" 2 ", 2), ("64", 3), ("0", 3), ("-1", 3), ("all", 3), ("", 3)],
)
def test_r04_a_program_that_was_told_to_keep_to_fewer_has_its_workers_keep_to_them(
    own: str, threads: int
) -> None:
    assert fair_share(3, {"OMP_NUM_THREADS": own}) == threads and fair_share(3, {}) == 3


def test_threads_that_wait_leave_the_processor_unless_somebody_wants_it_otherwise() -> None:
    assert environment({})["GOMP_SPINCOUNT"] == SPINS
    for name, value in (("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")):
        for made in (environment({name: value}), environment({}, {name: value})):
            assert made[name] == value and made.get("GOMP_SPINCOUNT") != SPINS


def test_r04_xla_is_told_in_its_own_way() -> None:
    one = environment({"XLA_FLAGS": "--xla_dump_to=/x"}, framework="jax", threads=1)
    assert one["NPROC"] == one["PJRT_NPROC"] == "1"
    assert one["XLA_FLAGS"] == "--xla_dump_to=/x"  # its own flag would change the bits of a matrix product
    assert "NPROC" not in environment({}, framework="torch", threads=1)
    assert environment({}, {"NPROC": "3"}, framework="jax", threads=1)["NPROC"] == "3"


def test_the_path_is_that_of_the_workers_environment(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").touch()
    base = {"VIRTUAL_ENV": "/callers", "PATH": "/callers/bin:/usr/bin"}
    assert environment(base, python=f"{tmp_path}/bin/python")["PATH"] == f"{tmp_path}/bin:/usr/bin"
    assert environment(base, python="/usr/local/bin/python3")["PATH"] == "/usr/bin"


def test_a_base_without_path_gets_none() -> None:
    assert "PATH" not in worker_environment({}, {}, python="/x/bin/python", framework="torch", threads=1)


# ---- Interpreters --------------------------------------------------------------------------------------------------


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_none_is_the_interpreter_of_the_program() -> None:
    assert find_interpreter(None, {}) == os.path.abspath(sys.executable)


def test_r06_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert find_interpreter(f"{tmp_path}/python", {}) == f"{tmp_path}/python"


def test_a_name_is_looked_up(tmp_path: Path) -> None:
    there = executable(tmp_path / "bin" / "python9")
    assert find_interpreter("python9", {"PATH": f"/nowhere:{tmp_path}/bin"}) == there
    with pytest.raises(NoInterpreter, match="no 'python9' on PATH"):
        find_interpreter("python9", {"PATH": "/nowhere"})


def test_a_version_is_looked_up_on_path_in_pyenv_and_in_uv(tmp_path: Path) -> None:
    shims = executable(tmp_path / ".pyenv" / "shims" / "python3.77")
    environment = {"HOME": str(tmp_path), "PATH": os.path.dirname(shims)}
    with pytest.raises(NoInterpreter, match=r"no Python 3\.77"):
        find_interpreter("3.77", environment)
    in_uv = executable(tmp_path / ".local/share/uv/python/cpython-3.77.1-linux" / "bin" / "python3.77")
    assert find_interpreter("3.77", environment) == in_uv
    in_pyenv = executable(tmp_path / ".pyenv" / "versions" / "3.77.4" / "bin" / "python3.77")
    assert find_interpreter("3.77", environment) == in_pyenv
    assert find_interpreter("3.77.4", environment) == in_pyenv
    on_path = executable(tmp_path / "bin" / "python3.77")
    assert find_interpreter("3.77", {**environment, "PATH": f"{tmp_path}/bin"}) == on_path
    with pytest.raises(NoInterpreter):
        find_interpreter("3.7", environment)


def test_r65_a_wrong_path_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    with pytest.raises(NoInterpreter, match="no interpreter at"):
        find_interpreter(f"{tmp_path}/bin/python", {})
    (tmp_path / "python").symlink_to(tmp_path / "gone")
    with pytest.raises(NoInterpreter, match="a link whose target is gone"):
        find_interpreter(f"{tmp_path}/python", {})
    inside = executable(tmp_path / "bin" / "python")
    with pytest.raises(NoInterpreter, match=f"is a folder; did you mean {inside}"):
        find_interpreter(str(tmp_path), {})
    with pytest.raises(NoInterpreter, match=f"is a folder; did you mean {inside}"):
        find_interpreter(f"{tmp_path}/bin", {})
    with pytest.raises(NoInterpreter, match=r"is a folder$"):
        find_interpreter(os.path.dirname(tmp_path), {})
    (tmp_path / "text").write_text("x")
    with pytest.raises(NoInterpreter, match="not executable"):
        find_interpreter(f"{tmp_path}/text", {})


# ---- Processors ----------------------------------------------------------------------------------------------------


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("", {}, 8),
        (
            "0::/a/b\n",
            {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"},
            2,
        ),
        ("0::/a/b\n", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "10000 100000"}, 1),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "9000000 100000"}, 8),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "nonsense"}, 8),
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/x\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3,
        ),
    ],
)
def test_r04_affinity_and_quota_are_respected(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert processors.available_processors(machine(tmp_path, cgroup, files)) == expected


@pytest.mark.usefixtures("eight")
def test_no_proc_no_quota(tmp_path: Path) -> None:
    assert processors.available_processors(tmp_path) == 8


@pytest.mark.parametrize(
    ("available", "workers", "share"), [(2, 1, 2), (2, 2, 1), (2, 3, 1), (8, 3, 2), (1, 0, 1)]
)
def test_r04_shares(available: int, workers: int, share: int) -> None:
    assert processors.share_of(available, workers) == share
