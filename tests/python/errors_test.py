"""Every exception: of Horovod's kind, with a text that names the thing, and the job goes on."""

import pickle

import pytest
import torch

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank has nobody to differ from")


@pytest.fixture(autouse=True)
def job_goes_on(together, size):
    yield
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="goes on").item() == size


def test_kinds_are_horovod_s():
    assert issubclass(hvd.SirtakiError, RuntimeError)
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for kind in (hvd.MismatchError, hvd.PeerLostError, hvd.TimedOutError, hvd.AbortedError, hvd.BackendError,
                 hvd.ProtocolError, hvd.ShutDownError):
        assert issubclass(kind, hvd.HorovodInternalError) and issubclass(kind, hvd.SirtakiError)
    for kind in (hvd.InvalidArgumentError, hvd.DuplicateNameError, hvd.NotInitializedError):
        assert issubclass(kind, ValueError) and issubclass(kind, hvd.SirtakiError)
    assert issubclass(hvd.UnsupportedError, NotImplementedError)
    assert issubclass(hvd.PendingGradientsError, AssertionError)
    assert not issubclass(hvd.HostsUpdatedInterrupt, hvd.HorovodInternalError)
    assert hvd.HostsUpdatedInterrupt().skip_sync is False and hvd.HostsUpdatedInterrupt(True).skip_sync is True


@SEVERAL
@pytest.mark.parametrize("what,mine", [
    ("shape", lambda rank: torch.ones(3 + rank)),
    ("dimensions", lambda rank: torch.ones((1,) * (1 + rank))),
    ("type", lambda rank: torch.ones(3, dtype=torch.float64 if rank else torch.float32)),
])
@pytest.mark.parametrize("name", [None, "different"])
def test_tensors_that_differ_are_a_mismatch_on_every_rank(rank, size, what, mine, name):
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(mine(rank), name=name)
    assert isinstance(caught.value, hvd.MismatchError)
    assert caught.value.code == "mismatch" and "rank" in str(caught.value)
    if name:
        assert caught.value.tensor == "different" and "different" in str(caught.value)


@SEVERAL
def test_operations_that_differ_are_a_mismatch(rank, size):
    with pytest.raises(hvd.MismatchError):
        hvd.allreduce(torch.ones(2), name="op", op=hvd.Sum if rank else hvd.Max)
    with pytest.raises(hvd.MismatchError):
        hvd.broadcast(torch.ones(2), root_rank=rank % 2, name="root")
    with pytest.raises(hvd.MismatchError):
        hvd.allgather(torch.ones(2, 2 + rank), name="rows")
    with pytest.raises(hvd.MismatchError):
        hvd.reducescatter(torch.ones(size, 1 + rank), name="parts")
    with pytest.raises(hvd.MismatchError):
        (hvd.allgather if rank else hvd.allreduce)(torch.ones(2), name="kind")
    with pytest.raises(hvd.MismatchError):
        hvd.grouped_allreduce([torch.ones(2), torch.ones(2 + rank)], name="one of a group")


def test_a_root_that_is_not_there_is_a_value_error(size):
    for call in (hvd.broadcast, hvd.broadcast_):
        with pytest.raises(ValueError) as caught:
            call(torch.ones(2), root_rank=size + 3, name="weights")
        assert isinstance(caught.value, hvd.InvalidArgumentError) and caught.value.tensor == "weights"


def test_wrong_splits_are_a_value_error(size):
    for splits in ([1] * (size + 1), [2] * size, [-1] + [1] * (size - 1)):
        with pytest.raises(ValueError):
            hvd.alltoall(torch.ones(size, 2), splits=splits)
    if size > 1:
        with pytest.raises(ValueError):
            hvd.alltoall(torch.ones(size + 1, 2))


def test_arguments_that_cannot_be(rank, size):
    with pytest.raises((ValueError, TypeError)):
        hvd.allreduce(torch.ones(2), op=99)
    with pytest.raises((ValueError, NotImplementedError)):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Sum, prescale_factor=0.5)
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum, prescale_factor=float("nan"))
    with pytest.raises((ValueError, TypeError)):
        hvd.allreduce([1.0, 2.0])
    with pytest.raises((ValueError, NotImplementedError)):
        hvd.reducescatter(torch.ones(size), op=hvd.Product)
    with pytest.raises((ValueError, NotImplementedError)):
        hvd.reducescatter(torch.ones(()))
    with pytest.raises((ValueError, NotImplementedError)):
        hvd.allreduce(torch.ones(2).to(torch.float8_e4m3fn), op=hvd.Sum)


def test_a_name_in_flight_is_a_value_error(rank, size):
    first = hvd.allreduce_async(torch.ones(2), name="twice")
    with pytest.raises(ValueError) as caught:
        hvd.allreduce_async(torch.ones(2), name="twice")
    assert isinstance(caught.value, hvd.DuplicateNameError) and caught.value.tensor == "twice"
    hvd.synchronize(first)
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="twice"))  # free again


def test_what_is_no_handle_is_refused():
    for call in (hvd.poll, hvd.synchronize):
        with pytest.raises((ValueError, TypeError)):
            call("handle")


@SEVERAL
def test_one_rank_s_mistake_is_told_to_all(rank, size):
    with pytest.raises(ValueError) as caught:
        hvd.alltoall(torch.ones(size, 2), splits=[2] * size if rank == 1 else [1] * size, name="mistake")
    assert caught.value.rank == 1


def test_errors_can_be_pickled(size):
    with pytest.raises(hvd.InvalidArgumentError) as caught:
        hvd.broadcast(torch.ones(2), root_rank=-1, name="w")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)
    assert (again.code, again.rank, again.tensor) == (caught.value.code, caught.value.rank, "w")


def test_a_message_to_nobody_is_a_value_error(size):
    with pytest.raises(ValueError):
        hvd.isend(torch.ones(1), size)
    with pytest.raises(ValueError):
        hvd.recv_(torch.ones(1), 0, tag=-1)


@SEVERAL
def test_a_rank_that_leaves_fails_what_the_others_wait_for(rank, size):
    if rank == 0:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.ShutDownError, match="rank 0"):
            hvd.allreduce(torch.ones(2), name="without rank 0")
        hvd.shutdown()
    hvd.init()
