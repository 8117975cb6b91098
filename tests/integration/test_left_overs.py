"""`left_overs.py` counts what it should, and can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("left_overs.py")
TIDY = "import gradwire as gw\nwith gw.connect() as b: b.worker('numpy').function('operator:neg')(1.0)"
PROCESS = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL, start_new_session=True).pid)"
FOLDER = "import tempfile; print(tempfile.mkdtemp(prefix='gradwire-', dir='/tmp'))"


def run(code: str, leaving_s: float = 60.0) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), sys.executable, "-c", code]
    environment = {**os.environ, "LEFT_OVERS_S": str(leaving_s)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_program_that_leaves_nothing() -> None:
    code, said = run(TIDY)
    assert code == 0, said
    assert [line.split()[0] for line in said.splitlines()[1:]] == [
        "processes",
        "descriptors",
        "mappings",
        "files",
    ]


def test_a_process_is_found() -> None:
    code, said = run(PROCESS, 0.2)
    os.kill(int(said.split()[0]), 9)
    assert code == 1 and "LEFT processes" in said


def test_a_folder_is_found() -> None:
    code, said = run(FOLDER, 0.2)
    os.rmdir(said.split()[0])
    assert code == 1 and "LEFT files" in said


def test_a_command_that_fails() -> None:
    assert run("raise SystemExit(3)")[0] == 1
