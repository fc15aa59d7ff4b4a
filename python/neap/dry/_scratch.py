"""Files that a script saves hold what was never computed: they go to the run's scratch folder."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from neap.dry import when_imported

WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npy", ".npz", ".distcp", ".h5")
"""How the names of files end that hold tensors, for scripts that open them themselves."""


class Scratch:
    """Sends what ``torch.save``, safetensors and the script itself write as weights to scratch.

    What was sent there is loaded, renamed, removed and found from there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "writes"
        self.redirected: list[str] = []

    def start(self) -> None:
        """Replaces the functions that save and load."""
        save, load = torch.save, torch.load

        def scratch_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return save(obj, self.path(f), *args, **kwargs)

        def scratch_load(f: Any, *args: Any, **kwargs: Any) -> Any:
            return load(self.found(f), *args, **kwargs)

        torch.save = scratch_save
        torch.load = scratch_load
        torch.serialization.save = scratch_save
        torch.serialization.load = scratch_load
        when_imported("safetensors.torch", self._safetensors)
        self._open()
        for name in ("stat", "remove", "unlink"):
            setattr(os, name, self._of_one(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(os, name, self._of_two(getattr(os, name)))

    def _safetensors(self, module: ModuleType) -> None:
        for name, saves in {"save_file": True, "load_file": False}.items():
            setattr(module, name, self._moved(getattr(module, name), saves))

    def _moved(self, function: Any, saves: bool) -> Any:
        place = 1 if saves else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            where = self.path if saves else self.found
            if len(args) > place:
                args = (*args[:place], where(args[place]), *args[place + 1 :])
            elif "filename" in kwargs:
                kwargs["filename"] = where(kwargs["filename"])
            return function(*args, **kwargs)

        return call

    def _open(self) -> None:
        real = builtins.open

        def scratch_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, os.PathLike)) and isinstance(mode, str):
                named = os.fspath(file)
                weights = isinstance(named, str) and named.endswith(WEIGHTS)
                if weights and any(letter in mode for letter in "wxa+"):
                    file = self.path(named)
                else:
                    file = self.found(named)
            return real(file, mode, *args, **kwargs)

        builtins.open = scratch_open
        io.open = scratch_open

    def _of_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            relative = kwargs.get("dir_fd") is not None
            return function(path if relative else self.found(path), *args, **kwargs)

        return call

    def _of_two(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            found = self.found(source)
            to = self.path(target) if found != source else target
            return function(found, to, *args, **kwargs)

        return call

    def _inside(self, name: str) -> Path:
        return self.folder / os.path.abspath(name).lstrip(os.sep)

    def path(self, file: Any) -> Any:
        """Where a file goes instead; open files and buffers stay what they are."""
        if not isinstance(file, (str, os.PathLike)) or not isinstance(os.fspath(file), str):
            return file
        name = os.fspath(file)
        if os.path.abspath(name).startswith((str(self.folder), "/dev/")):
            return file
        path = self._inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name not in self.redirected:
            self.redirected.append(name)
        return str(path)

    def found(self, file: Any) -> Any:
        """Where a file is: in scratch if it was sent there."""
        if self.redirected and isinstance(file, (str, os.PathLike)):
            name = os.fspath(file)
            if isinstance(name, str):
                path = str(self._inside(name))
                if os.access(path, os.F_OK):
                    return path
        return file
