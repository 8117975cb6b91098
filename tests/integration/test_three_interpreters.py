"""Three interpreters in one pipeline: the oldest and the newest Python there is, numpy 1 and numpy 2, and this program."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gradwire as gw

pytestmark = pytest.mark.integration

STAGES = """
import numpy as np

def warp(x, *, rate):
    return {"y": np.sin(rate * x), "aux": (x.shape, np.__version__)}

def _warp_vjp(x, *, rate):
    return warp(x, rate=rate), lambda out_bar: (out_bar["y"] * rate * np.cos(rate * x),)

warp.vjp = _warp_vjp

def mix(y, a):
    return y @ a

mix.vjp = lambda y, a: (mix(y, a), lambda z_bar: (z_bar @ a.T, y.T @ z_bar))
"""


def registry() -> ModuleType:
    found = importlib.util.spec_from_file_location("registry", Path(__file__).parent / "registry.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[gw.Worker, gw.Worker]]:
    """A worker of the oldest Python with numpy 1, and one of the newest with numpy 2."""
    with_registry: Any = registry()
    versions = with_registry.pythons()
    if len(versions) < 2:
        pytest.skip(f"there is one Python here that a worker may have: {versions}")
    oldest, newest = versions[0], versions[-1]
    with_registry.needs_registry(["numpy<2"], oldest)
    with_registry.needs_registry(["numpy>=2"], newest)
    folder = tmp_path_factory.mktemp("stages")
    (folder / "stages.py").write_text(STAGES)
    with pytest.MonkeyPatch.context() as patch, gw.connect() as bridge:
        patch.setenv("GRADWIRE_CACHE", str(with_registry.CACHE))
        old = bridge.worker("numpy", name="old", python=oldest, requirements=["numpy<2"], path=[folder])
        new = bridge.worker("numpy", name="new", python=newest, requirements=["numpy>=2"], path=[folder])
        assert old.info["python"].startswith(f"{oldest}.") and new.info["python"].startswith(f"{newest}.")
        yield old, new


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [2, 50_000], ids=["in the message", "in shared memory"])
def test_forward_and_gradient_through_three_interpreters(
    ends: tuple[gw.Worker, gw.Worker], rows: int
) -> None:
    old, new = ends
    assert [old.info["numpy"][:2], new.info["numpy"][:2]] == ["1.", "2."]
    warp, mix = old.function("stages:warp"), new.function("stages:mix")
    rng = np.random.default_rng(rows)
    x, a = rng.standard_normal((rows, 3)), rng.standard_normal((3, 2))
    kept = x.copy()

    out, warp_pullback = warp.vjp(x, rate=0.5)
    z, mix_pullback = mix.vjp(out["y"], a)
    assert out["aux"] == ((rows, 3), old.info["numpy"])
    np.testing.assert_allclose(out["y"], np.sin(0.5 * x), atol=1e-15)
    np.testing.assert_allclose(z, np.sin(0.5 * x) @ a, atol=1e-12)

    z_bar = rng.standard_normal(z.shape)
    y_bar, a_bar = mix_pullback(z_bar)
    (x_bar,) = warp_pullback({"y": y_bar, "aux": ((None, None), None)})
    np.testing.assert_allclose(a_bar, np.sin(0.5 * x).T @ z_bar, atol=1e-9)
    np.testing.assert_allclose(x_bar, (z_bar @ a.T) * 0.5 * np.cos(0.5 * x), atol=1e-12)
    np.testing.assert_array_equal(x, kept)
    assert old.info["executable"] != new.info["executable"] != os.path.realpath("/proc/self/exe")
