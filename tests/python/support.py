"""What the tests share: who this rank is, tensors of which the reduction is known, small trainings."""

import os
import time

import pytest
import torch
from torch import nn

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))

# A rank that misses a call fails the job, after the time that a loaded machine needs. By variables, so that every init() finds them.
os.environ.update(SIRTAKI_STALL_WARNING="40s", SIRTAKI_STALL_LIMIT="120s", SIRTAKI_LOG_LEVEL="error")

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]


def mpi_of_mpi4py():
    """Skips the test, or the module that is being imported, where there is none that works."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter where it finds no library of MPI's
        pytest.skip(f"mpi4py does not work here: {error}", allow_module_level=True)
    return MPI


def without_mpi():
    """This process is a rank of mpirun, what it starts is not."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_"))} | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def ranks_sum(size):
    """1 + 2 + … + size."""
    return size * (size + 1) // 2


def reinit(hvd):
    """Leaves the job and joins it again."""
    hvd.shutdown()
    hvd.init()


def await_true(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.001)


def net(seed=0, dtype=torch.float32):
    """The same weights on every rank that gives the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).to(dtype) / 2)
    return model


def batches(rank, steps=3, rows=6, seed=7):
    """The batches of a rank."""
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    return [(torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator))
            for _ in range(steps)]


def joined(size, steps=3, rows=6, seed=7):
    """The batches of all ranks in one: the mean over it has the average of the ranks' gradients."""
    shares = [batches(rank, steps, rows, seed) for rank in range(size)]
    return [tuple(torch.cat([share[step][part] for share in shares]) for part in range(2)) for step in range(steps)]


def loss_of(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def assert_same_everywhere(hvd, tensors):
    """Bit by bit."""
    for i, tensor in enumerate(tensors):
        flat = tensor.detach().contiguous().reshape(1, -1)
        rows = hvd.allgather(flat)
        assert all(torch.equal(row, rows[0]) for row in rows), f"tensor {i} differs between the ranks"


def assert_close(found, wanted, tolerance=1e-6):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
