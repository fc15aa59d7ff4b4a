"""Whole models at small sizes, each with a training loop of its kind. Nothing is downloaded.

As in idioms.py, each function takes a device and returns `(model, optimizers, iteration)`.
"""

import torch
from torch import nn
from torch.nn import functional as F


def split(model):
    """Groups with and without weight decay, as language models have them."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]


def images(model, size, optimizer, classes=10, many=2):
    """A classifier's loop."""

    def build(device):
        torch.manual_seed(0)
        torch.backends.cudnn.enabled = device == "cpu"
        net = model().to(device)
        stepped = optimizer(net)
        torch.manual_seed(1)
        x, y = torch.randn(many, 3, size, size), torch.randint(0, classes, (many,))

        def iteration():
            stepped.zero_grad()
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            stepped.step()
            return loss

        return net, [stepped], iteration

    return build


def bert(device):
    """Masked language model: parameter groups, clipping by norm, two batches to a step."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(config).to(device)
    optimizer = torch.optim.AdamW(split(model), lr=1e-3)
    torch.manual_seed(1)
    parts = [(torch.randint(0, 97, (2, 16)), torch.randint(0, 97, (2, 16))) for _ in range(2)]

    def iteration():
        optimizer.zero_grad()
        losses = []
        for tokens, labels in parts:
            out = model(input_ids=tokens.to(device)).logits
            losses.append(F.cross_entropy(out.view(-1, 97), labels.to(device).view(-1)) / 2)
            losses[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return losses[0]

    return model, [optimizer], iteration


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(53, 24), nn.LSTM(24, 32, 2, batch_first=True), nn.Linear(32, 53)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def tokens_loop(model, vocabulary, shape, optimizer, device):
    torch.manual_seed(1)
    tokens = torch.randint(0, vocabulary, shape)

    def iteration():
        optimizer.zero_grad()
        ids = tokens.to(device)
        out = model(ids)
        out = out if torch.is_tensor(out) else out.logits
        loss = F.cross_entropy(out[:, :-1].reshape(-1, vocabulary).float(), ids[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def lstm(device):
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = device == "cpu"
    model = Recurrent().to(device)
    return tokens_loop(model, 53, (3, 12), torch.optim.Adam(model.parameters(), lr=1e-3), device)


def qwen(device):
    """A decoder with grouped queries and rotary positions, in bf16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=32, use_cache=False)
    torch.backends.cuda.enable_cudnn_sdp(False)  # a fake device has none
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).to(device)
    return tokens_loop(model, 97, (2, 16), torch.optim.AdamW(split(model), lr=1e-3), device)


def t5(device):
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
                      decoder_start_token_id=0, use_cache=False)
    model = T5ForConditionalGeneration(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    source, target = torch.randint(1, 97, (2, 12)), torch.randint(1, 97, (2, 8))

    def iteration():
        optimizer.zero_grad()
        loss = model(input_ids=source.to(device), labels=target.to(device)).loss
        loss.backward()
        optimizer.step()
        return loss

    return model, [optimizer], iteration


class Double(nn.Sequential):
    def __init__(self, come, leave):
        layers = [nn.Conv2d(come, leave, 3, padding=1, bias=False), nn.BatchNorm2d(leave), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Conv2d(leave, leave, 3, padding=1, bias=False), nn.BatchNorm2d(leave), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Three levels down and up, with connections across."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([Double(3, 8), Double(8, 16), Double(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)])
        self.join, self.out = nn.ModuleList([Double(32, 16), Double(16, 8)]), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        for up, join, across in zip(self.up, self.join, reversed(kept[:-1])):
            x = join(torch.cat([across, up(x)], 1))
        return self.out(x)


def unet(device):
    torch.manual_seed(0)
    torch.backends.cudnn.enabled = device == "cpu"
    model = UNet().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    torch.manual_seed(1)
    x, y = torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))

    def iteration():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return model, [optimizer], iteration


def swin():
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
                           num_classes=10, drop_path_rate=0.0)


def efficientnet():
    from timm import create_model

    return create_model("efficientnet_b0", num_classes=10, pretrained=False, drop_rate=0.0, drop_path_rate=0.0)


MODELS = {
    "bert": bert,
    "lstm_words": lstm,
    "unet": unet,
    "swin": images(swin, 32, lambda m: torch.optim.AdamW(split(m), lr=1e-3)),
    "efficientnet": images(efficientnet, 64, lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-4, momentum=0.9, eps=1e-3)),
    "qwen_bf16": qwen,
    "t5": t5,
}
