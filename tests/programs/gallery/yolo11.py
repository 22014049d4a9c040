"""YOLO11m of Ultralytics: training on images of 640 x 640 pixels with its own loss, in float16 with a GradScaler."""

import torch
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

BATCH, OBJECTS, SIZE, STEPS = 16, 8, 640, 3


def main():
    torch.manual_seed(0)
    model = DetectionModel("yolo11m.yaml", nc=80, verbose=False).to("cuda")
    model.args = get_cfg()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(STEPS):
        images = torch.rand(BATCH, 3, SIZE, SIZE).to("cuda")
        batch = {"img": images, "batch_idx": torch.arange(BATCH).repeat_interleave(OBJECTS).to("cuda"),
                 "cls": torch.randint(80, (BATCH * OBJECTS, 1)).float().to("cuda"), "bboxes": (torch.rand(BATCH * OBJECTS, 4) * 0.4 + 0.1).to("cuda")}
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)[0].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
