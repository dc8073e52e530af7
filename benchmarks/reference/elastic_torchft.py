"""elastic_torchft.py FOLDER: trains until it is killed, as one replica group of torchft over gloo. The limits are those of the
example that torchft comes with."""

import os
import sys
from datetime import timedelta

from course import Course, Training
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main():
    course = Course(sys.argv[1])
    replica = int(os.environ["REPLICA_GROUP_ID"])
    training = Training(course, replica)

    def load_state_dict(state):
        training.net.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def state_dict():
        return {"model": training.net.state_dict(), "optimizer": training.optimizer.state_dict()}

    course.ready()
    manager = Manager(pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load_state_dict,
                      state_dict=state_dict, replica_id=f"train_ddp_{replica}", timeout=timedelta(seconds=30))
    # One bucket: after an error in an earlier one the hook of torchft 0.2.0 fails ("no attribute _fut").
    model = DistributedDataParallel(manager, training.net, bucket_cap_mb=25)
    optimizer = Optimizer(manager, training.optimizer)
    ranks = 0
    while True:
        before = manager.current_step()
        training.step(model, optimizer)
        if manager.current_step() == before:  # some replica was lost: no replica has applied the step
            continue
        if manager.num_participants() != ranks:
            ranks = manager.num_participants()
            course.joined()
        course.step(manager.current_step(), ranks)


main()
