"""Files that a script saves hold what was never computed: they go to the run's scratch folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from neap.dry import when_imported


class Scratch:
    """Sends ``torch.save`` and safetensors to scratch, and loads from there what was sent there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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

    def _inside(self, name: str) -> Path:
        return self.folder / "writes" / os.path.abspath(name).lstrip(os.sep)

    def path(self, file: Any) -> Any:
        """Where a file goes instead; open files and buffers stay what they are."""
        if not isinstance(file, (str, os.PathLike)):
            return file
        name = os.fspath(file)
        path = self._inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name not in self.redirected:
            self.redirected.append(name)
        return str(path)

    def found(self, file: Any) -> Any:
        """Where a file is: in scratch if it was sent there."""
        if isinstance(file, (str, os.PathLike)):
            path = self._inside(os.fspath(file))
            if path.exists():
                return str(path)
        return file
