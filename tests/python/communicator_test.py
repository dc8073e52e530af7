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
    hvd.init(comm=list(range(world.size))[::-1])
    if world.size > 1:
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


@pytest.mark.parametrize("of_job", [lambda world: None, lambda world: world.Split(0, -world.rank)],
                         ids=["the world", "backwards"])
def test_the_parts_of_a_communicator_are_a_set_each(world, of_job):
    """Each rank gives the part that it is in, as in Horovod's own example."""
    job = of_job(world)
    part = world.Split(world.rank % 2, world.rank)
    mine, everybody = hvd.ProcessSet(part), hvd.ProcessSet(range(world.size))
    assert mine.mpi_comm is part and everybody.mpi_comm is None
    hvd.init(comm=job, process_sets=[everybody, mine])
    assert hvd.global_process_set.mpi_comm == job
    in_job = world.allgather(hvd.rank())
    parts = [sorted(in_job[odd::2]) for odd in range(min(world.size, 2))]
    assert mine.ranks == parts[world.rank % 2] and mine.included()
    assert hvd.allreduce(torch.tensor([world.rank]), op=hvd.Sum, process_set=mine).item() \
        == sum(range(world.rank % 2, world.size, 2))
    known = hvd.get_process_set_ids_and_ranks()
    assert all(ranks in known.values() for ranks in parts) and hvd.allgather_object(known) == [known] * world.size
    hvd.shutdown()
    part.Free()
    if job is not None:
        job.Free()


def test_ranks_may_give_different_numbers_of_communicators(world):
    mine = hvd.ProcessSet(MPI.COMM_SELF)
    everybody, again = hvd.ProcessSet(world), hvd.ProcessSet(world)
    hvd.init(process_sets=[mine, everybody, again] if world.rank == 0 else [everybody, again])
    assert hvd.allgather_object((everybody.process_set_id, again.process_set_id)) \
        == [(everybody.process_set_id, again.process_set_id)] * world.size
    for one in (everybody, again):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=one).item() == world.size
    hvd.init(comm=world, process_sets=[])  # what it has
    hvd.init(comm=range(world.size))
    with pytest.raises(ValueError, match="sets of communicators"):
        hvd.init(process_sets=[hvd.ProcessSet(MPI.COMM_SELF)])


def test_a_communicator_of_others_is_refused_on_all_ranks(world):
    if world.size < 2:
        return
    jobs = world.Split(world.rank == world.size - 1, world.rank)
    outside = hvd.ProcessSet(world)
    with pytest.raises(ValueError, match="not in the job"):
        hvd.init(comm=jobs, process_sets=[outside])
    assert not hvd.is_initialized()
    jobs.Free()


def test_a_set_of_the_ranks_of_a_communicator(rank, size):
    part = MPI.COMM_WORLD.Split(rank % 2, rank)
    even = [r for r in range(size) if r % 2 == 0]
    made = hvd.add_process_set(hvd.ProcessSet(part) if rank % 2 == 0 else hvd.ProcessSet(even))
    assert made.ranks == even
    part.Free()
    hvd.remove_process_set(made)


def test_the_program_calls_mpi_in_a_pause(size):
    assert hvd.mpi_threads_supported() is False
    hvd.pause_mpi()
    waits = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    assert MPI.COMM_WORLD.allreduce(1) == size
    hvd.resume_mpi()
    assert hvd.synchronize(waits).tolist() == [float(size)] * 2
