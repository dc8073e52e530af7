"""elastic.py MODULE FOLDER: trains until it is killed, in an elastic job of sirtaki.torch or horovod.torch, as ../elastic.cc does
by C++ and ../reference/elastic_torchrun.py and ../reference/elastic_torchft.py by others."""

import os
import sys

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "reference"))

from course import COMMIT_EVERY, Course, Training  # noqa: E402
import lines  # noqa: E402
from lines import hvd  # noqa: E402


def main():
    course = Course(lines.ARGUMENTS[0])
    training = Training(course, os.getpid())
    course.ready()
    hvd.init()  # the others wait for what comes behind
    optimizer = hvd.DistributedOptimizer(training.optimizer, training.net.named_parameters())
    state = hvd.elastic.TorchState(training.net, optimizer, step=0)

    @hvd.elastic.run
    def train(state):
        course.joined()
        while True:
            training.step(training.net, optimizer)
            state.step += 1
            course.step(state.step, hvd.size())
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


main()
