"""DistributedDataParallel: the module wrapper that DDP's users know."""

import copy

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank reduces nothing")


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()


def trained_alone(size, steps=3):
    model = support.net()
    train(model, torch.optim.SGD(model.parameters(), 0.1), support.joined(size, steps))
    return model


def assert_trained(model, wanted, tolerance=1e-5):
    support.assert_same_everywhere(hvd, model.parameters())
    for found, parameter in zip(model.parameters(), wanted.parameters()):
        support.assert_close(found, parameter, tolerance)


def test_it_broadcasts_weights_and_averages_gradients(rank, size):
    wrapped = hvd.DistributedDataParallel(support.net(seed=rank))
    assert isinstance(wrapped, nn.Module) and isinstance(wrapped.module, nn.Sequential)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    assert_trained(wrapped, trained_alone(size))


def test_gradients_are_averaged_when_backward_returns(rank, size):
    wrapped = hvd.DistributedDataParallel(nn.Linear(2, 1))
    wrapped(torch.full((1, 2), float(rank))).sum().backward()
    support.assert_close(wrapped.module.weight.grad, torch.full((1, 2), (size - 1) / 2))


def test_arguments_of_ddp_are_accepted(rank, size):
    wrapped = hvd.DistributedDataParallel(support.net(), device_ids=None, output_device=None, dim=0,
                                          broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=True,
                                          gradient_as_bucket_view=True, static_graph=False)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), support.batches(rank))
    support.assert_same_everywhere(hvd, wrapped.parameters())


def test_its_state_dict_is_ddp_s(rank):
    wrapped = hvd.DistributedDataParallel(support.net())
    assert list(wrapped.state_dict()) == [f"module.{name}" for name in support.net().state_dict()]
    other = hvd.DistributedDataParallel(support.net(seed=5))
    other.load_state_dict(wrapped.state_dict())
    assert all(map(torch.equal, other.parameters(), wrapped.parameters()))


def test_no_sync(rank, size):
    wrapped = hvd.DistributedDataParallel(support.net())
    alone = support.net()
    mine, whole = support.batches(rank, 2), support.joined(size, 2)
    with wrapped.no_sync():
        support.loss_of(wrapped, mine[0]).backward()
    local = support.net()
    support.loss_of(local, mine[0]).backward()
    for found, wanted in zip(wrapped.parameters(), local.parameters()):
        support.assert_close(found.grad, wanted.grad, 1e-6)
    support.loss_of(wrapped, mine[1]).backward()
    for batch in whole:
        support.loss_of(alone, batch).backward()
    for found, wanted in zip(wrapped.parameters(), alone.parameters()):
        support.assert_close(found.grad, wanted.grad, 1e-5)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(2, 1, bias=False) for _ in range(3))
        for p in self.parameters():
            nn.init.ones_(p)

    def forward(self, x, both):
        return self.always(x) + (self.sometimes(x) if both else 0)


def test_parameters_that_are_not_used_need_no_flag(rank, size):
    wrapped = hvd.DistributedDataParallel(Branches())
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 2), rank == 0).sum().backward()
        support.assert_close(wrapped.module.always.weight.grad, torch.ones(1, 2))
        support.assert_close(wrapped.module.sometimes.weight.grad, torch.full((1, 2), 1 / size))
        assert wrapped.module.never.weight.grad is None


def test_buffers_are_rank_0_s_in_training(rank, size):
    wrapped = hvd.DistributedDataParallel(nn.BatchNorm1d(2, momentum=1.0))
    wrapped(torch.randn(8, 2) + 10 * rank)
    wrapped(torch.randn(8, 2) + 10 * rank)  # first takes rank 0's
    with torch.no_grad():
        wrapped.module.running_mean.fill_(rank + 1.0)
    wrapped.train()
    x = torch.zeros(8, 2)
    wrapped.module.momentum = 0.0
    wrapped(x)
    assert wrapped.module.running_mean.tolist() == [1.0, 1.0]
    own = hvd.DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
    with torch.no_grad():
        own.module.running_mean.fill_(rank + 1.0)
    own.module.momentum = 0.0
    own(x)
    assert own.module.running_mean.tolist() == [rank + 1.0] * 2


@SEVERAL
def test_a_hook_is_registered_as_with_ddp(rank, size):
    wrapped = hvd.DistributedDataParallel(support.net())
    state = {"calls": 0}

    def hook(state, bucket):
        state["calls"] += 1
        future = torch.futures.Future()
        future.set_result(hvd.allreduce(bucket.buffer(), name=bucket.name() + "/hook"))
        return future

    wrapped.register_comm_hook(state, hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    assert_trained(wrapped, trained_alone(size))
    assert state["calls"] > 0


def test_sum_compression_and_process_sets(rank, size):
    wrapped = hvd.DistributedDataParallel(nn.Linear(2, 1, bias=False), op=hvd.Sum)
    wrapped(torch.ones(1, 2)).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[size, size]]
    wrapped = hvd.DistributedDataParallel(support.net(), compression=hvd.Compression.bf16)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    assert_trained(wrapped, trained_alone(size), 1e-2)
    first = hvd.add_process_set([0])
    if first.included():
        wrapped = hvd.DistributedDataParallel(support.net(), process_set=first)
        train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(0))
    hvd.remove_process_set(first)


def test_evaluation_needs_nobody(rank):
    wrapped = hvd.DistributedDataParallel(support.net())
    wrapped.eval()
    if rank == 0:
        with torch.no_grad():
            assert wrapped(torch.ones(1, 4)).shape == (1, 3)


def test_the_module_can_be_copied(rank):
    wrapped = hvd.DistributedDataParallel(support.net())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    average = copy.deepcopy(wrapped.module)  # as for a moving average of the weights
    assert all(map(torch.equal, average.parameters(), wrapped.parameters()))
