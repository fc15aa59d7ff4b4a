"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name of a new file to fill, whose content ``path`` has once the block has ended.

    A file is replaced by a rename, and where ``path`` is a symbolic link, the file behind it. A
    pipe or a device is written to, since a rename would put a file in its place. A file that is
    there keeps its mode. After an error nothing is left.

    Raises:
        OSError: if it can't be written.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        with tempfile.TemporaryDirectory(prefix="neap-") as folder:
            filled = os.path.join(folder, "output")
            yield filled
            with open(filled, "rb") as file, open(target, "wb", buffering=0) as out:
                shutil.copyfileobj(file, out)
        return
    partial = f"{target}.{os.urandom(8).hex()}.tmp"
    # No file that another process has put there is followed or opened.
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    try:
        yield partial
        with contextlib.suppress(FileNotFoundError):
            os.chmod(partial, os.stat(target).st_mode & 0o777)
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)
