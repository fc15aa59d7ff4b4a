"""Small models of four libraries for `branches`, each with a padded or otherwise uneven batch.

A case takes the device and gives what runs: a function without arguments. Sizes are as small as
each model allows, since only the order of operators is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Case = Callable[[str], Callable[[], Any]]
CASES: dict[str, Case] = {}
LENGTHS = (12, 7)


def _case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def _text(device: str, padding: int = 0, size: int = 64) -> dict[str, torch.Tensor]:
    """Two texts of different lengths, filled up on the right, and their mask."""
    ids = torch.randint(4, size, (len(LENGTHS), max(LENGTHS)))
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids[~mask] = padding
    return {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}


def _image(device: str, side: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, side, side).to(device)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 64,
}


def _transformers(model: str, config: str, batch: Any, about: dict[str, Any]) -> Case:
    def case(device: str) -> Callable[[], Any]:
        import transformers

        chosen = getattr(transformers, config)(**about)
        built = getattr(transformers, model)(chosen).to(device).train()
        inputs = batch(device)
        return lambda: built(**inputs)

    return case


def _labels(device: str, **more: Any) -> dict[str, torch.Tensor]:
    text = _text(device, **more)
    labels = text["input_ids"].masked_fill(text["attention_mask"] == 0, -100)
    return {**text, "labels": labels}


def _classes(device: str, **more: Any) -> dict[str, torch.Tensor]:
    return {**_text(device, **more), "labels": torch.tensor([0, 1]).to(device)}


def _add(name: str, model: str, config: str, batch: Any, **about: Any) -> None:
    CASES[name] = _transformers(model, config, batch, about)


def _padded_with_one(device: str) -> dict[str, torch.Tensor]:
    return _classes(device, padding=1)


def _images(device: str) -> dict[str, torch.Tensor]:
    return {"pixel_values": _image(device), "labels": torch.tensor([0, 1]).to(device)}


def _pairs(device: str) -> dict[str, Any]:
    text = _text(device)
    text["input_ids"][:, -1] = 63  # The end of the text is the highest number.
    return {**text, "pixel_values": _image(device), "return_loss": True}


def _speech(device: str) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.randn(2, 8, 40).to(device),
        "labels": torch.randint(4, 60, (2, 6)).to(device),
    }


def _waves(device: str) -> dict[str, torch.Tensor]:
    heard = torch.ones(2, 800, dtype=torch.long)
    heard[1, 500:] = 0
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    return {
        "input_values": torch.randn(2, 800).to(device),
        "attention_mask": heard.to(device),
        "labels": labels.to(device),
    }


def _boxes(device: str) -> dict[str, Any]:
    found = [{"class_labels": torch.arange(n), "boxes": 0.2 + torch.rand(n, 4) / 2} for n in (1, 3)]
    labels = [{name: part.to(device) for name, part in one.items()} for one in found]
    seen = torch.ones(2, 64, 64, dtype=torch.long)
    seen[1, :, 40:] = 0
    return {
        "pixel_values": _image(device, 64),
        "pixel_mask": seen.to(device),
        "labels": labels,
    }


ROWS = {"max_position_embeddings": 40, **SMALL}
CAUSAL = {**ROWS, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 64}
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64,
}  # fmt: skip
VISION = {**SMALL, "image_size": 32, "patch_size": 8}
VISION.pop("vocab_size")
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVES = {**SMALL, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "pad_token_id": 0}
WAVES |= {"num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0}
CLIP = {
    "text_config": {**ROWS, "eos_token_id": 63, "bos_token_id": 1, "pad_token_id": 0},
    "vision_config": VISION,
    "projection_dim": 16,
}
EXPERTS = {**CAUSAL, "num_local_experts": 4, "num_experts_per_tok": 2}

_add("bert", "BertForSequenceClassification", "BertConfig", _classes, **ROWS)
_add("roberta", "RobertaForSequenceClassification", "RobertaConfig", _padded_with_one, **ROWS)
_add("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", _classes,
     dim=32, n_layers=2, n_heads=4, hidden_dim=64, vocab_size=64)  # fmt: skip
_add("electra", "ElectraForSequenceClassification", "ElectraConfig", _classes, **ROWS,
     embedding_size=16)  # fmt: skip
_add("deberta", "DebertaV2ForSequenceClassification", "DebertaV2Config", _classes, **ROWS,
     relative_attention=True, pos_att_type=["p2c", "c2p"])  # fmt: skip
_add("albert", "AlbertForSequenceClassification", "AlbertConfig", _classes, **ROWS,
     embedding_size=16)  # fmt: skip
_add("mpnet", "MPNetForSequenceClassification", "MPNetConfig", _padded_with_one, **ROWS)
_add("longformer", "LongformerForSequenceClassification", "LongformerConfig", _padded_with_one,
     **ROWS, attention_window=4)  # fmt: skip
_add("xlnet", "XLNetForSequenceClassification", "XLNetConfig", _classes,
     d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=64)  # fmt: skip
_add("gpt2", "GPT2LMHeadModel", "GPT2Config", _labels, **GPT)
_add("gpt2_classes", "GPT2ForSequenceClassification", "GPT2Config", _classes, **GPT,
     pad_token_id=0)  # fmt: skip
_add("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", _labels, hidden_size=32, num_layers=2,
     num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4, vocab_size=64,
     max_position_embeddings=40)  # fmt: skip
_add("opt", "OPTForCausalLM", "OPTConfig", _labels, hidden_size=32, num_hidden_layers=2,
     num_attention_heads=4, ffn_dim=64, vocab_size=64, max_position_embeddings=40,
     word_embed_proj_dim=32)  # fmt: skip
_add("bloom", "BloomForCausalLM", "BloomConfig", _labels, hidden_size=32, n_layer=2, n_head=4,
     vocab_size=64)  # fmt: skip
_add("llama", "LlamaForCausalLM", "LlamaConfig", _labels, **CAUSAL)
_add("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _labels, **CAUSAL, head_dim=8)
_add("mistral", "MistralForCausalLM", "MistralConfig", _labels, **CAUSAL, sliding_window=4)
_add("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _labels, **CAUSAL, head_dim=8,
     sliding_window=4)  # fmt: skip
_add("mixtral", "MixtralForCausalLM", "MixtralConfig", _labels, **EXPERTS)
_add("t5", "T5ForConditionalGeneration", "T5Config", _labels, **T5)
_add("bart", "BartForConditionalGeneration", "BartConfig", _labels, **BART, pad_token_id=0,
     decoder_start_token_id=2)  # fmt: skip
_add("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _speech, **WHISPER)
_add("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _waves, **WAVES)
_add("vit", "ViTForImageClassification", "ViTConfig", _images, **VISION)
_add("deit", "DeiTForImageClassification", "DeiTConfig", _images, **VISION)
_add("clip", "CLIPModel", "CLIPConfig", _pairs, **CLIP)


def _torchvision(name: str, side: int, **more: Any) -> Case:
    def case(device: str) -> Callable[[], Any]:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **more).to(device).train()
        images, classes = _image(device, side), torch.tensor([0, 1]).to(device)

        def run() -> Any:
            out = model(images)
            out = out.get("out") if isinstance(out, dict) else out
            out = out.mean((2, 3)) if out.ndim == 4 else out
            return torch.nn.functional.cross_entropy(out, classes)

        return run

    return case


for _name, _side in {
    "resnet18": 32, "mobilenet_v3_small": 32, "efficientnet_b0": 32, "convnext_tiny": 32,
    "swin_t": 32, "densenet121": 32,
}.items():  # fmt: skip
    CASES[f"tv_{_name}"] = _torchvision(_name, _side)
CASES["tv_fcn_resnet50"] = _torchvision("fcn_resnet50", 32, weights_backbone=None, num_classes=5)


def _detector(name: str) -> Case:
    def case(device: str) -> Callable[[], Any]:
        import torchvision

        build = getattr(torchvision.models.detection, name)
        model = build(weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=64)
        model.to(device).train()
        images = [torch.rand(3, 64, 48).to(device), torch.rand(3, 56, 64).to(device)]
        targets = []
        for n in (1, 3):
            corner = torch.rand(n, 2) * 20
            boxes = torch.cat([corner, corner + 10 + torch.rand(n, 2) * 10], 1)
            targets.append({"boxes": boxes.to(device), "labels": torch.arange(1, n + 1).to(device)})
        return lambda: model(images, targets)

    return case


for _name in ("retinanet_resnet50_fpn", "fcos_resnet50_fpn", "fasterrcnn_resnet50_fpn"):
    CASES[f"tv_{_name}"] = _detector(_name)


def _timm(name: str, side: int = 32, **more: Any) -> Case:
    def case(device: str) -> Callable[[], Any]:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=3, **more).to(device).train()
        images, classes = _image(device, side), torch.tensor([0, 1]).to(device)
        return lambda: torch.nn.functional.cross_entropy(model(images), classes)

    return case


CASES["timm_vit"] = _timm("vit_tiny_patch16_224", img_size=32)
CASES["timm_resnet"] = _timm("resnet18d")
CASES["timm_efficientnet"] = _timm("efficientnet_lite0")
CASES["timm_mixer"] = _timm("mixer_s32_224", 224)


def _graphs(device: str) -> Any:
    from torch_geometric.data import Batch, Data

    ring = [
        Data(
            x=torch.randn(n, 8),
            edge_index=torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]),
            y=torch.tensor([n % 2]),
        )
        for n in (3, 5, 4)
    ]
    return Batch.from_data_list(ring).to(device)


def _geometric(layer: str, pool: str = "global_mean_pool") -> Case:
    def case(device: str) -> Callable[[], Any]:
        from torch_geometric import nn as layers

        convolve = getattr(layers, layer)
        width = torch.nn.Linear(8, 2) if layer == "GINConv" else 8
        first = convolve(width) if layer == "GINConv" else convolve(width, 2)
        model, batch = first.to(device), _graphs(device)
        gather = getattr(layers, pool)

        def run() -> Any:
            nodes = model(batch.x, batch.edge_index)
            return torch.nn.functional.cross_entropy(gather(nodes, batch.batch), batch.y)

        return run

    return case


for _name in ("GCNConv", "SAGEConv", "GATConv", "GINConv"):
    CASES[f"pyg_{_name}"] = _geometric(_name)
CASES["pyg_max_pool"] = _geometric("GraphConv", "global_max_pool")
