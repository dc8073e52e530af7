"""Faults that end the job, and what every rank is told. Run by job_faults_test.sh, each in a job of its own: MPI is not
finalized after them, so mpirun reports failure whatever the tests say."""

import os
import pathlib
import signal

import pytest
import torch

import sirtaki.torch as hvd
import support


@pytest.fixture
def meet(request, rank, size):
    """All ranks are there when it returns, and none is in a call: what ends the job then meets none in what came before. By
    files, since the job itself cannot tell it."""
    rounds = iter(range(10))

    def meet():
        place = pathlib.Path(os.environ["JOB_FAULTS_FOLDER"]) / f"{request.node.name}.{next(rounds)}"
        files = [place.parent / f"{place.name}.{other}" for other in range(size)]
        files[rank].touch()
        support.await_true(lambda: all(file.exists() for file in files), 100)

    return meet


def test_abort_ends_the_job_with_its_reason(rank, size, meet):
    meet()
    if rank == 0:
        hvd.abort("the data set ends in the middle of a record")
    with pytest.raises(hvd.AbortedError, match="middle of a record") as caught:
        hvd.allreduce(torch.ones(2), name=f"only rank {rank}")
    assert caught.value.code == "aborted" and caught.value.rank == 0
    with pytest.raises(hvd.HorovodInternalError, match="middle of a record"):
        hvd.allreduce(torch.ones(2))


def test_a_barrier_that_somebody_misses_times_out_and_names_him(rank, size, meet):
    meet()
    if rank == size - 1:
        with pytest.raises(hvd.TimedOutError, match=f"rank {rank}"):
            hvd.allreduce(torch.ones(1), name="what nobody else calls")
    else:
        with pytest.raises(hvd.TimedOutError, match=f"rank {size - 1}") as caught:
            hvd.monitored_barrier(10)
        assert caught.value.code == "timed out"


def test_a_rank_that_is_killed_is_lost_to_the_others(rank, size, meet):
    hvd.allreduce(torch.ones(2))
    meet()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hvd.PeerLostError, match=f"rank {size - 1}") as caught:
        hvd.allreduce(torch.ones(2), name="w")
    assert caught.value.code == "peer lost" and isinstance(caught.value, hvd.HorovodInternalError)


def test_a_fault_in_a_step_is_of_horovod_s_kind_and_elastic_goes_on(rank, size):
    """The ranks are all still there, so they join the job anew and go on from the last commit."""
    model = support.net(seed=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    joined = []

    @hvd.elastic.run
    def train(state):
        joined.append(state.step)
        while state.step < 4:
            if state.step == 2 and len(joined) == 1 and rank == 0:
                hvd.abort("a fault on purpose")
            state.optimizer.zero_grad()
            support.loss_of(state.model, support.batches(rank, 4)[state.step]).backward()
            state.optimizer.step()
            state.step += 1
            state.commit()
        return state.step

    assert train(state) == 4
    assert len(joined) == 2 and joined[0] == 0 and joined[1] in (1, 2)
    support.assert_same_everywhere(hvd, model.parameters())


class Stage(torch.nn.Module):
    """Hands on its input times a weight; in the given pass it raises, or returns another shape."""

    def __init__(self, fault=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.fault, self.passes = fault, 0

    def forward(self, x):
        self.passes += 1
        return (self.fault(x) if self.fault is not None and self.passes == 3 else x) * self.weight


class NotOursError(Exception):
    pass


def raise_it(x):
    raise NotOursError("the data have a hole")


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise_it(gradient)


def faulty_pipeline(size, fault):
    stages = [lambda number=number: Stage(fault if number == 1 else None) for number in range(size)]
    return hvd.Pipeline(stages, torch.nn.functional.mse_loss, micro_batches=4, name="with a fault")


def expect_its_own_error(rank, size, fault, where):
    model = faulty_pipeline(size, fault)
    with pytest.raises(NotOursError if rank == 1 else hvd.AbortedError, match="the data have a hole") as caught:
        model.train_batch(torch.ones(8, 3), torch.zeros(8, 3))
    if rank != 1:
        assert where in str(caught.value) and "with a fault" in str(caught.value)


def test_what_a_stage_raises_leaves_as_it_is_and_is_told(rank, size, meet):
    meet()
    expect_its_own_error(rank, size, raise_it, "F1.2")


def test_what_the_backward_pass_of_a_stage_raises_leaves_as_it_is(rank, size, meet):
    meet()
    expect_its_own_error(rank, size, Backward.apply, "B1.2")


def test_a_shape_that_changes_is_named(rank, size, meet):
    model = faulty_pipeline(size, lambda x: x.double())
    meet()
    with pytest.raises(hvd.InvalidArgumentError if rank == 1 else hvd.AbortedError, match="stage 1.*(tensor|float)"):
        model.train_batch(torch.ones(8, 3), torch.zeros(8, 3))
