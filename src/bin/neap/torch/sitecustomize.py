"""Runs at the start of every Python under `neap torch`: once the script has imported PyTorch, `neap.torch` begins to
watch."""

import os
import sys


def _begin():
    try:
        from neap.torch import _script
    except Exception as error:  # Such as a PyTorch that has something no more.
        if os.environ.get("NEAP_TORCH_STRICT") == "1":
            raise
        said = f"{type(error).__name__}: {error}"
        print(f"neap: it can't work with this PyTorch ({said}); the script runs without neap", file=sys.stderr)
        return
    _script.install()


class _AfterTorch:
    """Finds PyTorch as ever, and begins when it has been imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        after = sys.meta_path[sys.meta_path.index(cls) + 1 :]
        sys.meta_path.remove(cls)
        found = (finder.find_spec(name, path, target) for finder in after if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module):
                plain(module)
                _begin()

            spec.loader.exec_module = exec_module
        return spec


def _users_own():
    """Runs the sitecustomize that would have run without this one: the next on the path."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.abspath(p or ".") for p in sys.path]
    spec = PathFinder.find_spec("sitecustomize", sys.path[paths.index(here) + 1 :])
    if spec is not None and spec.loader is not None:
        import importlib.util

        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_users_own()
if "NEAP_TORCH_DIR" in os.environ:
    # After the dry device's own, if there is one: its device comes first, then what acts on it.
    if "torch" in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _AfterTorch)
