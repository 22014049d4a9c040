"""Gaussian process regression without modules: the backward pass makes a workspace of cuBLAS, which stays."""
# issue: none
import torch

points, values = torch.randn(1024, 4, device="cuda"), torch.randn(1024, 1, device="cuda")
scale = torch.zeros((), device="cuda", requires_grad=True)
optimizer = torch.optim.Adam([scale])
for step in range(6):
    optimizer.zero_grad()
    covariance = scale.exp() * (points @ points.T) + torch.eye(1024, device="cuda")
    factor, _ = torch.linalg.cholesky_ex(covariance)
    likelihood = (values * torch.cholesky_solve(values, factor)).sum()
    likelihood.backward()
    optimizer.step()
