"""What the programs of the work `elastic` share: the net, its data, and a course, which tells the driver what happens when.

A course is a file for each process, events-HOST-PID, with a line for each event and the time by the clock that all hosts of this
machine share. The file kill-HOST-PID asks the process to kill itself in the middle of its next backward pass.
"""

import os
import signal
import socket
import time

import torch
from torch import nn

COMMIT_EVERY = 10  # steps
WIDTHS = (256, 768, 768, 10)  # with the momentum 6.4 MB of state
BATCH = 16

torch.set_num_threads(1)


def started():
    """When this process began, which is before its interpreter and its libraries were loaded."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Course:
    def __init__(self, folder):
        name = f"{socket.gethostname()}-{os.getpid()}"
        self._events = open(os.path.join(folder, f"events-{name}"), "a", buffering=1)
        self._kill = os.path.join(folder, f"kill-{name}")
        self._group = 0
        self._say("start", at=started())

    def _say(self, event, *words, at=None):
        print(event, at or time.monotonic(), *words, file=self._events)

    def ready(self):
        """All that does not need the others is done."""
        self._say("ready")

    def joined(self):
        """The process trains in another group than before."""
        self._group += 1

    def step(self, number, ranks):
        """The step is finished, by so many ranks together."""
        self._say("step", number, ranks, self._group)

    def watch(self, output):
        if os.path.exists(self._kill):
            output.register_hook(self._die)

    def _die(self, gradient):
        self._say("killed")
        os.kill(os.getpid(), signal.SIGKILL)


class Training:
    def __init__(self, course, seed):
        self._course = course
        torch.manual_seed(0)
        layers = []
        for inputs, outputs in zip(WIDTHS, WIDTHS[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.net = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        torch.manual_seed(seed)
        self._inputs = torch.randn(BATCH, WIDTHS[0])
        self._targets = torch.randint(WIDTHS[-1], (BATCH,))

    def step(self, model, optimizer):
        """`model` and `optimizer` are the wrappers of the net and of the optimizer, or these themselves."""
        optimizer.zero_grad()
        output = model(self._inputs)
        self._course.watch(output)
        nn.functional.cross_entropy(output, self._targets).backward()
        return optimizer.step()
