"""calls.py MODULE WORK [--bytes N,...] [--rounds N]: all-reduces of small tensors by sirtaki.torch or horovod.torch.

Works: latency, small. They have the names that ../vectors.cc and ../gradients.cc give them.
"""

import argparse
import statistics
import time

import torch

import lines
from lines import hvd


def size_name(size):
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def timed(body):
    hvd.barrier()
    begin = time.perf_counter()
    body()
    return time.perf_counter() - begin


def measure(work, rounds, unit, scale, body):
    body()  # the names become known
    times = lines.slowest([timed(body) for _ in range(rounds)])
    lines.emit(work, statistics.median(times) * scale, unit)


def latency(arguments):
    calls = 50
    for size in arguments.bytes or (4, 64, 1024, 4096, 16384, 65536):
        tensor = torch.zeros(size // 4)

        def body():
            for _ in range(calls):
                hvd.allreduce_(tensor, op=hvd.Sum, name=f"latency.{size}")

        measure(f"synchronous all-reduce of {size_name(size)}", arguments.rounds, "us", 1e6 / calls, body)


def small(arguments):
    tensors = [torch.zeros(256) for _ in range(1000)]
    names = [f"tensor.{number}" for number in range(len(tensors))]

    def group():
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum, name="group"))

    def each():
        for handle in [hvd.allreduce_async_(tensor, op=hvd.Sum, name=name) for tensor, name in zip(tensors, names)]:
            hvd.synchronize(handle)

    for how, body in (("one group", group), ("each by a call", each)):
        measure(f"1000 tensors of 256 floats, {how}", arguments.rounds, "ms", 1e3, body)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["latency", "small"])
    parser.add_argument("--bytes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(lines.ARGUMENTS)
    hvd.init()
    globals()[arguments.work](arguments)
    hvd.shutdown()


main()
