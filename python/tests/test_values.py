"""What is small and known is computed under ``neap dry``; what is not is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="needs a PyTorch for CUDA")
FIELD = Path(os.environ.get("NEAP_TRUTH", Path(__file__).parents[3] / "shared" / "truth")) / "field"


def dry(neap: str, script: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """What a script printed on the dry device in lines that begin with ``>``, and the report."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [neap, "dry", "--json", "--device", "a6000", "--", sys.executable, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    form: dict[str, Any] = json.loads(done.stdout)
    form["said"] = done.stderr
    # With --json the script's own words are among neap's.
    words = [line for line in done.stderr.splitlines() if line.startswith("> ")]
    return "".join(f"{line[2:]}\n" for line in words), form


OPERATORS = """
import sys, torch
device = sys.argv[1]
x = torch.arange(12).to(device).view(3, 4)
mask = (x % 3 == 0) & (x > 0)
lengths = mask.sum(1)
ids = torch.tensor([3, 1, 3, 2], device=device)
made = torch.zeros(5, dtype=torch.long, device=device)
made[1] = 7
made[ids[:2]] += x[0, :2]
made.data.add_(1)
with torch.inference_mode():
    inferred = torch.arange(4, device=device)
    inferred += 1
results = [
    mask, lengths, lengths.max(), lengths.cumsum(0), mask.any(), mask.all(), mask.nonzero(),
    x[mask], x.masked_select(mask), torch.where(mask, x, -1), torch.where(mask, 1.0, 0.0),
    x.t().contiguous().diff(dim=0), x.flatten().roll(2).view(3, 4).argsort(1), ids.unique(),
    torch.unique(x % 3, return_inverse=True, return_counts=True)[2], ids.bincount(),
    torch.arange(3, device=device).repeat_interleave(ids[1:]), torch.isin(x, ids),
    torch.nn.functional.one_hot(ids), torch.nn.functional.pad(ids, (1, 2), value=9),
    torch.cat([ids, x[0]]), torch.stack([ids, ids]).flip(1), ids.sort(descending=True)[1],
    x.gather(1, ids[:3, None] % 4), torch.zeros_like(x).scatter_(1, ids[None] % 4, 5), made,
    inferred, torch.searchsorted(x[1], ids), x.float().mean(), (x * 2.5).ceil().long(), 7 - x,
    torch.eye(3, device=device).bool(), torch.triu(torch.ones_like(x, dtype=torch.bool)),
    torch.full((2,), 3, device=device), x.clamp(2, 5), x.max(1).indices, x.topk(2, 1).values,
    torch.isfinite(x.float()).all(), torch.equal(x, x + 0), torch.equal(x, x + 1),
    x[:, 1:3].clone(), x.to(torch.int32), torch.vmap(lambda row: row.sum())(x),
    torch.where(mask, torch.zeros((), device=device), -1.0) < 0, 2 << ids, 99 >> ids, 5 & ids,
    100 // ids, 10 % ids, 2**ids, torch.bitwise_left_shift(1, ids),
]
for n, result in enumerate(results):
    print(">", n, result.tolist() if isinstance(result, torch.Tensor) else result)
"""


def test_what_is_known_is_computed_as_on_the_cpu(neap: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OPERATORS)
    host = subprocess.check_output([sys.executable, "script.py", "cpu"], cwd=tmp_path, text=True)
    script = OPERATORS.replace("sys.argv[1]", "'cuda'")
    printed, form = dry(neap, script, tmp_path)
    assert printed.splitlines() == [line[2:] for line in host.splitlines()]
    assert form["certainty"] == "exact"
    assert not form["processes"][0]["data_dependent"]


def test_known_lengths_masks_and_packed_sequences_are_exact(neap: str, tmp_path: Path) -> None:
    script = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
lengths = torch.tensor([7, 5, 2]).cuda()
mask = torch.arange(7, device="cuda")[None] < lengths[:, None]
x = torch.randn(3, 7, 16, device="cuda", requires_grad=True)
assert x[mask].shape == (14, 16) and mask.nonzero().shape == (14, 2)
packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
rnn = torch.nn.GRU(16, 32, batch_first=True).cuda()
assert packed.data.shape == (14, 16)
(x[mask].sum() + packed.data.sum()).backward()
logs = torch.randn(7, 3, 5, device="cuda").log_softmax(2)
torch.nn.functional.ctc_loss(logs, torch.ones(3, 2, device="cuda").long(), lengths, lengths // 3)
"""
    _, form = dry(neap, script, tmp_path)
    assert form["outcome"] == "fits", form["said"]
    assert form["certainty"].split(",")[0] == "exact", form["said"]


def test_sizes_of_what_is_unknown_are_the_most(neap: str, tmp_path: Path) -> None:
    script = """
import torch
x = torch.randint(9, (3, 4), device="cuda")
print(">", list(x.nonzero().shape), list(x[x > 5].shape), list(torch.unique(x).shape))
print(">", [list(part.shape) for part in torch.unique(x, dim=0, return_inverse=True)])
"""
    printed, form = dry(neap, script, tmp_path)
    assert printed.splitlines() == ["[12, 2] [12] [12]", "[[3, 4], [3]]"]
    assert form["certainty"] == "bound"
    found = {row["op"] for row in form["processes"][0]["data_dependent"]}
    assert found == {"aten::nonzero", "aten::_unique2", "aten::unique_dim"}


def test_a_write_that_is_not_followed_makes_a_value_unknown(neap: str, tmp_path: Path) -> None:
    script = """
import torch
known, other = torch.ones(4, dtype=torch.long).cuda(), torch.ones(2).cuda()
unknown = torch.randint(9, (4,), device="cuda")
print(">", (known + 1).sum().item(), known.tolist(), other.tolist())
known[0] = unknown[0]
torch._foreach_add_([other], 1.0)
print(">", known[1:].tolist())
known.random_()
print(">", known.tolist(), other.tolist(), (unknown + 1).tolist())
linear = torch.nn.Linear(2, 2).cuda()
print(">", linear.bias.detach().ne(0).all().item())
torch.optim.AdamW(linear.parameters(), 1.0).zero_grad()
linear(torch.ones(2, device="cuda")).sum().backward()
print(">", linear.weight.grad.tolist())
"""
    printed, form = dry(neap, script, tmp_path)
    said = printed.splitlines()
    assert said[:3] == [
        "8 [1, 1, 1, 1] [1.0, 1.0]",
        "[1, 1, 1]",
        f"{[0] * 4} {[0.0] * 2} {[0] * 4}",
    ]
    assert said[3] == "True"
    reads = {read["line"]: read["kind"] for read in form["processes"][0]["reads"]}
    kinds = [reads[line] for line in (5, 8, 10, 12, 15)]
    assert kinds == ["known", "known", "computed", "known", "computed"]


def test_what_a_kernel_writes_over_a_filling_is_unknown(neap: str, tmp_path: Path) -> None:
    script = """
import torch
from torch.nn import functional as F
x = torch.randn((), device="cuda", requires_grad=True)
F.multilabel_margin_loss(x, torch.ones((), dtype=torch.long, device="cuda")).backward()
logs = torch.randn(7, 2, 5, device="cuda", requires_grad=True)
F.ctc_loss(logs, torch.ones(2, 3).cuda().long(), (7, 7), (3, 3)).backward()
lu, pivots = torch.linalg.lu_factor(torch.randn(3, 3, device="cuda"))
found = [x.grad, logs.grad, torch.lu_unpack(lu, pivots)[0]]
for result in found:
    print(">", result.sum().item())
"""
    printed, form = dry(neap, script, tmp_path)
    assert len(printed.splitlines()) == 3, form["said"]
    reads = {read["line"]: read for read in form["processes"][0]["reads"]}
    assert (reads[11]["kind"], reads[11]["count"]) == ("computed", 3)


def test_batch_norms_running_statistics_are_unknown(neap: str, tmp_path: Path) -> None:
    script = """
import torch
norm = torch.nn.BatchNorm2d(4).cuda()
print(">", norm.running_var.tolist())
for backend in (True, False):
    torch.backends.cudnn.enabled = backend
    norm = torch.nn.BatchNorm2d(4).cuda()
    norm(torch.randn(2, 4, 8, 8, device="cuda"))
    print(">", norm.running_mean.tolist(), norm.running_var.tolist())
"""
    printed, form = dry(neap, script, tmp_path)
    assert printed.splitlines() == ["[1.0, 1.0, 1.0, 1.0]", *[f"{[0.0] * 4} {[0.0] * 4}"] * 2]
    reads = [(read["line"], read["kind"]) for read in form["processes"][0]["reads"]]
    assert reads == [(4, "known"), (9, "computed")]


def test_answers_of_neaps_own_are_listed(neap: str, tmp_path: Path) -> None:
    script = """
import torch
loss = torch.randn(3, device="cuda")
assert torch.isfinite(loss).all()
assert (loss > 5).all()
assert not (torch.ones(3).cuda() > 5).all()
"""
    _, form = dry(neap, script, tmp_path)
    reads = [(read["line"], read["kind"]) for read in form["processes"][0]["reads"]]
    assert reads == [(4, "assumed"), (5, "assumed"), (6, "known")]
    assert form["certainty"] == "exact, if no line listed above decides what runs"
    assert "script.py:4 asks once whether all is true, or finite" in form["said"]


def test_a_padded_batch_takes_the_path_with_a_mask(neap: str, tmp_path: Path) -> None:
    script = """
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
mask = torch.ones(2, 8, dtype=torch.bool)
mask[1, 5:] = False
mask = mask.cuda()
q = torch.randn(2, 1, 8, 16, device="cuda")
attend(q, q, q, None if mask.all() else mask[:, None, None])
print("> masked", not mask.all())
"""
    printed, form = dry(neap, script, tmp_path)
    assert printed.split() == ["masked", "True"]
    assert form["certainty"] == "exact"


LAZY = """
import torch
from torch import nn
model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 10)).cuda()
model(torch.zeros(2, 32, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 32, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_lazy_modules_are_no_problem(neap: str, tmp_path: Path) -> None:
    _, form = dry(neap, LAZY, tmp_path)
    assert form["certainty"] == "exact" and not form["processes"][0]["problems"], form


def test_a_failure_says_which_value_was_made_up_last(neap: str, tmp_path: Path) -> None:
    script = """
import torch
groups = torch.randint(4, (9,), device="cuda")
many = int(groups.max()) + 1
torch.zeros(many, 3, device="cuda") + torch.zeros(4, 2, device="cuda")
"""
    _, form = dry(neap, script, tmp_path)
    assert form["outcome"] == "failed"
    made_up = form["processes"][0]["last_made_up"]
    assert (made_up["op"], made_up["line"]) == ("aten::max", 4)
    assert "the last value made up here is that of aten::max, at " in form["said"]


@pytest.mark.skipif(not FIELD.is_dir(), reason="needs the files of ../shared/truth, or NEAP_TRUTH")
def test_the_files_right_answers(neap: str, tmp_path: Path) -> None:
    counted = "batch = torch.arange(32).repeat_interleave(20).cuda()"
    script = (FIELD / "pyg_mean_pool.py").read_text()
    assert counted in script
    printed, form = dry(neap, script + "\nprint('> graphs', n)\n", tmp_path)
    assert "graphs 32" in printed, form["said"]
    script = (FIELD / "trim_to_longest.py").read_text()
    printed, form = dry(neap, script + "\nprint('> longest', longest)\n", tmp_path)
    longest = int(printed.split()[1])
    assert 128 < longest <= 256
    assert form["certainty"] == "exact"


MODES = """
import threading, torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch._subclasses.fake_tensor import FakeTensorMode

x = torch.arange(6).cuda()
found = []
thread = threading.Thread(target=lambda: found.append((x + 1).sum().item()))
thread.start(), thread.join()

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, y):
        return y * 2
    @staticmethod
    def backward(context, gradient):
        found.append((x > 2).sum().item())  # In autograd's own thread.
        return gradient * 2

Twice.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

with Mode(), Mode():
    found.append((x * 3).max().item())
with torch.device("cuda"):
    found.append(torch.arange(4).add(0.5).sum().item())
with FakeTensorMode():
    fake = torch.ones(3, device="cuda", dtype=torch.long)
    assert (fake * 2.5).dtype is torch.float32 and torch.where(fake > 0, fake, 0).shape == (3,)
found.append(torch.func.vmap(lambda row: row.sum())(x.view(2, 3)).tolist())
torch.func.grad(lambda y: (y * x).sum())(torch.ones(6, device="cuda"))
for (batch,) in DataLoader(TensorDataset(torch.arange(4)), batch_size=2, num_workers=1):
    found.append(batch.cuda().sum().item())
graph = torch.cuda.CUDAGraph()
still = torch.arange(3).cuda()
with torch.cuda.graph(graph):
    out = still + 1
graph.replay()
assert out.tolist() == [0, 0, 0] and still.tolist() == [0, 1, 2]
half = torch.ones(2, dtype=torch.half, device="cuda")
assert (half * 2.5).dtype is torch.half and (2 - x).dtype is torch.long
assert torch.where(x > 0, half[0], 1.0).dtype is torch.half
print(">", found)
"""


def test_threads_modes_and_graphs_work_as_before(neap: str, tmp_path: Path) -> None:
    printed, form = dry(neap, MODES, tmp_path)
    assert printed.strip() == "[21, 3, 15, 8.0, [3, 12], 1, 5]", form["said"]
    assert not form["processes"][0]["problems"]


COMPILED = """
import torch
x = torch.arange(64).cuda()

@torch.compile
def double(y, out):
    out.copy_(y * 2)
    return (y + 1).sum()

out = torch.zeros(64, dtype=torch.long, device="cuda")
double(x, out)
assert x.sum().item() == 2016
print(">", out[5].item())
"""


def test_what_a_compiled_graph_writes_is_unknown(neap: str, tmp_path: Path) -> None:
    printed, form = dry(neap, COMPILED, tmp_path)
    reads = {read["line"]: read["kind"] for read in form["processes"][0]["reads"]}
    assert printed.split() == ["0"], form["said"]
    assert (reads[12], reads[13]) == ("known", "computed")
