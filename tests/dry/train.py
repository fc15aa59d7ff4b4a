"""Trains a model for three iterations as a plain script would: MODEL:OPTIMIZER:BATCH:SIZE:ZERO_GRAD.

The models have random weights: nothing is downloaded. SIZE is the image's side or the length of the sequence;
ZERO_GRAD says whether gradients are cleared at the iteration's start or just before backward().
"""

import sys

import torch

ITERATIONS = 3


def language_model(name):
    import transformers as t

    config = {
        "gpt2": lambda: t.GPT2Config(),
        "opt_125m": lambda: t.OPTConfig(),
        "t5_small": lambda: t.T5Config(
            d_model=512,
            d_kv=64,
            d_ff=2048,
            num_layers=6,
            num_heads=8,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        "qwen3_0_6b": lambda: t.Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        "llama_1b": lambda: t.LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            tie_word_embeddings=True,
        ),
    }[name]()
    if name.startswith("t5"):
        return t.AutoModelForSeq2SeqLM.from_config(config)
    return t.AutoModelForCausalLM.from_config(config)


def image_model(name):
    if name == "inception_v4":
        import timm

        return timm.create_model(name, num_classes=10)
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    return torchvision.models.get_model(name, num_classes=10, **more)


def optimizer(name, parameters):
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters)
    kind = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }[name]
    return kind(parameters, lr=1e-4)


def main():
    name, optimizer_name, batch, size, zero_grad = sys.argv[1].split(":")
    batch, size = int(batch), int(size)
    torch.manual_seed(0)
    is_image = name in ("inception_v4",)
    if not is_image:
        import torchvision

        is_image = name in torchvision.models.list_models()
    model = image_model(name) if is_image else language_model(name)
    criterion = torch.nn.CrossEntropyLoss()

    def batch_data():
        if is_image:
            images = torch.randn(batch, 3, size, size).to("cuda")
            return images, (torch.arange(batch) % 10).to("cuda")
        return (torch.arange(batch * size).view(batch, size) % 101).to("cuda")

    def loss_of(data):
        if is_image:
            return criterion(model(data[0]), data[1])
        return model(input_ids=data, labels=data).loss

    model.train().to("cuda")
    opt = optimizer(optimizer_name, model.parameters())

    def iteration():
        data = batch_data()
        if zero_grad == "start":
            opt.zero_grad()
        value = loss_of(data)
        if zero_grad == "backward":
            opt.zero_grad()
        value.backward()
        opt.step()
        return value

    for _ in range(ITERATIONS):
        iteration()
    print(torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
