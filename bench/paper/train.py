"""A few iterations of a net's training, as `bench/paper/record` records them: train.py NET BATCH
SIZE [PLACE]. With the place `backward`, zero_grad stands before backward, in place of the start of
the iteration.
"""

import sys

import torch
import torchvision

net, batch, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
late = sys.argv[4:] == ["backward"]
if net == "inception_v4":
    import timm

    model = timm.create_model("inception_v4", pretrained=False)
else:
    model = getattr(torchvision.models, net)(
        weights=None, **({"init_weights": False} if net == "inception_v3" else {})
    )
model = model.cuda()
optimizer = torch.optim.Adam(model.parameters())
images, labels = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
for _ in range(3):
    if not late:
        optimizer.zero_grad()
    answer = model(images.cuda())
    if net == "inception_v3":
        answer = answer.logits
    loss = torch.nn.functional.cross_entropy(answer, labels.cuda())
    if late:
        optimizer.zero_grad()
    loss.backward()
    del loss
    optimizer.step()
