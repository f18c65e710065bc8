"""The command line of this process, as `ps` and `/proc` show it.

PR_SET_MM_MAP of prctl(2), which needs no privilege, moves it to other memory of the process.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
# Of `/proc/self/stat`, numbered from 1 as in proc(5).
_FIELDS = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46,
    "start_brk": 47, "env_start": 50, "env_end": 51,
}  # fmt: skip
# Shown for as long as this process runs.
_memory: list[mmap.mmap] = []


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code", "end_code", "start_data", "end_data", "start_brk", "brk",
                "start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


def show(words: Sequence[str]) -> None:
    """Show these words; raises `OSError` where the kernel does not let a process do so."""
    text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
    # The kernel reads a command line from private memory only.
    memory = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    # What comes before may hold a space; the fields after the name do not.
    after_name = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    borders = {name: int(after_name[number - 3]) for name, number in _FIELDS.items()}
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    new = _Map(**borders, arg_start=begin, arg_end=begin + len(text), auxv=0, exe_fd=_NO_FILE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    # The heap must not grow between the two calls: it has room for more than they need.
    libc.free(libc.malloc(1 << 16))
    new.brk = libc.sbrk(0)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(new), ctypes.sizeof(new), 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")
    _memory[:] = [memory]
