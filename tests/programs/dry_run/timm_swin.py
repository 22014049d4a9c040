"""Swin-T of timm in float16 with a GradScaler, gradient clipping and layer-wise learning rates."""

import timm
import timm.optim
import torch
import torch.nn.functional as F

BATCH, STEPS = 48, 4


def main():
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", pretrained=False).cuda()
    groups = timm.optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.8)
    optimizer = torch.optim.AdamW([{"params": group["params"], "lr": 1e-3 * group["lr_scale"], "weight_decay": group["weight_decay"]} for group in groups])
    scaler = torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        images = torch.randn(BATCH, 3, 224, 224, device="cuda")
        labels = torch.randint(1000, (BATCH,), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
