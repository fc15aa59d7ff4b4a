"""Draws jobs of the xMem paper's Table 2, as far as the oracle can build them: `python3 draw.py SEED COUNT`.

Same seed, same jobs. Batches and sizes are smaller than the paper's (50 to 500 images, 10 to 70 texts): a CPU profile of one job
then takes under a minute. One job a line, model:optimizer:batch:size:zero_grad.
"""
import random
import sys

IMAGES = ["vgg16", "vgg19", "resnet101", "resnet152", "mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0",
          "regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "convnext_base"]
TEXTS = ["distilgpt2", "gpt2", "cerebras_111m", "gpt_neo_125m", "opt_125m", "opt_350m", "pythia_160m", "t5_small", "qwen3_0_6b"]
OPTIMIZERS = {"images": ["sgd", "adam", "adamw", "rmsprop", "adagrad"], "texts": ["sgd", "adam", "adamw", "adafactor"]}


def draw(seed, count):
    """Every model once before any comes twice; what else a job has is independent of it."""
    chance = random.Random(seed)
    models = []
    while len(models) < count:
        models += chance.sample(IMAGES + TEXTS, len(IMAGES + TEXTS))
    for model in models[:count]:
        if model in IMAGES:
            kind, batch, size = "images", chance.randint(4, 32), 86
        else:
            kind, batch, size = "texts", chance.randint(1, 4), chance.choice([64, 96, 128, 192])
        yield f"{model}:{chance.choice(OPTIMIZERS[kind])}:{batch}:{size}:{chance.choice(['start', 'backward'])}"


if __name__ == "__main__":
    seed, count = map(int, sys.argv[1:3])
    print(*draw(seed, count), sep="\n")
