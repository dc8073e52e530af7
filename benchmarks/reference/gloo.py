"""gloo.py MEETING WORK [--bytes N,...] [--rounds N] [--seconds S]: all-reduces over torch.distributed's gloo.

Works: latency, allreduce, resnet50, small, waiting. They have the names that vectors, gradients and waiting give them.
"""

import argparse
import os
import time

import ranks
import torch
import torch.distributed as dist


def size_name(size):
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def latency(arguments):
    for size in arguments.bytes or (4, 64, 1024, 4096, 16384, 65536):
        calls = 50
        tensor = torch.zeros(size // 4)

        def body():
            for _ in range(calls):
                dist.all_reduce(tensor)

        work = f"synchronous all-reduce of {size_name(size)}"
        ranks.measure([work], "gloo", arguments.rounds, "us", 1e6 / calls, body)


def allreduce(arguments):
    for size in arguments.bytes or (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20):
        tensor = torch.zeros(size // 4)
        works = [f"all-reduce of {size_name(size)}, {where}" for where in ("arena", "private")]
        ranks.measure(works, "gloo", arguments.rounds, "ms", 1e3, lambda: dist.all_reduce(tensor))


def resnet50(arguments):
    tensor = torch.zeros(25557032)
    works = [f"161 gradients of ResNet-50, 102 MB, {where}"
             for where in ("arena", "shared", "LibTorch's memory", "private")]
    ranks.measure(works, "gloo of one vector", arguments.rounds, "ms", 1e3, lambda: dist.all_reduce(tensor))


def small(arguments):
    tensors = [torch.zeros(256) for _ in range(1000)]

    def each():
        for handle in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            handle.wait()

    works = [f"1000 tensors of 256 floats, {how}" for how in ("one group", "each by a call")]
    ranks.measure(works, "gloo, each", min(arguments.rounds, 3), "ms", 1e3, each)


def waiting(arguments):
    seconds = arguments.seconds
    tensor = torch.zeros(1)

    def load(body):
        dist.barrier()
        cpu, begin = time.process_time(), time.perf_counter()
        body()
        return ranks.slowest((time.process_time() - cpu) / (time.perf_counter() - begin)) * 100

    def late():
        if ranks.RANK == ranks.SIZE - 1:
            time.sleep(seconds)
        dist.all_reduce(tensor)

    ranks.emit(f"CPU of an idle rank, {seconds} s", "gloo", load(lambda: time.sleep(seconds)), "% of a core")
    ranks.emit(f"CPU while a peer is late, {seconds} s", "gloo", load(late), "% of a core")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("meeting")
    parser.add_argument("work", choices=["latency", "allreduce", "resnet50", "small", "waiting"])
    parser.add_argument("--bytes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    arguments = parser.parse_args()
    ranks.start(arguments.meeting)
    globals()[arguments.work](arguments)
    dist.barrier()
    os._exit(0)  # gloo's threads may still be at work, and what they do then does not matter


main()
