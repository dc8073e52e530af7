"""submission.py MODULE ROUNDS: what it costs a Python program to submit a named asynchronous all-reduce, which it does not
wait for: the median over rounds of 100 calls under names that are known, on the rank that takes longest."""

import statistics
import time

import torch

import lines
from lines import hvd

CALLS = 100
ELEMENTS = 256


def cost(submit, tensors):
    """Seconds a call; collective."""
    hvd.barrier()
    begin = time.perf_counter()
    handles = [submit(tensor, number) for number, tensor in enumerate(tensors)]
    seconds = time.perf_counter() - begin
    for handle in handles:
        hvd.synchronize(handle)
    return seconds / CALLS


def main():
    rounds = int(lines.ARGUMENTS[0])
    hvd.init()
    tensors = [torch.ones(ELEMENTS) for _ in range(CALLS)]
    names = [f"layer.{number}.weight" for number in range(CALLS)]
    forms = {
        "submitting a named all-reduce, in place":
            lambda tensor, number: hvd.allreduce_async_(tensor, name=names[number]),
        "submitting a named all-reduce into a new tensor":
            lambda tensor, number: hvd.allreduce_async(tensor, name=names[number]),
        "submitting an all-reduce without a name, in place":
            lambda tensor, number: hvd.allreduce_async_(tensor),
    }
    for work, submit in forms.items():
        cost(submit, tensors)  # the names become known
        times = lines.slowest([cost(submit, tensors) for _ in range(rounds)])
        lines.emit(work, statistics.median(times) * 1e6, "us", "ours")
        lines.emit(work, 10, "us", "goal")
    hvd.shutdown()


main()
