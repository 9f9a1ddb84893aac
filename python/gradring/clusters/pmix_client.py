"""Program that prints rank 0's address from PMIx, and as rank 0 first puts it there.

It runs without the package, so that it starts in milliseconds. The interface is that of the PMIx
standard, version 2 and newer: https://pmix.org.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

KEY = b"gradring-rank-0"
LIBRARY = "libpmix.so.2"
SUCCESS, STRING, GLOBAL = 0, 3, 3
_MAX_NAMESPACE = 255


class Process(ctypes.Structure):
    """``pmix_proc_t``: a rank of a job."""

    _fields_ = [("namespace", ctypes.c_char * (_MAX_NAMESPACE + 1)), ("rank", ctypes.c_uint32)]


class Value(ctypes.Structure):
    """``pmix_value_t`` with text in it; its union is larger than a pointer."""

    _fields_ = [("type", ctypes.c_uint16), ("text", ctypes.c_char_p), ("rest", ctypes.c_uint64 * 4)]


def main(own: str) -> str:
    """Returns the address of rank 0, after putting ``own`` there if it is not empty."""
    library = _library()
    nothing = (None, ctypes.c_size_t(0))
    process = Process()
    _check("Init", library.PMIx_Init(ctypes.byref(process), *nothing))
    if own:
        value = Value(STRING, own.encode())
        _check("Put", library.PMIx_Put(ctypes.c_uint8(GLOBAL), KEY, ctypes.byref(value)))
        _check("Commit", library.PMIx_Commit())
    _check("Fence", library.PMIx_Fence(*nothing, *nothing))
    found = ctypes.POINTER(Value)()
    first = Process(process.namespace, 0)
    _check("Get", library.PMIx_Get(ctypes.byref(first), KEY, *nothing, ctypes.byref(found)))
    address: str = found.contents.text.decode()
    _check("Finalize", library.PMIx_Finalize(*nothing))
    return address


def _library() -> ctypes.CDLL:
    places = [
        Path(os.environ[name]) for name in ("PMIX_PREFIX", "OPAL_PREFIX") if name in os.environ
    ]
    folders = ("lib", "lib64", "lib/openmpi", "lib/pmix")
    for path in [LIBRARY, *(str(p / folder / LIBRARY) for p in places for folder in folders)]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    sys.exit(os.EX_UNAVAILABLE)


def _check(name: str, status: int) -> None:
    if status != SUCCESS:
        sys.exit(f"PMIx_{name} fails with {status}")


if __name__ == "__main__":
    print(main(sys.argv[1]))
