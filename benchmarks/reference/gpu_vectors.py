"""gpu_vectors.py MEETING WORKS BYTES ROUNDS: collectives of one vector on GPUs by torch.distributed over NCCL.

WORKS and BYTES are lists with commas; what is timed is what gpu_vectors.cc times. Ends with code 77 and the reason if there
is no GPU.
"""

import os
import statistics
import sys
import time

import ranks
import torch
import torch.distributed as dist


def size_name(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def seconds_of(call, calls):
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    worst = torch.tensor([(time.perf_counter() - begin) / calls], dtype=torch.float64, device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def main():
    meeting, works, sizes, rounds = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(","), int(sys.argv[4])
    device, where = ranks.start_on_gpus(meeting)
    others = (ranks.SIZE - 1) / ranks.SIZE
    for work in works:
        for size in map(int, sizes):
            elements = max(size // 4 // ranks.SIZE, 1)
            part = torch.zeros(elements, device=device)
            whole = torch.zeros(elements * ranks.SIZE, device=device)
            call, crossing = {
                "all-reduce": (lambda: dist.all_reduce(whole), 2 * others),
                "all-gather": (lambda: dist.all_gather_into_tensor(whole, part), others),
                "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, whole), others),
                "broadcast": (lambda: dist.broadcast(whole, 0), 1),
            }[work]
            moved = whole.numel() * 4
            calls = min(max((64 << 20) // moved, 2), 100)
            seconds_of(call, calls)
            seconds = statistics.median(seconds_of(call, calls) for _ in range(rounds))
            figures = [("time", "us", seconds * 1e6), ("algorithm bandwidth", "GB/s", moved * 1e-9 / seconds)]
            if ranks.SIZE > 1:
                figures.append(("bus bandwidth", "GB/s", crossing * moved * 1e-9 / seconds))
            for what, unit, value in figures:
                ranks.emit(f"{work} of {size_name(size)}{where}: {what}", "torch.distributed, NCCL", value, unit)
    dist.barrier()
    os._exit(0)


main()
