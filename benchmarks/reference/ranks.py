"""What the references over torch.distributed share: starting, timing, and the lines that the driver reads."""

import json
import os
import platform
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)


def of_environment(*names):
    for name in names:
        if name in os.environ:
            return int(os.environ[name])
    sys.exit("started by mpirun?")


RANK = of_environment("OMPI_COMM_WORLD_RANK", "PMI_RANK")
SIZE = of_environment("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def start(meeting, backend="gloo"):
    """`meeting`: a file that is not there yet, through which the ranks find each other."""
    dist.init_process_group(backend, init_method="file://" + meeting, rank=RANK, world_size=SIZE)


def start_on_gpus(meeting):
    """The same over NCCL: this rank's GPU, and what to add to a work's name. Ranks that are on one GPU, which NCCL refuses,
    say to be of different hosts before it begins. Ends with code 77 and the reason if there is no GPU."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print(f"torch {torch.__version__} finds no GPU, or has no NCCL", file=sys.stderr)
        sys.exit(77)
    local_rank = of_environment("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    gpus = dist.FileStore(meeting + "-gpus", SIZE)
    gpus.set(str(RANK), f"{platform.node()} {torch.cuda.get_device_properties(device).uuid}")
    shared = len({gpus.get(str(rank)) for rank in range(SIZE)}) < SIZE
    if shared:
        os.environ["NCCL_HOSTID"] = f"rank{RANK}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    start(meeting, "nccl")
    return device, ", GPU shared" if shared else ""


def slowest(value):
    worst = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def timed(body):
    dist.barrier()
    begin = time.perf_counter()
    body()
    return slowest(time.perf_counter() - begin)


def emit(work, variant, value, unit):
    if RANK == 0:
        sample = {"work": work, "ranks": SIZE, "variant": variant, "value": value, "unit": unit}
        print(json.dumps(sample), flush=True)


def measure(works, variant, rounds, unit, scale, body):
    body()
    median = statistics.median(timed(body) for _ in range(rounds))
    for work in works:
        emit(work, variant, median * scale, unit)
