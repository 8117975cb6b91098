"""The start of a worker's process, in this one."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire_workers import __main__ as start


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_while_a_framework_is_imported_and_afterwards_it_is(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []

    def import_module(name: str) -> Any:
        looked.append(gc.isenabled())
        if fails:
            raise ImportError("broken")
        return SimpleNamespace(prepare=lambda *_: looked.append(gc.isenabled()))

    config: Any = SimpleNamespace(framework="torch", threads=None, x64=None, device=None)
    lifeline: Any = SimpleNamespace(send_nowait=lambda _: None)
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", import_module)
        if fails:
            with pytest.raises(start.CannotStart, match="broken"):
                start._import_framework(config, lifeline)
        else:
            start._import_framework(config, lifeline)
    assert looked == ([False] if fails else [False, True]) and gc.isenabled()
