"""Training loops of other kinds: what papers and scripts of today do besides the usual step."""

import math

import torch
from idioms import batch, loop, mlp
from layers import net, plain, flat, Through
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint


def adamw(model, rate=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=rate)


def stepped(device, model, optimizer, forward, *inputs):
    """An iteration whose loss `forward` computes from inputs on the device."""

    def iteration():
        optimizer.zero_grad()
        loss = forward(*(t.to(device) for t in inputs))
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def averaged_equally(device):
    """Stochastic weight averaging with its own schedule."""
    model = mlp(device)
    follow = swa_utils.AveragedModel(model)
    model.average = [*follow.module.parameters()]
    model.lasting = {"n_averaged": follow.n_averaged}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)

    def after():
        follow.update_parameters(model)
        schedule.step()

    return loop(device, model, optimizer, after=after)


def step_in_backward(device):
    """Each parameter has an optimizer that steps as soon as its gradient is there."""
    model = mlp(device)
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    x, y = batch()

    def iteration():
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        return loss

    return model, [*optimizers.values()], iteration


def gradient_hooks(device):
    model = mlp(device)
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return loop(device, model, adamw(model))


def gradient_noise(device):
    """Noise too small to show in a loss, because random numbers differ from device to device."""
    model = mlp(device)

    def disturb():
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-9)

    return loop(device, model, adamw(model), before=disturb)


def clip_adaptive(device):
    """Each unit's gradient is held to a part of its weights' norm (Brock et al., 2021)."""
    model = mlp(device)

    def clip():
        for p in model.parameters():
            if p.dim() > 1:
                most = p.detach().norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.02
                norm = p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
                p.grad.copy_(torch.where(norm > most, p.grad * (most / norm), p.grad))

    return loop(device, model, torch.optim.SGD(model.parameters(), lr=0.1), before=clip)


def clip_total(device):
    model = mlp(device)

    def clip():
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.2, total)

    return loop(device, model, adamw(model), before=clip)


def uncertainty(device):
    """Two tasks, weighted by learned variances (Kendall et al., 2018)."""
    model = mlp(device)
    model.spread = nn.Parameter(torch.zeros(2, device=device))
    x, y = batch()
    torch.manual_seed(3)
    wanted = torch.randn(6, 4)

    def forward(x, y, wanted):
        out = model[2](model[1](model[0](x)))
        tasks = torch.stack([F.cross_entropy(out, y), F.mse_loss(out, wanted)])
        return (tasks * torch.exp(-model.spread) + model.spread).sum()

    return stepped(device, model, adamw(model), forward, x, y, wanted)


def accuracy_logged(device):
    """What a loop prints is computed on the device and read by `item`."""
    model = mlp(device)
    optimizer = adamw(model)
    x, y = batch()
    seen = []

    def iteration():
        optimizer.zero_grad()
        images, labels = x.to(device), y.to(device)
        out = model(images)
        loss = F.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            correct = (out.argmax(dim=1) == labels).float().mean()
            seen.append((correct.item(), loss.item()))
        return loss

    return model, [optimizer], iteration


def validated(device):
    """A forward pass in eval mode after the step."""
    model = mlp(device)
    optimizer = adamw(model)
    x, y = batch()
    seen = []

    def after():
        model.eval()
        with torch.no_grad():
            seen.append(F.cross_entropy(model(x.to(device)), y.to(device)))
        model.train()

    return loop(device, model, optimizer, after=after)


def two_backwards(device):
    """Two losses from one forward pass, a backward each."""
    model = mlp(device)
    optimizer = adamw(model)
    x, y = batch()

    def iteration():
        optimizer.zero_grad()
        out = model(x.to(device))
        loss = F.cross_entropy(out, y.to(device))
        loss.backward(retain_graph=True)
        out.pow(2).mean().backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def vector_loss(device):
    model = mlp(device)
    optimizer = adamw(model)
    x, y = batch()

    def iteration():
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x.to(device)), y.to(device), reduction="none")
        losses.backward(gradient=torch.full_like(losses, 0.2))
        optimizer.step()
        return losses.mean()

    return model, [optimizer], iteration


def near_start(device):
    """Weights are drawn to where they began, as in elastic weight consolidation."""
    model = mlp(device)
    start = [p.detach().clone() for p in model.parameters()]
    model.average = start
    x, y = batch()

    def forward(x, y):
        loss = F.cross_entropy(model(x), y)
        for p, s in zip(model.parameters(), start):
            loss = loss + 0.05 * (p - s).pow(2).sum() + 1e-3 * p.abs().sum()
        return loss

    return stepped(device, model, adamw(model), forward, x, y)


def equation(device):
    """The residual of a differential equation: derivatives of the output by the input, twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    points = torch.linspace(0.0, 1.0, 8).unsqueeze(1)

    def iteration():
        optimizer.zero_grad()
        at = points.to(device).requires_grad_(True)
        u = model(at)
        (first,) = torch.autograd.grad(u, at, torch.ones_like(u), create_graph=True)
        (second,) = torch.autograd.grad(first, at, torch.ones_like(first), create_graph=True)
        loss = (second + math.pi**2 * torch.sin(math.pi * at)).pow(2).mean() + 10 * u[0].pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def adapted(device):
    """One inner step by autograd.grad, then a backward through it (MAML)."""
    model = mlp(device)
    x, y = batch()

    def forward(x, y):
        inner = F.cross_entropy(model(x[:3]), y[:3])
        grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
        a, b, c, d = (p - 0.1 * g for p, g in zip(model.parameters(), grads))
        return F.cross_entropy(F.linear(torch.tanh(F.linear(x[3:], a, b)), c, d), y[3:])

    return stepped(device, model, adamw(model), forward, x, y)


def rebuilt(device):
    """Reentrant checkpoints, one after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)), nn.Linear(8, 4)).to(device)
    x, y = batch()

    def forward(x, y):
        h = model[0](x)
        for part in model[1:3]:
            h = checkpoint(part, h, use_reentrant=True)
        return F.cross_entropy(model[3](h), y)

    return stepped(device, model, adamw(model), forward, x, y)


def truncated(device):
    """A recurrent state that lives on from batch to batch."""
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = False
    model = nn.ModuleDict({"cell": nn.GRUCell(8, 6), "head": nn.Linear(6, 4)}).to(device)
    state = torch.zeros(6, 6, device=device)
    model.lasting = {"state": state}
    x, y = batch()
    optimizer = adamw(model)

    def iteration():
        optimizer.zero_grad()
        h = model["cell"](x.to(device), state)
        loss = F.cross_entropy(model["head"](h), y.to(device))
        loss.backward()
        optimizer.step()
        state.copy_(h.detach())
        return loss

    return model, [optimizer], iteration


def alternating(device):
    """A critic that is clipped, and an actor, each by its own loss and optimizer."""
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    first, second = torch.optim.Adam(actor.parameters(), lr=1e-2), torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    torch.manual_seed(1)
    state, action, reward = torch.randn(6, 8), torch.randint(0, 3, (6,)), torch.rand(6)

    def iteration():
        s, a, r = state.to(device), action.to(device), reward.to(device)
        value = critic(s).squeeze(-1)
        gain = r + 0.9 * value.detach().roll(-1) - value
        critic_loss = gain.pow(2).mean()
        chosen = F.log_softmax(actor(s), -1).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = -(chosen * gain.detach()).mean()
        first.zero_grad()
        second.zero_grad()
        (loss + critic_loss).backward()
        first.step()
        second.step()
        return loss + critic_loss

    return model, [first, second], iteration


def graph_network(device):
    """Messages along edges: index, add into rows, divide by degrees."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)]).to(device)
    x, y = batch()
    torch.manual_seed(2)
    ends = torch.randint(0, 6, (2, 14))

    def forward(x, y, ends):
        source, target = ends[0], ends[1]
        for number, layer in enumerate(model):
            sent = layer(x)[source]
            total = torch.zeros(6, sent.shape[1], device=x.device).index_add_(0, target, sent)
            degree = torch.zeros(6, device=x.device).scatter_add_(0, target, torch.ones(14, device=x.device))
            x = total / degree.clamp(min=1).unsqueeze(1)
            x = torch.relu(x) if number == 0 else x
        return F.cross_entropy(x, y)

    return stepped(device, model, adamw(model), forward, x, y, ends)


def quantized_codes(device):
    """A codebook: the nearest entry goes on, gradients pass straight through."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"code": nn.Embedding(5, 8), "out": nn.Linear(8, 8)}).to(device)
    x, _ = batch()

    def forward(x):
        distance = (x.pow(2).sum(1, keepdim=True) - 2 * x @ model["code"].weight.t()
                    + model["code"].weight.pow(2).sum(1))
        chosen = model["code"](distance.argmin(1))
        straight = x + (chosen - x).detach()
        return F.mse_loss(model["out"](straight), x) + F.mse_loss(chosen, x.detach())

    return stepped(device, model, adamw(model), forward, x)


def diffusion(device):
    """Noise of a given step is predicted, with sinusoidal embeddings of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8)).to(device)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 20), 0).to(device)
    model.lasting = {"kept": kept}
    x, _ = batch()
    torch.manual_seed(4)
    noise, step = torch.randn(6, 8), torch.randint(0, 20, (6,))

    def forward(x, noise, step):
        a = kept[step].unsqueeze(1)
        mixed = a.sqrt() * x + (1 - a).sqrt() * noise
        rate = torch.exp(-math.log(10000.0) * torch.arange(4, device=x.device) / 4)
        angle = step.float().unsqueeze(1) * rate
        return F.mse_loss(model(torch.cat([mixed, angle.sin(), angle.cos()], 1)), noise)

    return stepped(device, model, adamw(model), forward, x, noise, step)


def double_precision(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().to(device)
    x, y = batch()
    return stepped(device, model, adamw(model), lambda x, y: F.cross_entropy(model(x), y), x.double(), y)


def packed(device):
    """An LSTM over sequences of several lengths."""
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = False
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 6, batch_first=True), "head": nn.Linear(6, 4)}).to(device)
    x, y = batch()

    def forward(x, y):
        several = nn.utils.rnn.pack_padded_sequence(x.view(6, 2, 4), [2, 2, 2, 1, 1, 1], batch_first=True)
        _, (h, _) = model["lstm"](several)
        return F.cross_entropy(model["head"](h[-1]), y)

    return stepped(device, model, adamw(model), forward, x, y)


def autocast(device):
    model = mlp(device)
    x, y = batch()

    def forward(x, y):
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return stepped(device, model, adamw(model), forward, x, y)


def scheduled(schedule, rate=0.1):
    def build(device):
        model = mlp(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-3)
        return loop(device, model, optimizer, after=schedule(optimizer).step)

    return build


def decay_schedule(device):
    """Weight decay that follows a schedule of its own."""
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.04)

    def after():
        for group in optimizer.param_groups:
            group["weight_decay"] *= 1.5

    return loop(device, model, optimizer, after=after)


class Lookahead:
    """Slow weights that every second step moves toward the fast ones."""

    def __init__(self, optimizer, parameters):
        self.inner, self.fast, self.slow = optimizer, list(parameters), None
        self.slow = [p.detach().clone() for p in self.fast]

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.slow, self.fast):
            slow.add_(fast - slow, alpha=0.5)
            fast.copy_(slow)


def lookahead(device):
    model = mlp(device)
    ahead = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())
    model.average = ahead.slow
    return loop(device, model, ahead.inner, after=ahead.follow)


def muon(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False)).to(device)
    return loop(device, model, torch.optim.Muon(model.parameters(), lr=1e-2))


class Sophia(torch.optim.Optimizer):
    """Momentum over a squared gradient, clipped element by element."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["hessian"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 0.04)
                state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                ratio = (state["mean"].abs() / (0.05 * state["hessian"] + 1e-12)).clamp(None, 1)
                p.addcmul_(state["mean"].sign(), ratio, value=-group["lr"])


def twins(a, b):
    """Barlow Twins: cross-correlation near the identity."""
    first, second = a, a.roll(1, 1) * 0.9 + 0.1
    c = ((first - first.mean(0)) / (first.std(0) + 1e-4)).t() @ ((second - second.mean(0)) / (second.std(0) + 1e-4))
    n = c.shape[0]
    off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()
    return (torch.diagonal(c) - 1).pow(2).sum() + 5e-3 * off.pow(2).sum()


def simclr(a, b):
    z = F.normalize(torch.cat([a, a.flip(0) + 0.3]), dim=1)
    n = len(z)
    logits = (z @ z.t() / 0.5).masked_fill(torch.eye(n, dtype=torch.bool, device=a.device), -1e9)
    return F.cross_entropy(logits, (torch.arange(n, device=a.device) + n // 2) % n)


def boxes(a, b):
    """Generalized intersection over union of boxes."""
    p, q = torch.cat([a[:, :2], a[:, :2] + a[:, 2:].abs() + 0.1], 1), torch.cat([b[:, :2], b[:, :2] + b[:, 2:] + 0.1], 1)
    low, high = torch.maximum(p[:, :2], q[:, :2]), torch.minimum(p[:, 2:], q[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    each = (p[:, 2:] - p[:, :2]).prod(1) + (q[:, 2:] - q[:, :2]).prod(1) - both
    hull = (torch.maximum(p[:, 2:], q[:, 2:]) - torch.minimum(p[:, :2], q[:, :2])).prod(1)
    return (1 - both / each + (hull - each) / hull).mean()


def hard(a, b):
    """The hardest half of the samples count."""
    return torch.topk(F.cross_entropy(a, b, reduction="none"), 3)[0].mean()


def energy(a, b):
    return F.cross_entropy(a, b) + 0.1 * (torch.logsumexp(a, dim=1) ** 2).mean()


def tversky(a, b):
    p, t = F.softmax(a, 1), F.one_hot(b, 4).to(a.dtype)
    hit, over, miss = (p * t).sum(0), (p * (1 - t)).sum(0), ((1 - p) * t).sum(0)
    return (1 - (hit + 1) / (hit + 0.3 * over + 0.7 * miss + 1)).pow(0.75).mean()


def chosen_rows(a, b):
    """Rows by a mask: how many there are is known only while it runs."""
    return F.cross_entropy(a[b > 0], b[b > 0])


def masked_tokens(a, b):
    """Labels of -100 don't count, the others are weighted by a mask."""
    labels = torch.where(b > 2, torch.full_like(b, -100), b)
    return F.cross_entropy(a, labels, ignore_index=-100, reduction="sum") / (labels != -100).sum().clamp(min=1)


def lossy(loss, y=None):
    def build(device):
        model = mlp(device)
        torch.manual_seed(2)
        return loop(device, model, adamw(model), loss=loss, y=y() if y else None)

    return build


def rounded(x):
    """Fake quantization with a straight-through gradient."""
    scale = x.detach().abs().max() / 127.0
    return x + ((x / scale).round().clamp(-128, 127) * scale - x).detach()


FURTHER = {
    "sophia": lambda device: loop(device, m := mlp(device), Sophia(m.parameters())),
    "schedule_restarts": scheduled(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3)),
    "schedule_polynomial": scheduled(lambda o: lr_scheduler.PolynomialLR(o, 8, 2.0)),
    "loss_twins": lossy(twins),
    "loss_simclr": lossy(simclr),
    "loss_boxes": lossy(boxes, y=lambda: torch.rand(6, 4)),
    "loss_hard": lossy(hard),
    "loss_energy": lossy(energy),
    "loss_tversky": lossy(tversky),
    "loss_chosen_rows": lossy(chosen_rows),
    "loss_masked_tokens": lossy(masked_tokens),
    "fake_quantized": net(flat(lambda: nn.Linear(8, 8), lambda: Through(rounded), lambda: nn.Linear(8, 8), nn.ReLU), (8,)),
    "weight_norm_old": net(flat(lambda: nn.utils.weight_norm(nn.Linear(8, 8)), nn.Tanh), (8,)),
    "spectral_norm_old": net(flat(lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh), (8,)),
    "loss_arcface": net(plain, (8,), loss=lambda a, b: F.cross_entropy(
        8.0 * torch.cos(torch.acos(F.normalize(a).clamp(-0.99, 0.99)) + 0.3 * F.one_hot(b, 3)), b)),
    "scattered": net(flat(lambda: nn.Linear(8, 8), lambda: Through(lambda x: torch.zeros_like(x).scatter(
        1, x.detach().topk(3, dim=1)[1], 1.0) * x)), (8,)),
} | {
    f.__name__: f
    for f in (
        averaged_equally, step_in_backward, gradient_hooks, gradient_noise, clip_adaptive, clip_total, uncertainty,
        accuracy_logged, validated, two_backwards, vector_loss, near_start, equation, adapted, rebuilt, truncated,
        alternating, graph_network, quantized_codes, diffusion, double_precision, packed, autocast, decay_schedule,
        lookahead, muon,
    )
}
