"""Data-parallel training of PyTorch programs: Horovod's interface, on Sirtaki's C++ library.

    import sirtaki.torch as hvd

    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    ...  # train on this rank's share of the data

Start it with ``sirtakirun -np 4 python train.py``. docs/migrating-from-horovod.md says what differs from Horovod;
docs/migrating-from-ddp.md is for programs that use DistributedDataParallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sirtaki import __version__
from sirtaki.common.exceptions import (
    AbortedError,
    BackendError,
    DuplicateNameError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidArgumentError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    PendingGradientsError,
    ProtocolError,
    ShutDownError,
    SirtakiError,
    TimedOutError,
    UnsupportedError,
)
from sirtaki.torch._hooks import GradBucket
from sirtaki.torch.amp import GradScaler
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_parameters,
    check_parameters,
    metric_average,
)
from sirtaki.torch.mpi_ops import (
    Adasum,
    Average,
    BitAnd,
    BitOr,
    BitXor,
    Handle,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_broadcast,
    grouped_broadcast_,
    grouped_broadcast_async,
    grouped_broadcast_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    irecv,
    isend,
    join,
    monitored_barrier,
    poll,
    recv_,
    reducescatter,
    reducescatter_async,
    send,
    sparse_allreduce_async,
    synchronize,
)
from sirtaki.torch.observability import (
    mark,
    memory_use,
    metrics,
    release_memory,
    start_timeline,
    stop_timeline,
)
from sirtaki.torch.optimizer import DistributedOptimizer
from sirtaki.torch.optimizer_state import broadcast_optimizer_state
from sirtaki.torch.parallel import DistributedDataParallel
from sirtaki.torch.process_sets import (
    ProcessSet,
    add_process_set,
    cross_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_included,
    local_process_set,
    remove_process_set,
)
from sirtaki.torch.session import (
    abort,
    ccl_built,
    check_extension,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    num_rank_is_power_2,
    pause_mpi,
    rank,
    resume_mpi,
    rocm_built,
    seed_all,
    shutdown,
    size,
    xla_built,
)
from sirtaki.torch.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from sirtaki.torch import elastic
    from sirtaki.torch._run import run
else:

    def __getattr__(name: str) -> Any:
        # Late: few programs use them.
        if name == "elastic":
            import importlib

            return importlib.import_module("sirtaki.torch.elastic")
        if name == "run":
            from sirtaki.torch._run import run

            return run
        raise AttributeError(f"module 'sirtaki.torch' has no attribute {name!r}")


__all__ = [
    "AbortedError",
    "Adasum",
    "Average",
    "BackendError",
    "BitAnd",
    "BitOr",
    "BitXor",
    "Compression",
    "Compressor",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DuplicateNameError",
    "GradBucket",
    "GradScaler",
    "Handle",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "PendingGradientsError",
    "ProcessSet",
    "Product",
    "ProtocolError",
    "ReduceOp",
    "ShutDownError",
    "SirtakiError",
    "Sum",
    "SyncBatchNorm",
    "TimedOutError",
    "UnsupportedError",
    "abort",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "check_parameters",
    "cross_process_set",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "irecv",
    "is_homogeneous",
    "is_initialized",
    "is_process_set_included",
    "isend",
    "join",
    "local_process_set",
    "local_rank",
    "local_size",
    "mark",
    "memory_use",
    "metric_average",
    "metrics",
    "monitored_barrier",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "pause_mpi",
    "poll",
    "rank",
    "recv_",
    "reducescatter",
    "reducescatter_async",
    "release_memory",
    "remove_process_set",
    "resume_mpi",
    "rocm_built",
    "run",
    "seed_all",
    "send",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "xla_built",
]
