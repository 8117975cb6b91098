"""What the whole suite leaves behind: processes, descriptors, mappings and files, before and after.

    python tests/integration/left_overs.py [COMMAND...]      (python -m pytest -n 2 --dist loadfile tests)

What is still there `LEFT_OVERS_S` (6) seconds after the command's end is left.

Runs the command under a mark in its environment, which everything inherits that it starts, prints what there is of each
kind before and after, and exits with 1 if the two differ or the command failed. Descriptors and mappings are those of
gradwire's memory in any marked process; each test session looks at its own ones besides (tests/conftest.py). Files are
runtime folders and sockets that no living broker has locked, in every folder that gradwire may use.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

LEAVING_S = float(os.environ.get("LEFT_OVERS_S", "6"))
MARK = "GRADWIRE_LEFT_OVERS"
PATTERNS = ("gradwire-*", "gwt-*", "gws-*")
FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
KINDS = ("processes", "descriptors", "mappings", "files")


def snapshot(mark: str) -> dict[str, set[str]]:
    """What there is now, by kind."""
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for folder in marked(mark):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
            found["processes"].add(f"{folder.name} {command}")
            found["descriptors"].update(f"{folder.name}: {name}" for name in descriptors(folder))
            maps = (folder / "maps").read_text().splitlines()
            found["mappings"].update(f"{folder.name}: {line}" for line in maps if "gradwire" in line)
        except OSError:
            continue  # it ended while it was looked at
    found["files"].update(map(str, files()))
    return found


def marked(mark: str) -> Iterator[Path]:
    """Folders in /proc of processes that descend from the command; zombies have no environment any more."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield folder
        except OSError:
            continue


def descriptors(folder: Path) -> Iterator[str]:
    """Descriptors of gradwire's memory."""
    for link in (folder / "fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if "gradwire" in target:
            yield target


def files() -> Iterator[Path]:
    """Of this user, and of no living broker or test session."""
    parents = dict.fromkeys([*FOLDERS, os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", "")])
    for parent in filter(None, parents):
        for pattern in PATTERNS:
            for path in Path(parent).glob(pattern):
                if path.exists() and path.stat().st_uid == os.getuid() and not is_in_use(path):
                    yield path


def is_in_use(path: Path) -> bool:
    """Whether a living process has locked it, or anything in it."""
    return any(is_locked(one) for one in (path, *path.glob("gradwire-*")))


def is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def left(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    """What is there and was not."""
    return [f"{kind}: {one}" for kind in KINDS for one in sorted(after[kind] - before[kind])]


def main(command: list[str]) -> int:
    mark = uuid.uuid4().hex
    before = snapshot(mark)
    code = subprocess.run(command, env={**os.environ, MARK: mark}, check=False).returncode
    deadline = time.monotonic() + LEAVING_S
    while (more := left(before, after := snapshot(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    print(f"{'':12}{'before':>8}{'after':>8}")
    for kind in KINDS:
        print(f"{kind:12}{len(before[kind]):8}{len(after[kind]):8}")
    for one in more:
        print(f"LEFT {one}")
    if code:
        print(f"the command failed with {code}")
    return 1 if code or more else 0


if __name__ == "__main__":
    default = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "tests"]
    sys.exit(main(sys.argv[1:] or default))
