"""ConvNeXt-Large of timm in channels-last bfloat16, with an exponential moving average of its weights."""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

BATCH, STEPS = 32, 3


def main():
    torch.manual_seed(0)
    model = timm.create_model("convnext_large", num_classes=1000).to("cuda", memory_format=torch.channels_last)
    average = ModelEmaV3(model)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.randint(1000, (BATCH, ), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
