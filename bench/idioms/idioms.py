"""Small training loops, one for each idiom that real scripts use.

Each function takes a device and returns `(model, optimizers, iteration)`; `iteration()` makes one step
and returns its loss. The same seed gives the same weights and batches on every device.
"""

import torch
from torch import nn
from torch.nn import functional as F


def mlp(device, outputs=4, hidden=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(device)


def batch(outputs=4):
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.randint(0, outputs, (6,))


def loop(device, model, optimizer, loss=F.cross_entropy, after=None, before=None, y=None, set_to_none=True):
    """The usual iteration, with something before and after the step."""
    x, labels = batch()
    y = labels if y is None else y
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

    def iteration():
        optimizers[0].zero_grad(set_to_none=set_to_none)
        value = loss(model(x.to(device)), y.to(device))
        value.backward()
        if before:
            before()
        optimizers[0].step()
        if after:
            after()
        return value

    return model, optimizers, iteration


def split(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return decayed, plain


def groups_decay(device):
    model = mlp(device)
    decayed, plain = split(model)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return loop(device, model, torch.optim.AdamW(groups, lr=1e-2))


def groups_rates(device):
    model = mlp(device)
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.1}]
    return loop(device, model, torch.optim.SGD(groups, momentum=0.9))


def groups_three(device):
    model = mlp(device)
    groups = [{"params": [model[0].weight], "lr": 3e-3, "betas": (0.8, 0.99)},
              {"params": [model[0].bias], "eps": 1e-6}, {"params": model[2].parameters(), "weight_decay": 0.02}]
    return loop(device, model, torch.optim.Adam(groups, lr=1e-2))


def schedule_cosine(device):
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return loop(device, model, optimizer, after=schedule.step)


def schedule_warmup(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    return loop(device, model, optimizer, after=schedule.step)


def schedule_onecycle(device):
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)
    return loop(device, model, optimizer, after=schedule.step)


def amsgrad(device):
    model = mlp(device)
    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True))


def capturable(device):
    model = mlp(device)
    on = device != "cpu"
    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=on, foreach=on))


def tensor_rate(device):
    model = mlp(device)
    return loop(device, model, torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2)))


def nesterov(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return loop(device, model, optimizer)


def maximize(device):
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, maximize=True)
    return loop(device, model, optimizer, loss=lambda a, b: -F.cross_entropy(a, b))


def rmsprop(device):
    model = mlp(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9, centered=True)
    return loop(device, model, optimizer)


def adagrad(device):
    model = mlp(device)
    return loop(device, model, torch.optim.Adagrad(model.parameters(), lr=0.05, lr_decay=0.1))


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.mul(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


def lion(device):
    model = mlp(device)
    return loop(device, model, Lion(model.parameters(), lr=1e-2, weight_decay=0.1))


def clip_norm(device):
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return loop(device, model, optimizer, before=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def clip_value(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return loop(device, model, optimizer, before=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.05))


def clip_each(device):
    model = mlp(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def clip():
        for p in model.parameters():
            p.grad.mul_((0.1 / (p.grad.norm() + 1e-6)).clamp(max=1.0))

    return loop(device, model, optimizer, before=clip)


def average_lerp(device):
    model = mlp(device)
    average = [p.detach().clone() for p in model.parameters()]
    model.average = average

    @torch.no_grad()
    def follow():
        for a, p in zip(average, model.parameters()):
            a.lerp_(p, 0.01)

    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), after=follow)


def average_mul_add(device):
    model = mlp(device)
    average = {k: p.detach().clone() for k, p in model.named_parameters()}
    model.average = list(average.values())

    @torch.no_grad()
    def follow():
        for k, p in model.named_parameters():
            average[k].mul_(0.99).add_(p.data, alpha=1 - 0.99)

    return loop(device, model, torch.optim.SGD(model.parameters(), lr=0.1), after=follow)


def average_foreach(device):
    model = mlp(device)
    average = [p.detach().clone() for p in model.parameters()]
    model.average = average

    @torch.no_grad()
    def follow():
        torch._foreach_lerp_(average, list(model.parameters()), 0.05)

    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2), after=follow)


def logged_norm(device):
    model = mlp(device)
    log = []

    @torch.no_grad()
    def write():
        log.append(torch.stack([p.norm() for p in model.parameters()]).norm())

    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), after=write)


def weight_clamp(device):
    model = mlp(device)

    @torch.no_grad()
    def clamp():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)

    return loop(device, model, torch.optim.RMSprop(model.parameters(), lr=1e-2), after=clamp)


def gradients_kept(device):
    model = mlp(device)
    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), set_to_none=False)


def accumulation(device):
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch()
    parts = [(x[:3].clone(), y[:3].clone()), (x[3:].clone(), y[3:].clone())]

    def iteration():
        optimizer.zero_grad()
        losses = []
        for images, labels in parts:
            losses.append(F.cross_entropy(model(images.to(device)), labels.to(device)) / 2)
            losses[-1].backward()
        optimizer.step()
        return losses[0]  # the one that a trace's first backward starts from

    return model, [optimizer], iteration


def closure(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch()

    def evaluate():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        return loss

    return model, [optimizer], lambda: optimizer.step(evaluate)


def two_optimizers(device):
    model = mlp(device)
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    model, _, iteration = loop(device, model, first, after=second.step)

    def both():
        second.zero_grad()
        return iteration()

    return model, [first, second], both


def scaler(device):
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = batch()
    scale = torch.amp.GradScaler(device, init_scale=128.0)
    # What neap calls the scaler's states, and how they start.
    model.lasting = {"scaler.scale": torch.tensor(128.0), "scaler.growth_tracker": torch.tensor(0, dtype=torch.int32)}

    def iteration():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()
        return loss

    return model, [optimizer], iteration


def with_loss(loss, y, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)):
    def build(device):
        model = mlp(device)
        torch.manual_seed(2)
        return loop(device, model, optimizer(model.parameters()), loss=loss, y=y())

    return build


def lstm(device):
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = False  # a fake device has none

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 8, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            out, _ = self.lstm(x.view(6, 2, 4))
            return self.head(out[:, -1])

    model = Net().to(device)
    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def gru(device):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 8, batch_first=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            out, _ = self.gru(x.view(6, 2, 4))
            return self.head(out[:, -1])

    model = Net().to(device)
    return loop(device, model, torch.optim.Adam(model.parameters(), lr=1e-2))


def assignment(device):
    model = mlp(device)

    def loss(out, y):
        masked = out.clone()
        masked[..., 0] = -2.5
        return F.cross_entropy(masked, y)

    return loop(device, model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss=loss)


def shared_weight(device):
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.mix = nn.Linear(8, 8)

        def forward(self, tokens):
            return F.linear(torch.tanh(self.mix(self.embed(tokens))), self.embed.weight)

    model = Tied().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    tokens, y = torch.randint(0, 10, (6,)), torch.randint(0, 10, (6,))

    def iteration():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


IDIOMS = {
    f.__name__: f
    for f in (
        groups_decay, groups_rates, groups_three, schedule_cosine, schedule_warmup, schedule_onecycle, amsgrad,
        capturable, tensor_rate, nesterov, maximize, rmsprop, adagrad, lion, clip_norm, clip_value, clip_each,
        average_lerp, average_mul_add, average_foreach, logged_norm, weight_clamp, gradients_kept, accumulation,
        closure, two_optimizers, scaler, lstm, gru, assignment, shared_weight,
    )
} | {
    "loss_mse": with_loss(F.mse_loss, lambda: torch.randn(6, 4)),
    "loss_smooth_l1": with_loss(F.smooth_l1_loss, lambda: torch.randn(6, 4)),
    "loss_huber": with_loss(F.huber_loss, lambda: torch.randn(6, 4)),
    "loss_l1": with_loss(F.l1_loss, lambda: torch.randn(6, 4)),
    "loss_bce": with_loss(F.binary_cross_entropy_with_logits, lambda: torch.rand(6, 4)),
    "loss_kl": with_loss(
        lambda a, b: F.kl_div(F.log_softmax(a, -1), b, reduction="batchmean"),
        lambda: torch.softmax(torch.randn(6, 4), -1),
    ),
    "loss_smoothed": with_loss(lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1), lambda: batch()[1]),
    "loss_nadam": with_loss(F.mse_loss, lambda: torch.randn(6, 4), lambda p: torch.optim.NAdam(p, lr=1e-2)),
    "loss_adadelta": with_loss(F.mse_loss, lambda: torch.randn(6, 4), lambda p: torch.optim.Adadelta(p)),
    "loss_adamax": with_loss(F.mse_loss, lambda: torch.randn(6, 4), lambda p: torch.optim.Adamax(p)),
}
