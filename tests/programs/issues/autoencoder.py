"""An autoencoder. The previous iteration's gradients stay allocated through the whole forward."""
# issue: gradients-cleared-late
import torch
import torch.nn as nn

torch.manual_seed(0)
widths = [2048, 3072, 3072, 2048, 512, 2048, 3072, 3072, 2048]
net = nn.Sequential(*[m for i, o in zip(widths, widths[1:]) for m in (nn.Linear(i, o), nn.ReLU())]).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
for iteration in range(7):
    images = torch.rand(1536, 2048, device="cuda")
    reconstruction = net(images)
    loss = nn.functional.mse_loss(reconstruction, images)
    optimizer.zero_grad()  # issue here
    loss.backward()
    optimizer.step()
