"""Two models that train in turns: a generator and a discriminator."""
# issue: none
import torch
import torch.nn as nn

generator = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
critic = nn.Sequential(nn.Linear(1024, 1024), nn.LeakyReLU(), nn.Linear(1024, 1)).cuda()
for_generator = torch.optim.Adam(generator.parameters())
for_critic = torch.optim.Adam(critic.parameters())
for step in range(9):
    fake = generator(torch.randn(1024, 128, device="cuda"))
    for_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.randn(1024, 1024, device="cuda")).mean()).backward()
    for_critic.step()
    for_generator.zero_grad()
    (-critic(fake).mean()).backward()
    for_generator.step()
