"""Checkpoint files: readable by safetensors alone, whole or not there, every dtype as it is."""

from __future__ import annotations

import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from gradwire_wire.carriers import Carrier
from gradwire_wire.dtypes import BY_NAME
from gradwire_wire.errors import DtypeError, UsageError
from gradwire_workers import checkpoints

safetensors = pytest.importorskip("safetensors")

NAMES = (
    "bool int8 uint8 int16 uint32 int64 float16 float32 float64 bfloat16 float8_e4m3fn float8_e5m2 complex64"
)


def carrier(name: str, shape: tuple[int, ...] = (2, 3)) -> Carrier:
    dtype = BY_NAME[name]
    size = np.dtype(dtype.carrier).itemsize
    raw = np.arange(int(np.prod(shape)) * size, dtype=np.uint8) % 2
    return Carrier(raw.view(dtype.carrier).reshape(shape), dtype)


def test_every_dtype_goes_round(tmp_path: pathlib.Path) -> None:
    state = {f"layer.{name}": carrier(name) for name in NAMES.split()}
    state["scalar"] = carrier("float32", ())
    state["empty"] = carrier("bfloat16", (0, 3))
    state["strided"] = Carrier(np.arange(6.0).reshape(2, 3).T, BY_NAME["float64"])
    path = str(tmp_path / "state.safetensors")
    checkpoints.write(path, state)
    found = checkpoints.read(path)
    assert found.keys() == state.keys()
    for name, x in state.items():
        assert found[name].dtype == x.dtype and found[name].array.shape == x.array.shape
        assert found[name].array.tobytes() == x.array.tobytes(), name
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]


def test_other_programs_read_and_write_it(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    path = str(tmp_path / "state.safetensors")
    values = np.array([1.5, -2, 3], ml_dtypes.bfloat16)
    checkpoints.write(path, {"w": Carrier(values.view(np.uint16), BY_NAME["bfloat16"])})
    assert torch.equal(load_file(path)["w"], torch.tensor([1.5, -2, 3], dtype=torch.bfloat16))
    save_file({"b": torch.arange(3.0).to(torch.float8_e5m2)}, path)
    found = checkpoints.read(path)["b"]
    assert found.dtype.name == "float8_e5m2"
    assert found.array.view(ml_dtypes.float8_e5m2).astype(float).tolist() == [0, 1, 2]


def test_a_failure_leaves_the_former_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    checkpoints.write(str(path), {"w": carrier("float32")})
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "serialize_file", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(str(path), {"w": carrier("int8")})
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_written_or_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"w": carrier("float32")}
    with pytest.raises(UsageError, match="no folder"):
        checkpoints.write(str(tmp_path / "none" / "x"), good)
    with pytest.raises(UsageError, match="is a folder"):
        checkpoints.write(str(tmp_path), good)
    with pytest.raises(DtypeError, match=r"w \(complex128\)"):
        checkpoints.write(str(tmp_path / "x"), {"w": carrier("complex128")})
    with pytest.raises(UsageError, match="cannot be read"):
        checkpoints.read(str(tmp_path / "x"))
    checkpoints.write(str(tmp_path / "x"), good)
    content = (tmp_path / "x").read_bytes()
    for broken in (content[:-3], b"\x00" * 20, b""):
        (tmp_path / "y").write_bytes(broken)
        with pytest.raises(UsageError, match="whole safetensors file"):
            checkpoints.read(str(tmp_path / "y"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        checkpoints.write(str(tmp_path / "x"), good)
    assert {p.name for p in tmp_path.iterdir()} == {"x", "y"}
