"""Run a program where system calls are forbidden, as in a hardened container:

    python hardened.py memfd_create[,...] PROGRAM ARGUMENT...

Forbidden calls fail with EPERM in the program and in all that it starts (seccomp). Exits with 77 where that cannot be had.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434},
}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_NUMBER, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def forbid(names: list[str]) -> bool:
    """Whether these calls fail from now on."""
    numbers = [NUMBERS.get(platform.machine(), {}).get(name) for name in names]
    if None in numbers:
        return False
    code = [(LOAD_NUMBER, 0, 0, 0)]
    for number in numbers:
        code += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, EPERM)]
    code.append((RETURN, 0, 0, ALLOW))
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    program = Program(len(code), packed)
    return not libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)


if __name__ == "__main__":
    if not forbid(sys.argv[1].split(",")):
        sys.exit(77)
    os.execv(sys.argv[2], sys.argv[2:])
