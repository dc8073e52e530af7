"""What backward() gives through each collective, as in Horovod.

All-reduce and all-to-all: the derivative, by this rank's tensor, of what the losses of all ranks add up to. All-gather and
broadcast: of their mean. Reduce-scatter: as many times the derivative of the sum as there are ranks.
"""

import pytest
import torch

import sirtaki.torch as hvd
import support

PRESCALE, POSTSCALE = 0.5, 3.0


def weights(rank, shape, seed=3):
    """What each rank weighs the result's elements by: the loss is their sum, so the gradients are known."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradient(rank, x, results):
    loss = sum((result * weights(rank, result.shape, seed)).sum() for seed, result in enumerate(results))
    loss.backward()
    return x.grad


def tensor(rank, *shape):
    return weights(rank, shape, seed=50).requires_grad_()


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=str)
def test_allreduce(rank, size, op):
    x = tensor(rank, 3, 2)
    found = gradient(rank, x, [hvd.allreduce(x, op=op, name="x")])
    wanted = sum(weights(r, (3, 2), 0) for r in range(size)) / (size if op == hvd.Average else 1)
    support.assert_close(found, wanted)


def test_allreduce_with_factors(rank, size):
    x = tensor(rank, 4)
    found = gradient(rank, x, [hvd.allreduce(x, op=hvd.Sum, prescale_factor=PRESCALE, postscale_factor=POSTSCALE)])
    support.assert_close(found, PRESCALE * POSTSCALE * sum(weights(r, (4,), 0) for r in range(size)))


def test_allreduce_with_compression_goes_back_through_the_conversion(rank, size):
    x = torch.full((4,), 2.0, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16) * 2).sum().backward()
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, torch.full((4,), 2.0 * size))


def test_grouped_allreduce(rank, size):
    x = tensor(rank, 3)
    found = gradient(rank, x, hvd.grouped_allreduce([x, 2 * x], op=hvd.Average))
    wanted = sum(weights(r, (3,), 0) + 2 * weights(r, (3,), 1) for r in range(size)) / size
    support.assert_close(found, wanted)


def test_allgather(rank, size):
    x = tensor(rank, rank + 1, 2)
    found = gradient(rank, x, [hvd.allgather(x)])
    rows = support.ranks_sum(size)
    begin = support.ranks_sum(rank)
    wanted = sum(weights(r, (rows, 2), 0) for r in range(size))[begin:begin + rank + 1]
    support.assert_close(found, wanted / size)


def test_grouped_allgather(rank, size):
    x = tensor(rank, 2)
    found = gradient(rank, x, hvd.grouped_allgather([x, 3 * x]))
    both = [sum(weights(r, (2 * size,), seed) for r in range(size))[2 * rank:2 * rank + 2] for seed in (0, 1)]
    support.assert_close(found, (both[0] + 3 * both[1]) / size)


def test_broadcast(rank, size):
    root = size - 1
    x = tensor(rank, 3)
    found = gradient(rank, x, [hvd.broadcast(x, root)])
    wanted = sum(weights(r, (3,), 0) for r in range(size)) if rank == root else torch.zeros(3, dtype=torch.float64)
    support.assert_close(found, wanted / size)


def test_alltoall(rank, size):
    x = tensor(rank, size, 2)
    found = gradient(rank, x, [hvd.alltoall(x)])
    support.assert_close(found, torch.stack([weights(r, (size, 2), 0)[rank] for r in range(size)]))


def test_alltoall_with_splits(rank, size):
    x = tensor(rank, support.ranks_sum(size))  # i + 1 rows for rank i
    result, _ = hvd.alltoall(x, splits=[i + 1 for i in range(size)])
    found = gradient(rank, x, [result])
    wanted = torch.cat([weights(r, (size * (r + 1),), 0)[rank * (r + 1):(rank + 1) * (r + 1)] for r in range(size)])
    support.assert_close(found, wanted)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average], ids=str)
def test_reducescatter(rank, size, op):
    x = tensor(rank, 2 * size, 2)
    found = gradient(rank, x, [hvd.reducescatter(x, op=op)])
    wanted = torch.cat([weights(r, (2, 2), 0) for r in range(size)])
    support.assert_close(found, wanted * (1 if op == hvd.Average else size))


def test_grouped_reducescatter(rank, size):
    x = tensor(rank, size)
    found = gradient(rank, x, hvd.grouped_reducescatter([x, 2 * x], op=hvd.Sum))
    wanted = [torch.cat([weights(r, (1,), seed) for r in range(size)]) for seed in (0, 1)]
    support.assert_close(found, size * (wanted[0] + 2 * wanted[1]))


def test_within_a_process_set(rank, size):
    ranks = list(range(0, size, 2))
    even = hvd.add_process_set(ranks)
    if even.included():
        x = tensor(rank, 3)
        found = gradient(rank, x, [hvd.allreduce(x, op=hvd.Average, process_set=even)])
        support.assert_close(found, sum(weights(r, (3,), 0) for r in ranks) / len(ranks))
    hvd.remove_process_set(even)


def test_gradients_of_what_has_no_derivative_are_refused(rank, size):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises((NotImplementedError, RuntimeError)):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def test_a_chain_by_differences(rank, size):
    """Twice through the ranks: every rank disturbs the same element, and the losses of all ranks are equal."""
    x = tensor(0, size)

    def f(x):
        return hvd.allreduce(hvd.alltoall(x.sin()).square(), op=hvd.Average).sum()

    f(x).backward()
    step = 1e-6
    total = hvd.allreduce(x.grad, op=hvd.Sum)
    for i in range(size):
        with torch.no_grad():
            changed = x.detach().clone()
            changed[i] += step
            slope = size * (f(changed) - f(x)) / step
        support.assert_close(total[i], slope, 1e-4)


def test_no_grad_makes_no_graph(rank):
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad
