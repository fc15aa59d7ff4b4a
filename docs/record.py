"""Records one training iteration for `neap import`, on a CUDA device or on the CPU.

    python docs/record.py small.et.json.gz

As a module, `record(path, model, optimizer, iteration, inputs=..., steps=...)` records a loop of yours.
The optional `neap.*` annotations say what a trace leaves out: names, numbers, optimizer settings.
"""

import gzip
import json
import os
import sys
import tempfile
import types as kinds

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ExecutionTraceObserver, record_function


def number_in(function, arguments, keywords):
    """The Python number that a call combines with a tensor, if there is exactly one."""
    if function is torch.Tensor.__setitem__:
        arguments, keywords = arguments[2:], {}  # an index is no operand
    given = [*arguments, *keywords.values()]
    numbers = {a for a in given if isinstance(a, (int, float)) and not isinstance(a, bool)}
    return numbers.pop() if len(numbers) == 1 else None


def name_of(tensor):
    """What the calling script calls a tensor: the innermost variable that holds it."""
    frame = sys._getframe(2)
    while frame is not None:
        for name, value in frame.f_locals.items():
            if value is tensor and frame.f_globals.get("__name__") not in (__name__, "torch"):
                return name
        frame = frame.f_back
    return None


# What PyTorch's own Python code combines tensors with numbers by: `F.kl_div` divides by the batch.
OPERATORS = [f"__{way}{name}__" for way in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "pow")]
OPERATORS += [name + end for end in ("", "_") for name in ("add", "sub", "mul", "div")]


def marked(method):
    """A method of a tensor that marks the number that it is given."""

    def call(self, *arguments, **keywords):
        number = number_in(method, arguments, keywords)
        if number is None:
            return method(self, *arguments, **keywords)
        with record_function(f"neap.scalar:{number!r}"):
            return method(self, *arguments, **keywords)

    return call


class Annotate(TorchFunctionMode):
    """Marks numbers and batch data, neither of which a trace names.

    A Python number that meets a tensor becomes a tensor on the host whose value is not recorded.
    A function of Python may have numbers of its own that meet no tensor; its operators are marked.
    """

    def __enter__(self):
        self.kept = {}
        for name in OPERATORS:
            method = getattr(torch.Tensor, name, None)
            if method is not None:
                self.kept[name] = vars(torch.Tensor).get(name)
                setattr(torch.Tensor, name, marked(method))
        return super().__enter__()

    def __exit__(self, *failure):
        for name, method in self.kept.items():
            setattr(torch.Tensor, name, method) if method else delattr(torch.Tensor, name)
        return super().__exit__(*failure)

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        mark = None
        name = getattr(function, "__name__", "")
        if name in ("cuda", "to", "copy_") and any(torch.is_tensor(a) for a in arguments):
            source = arguments[1 if name == "copy_" and len(arguments) > 1 else 0]
            if torch.is_tensor(source) and source.device.type == "cpu":
                called = name_of(source) if source.dim() > 0 else None
                mark = called and f"neap.input:{called}"
                if source.dim() == 0:
                    mark = f"neap.scalar:{float(source)!r}"
        python = isinstance(function, kinds.FunctionType)
        number = None if python else number_in(function, arguments, keywords)
        if mark is None and number is not None:
            mark = f"neap.scalar:{number!r}"
        if mark is None:
            return function(*arguments, **keywords)
        with record_function(mark):
            return function(*arguments, **keywords)


def spell(settings):
    """`key=value,…` of an optimizer's settings; those that are no numbers or flags are left out."""

    def text(value):
        if isinstance(value, (tuple, list)):
            return "/".join(text(v) for v in value)
        return repr(value.item()) if torch.is_tensor(value) else str(value)

    return ",".join(f"{key}={text(value)}" for key, value in settings.items() if key != "params")


def class_of(optimizer):
    """The class whose `step` it runs: a subclass that only sets defaults is its base class."""
    owner = next(c for c in type(optimizer).__mro__ if "step" in vars(c))
    return owner.__name__


def groups_of(optimizers):
    return [(class_of(o), group) for o in optimizers for group in o.param_groups]


def follow(model):
    """Annotates the calls of every module with its path; returns what ends that."""
    handles = []
    for path, module in model.named_modules():
        if path:
            calls = []

            def enter(module, _, path=path, calls=calls):
                calls.append(record_function(f"neap.module:{path}"))
                calls[-1].__enter__()

            def leave(*_, calls=calls):
                calls.pop().__exit__(None, None, None)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
    return handles


def touch(text, tensors):
    """An annotation around one call for each tensor: the trace then knows which they are."""
    with record_function(text), torch.no_grad():
        for tensor in tensors:
            tensor.detach()


def mark(model, optimizers, inputs, buffers):
    """Names long-lived tensors and says which parameters each group has, and its settings."""
    names = {parameter: key for key, parameter in model.named_parameters()}
    for parameter, key in names.items():
        touch(f"neap.parameter:{key}", [parameter])
    for key, buffer in [*model.named_buffers(), *buffers.items()]:
        touch(f"neap.buffer:{key}", [buffer])
    for key, tensor in inputs.items():
        touch(f"neap.batch:{key}", [tensor])
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for key, state in states.items():
                if torch.is_tensor(state) and state.device == parameter.device:
                    touch(f"neap.optimizer_state:{key}:{names[parameter]}", [state])
    for name, group in groups_of(optimizers):
        touch(f"neap.group:{name}:{spell(group)}", group["params"])


def settings_now(optimizers):
    """The settings that a schedule may change, one dictionary for each group."""
    now = []
    for _, group in groups_of(optimizers):
        values = {k: v for k, v in group.items() if k in ("lr", "momentum", "weight_decay")}
        values |= {f"beta{n + 1}": b for n, b in enumerate(group.get("betas", ()))}
        now.append({key: float(value) for key, value in values.items()})
    return now


def schedules(history):
    """`neap.schedule:` annotations: what changes from step to step, in each group."""
    for number, steps in enumerate(zip(*history)):
        for key in steps[0]:
            values = [step[key] for step in steps]
            if len(set(values)) > 1:
                yield f"neap.schedule:{number}:{key}:{'/'.join(map(repr, values))}"


def record(path, model, optimizer, iteration, inputs=None, steps=2, buffers=None):
    """Writes a trace of the second `iteration()`; the first makes the optimizer's states.

    `optimizer` may be a list. `inputs` names batch data that already is on the training device.
    `buffers` names what lives on outside the model, such as averaged weights.
    With a schedule, `steps` is how many iterations to run, so that the trace knows their settings.
    """
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    history = []

    def note(*_):
        history.append(settings_now(optimizers))

    handle = optimizers[0].register_step_pre_hook(note) if optimizers else None
    iteration()
    raw = tempfile.NamedTemporaryFile(suffix=".json", delete=False).name
    observer = ExecutionTraceObserver().register_callback(raw)
    observer.start()
    mark(model, optimizers, inputs or {}, buffers or {})
    hooks = follow(model)
    with record_function("neap.iteration"), Annotate():
        iteration()
    for hook in hooks:
        hook.remove()
    observer.stop()
    observer.unregister_callback()
    for _ in range(steps - 2):
        iteration()
    if handle:
        handle.remove()
    with open(raw) as plain:
        trace = json.load(plain)
    os.unlink(raw)
    append(trace, schedules(history))
    with gzip.open(path, "wt") as packed:
        json.dump(trace, packed, separators=(",", ":"))


def append(trace, annotations):
    """Adds annotations that were not known yet when the iteration was recorded."""
    nodes = trace["nodes"]
    last = max(nodes, key=lambda node: node["id"])["id"]
    nothing = {"values": [], "shapes": [], "types": [], "strides": []}
    for at, name in enumerate(annotations, 1):
        node = {"id": last + at, "name": name, "ctrl_deps": 1, "inputs": nothing, "outputs": nothing}
        nodes.append(node | {"attrs": [{"name": "rf_id", "type": "uint64", "value": 0}]})


def main(path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))

    def iteration():
        optimizer.zero_grad()
        # The batch crosses to the GPU inside the iteration: that makes it the job's input.
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()

    record(path, model, optimizer, iteration, {} if device == "cuda" else {"images": images, "labels": labels})


if __name__ == "__main__":
    main(sys.argv[1])
