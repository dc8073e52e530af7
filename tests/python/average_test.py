"""DistributedOptimizer(average_at="backward"): .grad is the average when backward() returns."""

import warnings

import pytest
import torch

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank reduces nothing")
CLIP = 0.05


def distributed(model, lr=0.5, average_at="backward", **kwargs):
    base = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return hvd.DistributedOptimizer(base, model.named_parameters(), average_at=average_at, **kwargs)


def test_clipping_by_torch_follows_one_process(rank, size):
    alone = support.net()
    plain = torch.optim.SGD(alone.parameters(), 0.5, momentum=0.9)
    model = support.net()
    optimizer = distributed(model)
    assert optimizer.average_at == "backward"
    for mine, all_of_them in zip(support.batches(rank, 6), support.joined(size, 6)):
        plain.zero_grad()
        support.loss_of(alone, all_of_them).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        assert norm > CLIP
        plain.step()
        optimizer.zero_grad()
        support.loss_of(model, mine).backward()
        support.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP), norm, 1e-5)
        optimizer.step()
    support.assert_same_everywhere(hvd, model.parameters())
    for found, wanted in zip(model.parameters(), alone.parameters()):
        support.assert_close(found, wanted, 1e-5)


def test_the_default_is_horovods_rule(rank, size):
    weight = torch.nn.Parameter(torch.zeros(2))
    named = [("weight", weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), named)
    assert optimizer.average_at == "step"
    ((rank + 1) * weight).sum().backward()
    if size > 1:
        with pytest.raises(AssertionError):
            optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(weight.grad, torch.full((2,), (size + 1) / 2))


def test_several_backwards_and_synchronize_without_a_warning(rank, size):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("weight", weight)], average_at="backward")
    mean = (size + 1) / 2
    for _ in range(3):
        optimizer.zero_grad()
        ((rank + 1) * weight).sum().backward()
        assert torch.equal(weight.grad, torch.full((2,), mean))
        (10 * (rank + 1) * weight).sum().backward()
        assert torch.equal(weight.grad, torch.full((2,), 11 * mean))
        optimizer.synchronize()
        weight.grad.mul_(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    assert torch.equal(weight.detach(), torch.zeros(2))


def test_a_hook_and_reentrant_checkpoints(rank, size):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(5)
    first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    model = torch.nn.Sequential(first, last)
    optimizer = distributed(model, lr=0.1)
    alone = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    alone.load_state_dict(model.state_dict())
    for step in range(4):
        optimizer.zero_grad()
        batches = [torch.arange(6, dtype=torch.float32).reshape(2, 3) * (r + 1 + step) / 7 for r in range(size)]
        x = batches[rank].clone().requires_grad_()
        last(checkpoint(first, x, use_reentrant=True)).pow(2).mean().backward()
        alone.zero_grad()
        (sum(alone(batch).pow(2).mean() for batch in batches) / size).backward()
        for found, wanted in zip(model.parameters(), alone.parameters()):
            support.assert_close(found.grad, wanted.grad, 1e-4)


@SEVERAL
def test_a_step_without_a_backward_names_the_rank(rank):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [("weight", weight)], average_at="backward")
    with pytest.raises((ValueError, RuntimeError), match=r"in step\(\) on rank 1.*synchronize\(\)"):
        if rank != 1:
            weight.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, [weight])


def test_a_backward_that_throws_throws_everywhere(rank, size):
    weight = torch.nn.Parameter(torch.zeros(2))
    bias = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], 1.0), [("weight", weight), ("bias", bias)],
                                         average_at="backward")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no more memory")

    last = rank == size - 1
    with pytest.raises((ValueError, RuntimeError), match="no more memory" if last else r"backward\(\) has thrown"):
        ((Fails.apply(bias) if last else bias).sum() + weight.sum()).backward()
    optimizer.zero_grad()
    ((rank + 1) * (weight + bias)).sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), (size + 1) / 2))
    optimizer.step()


def test_what_is_neither_step_nor_backward_is_refused():
    model = support.net()
    with pytest.raises(ValueError, match="average_at is 'forward'"):
        distributed(model, average_at="forward")
