"""SyncBatchNorm: the statistics of the joined batch."""

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
import support


def share(rank, shape, seed=11):
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 4), (2, 3, 2, 2, 2)], ids=str)
def test_it_normalizes_as_one_process_does_the_joined_batch(rank, size, shape):
    def rows(r):
        return share(r, (shape[0] + r,) + shape[1:])  # batches may differ in size

    mine = rows(rank).requires_grad_()
    norm, alone = hvd.SyncBatchNorm(3).double(), (nn.BatchNorm1d if len(shape) < 4 else
                                                  nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm3d)(3).double()
    with torch.no_grad():
        for module in (norm, alone):
            module.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            module.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
    whole = torch.cat([rows(r) for r in range(size)]).requires_grad_()
    found, wanted = norm(mine), alone(whole)
    begin = sum(shape[0] + r for r in range(rank))
    part = slice(begin, begin + shape[0] + rank)
    support.assert_close(found, wanted[part], 1e-9)
    support.assert_close(norm.running_mean, alone.running_mean, 1e-9)
    support.assert_close(norm.running_var, alone.running_var, 1e-9)
    assert norm.num_batches_tracked.item() == 1
    weight = share(99, whole.shape)
    (found * weight[part]).sum().backward()
    (wanted * weight).sum().backward()
    support.assert_close(mine.grad, whole.grad[part], 1e-8)
    # Each rank has its own share of weight and bias, which an optimizer adds up.
    support.assert_close(hvd.allreduce(norm.weight.grad, op=hvd.Sum), alone.weight.grad, 1e-8)
    support.assert_close(hvd.allreduce(norm.bias.grad, op=hvd.Sum), alone.bias.grad, 1e-8)


def test_evaluation_takes_the_running_statistics_and_needs_nobody(rank):
    norm, plain = hvd.SyncBatchNorm(2), nn.BatchNorm1d(2)
    norm.eval(), plain.eval()
    if rank == 0:
        x = torch.randn(3, 2)
        support.assert_close(norm(x), plain(x))


@pytest.mark.parametrize("arguments", [{"affine": False}, {"momentum": None}, {"track_running_stats": False},
                                       {"eps": 1e-2}], ids=str)
def test_its_arguments(rank, size, arguments):
    norm, alone = hvd.SyncBatchNorm(3, **arguments).double(), nn.BatchNorm1d(3, **arguments).double()
    for turn in range(2):
        whole = torch.cat([share(r, (4, 3), turn) for r in range(size)])
        support.assert_close(norm(share(rank, (4, 3), turn)), alone(whole)[4 * rank:4 * rank + 4], 1e-9)
    if norm.running_mean is not None:
        support.assert_close(norm.running_mean, alone.running_mean, 1e-9)
    assert list(norm.state_dict()) == list(alone.state_dict())


def test_a_model_is_converted(rank, size):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)),
                          nn.Flatten(), nn.Linear(4 * 36, 2), nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.manual_seed(3)
        nn.init.normal_(parameter)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(m).__name__ for m in converted.modules()].count("SyncBatchNorm") == 3
    assert not any(type(m) in (nn.BatchNorm1d, nn.BatchNorm2d) for m in converted.modules())
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(converted.parameters(), 0.01), converted.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        converted(torch.randn(4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    support.assert_same_everywhere(hvd, list(converted.parameters()) + [b.double() for b in converted.buffers()])


def test_a_module_that_stands_in_several_places_is_converted_once():
    shared = nn.BatchNorm1d(2)
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared)))
    assert type(model[0]) is hvd.SyncBatchNorm and model[0] is model[2] is model[3][0]


def test_statistics_that_are_not_tracked_for_a_while_stay(rank):
    norm = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3))
    norm.track_running_stats = False
    norm(torch.randn(8, 3) + 5)
    norm.track_running_stats = True
    assert norm.running_mean.tolist() == [0.0] * 3 and norm.num_batches_tracked == 0
    norm(torch.randn(8, 3) + 5)
    assert norm.running_mean.min() > 0 and norm.num_batches_tracked == 1


def test_what_is_no_batch_is_refused():
    with pytest.raises(ValueError):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    with pytest.raises((ValueError, RuntimeError)):
        hvd.SyncBatchNorm(3)(torch.ones(4, 5))


def test_of_a_process_set(rank, size):
    members = list(range((size + 1) // 2))
    first = hvd.add_process_set(members)
    if first.included():
        norm = hvd.SyncBatchNorm(3, process_set=first).double()
        whole = torch.cat([share(r, (4, 3)) for r in members])
        support.assert_close(norm(share(rank, (4, 3))), nn.BatchNorm1d(3).double()(whole)[4 * rank:4 * rank + 4], 1e-9)
    hvd.remove_process_set(first)


def test_of_a_process_set_after_the_job_was_joined_anew(rank, size):
    everybody = hvd.ProcessSet(range(size))
    try:
        hvd.shutdown()
        hvd.init(process_sets=[everybody])
        norm = hvd.SyncBatchNorm(3, process_set=everybody)
        before = norm(share(rank, (4, 3)).float())
        hvd.elastic.running.reset()
        assert torch.equal(norm(share(rank, (4, 3)).float()), before)
    finally:
        support.reinit(hvd)
