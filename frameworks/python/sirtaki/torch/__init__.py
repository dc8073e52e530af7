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
from sirtaki.common import exceptions
from sirtaki.common.exceptions import *  # noqa: F403
from sirtaki.torch import functions, movement, observability, process_sets, reductions, session, tensor_parallel
from sirtaki.torch._hooks import GradBucket
from sirtaki.torch._mesh import Mesh, mesh
from sirtaki.torch.amp import GradScaler
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.functions import *  # noqa: F403
from sirtaki.torch.movement import *  # noqa: F403
from sirtaki.torch.mpi_ops import barrier, join, monitored_barrier, poll, synchronize
from sirtaki.torch.observability import *  # noqa: F403
from sirtaki.torch.optimizer import DistributedOptimizer
from sirtaki.torch.optimizer_state import broadcast_optimizer_state
from sirtaki.torch.parallel import DistributedDataParallel
from sirtaki.torch.pipeline import Pipeline, PipelineReport
from sirtaki.torch.process_sets import *  # noqa: F403
from sirtaki.torch.reductions import *  # noqa: F403
from sirtaki.torch.session import *  # noqa: F403
from sirtaki.torch.sync_batch_norm import SyncBatchNorm
from sirtaki.torch.tensor_parallel import *  # noqa: F403

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
    "Compression", "Compressor", "DistributedDataParallel", "DistributedOptimizer", "GradBucket", "GradScaler",
    "Mesh", "Pipeline", "PipelineReport", "SyncBatchNorm", "barrier", "broadcast_optimizer_state", "elastic", "join", "mesh",
    "monitored_barrier", "poll", "run", "synchronize",
]
__all__ += exceptions.__all__
__all__ += functions.__all__
__all__ += movement.__all__
__all__ += observability.__all__
__all__ += process_sets.__all__
__all__ += reductions.__all__
__all__ += session.__all__
__all__ += tensor_parallel.__all__
