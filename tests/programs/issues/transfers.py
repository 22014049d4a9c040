"""Copies each chunk of a video to the device on a stream that nobody uses again, and encodes it there."""
# issue: stream-caches
import torch
import torch.nn as nn

encoder = nn.Conv3d(3, 8, 3, padding=1).cuda().eval()


def encode(chunk):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        frames = chunk.cuda(non_blocking=True)  # issue here
        code = encoder(frames).mean(dim=(2, 3, 4)).cpu()  # issue here
    side.synchronize()
    return code


codes = []
for number in range(12):
    codes.append(encode(torch.randn(1, 3, 16, 224, 224)))
