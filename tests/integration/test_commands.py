"""The command line, as a person and as a program use it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gradwire import commands


def gradwire(*arguments: str, timeout_s: float = 60.0, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; stdout and stderr as text."""
    command = [sys.executable, "-m", "gradwire", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s, **options)  # type: ignore[call-overload]


def test_every_command_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        commands.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name in commands.COMMANDS:
        assert f"    {name} " in shown


def test_an_unknown_command_is_a_usage_error() -> None:
    done = gradwire("doktor")
    assert done.returncode == 2
    assert "doctor" in done.stderr and "Traceback" not in done.stderr


def test_doctor_names_this_interpreter_and_what_it_has() -> None:
    done = gradwire("doctor", "--json")
    findings = json.loads(done.stdout)
    assert done.returncode == any(finding["level"] == "problem" for finding in findings)
    (own,) = [f["text"] for f in findings if f["topic"] == "interpreter" and sys.executable in f["text"]]
    assert "numpy" in own and "pyzmq" in own
    assert {"memory", "tensors", "calls", "open files"} <= {finding["topic"] for finding in findings}
