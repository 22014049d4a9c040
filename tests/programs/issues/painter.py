"""LBFGS optimizes a picture to match another's features in a frozen network; a list holds features within a step."""

# issue: none

import torch
import torch.nn as nn
import torch.nn.functional as F


def gram(x):
    b, c, h, w = x.shape
    f = x.view(b * c, h * w)
    return f @ f.t() / (b * c * h * w)


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        chans = [3, 32, 64, 128]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(chans, chans[1:]))

    def forward(self, x):
        feats = []
        for conv in self.convs:
            x = F.relu(conv(x))
            feats.append(x)
            x = F.avg_pool2d(x, 2)
        return feats


def main():
    torch.manual_seed(0)
    net = Features().cuda().eval()
    net.requires_grad_(False)
    content = torch.randn(1, 3, 256, 256, device="cuda")
    style = torch.randn(1, 3, 256, 256, device="cuda")
    content_feats = [f.detach() for f in net(content)]
    style_grams = [gram(f).detach() for f in net(style)]
    image = content.clone().requires_grad_(True)
    # Negative tolerances: on the simulated GPU every comparison reads garbage.
    opt = torch.optim.LBFGS([image], max_iter=2, history_size=10, tolerance_grad=-1, tolerance_change=-1)
    run = [0]
    while run[0] < 24:
        def closure():
            opt.zero_grad()
            feats = net(image)
            content_loss = F.mse_loss(feats[-1], content_feats[-1])
            style_loss = sum(F.mse_loss(gram(f), g) for f, g in zip(feats, style_grams))
            loss = content_loss + 1e5 * style_loss
            loss.backward()
            run[0] += 1
            return loss
        opt.step(closure)
        with torch.no_grad():
            image.clamp_(0, 1)


main()
