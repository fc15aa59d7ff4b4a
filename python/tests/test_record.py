"""What `neap.torch.record` writes: a graph that means what ran."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import neap.torch
import pytest
import torch
from jobs import Job, Transformer, classify, cnn, language
from torch import nn

SIZES = {"f32": 4, "i64": 8, "u8": 1, "bool": 1, "f64": 8, "bf16": 2, "f16": 2, "i32": 4}


def operands(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, dict) and "tensor" in value:
        return [value]
    if isinstance(value, list):
        return [found for item in value for found in operands(item)]
    return []


def check(graph: dict[str, Any]) -> None:
    """What the graph format demands: names once, versions in order, views inside their storages."""
    tensors = {t["name"]: t for t in graph["tensors"]}
    assert len(tensors) == len(graph["tensors"])
    names = [o["name"] for o in graph["operators"]]
    assert len(set(names)) == len(names)
    version: dict[str, int] = {}
    made = {
        o["tensor"]
        for operator in graph["operators"]
        for o in operands(operator["outputs"]) + operator.get("hidden", [])
        if not o.get("version")
    }
    for operator in graph["operators"]:
        for operand in operands(operator["args"]):
            name = operand["tensor"]
            assert name in version or name not in made, f"{name} is read before it is made"
            assert operand.get("version", 0) == version.get(name, 0)
        for operand in operands(operator["outputs"]) + operator.get("hidden", []):
            name = operand["tensor"]
            expected = version.get(name, -1 if name in made else 0) + 1
            assert operand.get("version", 0) in (expected, version.get(name))
            version[name] = operand.get("version", 0)
        for operand in operands(operator["args"]) + operands(operator["outputs"]):
            tensor = tensors[operand["tensor"]]
            shape = operand.get("shape", tensor["shape"])
            stride = operand.get("stride")
            size = SIZES[operand.get("dtype", tensor["dtype"])]
            if stride is None:
                count = 1
                for extent in shape:
                    count *= extent
            else:
                count = 1 + sum((n - 1) * s for n, s in zip(shape, stride))
            assert (operand.get("offset", 0) + count) * size <= bytes_of(tensor)
    for tensor in graph["tensors"]:
        assert tensor.get("kept_until") is None or tensor["kept_until"] in names


def bytes_of(tensor: dict[str, Any]) -> int:
    if "bytes" in tensor:
        return int(tensor["bytes"])
    size = SIZES[tensor["dtype"]]
    for extent in tensor["shape"]:
        size *= extent
    return size


def record(job: Job, **more: Any) -> dict[str, Any]:
    graph = neap.torch.record(job.iteration, job.model, job.optimizer, **more)
    check(graph)
    return graph


OPTIMIZERS: list[tuple[str, dict[str, Any], str]] = [
    ("SGD", {}, "neap::sgd"),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}, "neap::sgd"),
    ("Adam", {"amsgrad": True, "foreach": True}, "neap::adam"),
    ("Adam", {"fused": True}, "neap::adam"),
    ("AdamW", {"foreach": False}, "neap::adamw"),
    ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}, "neap::rmsprop"),
    ("Adagrad", {"foreach": True}, "neap::adagrad"),
    ("Adadelta", {"foreach": True}, "neap::adadelta"),
    ("NAdam", {"foreach": True}, "neap::nadam"),
    ("RAdam", {}, "neap::radam"),
    ("ASGD", {"foreach": True}, "neap::asgd"),
    ("Rprop", {}, "neap::rprop"),
    ("Adamax", {"foreach": True}, "neap::adamax"),
]


@pytest.mark.parametrize(("name", "settings", "kind"), OPTIMIZERS)
def test_every_optimizer_is_one_update_a_parameter(
    name: str, settings: dict[str, Any], kind: str
) -> None:
    model = cnn()
    graph = record(
        classify(model, getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings))
    )
    updates = [o for o in graph["operators"] if o["phase"] == "optimize"]
    assert [o["kind"] for o in updates] == [kind] * len(list(model.parameters()))
    assert [o["args"][0]["tensor"] for o in updates] == [n for n, _ in model.named_parameters()]
    assert all(o["args"][1]["tensor"] == "grad:" + o["args"][0]["tensor"] for o in updates)
    assert all(o["replay"] == "never" for o in updates)


def test_an_optimizer_that_looks_at_all_gradients_is_one_update() -> None:
    class Together(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            gradients = [p.grad for p in self.param_groups[0]["params"]]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(parameter.grad / norm)

    model = cnn()
    graph = record(classify(model, Together(model.parameters(), lr=0.1)))
    updates = [o for o in graph["operators"] if o["phase"] == "optimize"]
    assert len(updates) == 1
    assert [o["tensor"] for o in updates[0]["hidden"]] == [n for n, _ in model.named_parameters()]


def test_roles_and_names() -> None:
    model = cnn()
    graph = record(classify(model, torch.optim.Adam(model.parameters())))
    role = {t["name"]: t["role"] for t in graph["tensors"]}
    for name, _ in model.named_parameters():
        assert role[name] == "parameter"
        assert role[f"grad:{name}"] == "gradient"
        assert role[f"exp_avg:{name}"] == "optimizer_state"
    assert role["1.running_mean"] == "buffer"
    # Gradients stay from backward to the next `zero_grad`, and nothing else outlives the iteration.
    kept = {t["name"] for t in graph["tensors"] if "kept_until" in t}
    assert kept == {f"grad:{name}" for name, _ in model.named_parameters()}


def test_gradients_that_wait_for_zero_grad_at_the_end_are_no_workspace_of_the_updates() -> None:
    def updates(last: bool) -> tuple[list[dict[str, Any]], set[str | None], str]:
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def iteration() -> torch.Tensor:
            images, labels = torch.randn(4, 3, 8, 8), torch.arange(4) % 4
            if not last:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            if last:
                optimizer.zero_grad()
            return loss.detach()

        graph = record(Job(model, optimizer, iteration))
        found = [o for o in graph["operators"] if o["kind"] == "neap::sgd"]
        kept = {t.get("kept_until") for t in graph["tensors"] if t["role"] == "gradient"}
        return found, kept, graph["operators"][0]["name"]

    first, kept_first, _ = updates(last=False)
    last, kept_last, start = updates(last=True)
    assert len(first) == len(last) > 2
    assert kept_last == {start}
    assert None not in kept_first
    workspace = [o.get("workspace_bytes", 0) for o in first]
    assert [o.get("workspace_bytes", 0) for o in last] == workspace


def test_constants_in_place_writes_and_batch_norm() -> None:
    model = cnn()
    graph = record(classify(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    by_kind = {o["kind"]: o for o in reversed(graph["operators"])}
    norm = by_kind["aten::native_batch_norm"]
    assert norm["args"][5:] == [True, 0.1, 1e-05]
    assert norm["replay"] == "skip_updates"
    assert {o["tensor"] for o in norm["hidden"]} == {"1.running_mean", "1.running_var"}
    relu = by_kind["aten::relu_"]
    assert relu["outputs"] == [{"tensor": norm["outputs"][0]["tensor"], "version": 1}]
    assert "replay" not in relu
    convolution = by_kind["aten::convolution"]
    assert convolution["args"][3:] == [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]


def test_a_gradient_that_is_not_wanted_leaves_its_place_empty() -> None:
    """The images need none, so that the first convolution's backward gives its weight's second."""
    model = cnn()
    graph = record(classify(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    kinds = [o for o in graph["operators"] if o["kind"] == "aten::convolution_backward"]
    for operator in kinds:
        mask, places = operator["args"][10], [o is not None for o in operator["outputs"]]
        assert places + [False] * (3 - len(places)) == mask
    assert [False, True] in [o["args"][10][:2] for o in kinds]


def test_random_operators_are_marked() -> None:
    model = Transformer(dropout=0.5)
    graph = record(language(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert any(
        o["kind"].endswith("dropout") or "bernoulli" in o["kind"]
        for o in graph["operators"]
        if o.get("random")
    )


def test_a_tied_weight_is_one_tensor_with_one_update() -> None:
    model = Transformer(tied=True)
    graph = record(language(model, torch.optim.AdamW(model.parameters())))
    names = [t["name"] for t in graph["tensors"]]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    updates = [o for o in graph["operators"] if o["kind"] == "neap::adamw"]
    assert len(updates) == len(list(model.parameters()))
    # Autograd adds the two gradients up in place when nothing records it.
    adds = [o for o in graph["operators"] if o["kind"] == "aten::add_" and o["phase"] == "backward"]
    assert adds


def test_peak_and_deaths_of_a_job_that_can_be_counted_by_hand() -> None:
    size = 1 << 16
    weight = nn.Parameter(torch.ones(size))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = nn.ParameterList([weight])

    def iteration() -> None:
        optimizer.zero_grad()
        kept = weight * 2.0  # Held to the end of the iteration by the variable.
        loss = (weight.exp() * 3.0).sum()
        loss.backward()
        optimizer.step()
        assert kept.numel() == size

    graph = neap.torch.record(iteration, model, optimizer)
    check(graph)
    one = 4 * size
    by_name = {o["name"]: o for o in graph["operators"]}
    # Held, though nothing uses it: the operators after it carry its bytes.
    assert by_name["exp_0"]["workspace_bytes"] == one
    # While exp's gradient is made: weight, kept, exp's result, the product's gradient, exp's
    # gradient; and the loss and its gradient, a block each.
    assert graph["recorded_peak_bytes"] == 5 * one + 2 * 512


def test_accumulated_iterations_and_clipping() -> None:
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters())

    def iteration() -> None:
        for _ in range(2):
            loss = model(torch.randn(4, 3, 8, 8)).square().mean() / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    graph = record(Job(model, optimizer, iteration))
    assert sum(o["kind"] == "aten::convolution" for o in graph["operators"]) == 4
    assert sum(o["kind"] == "neap::adamw" for o in graph["operators"]) == 7
    clipping = [o for o in graph["operators"] if o["kind"] == "aten::_foreach_norm"]
    assert clipping or any("norm" in o["kind"] for o in graph["operators"])
    phases = [o["phase"] for o in graph["operators"]]
    assert "forward" not in phases[len(phases) - phases[::-1].index("backward") :]


def test_gradients_that_are_zeroed_in_place_stay() -> None:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()

    graph = record(Job(model, optimizer, iteration))
    made = {
        o["tensor"]
        for x in graph["operators"]
        for o in operands(x["outputs"])
        if not o.get("version")
    }
    gradients = [t for t in graph["tensors"] if t["role"] == "gradient"]
    assert len(gradients) == 7
    assert not any(t["name"] in made for t in gradients)


def test_recording_leaves_nothing_behind_and_changes_no_number() -> None:
    def run(recorded: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = cnn()
        job = classify(model, torch.optim.Adam(model.parameters()))
        if recorded:
            neap.torch.record(job.iteration, model, job.optimizer)
        else:
            for _ in range(3):
                job.iteration()
        job.iteration()
        return [p.detach().clone() for p in model.parameters()]

    hooks = torch.nn.modules.module._global_forward_hooks
    engine = torch.autograd._engine_run_backward
    assert all(map(torch.equal, run(False), run(True)))
    assert not hooks
    assert torch.autograd._engine_run_backward is engine


def test_an_error_in_the_script_is_the_scripts_and_recording_is_over() -> None:
    model = cnn()
    calls = []

    def iteration() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        model(torch.randn(4, 3, 8, 8)).sum().backward()

    with pytest.raises(KeyError, match="mine"):
        neap.torch.record(iteration, model)
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_nothing_to_record_is_said() -> None:
    with pytest.raises(ValueError, match="no operator was recorded"):
        neap.torch.record(lambda: None, cnn())


@pytest.mark.parametrize("kind", ["cnn", "language", "checkpoint"])
def test_neap_reads_plans_and_checks_it(neap: str, tmp_path: Path, kind: str) -> None:
    if kind == "cnn":
        model = cnn()
        job = classify(model, torch.optim.Adam(model.parameters()), size=32)
    else:
        model = Transformer(again=kind == "checkpoint")
        job = language(model, torch.optim.AdamW(model.parameters()), batch=8)
    path = tmp_path / "job.graph.json"
    graph = record(job, path=path)
    assert json.loads(path.read_text()) == graph
    plan = tmp_path / "job.plan.json"
    command = [neap, "plan", str(path), "--budget", "80%", "-o", str(plan), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["peak_bytes"] <= figures["budget_bytes"] < figures["unplanned_peak_bytes"]
    assert subprocess.run([neap, "check", str(plan)], capture_output=True).returncode == 0
