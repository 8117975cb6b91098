"""How much memory may be taken: the tightest limit wins and is named; and what the machine says is read right."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_wire import machine
from gradwire_wire.budget import SPARE, SPARE_ADDRESSES, Group, Reading, room_for
from gradwire_wire.machine import read_memory

GIB = 1 << 30
FREE = Reading(None, [], None, 0)


@pytest.mark.parametrize(
    ("reading", "limit", "used", "room", "why"),
    [
        (FREE, None, 0, 1 << 62, "no limit known"),
        (FREE._replace(available=GIB), None, 0, GIB - SPARE, "this machine"),
        (FREE._replace(groups=[Group(GIB, SPARE)]), None, 0, GIB - 2 * SPARE, "control group"),
        (
            FREE._replace(groups=[Group(4 * GIB, 0), Group(2 * GIB, GIB)]),
            None,
            0,
            GIB - SPARE,
            "control group",
        ),
        (FREE._replace(address_space=GIB, mapped=1000), None, 0, GIB - 1000 - SPARE_ADDRESSES, "RLIMIT_AS"),
        (FREE, 16 << 20, 4 << 20, 12 << 20, "GRADWIRE_MAX_SHARED_BYTES"),
        (FREE._replace(available=GIB), 10 * GIB, 0, GIB - SPARE, "this machine"),
        (FREE._replace(available=10), None, 0, 0, "this machine"),
        (FREE, 10, 20, 0, "GRADWIRE_MAX_SHARED_BYTES"),
        (FREE, 0, 0, 0, "GRADWIRE_MAX_SHARED_BYTES"),
    ],
)
def test_the_tightest_limit_wins(reading: Reading, limit: int | None, used: int, room: int, why: str) -> None:
    found, reason = room_for(reading, limit, used)
    assert found == room and why in reason


NUMBERS = st.one_of(st.none(), st.integers(0, 1 << 50))
GROUPS = st.lists(st.builds(Group, st.integers(0, 1 << 50), st.integers(0, 1 << 50)), max_size=3)


@given(
    st.builds(Reading, NUMBERS, GROUPS, NUMBERS, st.integers(0, 1 << 50)), NUMBERS, st.integers(0, 1 << 50)
)
def test_a_further_limit_never_leaves_more(reading: Reading, limit: int | None, used: int) -> None:
    room, _ = room_for(reading, limit, used)
    assert room >= 0
    for fewer in (
        reading._replace(available=None),
        reading._replace(groups=[]),
        reading._replace(address_space=None),
    ):
        assert room_for(fewer, limit, used)[0] >= room
    assert room_for(reading, None, used)[0] >= room


def test_this_machine_is_read() -> None:
    reading = read_memory()
    physical = resource.getpagesize() * int(Path("/proc/meminfo").read_text().split()[1]) // 4 * 1024 // 1024
    assert reading.available is not None and 0 < reading.available <= 1024 * physical
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    assert reading.address_space == (None if limit == resource.RLIM_INFINITY else limit)


def files(root: Path, folder: str, **contents: str) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (root / folder / name.replace("__", ".")).write_text(text)


STAT_1 = "cache 900\ntotal_inactive_file 300\ntotal_active_file 100\n"
STAT_2 = "anon 5\ninactive_file 300\nactive_file 100\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Group]]:
    """The groups that are found when /proc/self/cgroup has the given text and the mount is tmp_path."""
    text = machine._text
    monkeypatch.setattr(machine, "GROUPS", str(tmp_path))

    def groups(memberships: str) -> list[Group]:
        machine._folders.cache_clear()
        monkeypatch.setattr(
            machine, "_text", lambda path: memberships if path == "/proc/self/cgroup" else text(path)
        )
        return list(read_memory().groups)

    return groups


def test_control_groups_of_version_2(tmp_path: Path, groups: Callable[[str], list[Group]]) -> None:
    files(tmp_path, "user/app", memory__max="max\n", memory__current="5000\n", memory__stat=STAT_2)
    files(tmp_path, "user", memory__max="10000\n", memory__current="6000\n", memory__stat=STAT_2)
    assert groups("0::/user/app\n") == [Group(10000, 5600)]  # the one around it limits; caches do not count


def test_control_groups_of_version_1(tmp_path: Path, groups: Callable[[str], list[Group]]) -> None:
    limit, usage = "memory__limit_in_bytes", "memory__usage_in_bytes"
    files(tmp_path, "memory/a", **{limit: "8000\n", usage: "1000\n"}, memory__stat=STAT_1)
    files(tmp_path, "memory", **{limit: "9223372036854771712\n", usage: "9000\n"}, memory__stat=STAT_1)
    assert groups("4:memory:/a\n2:cpu,cpuacct:/a\n0::/\n") == [Group(8000, 600)]
    assert groups("4:hugetlb,memory:/a/gone\n") == [Group(8000, 600)]


def test_in_a_container_the_root_is_the_group(tmp_path: Path, groups: Callable[[str], list[Group]]) -> None:
    files(tmp_path, ".", memory__max="7000\n", memory__current="100\n")
    assert groups("0::/\n") == [Group(7000, 100)]
    assert groups("0::/a/path/of/the/host\n") == [Group(7000, 100)]


@pytest.mark.parametrize("memberships", ["", "nonsense", "0::/x", "4:memory:/x", ":::", "\n\n"])
def test_where_nothing_is_said_there_is_no_limit(
    memberships: str, groups: Callable[[str], list[Group]]
) -> None:
    assert groups(memberships) == []
