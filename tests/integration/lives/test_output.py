"""What workers print is shown, whole and in order, and nobody is ever held up by it (R60)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EVERY_WAY = """
import ctypes, logging, os, subprocess, sys
print("by print")
sys.stderr.write("by stderr\\n")
os.write(1, b"by descriptor 1\\n")
os.write(2, b"by descriptor 2\\n")
ctypes.CDLL(None).puts(b"by C")
logging.warning("by logging")
subprocess.run(["echo", "by a child"])
os.write(1, "grün \\u2713\\n".encode() + b"not utf-8: \\xff\\n")
print("surrogate: \\udc80")
for i in range(3):
    sys.stderr.write(f"\\r{i}0%")
    sys.stderr.flush()
print()
print("the end")
"""


def shown_by(one: Any, until_line: str = "the end") -> list[str]:
    """What its stderr shows up to a line."""
    lines: list[str] = []
    while not lines or until_line not in lines[-1]:
        line = one.process.stderr.readline()
        assert line, lines
        lines.append(line.rstrip("\n"))
    return lines


def test_r60_every_way_of_printing_is_shown_with_the_workers_name(program: Callable[..., Any]) -> None:
    one = program(
        f"link = standin.link(); standin.worker(link, name='enc', serving={EVERY_WAY!r}); time.sleep(600)"
    )
    lines = shown_by(one)
    assert all(line.startswith("[enc] ") for line in lines), lines
    text = "\n".join(lines)
    for way in ("print", "stderr", "descriptor 1", "descriptor 2", "C", "a child"):
        assert f"[enc] by {way}\n" in text
    for line in ("WARNING:root:by logging", "grün ✓", "not utf-8: \\xff", "surrogate: \\udc80"):
        assert f"[enc] {line}\n" in text
    assert "20%" in text


def test_output_while_starting_is_shown_too(program: Callable[..., Any]) -> None:
    one = program("standin.worker(standin.link(), importing=\"print('the end')\"); time.sleep(600)")
    assert shown_by(one) == ["[numpy] the end"]


def test_what_is_printed_last_is_shown(program: Callable[..., Any]) -> None:
    one = program(
        "link = standin.link(); facts = standin.worker(link, serving=\"print('by', end=' ', flush=True); raise SystemExit('e')\")\n"
        "link.death_of(facts.incarnation, 60)\nlink.close()"
    )
    assert one.end()[2] == "[numpy] by e\n"


@pytest.mark.slow
def test_r60_10_mb_are_shown_whole(program: Callable[..., Any]) -> None:
    code = "for i in range(100_000): print(f'{i:05} ' + 'x' * 94)\nprint('the end')"
    one = program(f"link = standin.link(); standin.worker(link, serving={code!r}); time.sleep(600)")
    lines = shown_by(one)
    assert len(lines) == 100_001
    assert [int(line[8:13]) for line in lines[:-1]] == list(range(100_000))


PRINTS_A_LOT = "for i in range(100_000): print('x' * 99)\nopen({note!r}, 'w').write('through')"


def wait_for(path: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, "the worker was held up"
        time.sleep(0.02)


def test_r60_10_mb_that_nobody_reads_hold_up_nothing(program: Callable[..., Any], tmp_path: Path) -> None:
    """stderr is a pipe that is full: the worker goes on, deaths are told, the program ends in time."""
    note = tmp_path / "note"
    one = program(f"""
        link = standin.link()
        facts = standin.worker(link, serving={PRINTS_A_LOT.format(note=str(note))!r})
        while not os.path.exists({str(note)!r}): time.sleep(0.02)
        link.stop_worker(facts.incarnation)
        print(standin.worker(link).name, flush=True)
        sys.exit(3)
        """)
    wait_for(note)
    assert one.line() == "numpy"
    assert one.process.wait(60) == 3
    assert not one.wait_gone()


def test_r60_a_program_that_stands_still_holds_up_nobody(program: Callable[..., Any], tmp_path: Path) -> None:
    """Its threads do not run (the GIL is held): the broker keeps what it may, and the worker goes on."""
    note = tmp_path / "note"
    one = program(f"""
        import ctypes
        link = standin.link()
        facts = standin.worker(link, serving={PRINTS_A_LOT.format(note=str(note))!r})
        print(link._broker._process.pid, flush=True)
        ctypes.PyDLL(None).sleep(600)
        """)
    broker = int(one.line())
    wait_for(note)
    status = Path(f"/proc/{broker}/status").read_text()
    resident_kb = int(status.split("VmRSS:")[1].split()[0])
    assert resident_kb < 150_000


def test_the_bound_says_what_was_dropped(program: Callable[..., Any], tmp_path: Path) -> None:
    note, held = tmp_path / "note", tmp_path / "held"
    code = (
        f"import os, time\nwhile not os.path.exists({str(held)!r}): time.sleep(0.01)\n"
        f"for i in range(400): print('x' * 99_999)\nopen({str(note)!r}, 'w').write('through')\nprint('the end')"
    )
    one = program(f"""
        import ctypes
        link = standin.link()
        standin.worker(link, serving={code!r})
        ctypes.PyDLL(None).system(b"touch '{held}'; while ! [ -e '{note}' ]; do sleep 0.1; done")  # the GIL is held meanwhile
        time.sleep(600)
        """)
    wait_for(note)
    lines = shown_by(one)
    dropped = [line for line in lines if "characters dropped" in line]
    assert len(dropped) == 1
    lost = int(dropped[0].split("… ")[1].split()[0].replace(",", ""))
    assert 20_000_000 < lost < 30_000_000


def test_a_workers_output_does_not_reach_stdout(program: Callable[..., Any]) -> None:
    one = program(
        "link = standin.link(); standin.worker(link, serving=\"print('x')\"); time.sleep(0.3); link.close(); print('mine')"
    )
    assert one.end() == (0, "mine\n", "[numpy] x\n")
