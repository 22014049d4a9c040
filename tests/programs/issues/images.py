# issue: worker-context
# env: OMP_NUM_THREADS=1
"""A data set that moves each image to the GPU, read by DataLoader workers."""

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        image = torch.full((3, 32, 32), float(index))
        return image.cuda().mul(2).cpu()  # issue here


def main():
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 512)).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for batch in DataLoader(Images(), batch_size=4, num_workers=1, multiprocessing_context="spawn"):
        net(batch.cuda()).sum().backward()
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
