"""More training loops: layers and losses that real models are built from, each in a tiny network."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Through(nn.Module):
    """What a function of tensors does, as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(layers, shape, classes=3, loss=F.cross_entropy, y=None, rate=1e-2):
    """A network of `layers()` from inputs of `shape` to `classes` numbers, stepped by AdamW."""

    def build(device):
        torch.manual_seed(0)
        model = layers()
        x = torch.randn(2, *shape) if isinstance(shape, tuple) else shape()
        labels = torch.randint(0, classes, (2,)) if y is None else y()
        with torch.no_grad():
            model(x)  # shapes lazy layers
        torch.manual_seed(0)
        model = layers()
        with torch.no_grad():
            model.eval()(x)
            model.train()
        model = model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

        def iteration():
            optimizer.zero_grad()
            value = loss(model(x.to(device)), labels.to(device))
            value.backward()
            optimizer.step()
            return value

        return model, [optimizer], iteration

    return build


def flat(*layers):
    return lambda: nn.Sequential(*[make() for make in layers], nn.Flatten(), nn.LazyLinear(3))


def take(layer):
    """The first result of a layer that has several."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer()

        def forward(self, x):
            return self.inner(x)[0]

    return First


def tokens():
    return torch.randint(0, 11, (2, 6))


class Block(nn.Module):
    """A transformer's layer with attention written out and a causal mask."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8, padding_idx=0), nn.Embedding(6, 8)
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6, dtype=torch.bool)))

    def forward(self, ids):
        x = self.embed(ids) + self.place(torch.arange(6, device=ids.device))
        q, k, v = self.qkv(self.norm(x)).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2.0
        scores = scores.masked_fill(~self.mask, float("-inf"))
        mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(2, 6, 8))


class Encoder(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.causal = causal

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(6, device=ids.device) if self.causal else None
        padded = (ids == 0) if not self.causal else None
        return self.layer(self.embed(ids), src_mask=mask, src_key_padding_mask=padded)


class Biased(nn.Module):
    """Attention with a learned bias for each distance, as T5 and Swin have."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(8, 24), nn.Embedding(9, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        at = torch.arange(5, device=x.device)
        bias = self.bias(at[:, None] - at[None, :] + 4).permute(2, 0, 1)[None].contiguous()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(2, 5, 8)


class Experts(nn.Module):
    """A gate that chooses two of three experts, all of which are computed."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.gate(x), dim=-1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


class Recurrent(nn.Module):
    def __init__(self, kind, **more):
        super().__init__()
        self.inner = kind(4, 5, batch_first=True, **more)

    def forward(self, x):
        return self.inner(x)[0]


class Rotary(nn.Module):
    """Rotary positions, root-mean-square norm and a gated layer, as Llama has them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def forward(self, x):
        inverse = 1.0 / (10000 ** (torch.arange(0, 4, 2, device=x.device).float() / 4))
        angles = torch.outer(torch.arange(5, device=x.device).float(), inverse)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def turned(t):
            a, b = t.chunk(2, dim=-1)
            return t * cos + torch.cat([-b, a], -1) * sin

        h = self.norm(x)
        q, k, v = (p(h).view(2, 5, 2, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(2, 5, 8)
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Scaled(nn.Module):
    """A scale for each channel and a path that is dropped for no sample."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(1e-1 * torch.ones(4))
        self.conv = nn.Conv2d(4, 4, 7, padding=3, groups=4)
        self.norm = nn.LayerNorm(4, eps=1e-6)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * F.gelu(y)).permute(0, 3, 1, 2)


class Attended(nn.Module):
    """Squeeze and excitation."""

    def __init__(self):
        super().__init__()
        self.less, self.more = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        s = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.more(F.silu(self.less(s))))


def images(*size):
    return (3, *size)


def numbers(*shape):
    return lambda: torch.randn(*shape)


def contrastive(a, b):
    """InfoNCE between two halves."""
    first, second = F.normalize(a, dim=-1), F.normalize(a.flip(0) + 0.5 * a, dim=-1)
    logits = first @ second.t() / 0.07
    return F.cross_entropy(logits, torch.arange(len(a), device=a.device))


def clipped_policy(a, b):
    """PPO's objective."""
    probability = F.log_softmax(a, -1).gather(1, b[:, None]).squeeze(1)
    ratio = torch.exp(probability - probability.detach() + 0.1)
    gain = torch.linspace(-1.0, 1.0, 2, device=a.device)
    entropy = -(F.softmax(a, -1) * F.log_softmax(a, -1)).sum(-1).mean()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * entropy


def focal(a, b):
    ce = F.cross_entropy(a, b, reduction="none")
    return (0.25 * (1 - torch.exp(-ce)) ** 2.0 * ce).mean()


def dice(a, b):
    p = torch.sigmoid(a)
    wanted = F.one_hot(b, 3).float()
    return 1 - (2 * (p * wanted).sum() + 1) / (p.sum() + wanted.sum() + 1)


def triplet(a, b):
    return F.triplet_margin_loss(a, a.roll(1, 0).detach(), a.flip(0) + 1.0)


def mixup(a, b):
    return 0.3 * F.cross_entropy(a, b) + 0.7 * F.cross_entropy(a, b.flip(0))


plain = flat(lambda: nn.Linear(8, 8), nn.Tanh)
convolved = [lambda: nn.Conv2d(3, 4, 3, padding=1)]
LAYERS = {
    "conv1d": net(flat(lambda: nn.Conv1d(3, 4, 3, padding=1, stride=2), nn.ReLU), images(9)),
    "conv3d": net(flat(lambda: nn.Conv3d(3, 4, 3, padding=1), nn.ReLU, lambda: nn.MaxPool3d(2)), images(4, 4, 4)),
    "conv_transposed": net(flat(lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), nn.ReLU), images(4, 4)),
    "conv_transposed1d": net(flat(lambda: nn.ConvTranspose1d(3, 4, 4, stride=2, padding=1), nn.ELU), images(5)),
    "conv_depthwise": net(flat(lambda: nn.Conv2d(3, 6, 3, groups=3, bias=False), lambda: nn.BatchNorm2d(6), nn.SiLU),
                          images(6, 6)),
    "conv_pointwise": net(flat(lambda: nn.Conv2d(3, 72, 1), nn.ReLU, lambda: nn.Conv2d(72, 8, 1, bias=False), nn.ReLU),
                          images(9, 9), rate=1e-3),
    "conv_dilated_same": net(flat(lambda: nn.Conv2d(3, 4, 3, dilation=2, padding="same"), nn.ReLU6), images(6, 6)),
    "conv_reflected": net(flat(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU), images(5, 5)),
    "conv_circular": net(flat(lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.ReLU), images(5, 5)),
    "batch_norm1d": net(flat(lambda: nn.Linear(8, 8), lambda: nn.BatchNorm1d(8), nn.ReLU), (8,)),
    "instance_norm": net(flat(*convolved, lambda: nn.InstanceNorm2d(4, affine=True), nn.PReLU), images(5, 5)),
    "group_norm": net(flat(*convolved, lambda: nn.GroupNorm(2, 4), nn.Mish), images(5, 5)),
    "local_norm": net(flat(*convolved, lambda: nn.LocalResponseNorm(3), nn.ReLU), images(5, 5)),
    "rms_norm": net(flat(lambda: nn.Linear(8, 8), lambda: nn.RMSNorm(8), nn.Softplus), (8,)),
    "weight_norm": net(flat(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Hardtanh), (8,)),
    "spectral_norm": net(flat(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.SELU), (8,)),
    "pool_average": net(flat(*convolved, lambda: nn.AvgPool2d(2), nn.Hardswish), images(6, 6)),
    "pool_adaptive": net(flat(*convolved, lambda: nn.AdaptiveAvgPool2d(2), nn.CELU), images(7, 7)),
    "pool_adaptive_max": net(flat(*convolved, lambda: nn.AdaptiveMaxPool2d(2), nn.ELU), images(7, 7)),
    "pool1d": net(flat(lambda: nn.Conv1d(3, 4, 3), lambda: nn.MaxPool1d(2), lambda: nn.AvgPool1d(2)), images(12)),
    "upsampled": net(flat(*convolved, lambda: nn.Upsample(scale_factor=2, mode="bilinear")), images(4, 4)),
    "upsampled_nearest": net(flat(*convolved, lambda: nn.Upsample(scale_factor=2)), images(4, 4)),
    "upsampled_bicubic": net(flat(*convolved, lambda: nn.Upsample(scale_factor=2, mode="bicubic")), images(4, 4)),
    "shuffled": net(flat(*convolved, lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2)), images(4, 4)),
    "unfolded": net(flat(lambda: nn.Unfold(2, stride=2)), images(4, 4)),
    "padded": net(flat(lambda: nn.ZeroPad2d(1), lambda: nn.ReplicationPad2d(1), *convolved), images(4, 4)),
    "scaled_block": net(flat(lambda: nn.Conv2d(3, 4, 2, stride=2), Scaled), images(8, 8)),
    "squeezed": net(flat(*convolved, Attended), images(5, 5)),
    "channels_last": net(lambda: flat(*convolved, lambda: nn.BatchNorm2d(4), nn.ReLU)(), lambda: torch.randn(
        2, 3, 5, 5).contiguous(memory_format=torch.channels_last)),
    "lstm_two_ways": net(flat(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True)), (3, 4)),
    "gru_two_layers": net(flat(lambda: Recurrent(nn.GRU, num_layers=2)), (3, 4)),
    "rnn": net(flat(lambda: Recurrent(nn.RNN)), (3, 4)),
    "rnn_relu": net(flat(lambda: Recurrent(nn.RNN, nonlinearity="relu", bidirectional=True)), (3, 4)),
    "attention_by_hand": net(flat(Block), tokens),
    "multihead": net(flat(lambda: nn.Linear(8, 8), take(lambda: MultiHead())), (5, 8)),
    "encoder": net(flat(Encoder), tokens),
    "encoder_causal": net(flat(lambda: Encoder(True)), tokens),
    "rotary": net(flat(Rotary), (5, 8)),
    "experts": net(flat(Experts), (8,)),
    "checkpointed": net(flat(Checkpointed), (8,)),
    "embedding_bag": net(lambda: nn.Sequential(nn.EmbeddingBag(11, 8, mode="mean"), nn.Linear(8, 3)), tokens),
    "bilinear": net(flat(lambda: Through(lambda x: x[:, :4] * x[:, 4:]), lambda: nn.Linear(4, 6), nn.GLU), (8,)),
    "activations": net(flat(lambda: nn.Linear(8, 8), nn.LogSigmoid, nn.Tanhshrink, nn.Softsign, nn.Hardshrink,
                            nn.Softshrink, lambda: nn.Threshold(0.1, 0.2)), (8,)),
    "activations_in_place": net(flat(lambda: nn.Linear(8, 8), lambda: nn.SiLU(inplace=True), lambda: nn.Linear(8, 8),
                                     lambda: nn.Hardswish(inplace=True), lambda: nn.Linear(8, 8),
                                     lambda: nn.ELU(inplace=True)), (8,)),
    "attention_biased": net(flat(Biased, lambda: nn.Linear(8, 32), nn.ReLU, lambda: nn.Linear(32, 32)), (5, 8)),
    "sorted": net(flat(lambda: nn.Linear(8, 8), lambda: Through(lambda x: x.sort(dim=-1)[0])), (8,)),
    "cumulated": net(flat(lambda: nn.Linear(8, 8), lambda: Through(lambda x: x.cumsum(-1) * 0.1)), (8,)),
    "split_sizes": net(flat(lambda: nn.Linear(8, 8), lambda: Through(
        lambda x: torch.cat([t * (k + 1) for k, t in enumerate(x.split([3, 5], -1))], -1))), (8,)),
    "masked": net(flat(lambda: nn.Linear(8, 8), lambda: Through(lambda x: torch.where(x > 0, x, x * 0.1))), (8,)),
    "spread": net(flat(lambda: nn.Linear(8, 8), lambda: Through(
        lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5))), (8,)),
    "maxima": net(flat(lambda: nn.Linear(8, 8), lambda: Through(
        lambda x: x + x.max(dim=-1, keepdim=True)[0] + x.amin(-1, keepdim=True) + x.norm(dim=-1, keepdim=True))), (8,)),
    "products": net(flat(lambda: nn.Linear(8, 8), lambda: Through(
        lambda x: torch.baddbmm(x.view(2, 2, 4), x.view(2, 2, 4), torch.ones(2, 4, 4, device=x.device) / 4))), (8,)),
    "distances": net(flat(lambda: nn.Linear(8, 8), lambda: Through(
        lambda x: torch.cdist(x.view(2, 4, 2), x.view(2, 4, 2).flip(1) + 1.0))), (8,)),
    "fft": net(flat(lambda: nn.Linear(8, 8), lambda: Through(lambda x: torch.fft.rfft(x, dim=-1).abs())), (8,)),
    "grid_sampled": net(flat(*convolved, lambda: Through(lambda x: F.grid_sample(
        x, F.affine_grid(0.9 * torch.eye(2, 3, device=x.device).expand(2, 2, 3), [2, 4, 5, 5], align_corners=False),
        align_corners=False))), images(5, 5)),
    "loss_contrastive": net(plain, (8,), loss=contrastive),
    "loss_policy": net(plain, (8,), loss=clipped_policy),
    "loss_focal": net(plain, (8,), loss=focal),
    "loss_dice": net(plain, (8,), loss=dice),
    "loss_triplet": net(plain, (8,), loss=triplet),
    "loss_mixup": net(plain, (8,), loss=mixup),
    "loss_weighted": net(plain, (8,), loss=lambda a, b: F.cross_entropy(
        a, b, weight=torch.linspace(0.5, 1.5, 3, device=a.device))),
    "loss_smoothed_weighted": net(plain, (8,), loss=lambda a, b: F.cross_entropy(
        a, b, weight=torch.linspace(0.5, 1.5, 3, device=a.device), label_smoothing=0.1)),
    "loss_probabilities": net(plain, (8,), loss=F.cross_entropy, y=lambda: torch.softmax(torch.randn(2, 3), -1)),
    "loss_probabilities_smoothed": net(plain, (8,), loss=lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1),
                                       y=lambda: torch.softmax(torch.randn(2, 3), -1)),
    "loss_nll": net(plain, (8,), loss=lambda a, b: F.nll_loss(F.log_softmax(a, 1), b, ignore_index=1)),
    "loss_margin": net(plain, (8,), loss=F.multi_margin_loss),
    "loss_hinge": net(plain, (8,), loss=lambda a, b: F.relu(1 - a * (2 * F.one_hot(b, 3).float() - 1)).mean()),
    "loss_cosine": net(plain, (8,), loss=lambda a, b: F.cosine_embedding_loss(
        a, a.flip(0).detach(), 2.0 * (b > 0).float() - 1)),
    "loss_gaussian": net(plain, (8,), loss=lambda a, b: F.gaussian_nll_loss(a, b, F.softplus(a.detach()) + 0.1),
                         y=numbers(2, 3)),
    "loss_poisson": net(plain, (8,), loss=F.poisson_nll_loss, y=lambda: torch.rand(2, 3)),
    "loss_bce": net(plain, (8,), loss=lambda a, b: F.binary_cross_entropy(torch.sigmoid(a), b),
                    y=lambda: torch.rand(2, 3)),
    "loss_bce_weighted": net(plain, (8,), loss=lambda a, b: F.binary_cross_entropy_with_logits(
        a, b, pos_weight=torch.full((3,), 2.0, device=a.device)), y=lambda: torch.rand(2, 3)),
    "loss_regularized": net(plain, (8,), loss=lambda a, b: F.cross_entropy(a, b) + 1e-2 * a.abs().sum()
                            + 1e-2 * a.pow(2).mean()),
    "loss_log_cosh": net(plain, (8,), loss=lambda a, b: torch.log(torch.cosh(a - b)).mean(), y=numbers(2, 3)),
    "loss_rmsle": net(plain, (8,), loss=lambda a, b: torch.sqrt(F.mse_loss(torch.log1p(a.abs()), b) + 1e-6),
                      y=lambda: torch.rand(2, 3)),
    "loss_ctc": net(lambda: nn.Sequential(nn.Linear(4, 5)), (6, 4), loss=lambda a, b: F.ctc_loss(
        F.log_softmax(a, -1).transpose(0, 1), b, torch.full((2,), 6), torch.full((2,), 3)),
        y=lambda: torch.randint(1, 5, (2, 3))),
    "segmented": net(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)), images(4, 4),
                     y=lambda: torch.randint(0, 3, (2, 4, 4))),
    "segmented_smoothed": net(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)), images(4, 4),
        y=lambda: torch.randint(0, 3, (2, 4, 4)), loss=lambda a, b: F.cross_entropy(a, b, label_smoothing=0.1)),
}


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)

