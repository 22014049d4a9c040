"""Trains a DCGAN: a discriminator and a generator in turns, each with its own Adam."""
import changes
import torch
import torch.nn as nn

CHANGES = changes.parse("smaller-batches", "bfloat16-model", "single-tensor-step", "fused-step", "eight-bit-moments", "checkpoint-layers", *changes.FORWARD)
NOISE, WIDTH = 100, 64


def generator():
    layers, width = [nn.ConvTranspose2d(NOISE, WIDTH * 16, 4, 1, 0, bias=False), nn.BatchNorm2d(WIDTH * 16), nn.ReLU(True)], WIDTH * 16
    for _ in range(4):
        layers += [nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width // 2), nn.ReLU(True)]
        width //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator():
    layers, width = [nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)], WIDTH
    for _ in range(4):
        layers += [nn.Conv2d(width, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, inplace=True)]
        width *= 2
    return nn.Sequential(*layers, nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


netG, netD = generator().cuda().to(CHANGES.dtype), discriminator().cuda().to(CHANGES.dtype)
CHANGES.checkpoint("net?", netG=netG, netD=netD)
optimizerG = CHANGES.optimizer(torch.optim.Adam, netG, lr=2e-4, betas=(0.5, 0.999))
optimizerD = CHANGES.optimizer(torch.optim.Adam, netD, lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
batch, accumulate = CHANGES.batches(64)
for step in range(3):
    optimizerD.zero_grad()
    for _ in range(accumulate):
        real = torch.rand(batch, 3, 128, 128, device="cuda", dtype=CHANGES.dtype)
        ones, zeros = torch.ones(batch, device="cuda", dtype=CHANGES.dtype), torch.zeros(batch, device="cuda", dtype=CHANGES.dtype)
        with CHANGES.around_forward():
            errD_real = criterion(netD(real), ones)
        errD_real.backward()
        with CHANGES.around_forward():
            fake = netG(torch.randn(batch, NOISE, 1, 1, device="cuda", dtype=CHANGES.dtype))
            errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
    optimizerD.step()
    optimizerG.zero_grad()
    for part in range(accumulate):
        if part:
            fake = netG(torch.randn(batch, NOISE, 1, 1, device="cuda", dtype=CHANGES.dtype))
        with CHANGES.around_forward():
            errG = criterion(netD(fake), ones)
        errG.backward()
    optimizerG.step()
changes.done()
