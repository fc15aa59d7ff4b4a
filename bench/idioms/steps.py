"""More training loops: how real scripts step, schedule, clip and average."""

import copy

import torch
from idioms import batch, loop, mlp
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils


def with_optimizer(make, **more):
    def build(device):
        model = mlp(device)
        return loop(device, model, make(model.parameters()), **more)

    return build


def scheduled(optimizer, schedule):
    def build(device):
        model = mlp(device)
        stepped = optimizer(model.parameters())
        return loop(device, model, stepped, after=schedule(stepped).step)

    return build


def sequential(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2)
    rest = lr_scheduler.ExponentialLR(optimizer, 0.8)
    return lr_scheduler.SequentialLR(optimizer, [warm, rest], [2])


def by_hand(device):
    """No optimizer: parameters are assigned under no_grad."""
    model = mlp(device)
    x, y = batch()

    def iteration():
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        return loss

    return model, [], iteration


def decay_by_hand(device):
    model = mlp(device)

    def decay():
        for p in model.parameters():
            p.grad.add_(p.detach(), alpha=0.01)

    return loop(device, model, torch.optim.SGD(model.parameters(), lr=0.1), before=decay)


def centralized(device):
    model = mlp(device)

    def centre():
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))

    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2), before=centre)


def logged_gradients(device):
    model = mlp(device)
    log = {}

    def write():
        for name, p in model.named_parameters():
            log[name] = p.grad.detach().norm(2)
            log[name + ".max"] = p.grad.detach().abs().max()

    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), before=write)


def clip_one_by_one(device):
    model = mlp(device)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.3, foreach=False)

    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), before=clip)


def clip_infinity(device):
    model = mlp(device)

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))

    return loop(device, model, torch.optim.SGD(model.parameters(), lr=0.1), before=clip)


def averaged(device):
    model = mlp(device)
    follow = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    model.average = [*follow.module.parameters()]
    model.lasting = {"n_averaged": follow.n_averaged}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return loop(device, model, optimizer, after=lambda: follow.update_parameters(model))


def frozen(device):
    model = mlp(device)
    for p in model[0].parameters():
        p.requires_grad_(False)
    return loop(device, model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2))


def frozen_in_optimizer(device):
    """A frozen parameter that the optimizer has too, without a gradient."""
    model = mlp(device)
    model[0].weight.requires_grad_(False)
    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def two_steps(device):
    """Two batches, two steps: more than one iteration of the usual kind."""
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = nn.Sequential(*model[:2]), model[2]
    head = torch.optim.SGD(second.parameters(), lr=0.05)
    body = torch.optim.AdamW(first.parameters(), lr=1e-2)
    x, y = batch()
    del optimizer

    def iteration():
        head.zero_grad()
        body.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        head.step()
        body.step()
        return loss

    return model, [head, body], iteration


def adversarial(device):
    """A generator and a discriminator, an optimizer each."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    judge = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).to(device)
    model = nn.ModuleDict({"made": made, "judge": judge})
    first = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.999))
    second = torch.optim.Adam(made.parameters(), lr=1e-2, betas=(0.5, 0.999))
    torch.manual_seed(1)
    real, noise = torch.randn(6, 8), torch.randn(6, 4)

    def iteration():
        x, z = real.to(device), noise.to(device)
        first.zero_grad()
        fake = made(z)
        ones, zeros = torch.ones(6, 1, device=device), torch.zeros(6, 1, device=device)
        loss = F.binary_cross_entropy_with_logits(judge(x), ones)
        loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        loss.backward()
        first.step()
        second.zero_grad()
        F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
        second.step()
        return loss

    return model, [first, second], iteration


def gradient_penalty(device):
    """The gradient's norm as a term of the loss: a backward of a backward."""
    model = mlp(device, outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, _ = batch()

    def iteration():
        optimizer.zero_grad()
        at = x.to(device).requires_grad_(True)
        out = model(at)
        (slope,) = torch.autograd.grad(out.sum(), at, create_graph=True)
        loss = out.mean() + 10.0 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def sharpness_aware(device):
    """Two backward passes, the second at perturbed weights (Foret et al., 2021)."""
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch()

    def iteration():
        images, labels = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p.sub_(move)
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def distilled(device):
    """A teacher without gradients, a divergence at a temperature."""
    model = mlp(device)
    torch.manual_seed(7)
    teacher = nn.Linear(8, 4).to(device).eval()
    model.teacher = teacher
    for p in teacher.parameters():
        p.requires_grad_(False)
    body = nn.Sequential(model[0], model[1], model[2])
    optimizer = torch.optim.AdamW(body.parameters(), lr=1e-2)
    x, y = batch()

    def iteration():
        optimizer.zero_grad()
        images, labels = x.to(device), y.to(device)
        with torch.no_grad():
            wanted = F.softmax(teacher(images) / 2.0, dim=-1)
        out = body(images)
        soft = F.kl_div(F.log_softmax(out / 2.0, dim=-1), wanted, reduction="batchmean") * 4.0
        loss = 0.5 * soft + 0.5 * F.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def mean_teacher(device):
    """A copy that follows the weights and says what to come near to."""
    model = mlp(device)
    teacher = copy.deepcopy(model)
    model.average = [*teacher.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()

    def iteration():
        optimizer.zero_grad()
        images, labels = x.to(device), y.to(device)
        with torch.no_grad():
            wanted = teacher(images)
        out = model(images)
        loss = F.cross_entropy(out, labels) + F.mse_loss(out, wanted)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(teacher.parameters(), model.parameters()):
                a.mul_(0.9).add_(p, alpha=0.1)
        return loss

    return model, [optimizer], iteration


def accumulated_three(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch()
    parts = [(x[k : k + 2].clone(), y[k : k + 2].clone()) for k in (0, 2, 4)]

    def iteration():
        total = torch.zeros((), device=device)
        for number, (images, labels) in enumerate(parts):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device)) / len(parts)
            loss.backward()
            total += loss.detach()
            if number == 0:
                first = loss
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return first

    return model, [optimizer], iteration


def in_half(make, dtype=torch.bfloat16):
    """Parameters of a half type, whose gradients the batch gives exactly: losses show every rounding."""

    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(16).to(dtype))

        def forward(self, x):
            return (self.weight.float() * x).sum()

    def build(device):
        model = Weighed().to(device)
        optimizer = make(model.parameters())
        x = torch.randn(16).to(dtype).float()

        def iteration():
            optimizer.zero_grad()
            loss = model(x.to(device))
            loss.backward()
            optimizer.step()
            return loss

        return model, [optimizer], iteration

    return build


class Lamb(torch.optim.Optimizer):
    """Adam whose step each layer scales by its trust ratio (You et al., 2020)."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(first).add_(p.grad, alpha=1 - first)
                square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                update = mean / square.sqrt().add(group["eps"]) + group["weight_decay"] * p
                ratio = torch.where(update.norm() > 0, p.norm() / update.norm(), torch.ones_like(p.norm()))
                p.add_(update * ratio.clamp(max=10.0), alpha=-group["lr"])


def rates(**more):
    return lambda p: torch.optim.SGD(p, lr=0.1, **more)


STEPS = {
    "sgd_dampening": with_optimizer(rates(momentum=0.9, dampening=0.5, weight_decay=1e-2)),
    "sgd_not_foreach": with_optimizer(rates(momentum=0.9, foreach=False)),
    "sgd_fused": with_optimizer(rates(momentum=0.9, fused=True)),
    "sgd_maximize": with_optimizer(rates(maximize=True), loss=lambda a, b: -F.cross_entropy(a, b)),
    "adamw_fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True)),
    "adam_not_foreach": with_optimizer(lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False, weight_decay=0.1)),
    "rmsprop_momentum": with_optimizer(lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, weight_decay=1e-2)),
    "adadelta_decay": with_optimizer(lambda p: torch.optim.Adadelta(p, lr=0.5, rho=0.95, weight_decay=1e-2)),
    "radam": with_optimizer(lambda p: torch.optim.RAdam(p, lr=1e-2)),
    "radam_decoupled": with_optimizer(
        lambda p: torch.optim.RAdam(p, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True)
    ),
    "nadam": with_optimizer(lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=1e-2)),
    "nadam_decoupled": with_optimizer(
        lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=False)
    ),
    "adamax": with_optimizer(lambda p: torch.optim.Adamax(p, lr=1e-2, weight_decay=1e-2)),
    "adamax_not_foreach": with_optimizer(lambda p: torch.optim.Adamax(p, lr=1e-2, foreach=False)),
    "asgd": with_optimizer(lambda p: torch.optim.ASGD(p, lr=1e-2)),
    "rprop": with_optimizer(lambda p: torch.optim.Rprop(p, lr=1e-2)),
    "adafactor": with_optimizer(lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "lamb": with_optimizer(Lamb),
    "bf16_adamw": in_half(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=False)),
    "f16_adam": in_half(lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1), torch.float16),
    "schedule_lambda": scheduled(rates(), lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n)),
    "schedule_steps": scheduled(rates(momentum=0.9), lambda o: lr_scheduler.MultiStepLR(o, [2, 4])),
    "schedule_sequence": scheduled(lambda p: torch.optim.AdamW(p, lr=1e-2), sequential),
    "schedule_cyclic": scheduled(rates(momentum=0.9), lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2)),
} | {
    f.__name__: f
    for f in (
        by_hand, decay_by_hand, centralized, logged_gradients, clip_one_by_one, clip_infinity, averaged, frozen,
        frozen_in_optimizer, two_steps, adversarial, gradient_penalty, sharpness_aware, distilled, mean_teacher,
        accumulated_three,
    )
}
