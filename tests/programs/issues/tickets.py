"""A service answers tickets of three lengths and keeps 256 KiB for each: every call of the model is a request."""
# issue: leak
import torch
import torch.nn as nn

layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
model = nn.TransformerEncoder(layer, 2).cuda().eval()
answers = {}
for ticket in range(200):
    with torch.inference_mode():
        states = model(torch.randn(1, (100, 70, 40)[ticket % 3], 512, device="cuda"))
        answers[ticket] = states.new_zeros(128, 512).add_(states.mean())  # issue here
