"""R01, R05, R06: environments that could never be one, each as it is, and nothing leaks from one into another."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from tests.conftest import users_environment

pytestmark = pytest.mark.integration


def beside(name: str) -> ModuleType:
    """The module of that name in this folder."""
    found = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


prefixes, registry = beside("prefixes"), beside("registry")

# ---- R06: each as it is --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridge() -> Iterator[gw.Bridge]:
    with gw.connect() as bridge:
        yield bridge


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "about.py").write_text(
        "import os, sys\n"
        "def it():\n"
        "    return {'prefix': sys.prefix, 'path': list(sys.path), 'PATH': os.environ['PATH'].split(':')}\n"
    )
    return folder


def assert_worker_at_home(bridge: gw.Bridge, targets: Path, python: Any, folder: Path) -> dict[str, Any]:
    """A worker of that interpreter has the folder's packages, and none of this program's; the folder is as it was."""
    before = prefixes.content(folder)
    worker = bridge.worker("numpy", python=python, path=[targets])
    about: dict[str, Any] = worker.function("about:it")()
    assert Path(worker.info["executable"]).parents[1] == folder
    assert worker.info["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert worker.info["numpy"] == np.__version__
    assert about["prefix"] == str(folder)
    mine = [path for path in sys.path if "site-packages" in path]
    assert mine and not set(mine) & set(about["path"])
    assert prefixes.content(folder) == before
    worker.close()
    return about


def test_r06_a_virtual_environment(bridge: gw.Bridge, targets: Path, tmp_path: Path) -> None:
    python = prefixes.make_venv(tmp_path / "env")
    about = assert_worker_at_home(bridge, targets, python, tmp_path / "env")
    assert about["PATH"][0] == f"{tmp_path}/env/bin"


def test_r06_a_condas_prefix(bridge: gw.Bridge, targets: Path, tmp_path: Path) -> None:
    python = prefixes.make_installation(tmp_path / "conda" / "envs" / "mine")
    (python.parents[1] / "conda-meta").mkdir()
    (python.parents[1] / "conda-meta" / "history").touch()
    about = assert_worker_at_home(bridge, targets, python, python.parents[1])
    assert about["PATH"][0] == str(python.parent)  # as when it is activated


def test_r06_pyenvs_interpreter_by_path_and_by_version(
    bridge: gw.Bridge, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "{}.{}.{}".format(*sys.version_info[:3])
    python = prefixes.make_installation(tmp_path / "pyenv" / "versions" / version)
    assert_worker_at_home(bridge, targets, python, python.parents[1])
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PYENV_VERSION", "2.7.18")
    assert_worker_at_home(bridge, targets, version, python.parents[1])


# ---- R05: nothing leaks --------------------------------------------------------------------------------------------


def test_r05_nothing_of_the_callers_environment_reaches_a_worker(
    bridge: gw.Bridge, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sitecustomize on the path, a user site, a startup file: each would run before a line of ours."""
    bogus = tmp_path / "bogus"
    user_site = bogus / "lib" / "python{}.{}".format(*sys.version_info[:2]) / "site-packages"
    user_site.mkdir(parents=True)
    for name in ("sitecustomize", "usercustomize", "numpy"):
        for folder in (bogus, user_site):
            (folder / f"{name}.py").write_text("raise SystemExit('of the caller')")
    python = prefixes.make_venv(tmp_path / "env")
    for name in (
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONUSERBASE",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYTHONSTARTUP",
    ):
        monkeypatch.setenv(name, str(bogus))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(bogus))
    about = assert_worker_at_home(bridge, targets, python, tmp_path / "env")
    assert not [path for path in about["path"] if path.startswith(str(bogus))]
    worker = bridge.worker("numpy", python=python, env={"LD_LIBRARY_PATH": "/right"}, path=[targets])
    assert Path(f"/proc/{worker.pid}/environ").read_bytes().count(b"LD_LIBRARY_PATH=/right\0") == 1
    assert set(worker.info) >= {"executable", "python", "version", "devices", "threads", "numpy"}
    worker.close()


# ---- R01: the two ends, in one program -----------------------------------------------------------------------------

OLD = ["tensorflow-cpu==2.8.4", "numpy<1.24", "protobuf<3.21"]
NEW = ["jax>=0.12"]

PARTS = {
    "old.py": """
import numpy as np
import tensorflow as tf
W = np.linspace(-1.0, 1.0, 12).reshape(3, 4)
def encode(x):
    return tf.tanh(tf.matmul(x, tf.constant(W, x.dtype)))
def make_net():
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Dense(4, input_shape=(3,)), layers.BatchNormalization(), layers.Dense(1)])
""",
    "new.py": """
import jax.numpy as jnp
def head(y, *, scale):
    return {"loss": scale * jnp.sin(y).sum(), "rows": y.sum(0)}
""",
    "program.py": """
import json, sys
import numpy as np
import gradwire as gw
old, new, newest = json.loads(sys.argv[1])
with gw.connect() as bridge:
    tf_w = bridge.worker("tensorflow", python="3.9", requirements=old)
    jax_w = bridge.worker("jax", python=newest, requirements=new, x64=True)
    encode, head = tf_w.function("old.py:encode"), jax_w.function("new.py:head")
    x = np.linspace(-1.0, 1.0, 6).reshape(2, 3)
    y, encode_pullback = encode.vjp(x)
    out, head_pullback = head.vjp(y, scale=2.0)
    y_bar, = head_pullback({"loss": np.float64(1.0), "rows": np.zeros(4)})
    x_bar, = encode_pullback(y_bar)
    # more than a page, which is lent: numpy 1.22 and 1.23 let go of it without the interpreter's lock
    lent = np.linspace(-1.0, 1.0, 6000).reshape(2000, 3)
    far = [float(encode(lent).sum()) for _ in range(3)]

    net = tf_w.module("old.py:make_net")
    step = net.optimizer("tensorflow.keras.optimizers:SGD", learning_rate=0.1)
    net.train()
    before = net.state_dict()
    z, pullback = net.vjp(x.astype(np.float32))
    pullback(np.array([[1.0], [-2.0]], np.float32))
    step.step()
    moved = [name for name, value in net.state_dict().items() if not np.array_equal(value, before[name])]
    print(json.dumps([
        out["loss"].item(), y.tolist(), x_bar.tolist(), far, tf_w.info, jax_w.info, sorted(moved),
        [name for name in ("jax", "tensorflow", "torch", "keras") if name in sys.modules],
    ]))
""",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_r01_the_two_ends_of_what_there_is(tmp_path: Path) -> None:
    """TensorFlow 2.8 on Python 3.9 with numpy 1, the newest JAX on the newest Python with numpy 2, in one gradient."""
    newest = [version for version in registry.pythons() if version in ("3.12", "3.13", "3.14")][-1:]
    if not newest:
        pytest.skip("JAX 0.12 needs Python 3.12 or newer, and there is none here")
    registry.needs_registry(OLD, "3.9")
    registry.needs_registry(NEW, newest[0])
    for name, text in PARTS.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py", json.dumps([OLD, NEW, newest[0]])],
        cwd=tmp_path,
        env={**users_environment(), "GRADWIRE_CACHE": str(registry.CACHE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, y, x_bar, far, old, new, moved, loaded = json.loads(done.stdout)
    w, x = np.linspace(-1.0, 1.0, 12).reshape(3, 4), np.linspace(-1.0, 1.0, 6).reshape(2, 3)
    expected = np.tanh(x @ w)
    np.testing.assert_allclose(y, expected, atol=1e-14)
    np.testing.assert_allclose(loss, 2 * np.sin(expected).sum(), atol=1e-13)
    np.testing.assert_allclose(x_bar, (2 * np.cos(expected) * (1 - expected**2)) @ w.T, atol=1e-13)
    np.testing.assert_allclose(
        far, 3 * [np.tanh(np.linspace(-1.0, 1.0, 6000).reshape(2000, 3) @ w).sum()], atol=1e-9
    )
    assert [old["python"][:4], old["version"], old["numpy"][:4]] == ["3.9.", "2.8.4", "1.23"]
    assert new["python"].startswith(f"{newest[0]}.") and new["numpy"].startswith("2.")
    assert tuple(map(int, new["version"].split(".")[:2])) >= (0, 12)
    assert {"dense/kernel", "dense_1/kernel", "batch_normalization/moving_mean"} <= set(moved)
    assert loaded == []
