"""Training that runs out of memory in the optimizer's first step (SIMCUDA_MEMORY=400M): the state does not fit.

    python oom_train.py [catch|print]    catch: handles the error; print: also prints the state that was being made
"""

import sys

import torch
import torch.nn as nn

model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(6)], nn.Linear(2048, 1500, bias=False)).cuda()
optimizer = torch.optim.Adam(model.parameters())


def step():
    model(torch.randn(16, 2048, device="cuda")).sum().backward()
    optimizer.step()


try:
    step()
except torch.cuda.OutOfMemoryError as error:
    if "print" in sys.argv[1:]:
        trace = error.__traceback__
        while trace.tb_frame.f_code.co_name != "_init_group":
            trace = trace.tb_next
        # The first state that this parameter lacks, in the order in which Adam makes them.
        parameter, state = trace.tb_frame.f_locals["p"], trace.tb_frame.f_locals["state"]
        name = next(name for name, one in model.named_parameters() if one is parameter)
        print("requested for Adam.%s of %s" % (next(kind for kind in ("exp_avg", "exp_avg_sq") if kind not in state), name))
        sys.exit(0)
    elif "catch" not in sys.argv[1:]:
        raise
    print("caught")
    model.zero_grad()
    kept = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]
