"""What ``neap dry`` runs inside the user's Python: it watches memory and writes a report at the
end.

``neap dry`` calls :func:`install` at the start of every Python process of a run. Nothing happens in
processes that never import PyTorch, and no file is written by those that never use the device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_hooks: dict[str, list[Callable[[ModuleType], None]]] = {}
"""What waits for each module, in the order of asking."""


def install() -> None:
    """Arranges that watching begins when PyTorch is imported. Imports nothing of PyTorch itself."""
    if not os.environ.get("NEAP_DRY_DIR"):
        return
    from neap.dry._settings import distributed_environment

    distributed_environment()
    when_imported("torch", _attach)


def _attach(torch: ModuleType) -> None:
    from neap.dry import _session

    _session.attach()


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls ``call`` with a module once it has been imported; now, if it has been."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    _hooks.setdefault(name, []).append(call)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module by the other finders, and has its loader call back at the end."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _hooks:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    _wrap(spec.loader, _hooks.pop(fullname))
                return spec
        return None


def _wrap(loader: Any, calls: list[Callable[[ModuleType], None]]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for call in calls:
            call(module)

    loader.exec_module = exec_module
