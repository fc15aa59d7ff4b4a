"""Runs at the start of every Python under `neap torch`: once the script has imported PyTorch, `neap.torch` begins to
watch."""

import os
import sys


def _begin():
    from neap.torch import _script

    _script.install()


class _AfterTorch:
    """Finds PyTorch as ever, and begins when it has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(cls)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module):
                plain(module)
                _begin()

            spec.loader.exec_module = exec_module
        return spec


def _users_own():
    """Runs the sitecustomize that would have run without this one."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    paths = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", paths)
    # Under the dry device its own comes first, and calls this one.
    if spec is not None and spec.loader is not None and "NEAP_DRY_DIR" not in os.environ:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if "NEAP_TORCH_DIR" in os.environ:
    if "torch" in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _AfterTorch)
_users_own()
