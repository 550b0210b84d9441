"""A stranger on the GPU: ``trainer.py GIB`` holds so much memory of GPU 0 under the name `trainer`, until killed."""

import sys
import time

import setproctitle
import torch

setproctitle.setproctitle("trainer")
held = torch.empty(int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device="cuda:0")
held.fill_(1)
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(3600)
