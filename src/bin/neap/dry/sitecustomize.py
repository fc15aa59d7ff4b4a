"""Runs at the start of every Python under `neap dry`: puts the device under the PyTorch that this Python would
import, by starting the same command line once more with the device preloaded, and then lets `neap.dry` watch."""

import os
import sys


def _command_line():
    with open("/proc/self/cmdline", "rb") as f:
        return [os.fsdecode(a) for a in f.read().split(b"\0")[:-1]]


def _torch_folder():
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.realpath(list(spec.submodule_search_locations)[0])


def _tell(what):
    path = os.path.join(os.environ["NEAP_DRY_DIR"], f"python-{os.getpid()}")
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"{what}\n{sys.executable}\n")


def _show_devices(environment):
    """Takes back the empty list that hides real GPUs from processes without the device."""
    hidden = environment.pop("NEAP_DRY_HIDDEN", None)
    own = environment.pop("NEAP_DRY_USER_VISIBLE", None)
    if hidden and environment.get("CUDA_VISIBLE_DEVICES") == "":
        if own is None:
            del environment["CUDA_VISIBLE_DEVICES"]
        else:
            environment["CUDA_VISIBLE_DEVICES"] = own


def _begin():
    torch = _torch_folder()
    if torch is None:
        _tell("none")
        return False
    if os.environ.get("NEAP_DRY_TORCH") == torch:
        _tell("ready")
        return True
    if not os.path.exists(os.path.join(torch, "lib", "libtorch_cuda.so")):
        _tell("cpu")
        return True
    import subprocess

    made = subprocess.run(
        [os.environ["NEAP_DRY_EXE"], "dry", "--prepare", torch], stdout=subprocess.PIPE, check=False
    )
    if made.returncode != 0:
        _tell("failed")
        return False
    environment = dict(os.environ, NEAP_DRY_TORCH=torch)
    _show_devices(environment)
    for line in made.stdout.decode().splitlines():
        name, _, value = line.partition("=")
        if name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
            before = environment.get("NEAP_DRY_USER_" + name, environment.get(name, ""))
            environment["NEAP_DRY_USER_" + name] = before
            value = value + ":" + before if before else value
        environment[name] = value
    os.execve(sys.executable, _command_line(), environment)


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


if "NEAP_DRY_DIR" in os.environ and _begin():
    import neap.dry

    neap.dry.install()
_users_own()
