"""init() on a communicator of mpi4py's, on a list of ranks, and sets that are made of communicators."""

import pytest
import torch

import sirtaki.torch as hvd
import support

MPI = support.mpi_of_mpi4py()


@pytest.fixture
def world():
    """MPI's, with no session of the library; afterwards there is one again."""
    hvd.shutdown()
    yield MPI.COMM_WORLD
    hvd.shutdown()
    hvd.init()


def test_the_ranks_of_a_communicator_are_the_job(world):
    backwards = world.Split(0, -world.rank)
    hvd.init(comm=backwards)
    assert (hvd.rank(), hvd.size()) == (world.size - 1 - world.rank, world.size)
    hvd.init(comm=backwards)  # nothing: it is what the job has
    with pytest.raises(ValueError, match="another communicator"):
        hvd.init(comm=world)
    numbers = hvd.allgather(torch.tensor([world.rank]))
    assert numbers.tolist() == list(range(world.size - 1, -1, -1))
    # Sets are of ranks of the job, whatever they are in MPI's world.
    alone = MPI.COMM_SELF
    sets = [hvd.ProcessSet(alone) if hvd.rank() == rank else hvd.ProcessSet([rank]) for rank in range(hvd.size())]
    for rank, one in enumerate(sets):
        assert hvd.add_process_set(one).ranks == [rank] and one.included() == (rank == hvd.rank())
    hvd.shutdown()
    backwards.Free()


def test_two_jobs_side_by_side(world):
    half = world.Split(world.rank % 2, world.rank)
    hvd.init(comm=half)
    assert (hvd.rank(), hvd.size()) == (half.rank, half.size)
    wanted = sum(range(world.rank % 2, world.size, 2))
    assert hvd.allreduce(torch.tensor([world.rank]), op=hvd.Sum).item() == wanted
    hvd.shutdown()
    half.Free()


def test_a_list_of_ranks_is_the_job(world):
    ranks = [0, world.size - 1] if world.size > 1 else [0]
    if world.rank in ranks:
        hvd.init(comm=ranks)
        assert (hvd.rank(), hvd.size()) == (ranks.index(world.rank), len(ranks))
        hvd.barrier()
        hvd.shutdown()
    else:
        with pytest.raises(ValueError, match=f"rank {world.rank} "):
            hvd.init(comm=ranks)
    world.Barrier()


def test_a_set_of_the_ranks_of_a_communicator(rank, size):
    part = MPI.COMM_WORLD.Split(rank % 2, rank)
    even = [r for r in range(size) if r % 2 == 0]
    made = hvd.add_process_set(hvd.ProcessSet(part) if rank % 2 == 0 else hvd.ProcessSet(even))
    assert made.ranks == even
    part.Free()
    hvd.remove_process_set(made)
