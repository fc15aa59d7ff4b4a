"""Whether a GPU answers: makes a context, writes and reads 1 MiB. Prints JSON; exit code 1 if not.

Needs Python and the driver's library, no PyTorch.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable

SIZE = 1 << 20


def main() -> int:
    """Asks the driver."""
    found: dict[str, object] = {}
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        try:
            cuda = ctypes.CDLL("libcuda.so")
        except OSError as problem:
            print(json.dumps({"error": f"no driver: {problem}"}))
            return 1
    version, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    memory, name = ctypes.c_uint64(), ctypes.create_string_buffer(100)
    sent = ctypes.create_string_buffer(b"neap" * (SIZE // 4), SIZE)
    back = ctypes.create_string_buffer(SIZE)
    steps: list[tuple[str, Callable[[], int]]] = [
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDriverGetVersion", lambda: cuda.cuDriverGetVersion(ctypes.byref(version))),
        ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(device), 0)),
        ("cuDeviceGetName", lambda: cuda.cuDeviceGetName(name, len(name), device)),
        (
            "cuDevicePrimaryCtxRetain",
            lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        ),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
        ("cuMemAlloc_v2", lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(SIZE))),
        ("cuMemcpyHtoD_v2", lambda: cuda.cuMemcpyHtoD_v2(memory, sent, ctypes.c_size_t(SIZE))),
        ("cuMemcpyDtoH_v2", lambda: cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(SIZE))),
    ]
    for step, ask in steps:
        if code := ask():
            print(json.dumps({"error": f"{step}: CUDA's error {code}"}))
            return 1
    if back.raw != sent.raw:
        print(json.dumps({"error": "memory that was written reads back otherwise"}))
        return 1
    found["driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    found["name"] = name.value.decode("utf-8", "replace")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
