"""A Wasserstein GAN with gradient penalty: two networks, two optimizers, a gradient of a gradient."""

import torch
import torch.nn as nn

BATCH, LATENT, WIDTH, STEPS = 128, 128, 96, 3


def generator():
    layers, width = [nn.ConvTranspose2d(LATENT, 8 * WIDTH, 4), nn.BatchNorm2d(8 * WIDTH), nn.ReLU(True)], 8 * WIDTH
    for _ in range(3):
        layers += [nn.ConvTranspose2d(width, width // 2, 4, stride=2, padding=1), nn.BatchNorm2d(width // 2), nn.ReLU(True)]
        width //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1), nn.Tanh())


def critic():
    layers, width = [nn.Conv2d(3, WIDTH, 4, stride=2, padding=1), nn.LeakyReLU(0.2)], WIDTH
    for _ in range(3):
        layers += [nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.InstanceNorm2d(2 * width, affine=True), nn.LeakyReLU(0.2)]
        width *= 2
    return nn.Sequential(*layers, nn.Conv2d(width, 1, 4), nn.Flatten())


def gradient_penalty(D, real, fake):
    mix = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    gradient, = torch.autograd.grad(D(between).sum(), between, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


def main():
    torch.manual_seed(0)
    G, D = generator().cuda(), critic().cuda()
    optimizer_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
    optimizer_d = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))
    for step in range(STEPS):
        for _ in range(2):
            real = torch.rand(BATCH, 3, 64, 64, device="cuda") * 2 - 1
            with torch.no_grad():
                fake = G(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))
            loss_d = D(fake).mean() - D(real).mean() + 10 * gradient_penalty(D, real, fake)
            optimizer_d.zero_grad()
            loss_d.backward()
            optimizer_d.step()
        loss_g = -D(G(torch.randn(BATCH, LATENT, 1, 1, device="cuda"))).mean()
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
        print(f"step {step}: critic {loss_d.item():.4f}, generator {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
