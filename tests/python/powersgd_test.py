"""The hook of examples/python/powersgd.py, with gradients that are known."""

import io
import pathlib
import sys

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
import support

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples" / "python"))

from powersgd import PowerSGD  # noqa: E402

pytestmark = pytest.mark.skipif(hvd.size() == 1, reason="one rank calls no hook")
RANKS = [1, 2, 3, 4]
ROWS, COLUMNS = 24, 40


class Training:
    """The parameters of one optimizer with the hook, a matrix and what goes plain."""

    def __init__(self, rank, start=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        shapes = {"matrix": (ROWS, 2, COLUMNS // 2), "square": (4, 4), "bias": (ROWS,), "nothing": (0, 4)}
        self.parameters = {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                           for name, shape in shapes.items()}
        self.hook = PowerSGD(rank, start)
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters.values(), lr=0.1, momentum=0.9),
                                                  self.parameters.items(), communication_hook=self.hook)

    def step(self, gradients):
        """Copies of the averages, after a step with these gradients."""
        self.optimizer.zero_grad()
        sum((parameter * gradient).sum() for parameter, gradient in zip(self.parameters.values(), gradients)).backward()
        self.optimizer.step()
        averages = [parameter.grad.clone() for parameter in self.parameters.values()]
        support.assert_same_everywhere(hvd, [average.nan_to_num() for average in averages[:-1]])
        return averages


def gradients_of(rank, step, inner=None, dtype=torch.float32):
    """What a rank brings to a step; `inner`: the matrix is of this rank, and the same everywhere but for a factor."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    matrix = torch.randn(ROWS, 2, COLUMNS // 2, generator=generator)
    if inner:
        same = torch.Generator().manual_seed(step)
        left, right = (torch.randn(length, inner, generator=same, dtype=torch.float64) for length in (ROWS, COLUMNS))
        matrix = (1 + rank) * (left @ right.T).reshape(matrix.shape)
    return [matrix.to(dtype)] + [torch.randn(shape, generator=generator).to(dtype) for shape in ((4, 4), (ROWS,), (0, 4))]


def mean_of(size, step, **options):
    every = [gradients_of(rank, step, **options) for rank in range(size)]
    return [sum(parts) / size for parts in zip(*every)]


@pytest.mark.parametrize("factors", RANKS)
def test_a_matrix_of_that_rank_arrives_whole(rank, size, factors):
    training = Training(factors, dtype=torch.float64)
    for step in range(3):
        averages = training.step(gradients_of(rank, step, inner=factors, dtype=torch.float64))
        for found, wanted in zip(averages, mean_of(size, step, inner=factors, dtype=torch.float64)):
            support.assert_close(found, wanted)


@pytest.mark.parametrize("factors", RANKS)
def test_what_is_left_out_comes_later(rank, size, factors):
    training = Training(factors)
    arrived = torch.zeros(ROWS, 2, COLUMNS // 2)
    brought = torch.zeros(ROWS, 2, COLUMNS // 2)
    for step in range(6):
        average = training.step(gradients_of(rank, step))[0]
        assert torch.linalg.matrix_rank(average.reshape(ROWS, COLUMNS), rtol=1e-4) == factors
        arrived += average
        brought += mean_of(size, step)[0]
        left_out = hvd.allreduce(training.hook.left_out["matrix"])
        assert left_out.norm() > 1
        support.assert_close(arrived + left_out.reshape(arrived.shape), brought, 1e-4)


def test_a_warm_start_finds_the_strongest_directions(rank, size):
    """The factors of a gradient that stays come to be those of the best approximation of it and of what was left out."""
    training = Training(2)
    generator = torch.Generator().manual_seed(8)
    left, right = (torch.linalg.qr(torch.randn(length, 6, generator=generator))[0] for length in (ROWS, COLUMNS))
    strengths = torch.tensor([100.0, 80.0, 0.1, 0.1, 0.1, 0.1])
    matrix = ((left * strengths) @ right.T).reshape(ROWS, 2, COLUMNS // 2)
    for _ in range(4):
        found = training.step([matrix, *gradients_of(rank, 0)[1:]])[0]
    wanted = ((left[:, :2] * strengths[:2]) @ right[:, :2].T).reshape(matrix.shape)
    assert (found - wanted).norm() < 1


def test_the_first_steps_are_plain(rank, size):
    training, plain = Training(1, start=2), Training(1, start=9)
    for step in range(3):
        gradients = gradients_of(rank, step)
        found, wanted = training.step(gradients), plain.step(gradients)
        assert torch.equal(found[0], wanted[0]) == (step < 2)
        support.assert_close(wanted[0], mean_of(size, step)[0])
    assert not plain.hook.left_out and not plain.hook.q


def test_what_would_not_shrink_goes_plain(rank, size):
    training = Training(8)  # whose factors have 8 x (24 + 40) numbers, more than half of 24 x 40
    found = training.step(gradients_of(rank, 0))
    assert not training.hook.left_out and not training.hook.q
    for one, wanted in zip(found, mean_of(size, 0)):
        support.assert_close(one, wanted)


@pytest.mark.parametrize("factors", RANKS)
def test_a_checkpoint_goes_on_to_the_bit(rank, size, factors):
    first = Training(factors, start=1)
    for step in range(3):
        first.step(gradients_of(rank, step))
    file = io.BytesIO()
    torch.save(first.hook.state_dict(), file)
    second = Training(factors, start=1)
    file.seek(0)
    second.hook.load_state_dict(torch.load(file) if rank == 0 else None)
    assert second.hook.steps == {"matrix": 3, "square": 3, "bias": 3, "nothing": 3}
    for step in range(3, 6):
        gradients = gradients_of(rank, step)
        for one, other in zip(first.step(gradients), second.step(gradients)):
            assert torch.equal(one, other)


def test_a_checkpoint_before_the_first_factors(rank, size):
    training = Training(2, start=5)
    training.step(gradients_of(rank, 0))
    training.hook.load_state_dict(training.hook.state_dict())
    assert not training.hook.left_out and training.hook.steps["matrix"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(rank, size, dtype):
    training = Training(2, dtype=dtype)
    found = training.step(gradients_of(rank, 0, inner=2, dtype=dtype))
    assert found[0].dtype == dtype
    assert training.hook.left_out["matrix"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = mean_of(size, 0, inner=2)[0]
    assert (found[0] - wanted).norm() < 0.02 * wanted.norm()


def test_a_step_of_no_numbers_leaves_no_trace(rank, size):
    """A gradient that is not finite on one rank is not on any, so that all programs leave out the step; the next are right."""
    training, other = Training(2), Training(2)
    for each in (training, other):
        each.step(gradients_of(rank, 0))
    broken = gradients_of(rank, 1)
    if rank == 0:
        broken[0][3, 1, 4] = float("nan")
    assert not training.step(broken)[0].isfinite().all()
    assert torch.equal(training.step(gradients_of(rank, 2))[0], other.step(gradients_of(rank, 2))[0])
