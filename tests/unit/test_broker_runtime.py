"""The runtime directory: on a short path, ours alone, locked, swept (field reports R51, R52, R61)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire_broker import runtime
from gradwire_broker.runtime import NoRuntimeFolder, RuntimeFolder, candidates, sweep
from gradwire_wire import rendezvous


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short private folder, and no other candidate."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="gwr-", dir="/tmp"))
    monkeypatch.setattr(rendezvous, "_SYSTEM_FOLDERS", ())
    yield folder
    shutil.rmtree(folder)


def test_it_is_ours_alone_and_removed(place: Path) -> None:
    before = os.umask(0o777)
    try:
        made = RuntimeFolder.make({"TMPDIR": str(place)})
    finally:
        os.umask(before)
    about = made.path.stat()
    assert (about.st_mode & 0o777, about.st_uid) == (0o700, os.geteuid())
    (made.path / "socket").touch()
    made.remove()
    made.remove()
    assert list(place.iterdir()) == []


def test_the_best_candidate_comes_first(place: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(place / "xdg"), "TMPDIR": str(place)}
    assert list(candidates(environment)) == [place / "xdg", place]
    (place / "xdg").mkdir()
    made = RuntimeFolder.make(environment)
    assert made.path.parent == place / "xdg"
    made.remove()


@pytest.mark.parametrize("kind", ["long", "missing", "a file", "relative", "empty", "others may rename"])
def test_r52_what_will_not_do_is_passed_over(place: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = place / ("x" * 150 if kind == "long" else "bad")
    if kind in ("long", "others may rename"):
        bad.mkdir()
    if kind == "a file":
        bad.touch()
    if kind == "others may rename":
        bad.chmod(0o777)
    name = {"relative": "bad", "empty": ""}.get(kind, str(bad))
    monkeypatch.setattr(rendezvous, "_SYSTEM_FOLDERS", (str(place),))
    made = RuntimeFolder.make({"TMPDIR": name})
    assert made.path.parent == place
    made.remove()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_r52_unwritable(place: Path) -> None:
    bad = place / "bad"
    bad.mkdir(0o500)
    made = RuntimeFolder.make({"XDG_RUNTIME_DIR": str(bad), "TMPDIR": str(place)})
    assert made.path.parent == place
    made.remove()


def test_r52_sockets_fit_into_107_bytes(place: Path) -> None:
    room = runtime.SUN_PATH - len(os.fsencode(place)) - 1
    name = f"{rendezvous.folder_prefix()}01234567/{runtime.LONGEST_NAME}"
    just = place / ("x" * (room - len(name) - 1))
    just.mkdir()
    made = RuntimeFolder.make({"TMPDIR": str(just)})
    assert len(os.fsencode(made.path / runtime.LONGEST_NAME)) == runtime.SUN_PATH
    made.remove()
    over = place / ("y" * (room - len(name)))
    over.mkdir()
    with pytest.raises(NoRuntimeFolder, match="108 bytes, 107 are allowed"):
        RuntimeFolder.make({"TMPDIR": str(over)})


def test_nowhere_says_why_of_every_candidate(place: Path) -> None:
    with pytest.raises(
        NoRuntimeFolder, match=r"(?s)set XDG_RUNTIME_DIR.*/gone1: No such file.*/gone2: No such file"
    ):
        RuntimeFolder.make({"XDG_RUNTIME_DIR": "/gone1", "TMPDIR": "/gone2"})


def test_another_users_folder_is_not_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.getuid() != 0:
        with pytest.raises(NoRuntimeFolder, match="another user"):
            RuntimeFolder.make({"TMPDIR": str(place)})
    else:
        assert sweep(place) == []


def test_r51_leftovers_are_swept_and_the_living_are_left(place: Path) -> None:
    living = RuntimeFolder.make({"TMPDIR": str(place)})
    code = (
        "import os, sys; from gradwire_broker.runtime import RuntimeFolder\n"
        f"made = RuntimeFolder.make({{'TMPDIR': {str(place)!r}}})\n"
        "(made.path / 'socket').touch(); print(made.path, flush=True); os.kill(os.getpid(), 9)"
    )
    left = Path(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    assert left.is_dir()
    (place / "gradwire-other").mkdir()
    assert sweep(place) == [left]
    assert {path.name for path in place.iterdir()} == {living.path.name, "gradwire-other"}
    living.remove()


def test_a_link_of_our_name_is_not_followed(place: Path) -> None:
    target = place / "precious"
    target.mkdir()
    (target / "file").touch()
    (place / f"{rendezvous.folder_prefix()}0badf00d").symlink_to(target)
    assert sweep(place) == []
    assert (target / "file").exists()


def test_r61_a_folder_swept_before_it_was_locked_is_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stolen = runtime._lock, []

    def late(path: Path) -> int | None:
        if not stolen:
            stolen.append(path)
            os.rmdir(path)  # another broker's sweep was faster
        return real(path)

    monkeypatch.setattr(runtime, "_lock", late)
    made = RuntimeFolder.make({"TMPDIR": str(place)})
    assert made.path != stolen[0]
    assert made.path.is_dir()
    made.remove()


def test_of_brokers_of_one_name_that_start_at_once_the_first_stays(place: Path) -> None:
    environment = {"TMPDIR": str(place)}
    folders = [RuntimeFolder.make(environment) for _ in range(3)]
    for folder, name in zip(folders, ("one", "one", "two"), strict=True):
        card = rendezvous.Card(name, f"ipc://{folder.path}/b", "00", os.getpid(), str(folder.path), "f", "")
        rendezvous.write_card(card)
        os.chmod(folder.path / rendezvous.CARD, 0o600)  # which is later than the one before
    first, second, other = (str(folder.path) for folder in folders)
    rendezvous.check_alone(first, environment)
    rendezvous.check_alone(other, environment)
    with pytest.raises(rendezvous.NamedAlike, match="runs already"):
        rendezvous.check_alone(second, environment)
    folders[0].remove()
    rendezvous.check_alone(second, environment)
    for folder in folders[1:]:
        folder.remove()


def test_r65_where_a_broker_was_sought_is_said(tmp_path: Path) -> None:
    told = rendezvous.where_sought({"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "gone")})
    assert str(tmp_path) in told and "gone" not in told and "`gradwire up` has printed" in told
