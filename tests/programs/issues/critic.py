"""A generator and its critic, which takes five steps for one of the generator's; its gradients wait meanwhile."""
# issue: none

import torch

device = "cuda"
generator = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1024)).to(device)
critic = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.LeakyReLU(), torch.nn.Linear(512, 1)).to(device)
of_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-5)


def teach():
    of_critic.zero_grad()
    with torch.no_grad():
        made = generator(torch.randn(64, 64, device=device))
    real = torch.randn(64, 1024, device=device)
    (critic(made).mean() - critic(real).mean()).backward()
    of_critic.step()


for round_ in range(4):
    for _ in range(5):
        teach()
    of_generator.zero_grad()
    (-critic(generator(torch.randn(64, 64, device=device))).mean()).backward()
    of_generator.step()
for _ in range(4):
    teach()
