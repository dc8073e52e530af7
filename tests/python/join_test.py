"""Ranks with different numbers of batches: who is through joins, and changes nothing of what the others call."""

import threading

import pytest
import torch

import sirtaki.torch as hvd
import support
from sirtaki.common.exceptions import InvalidArgumentError


@pytest.mark.parametrize("turn", range(3))
def test_uneven_unnamed_operations_end_right(rank, size, turn):
    """Horovod hangs here at 4 ranks: its unnamed operations diverge after a join."""
    calls = 2 + (rank + turn) % size * 3
    most = 2 + (size - 1) * 3
    for call in range(calls):
        left = sum(1 for r in range(size) if 2 + (r + turn) % size * 3 > call)
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [left] * 3
        gathered = hvd.allgather(torch.tensor([rank]))
        assert gathered.tolist() == [r for r in range(size) if 2 + (r + turn) % size * 3 > call]
        average = hvd.synchronize(hvd.allreduce_async(torch.full((2,), float(size))))
        assert average.tolist() == [left] * 2
    last = hvd.join()
    assert isinstance(last, int) and 2 + (last + turn) % size * 3 == most
    # All are there again, and unnamed calls match.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_uneven_training_ends_with_equal_parameters(rank, size):
    model = support.net(seed=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for batch in support.batches(rank, steps=2 + rank):
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()
    last = hvd.join()
    assert last == size - 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)  # who came last has made every step
    support.assert_same_everywhere(hvd, model.parameters())


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_uneven_steps_with_shards_are_an_error_and_training_goes_on_after_the_join(rank, size, shard):
    if size == 1:
        pytest.skip("nobody else makes a step")
    model = support.net(seed=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1), model.named_parameters(), shard=shard)

    def step(batch):
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()

    first, second, third = support.batches(rank, steps=3)
    step(first)
    if rank < size - 1:  # the last rank has no more
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(InvalidArgumentError, match=f"rank {size - 1} has joined"):
            step(second)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before))
    hvd.join()
    step(third)
    support.assert_same_everywhere(hvd, model.parameters())


def test_join_of_a_set(rank, size):
    pair = hvd.add_process_set(list(range(min(size, 2))))
    if pair.included():
        for _ in range(1 + rank):
            hvd.allreduce(torch.ones(2), process_set=pair)
        assert hvd.join(process_set=pair) == pair.size() - 1
    hvd.remove_process_set(pair)


def test_join_takes_a_device_as_horovod_s_does(size):
    assert 0 <= hvd.join(-1) < size
    assert 0 <= hvd.join(device=-1) < size


@pytest.mark.skipif(hvd.size() < 3, reason="a rank that has joined, one that is wrong, and one that is told")
def test_what_is_wrong_on_a_rank_is_told_of_that_one_while_another_has_joined(rank):
    if rank > 0:
        with pytest.raises(ValueError) as told:
            hvd.broadcast_parameters([1 if rank == 1 else torch.ones(1)], root_rank=1)
        assert rank == 1 or (told.value.rank == 1 and "rank 1: " in str(told.value))
        with pytest.raises(Exception, match="pickle") as told:
            hvd.allgather_object(threading.Lock() if rank == 1 else None)
        assert rank == 1 or "the object of rank 1 cannot be pickled" in str(told.value)
    hvd.join()
