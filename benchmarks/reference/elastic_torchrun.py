"""elastic_torchrun.py FOLDER: trains until it is killed, and begins from the last checkpoint, as torchrun's documentation has it."""

import os
import sys

from course import COMMIT_EVERY, Course, Training
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    folder = sys.argv[1]
    course = Course(folder)
    course.ready()
    dist.init_process_group("gloo")
    training = Training(course, dist.get_rank())
    path = os.path.join(folder, "checkpoint.pt")
    step = 0
    if os.path.exists(path):
        saved = torch.load(path)
        training.net.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model = DistributedDataParallel(training.net)
    course.joined()
    while True:
        training.step(model, training.optimizer)
        step += 1
        course.step(step, dist.get_world_size())
        if step % COMMIT_EVERY == 0 and dist.get_rank() == 0:
            saved = {"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step}
            torch.save(saved, path + ".new")
            os.rename(path + ".new", path)


main()
