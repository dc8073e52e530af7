"""DistributedDataParallel: the module wrapper that DDP's users know."""

import collections
import copy
import dataclasses
import inspect
import pickle
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
import support
from sirtaki.torch._library import _C

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


class Checkpointed(nn.Module):
    """Each part has a backward() of its own, within that of the whole."""

    def __init__(self, reentrant):
        super().__init__()
        self.parts = nn.ModuleList(support.net(seed) if seed == 0 else nn.Linear(3, 3) for seed in range(3))
        self.reentrant = reentrant
        for part in self.parts[1:]:
            nn.init.constant_(part.weight, 0.5)
            nn.init.zeros_(part.bias)

    def forward(self, x):
        for part in self.parts:
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return {"output": [x]}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_reduce_once(rank, size, reentrant):
    plain = Checkpointed(None)
    wrapped = hvd.DistributedDataParallel(Checkpointed(reentrant), op=hvd.Sum)
    whole = torch.cat([torch.full((2, 4), 0.1 * other) for other in range(size)])
    before = hvd.metrics()["steps"]
    for _ in range(3):
        for module, x in ((plain, whole), (wrapped, torch.full((2, 4), 0.1 * rank).requires_grad_())):
            module.zero_grad()
            module(x)["output"][0].square().sum().backward()
        for found, wanted in zip(wrapped.parameters(), plain.parameters()):
            support.assert_close(found.grad, wanted.grad, 1e-5)
    assert hvd.metrics()["steps"] - before == (3 if size > 1 else 0)


@SEVERAL
def test_a_backward_that_makes_no_gradients_changes_none(rank, size):
    wrapped = hvd.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    output = wrapped(x).sum()
    torch.autograd.grad(output, x, retain_graph=True)
    with wrapped.no_sync():
        output.backward(retain_graph=True)
    assert wrapped.module.weight.grad.tolist() == [[rank + 1.0] * 2]
    output.backward()
    support.assert_close(wrapped.module.weight.grad, torch.full((1, 2), size + 1.0))


@SEVERAL
def test_a_backward_that_fails_before_its_first_gradient_does_not_spoil_the_next(rank, size):
    wrapped = hvd.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    failing, good = (wrapped(torch.full((1, 2), rank + 1.0)).sum() for _ in range(2))

    def fail(_gradients):
        raise KeyError("on purpose")

    failing.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(KeyError):
        failing.backward()
    good.backward()
    support.assert_close(wrapped.module.weight.grad, torch.full((1, 2), (size + 1) / 2))


@dataclasses.dataclass
class Slotted:
    __slots__ = ("output",)
    output: torch.Tensor


def test_outputs_of_any_kind_pass_through(rank, size, tmp_path):
    for kind in (Slotted, lambda y: types.SimpleNamespace(output=y)):
        class Gives(nn.Linear):
            def forward(self, x):
                return kind(super().forward(x))

        wrapped = hvd.DistributedDataParallel(Gives(2, 1, bias=False))
        output = wrapped(torch.full((1, 2), float(rank))).output
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.save(output, tmp_path / "output.pt")
        output.sum().backward()
        support.assert_close(wrapped.module.weight.grad, torch.full((1, 2), (size - 1) / 2))


def test_arguments_are_moved_to_the_one_device():
    class Where(nn.Linear):
        def forward(self, x, *, others):
            return self.weight.sum(), x, others

    wrapped = hvd.DistributedDataParallel(Where(1, 1), device_ids=["meta"])
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    counted, made = collections.Counter("aab"), collections.defaultdict(list, z=[torch.ones(1)])
    _, x, others = wrapped(torch.ones(1), others={"y": (torch.ones(1), 1), "p": packed, "c": counted, "d": made})
    assert [one.device.type for one in (x, others["y"][0], others["p"].data, others["d"]["z"][0])] == ["meta"] * 4
    assert others["y"][1] == 1 and others["p"].batch_sizes.device.type == "cpu" and others["c"] is counted
    assert others["d"]["new"] == [] and made["z"][0].device.type == "cpu"
    with pytest.raises(ValueError, match="one device"):
        hvd.DistributedDataParallel(Where(1, 1), device_ids=[0, 1])


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
    norm = nn.BatchNorm1d(2, momentum=0.0)
    norm.running_mean.fill_(rank + 1.0)
    own = hvd.DistributedDataParallel(norm, broadcast_buffers=False)
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


def test_copies_are_for_use_and_not_for_training(rank):
    wrapped = hvd.DistributedDataParallel(support.net())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    average = torch.optim.swa_utils.AveragedModel(wrapped)
    average.update_parameters(wrapped)
    for other in (copy.deepcopy(wrapped.module), copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), average):
        assert all(map(torch.equal, other.parameters(), wrapped.parameters()))
        with torch.no_grad():
            assert torch.equal(other(torch.ones(1, 4)), wrapped(torch.ones(1, 4)))
    with pytest.raises(hvd.InvalidArgumentError, match="copy"):
        copy.deepcopy(wrapped)(torch.ones(1, 4))
    with pytest.raises(hvd.InvalidArgumentError, match="copy"):
        copy.deepcopy(wrapped).register_comm_hook(None, lambda state, bucket: bucket.buffer())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    support.assert_same_everywhere(hvd, wrapped.parameters())


def test_its_arguments_are_torch_s_in_their_order():
    of_torch = list(inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters)
    ours = inspect.signature(hvd.DistributedDataParallel.__init__).parameters
    assert [name for name, one in ours.items() if one.kind is one.POSITIONAL_OR_KEYWORD] == of_torch
    for argument in ("mixed_precision", "device_mesh", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
        with pytest.raises(hvd.UnsupportedError, match=argument):
            hvd.DistributedDataParallel(support.net(), **{argument: object()})


@SEVERAL
def test_without_init_sync_weights_stay_what_they_are(rank):
    wrapped = hvd.DistributedDataParallel(support.net(seed=rank), init_sync=False)
    assert all(map(torch.equal, wrapped.parameters(), support.net(seed=rank).parameters()))
    with pytest.raises(hvd.MismatchError, match="init_sync"):
        hvd.DistributedDataParallel(support.net(), init_sync=rank == 0)


@SEVERAL
def test_outside_its_set_it_is_refused(rank):
    first = hvd.add_process_set([0])
    if rank == 0:
        hvd.DistributedDataParallel(support.net(), process_set=first)
    else:
        with pytest.raises(hvd.InvalidArgumentError):
            hvd.DistributedDataParallel(support.net(), process_set=first)
    hvd.remove_process_set(first)


def test_a_second_hook_is_refused_and_the_first_stays(rank, size):
    wrapped = hvd.DistributedDataParallel(support.net())
    wrapped.register_comm_hook(None, lambda _, bucket: hvd.allreduce_async(bucket.buffer(), name=bucket.name()))
    with pytest.raises(hvd.InvalidArgumentError, match="already"):
        wrapped.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    train(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1), support.batches(rank))
    assert_trained(wrapped, trained_alone(size))
    with_sums = hvd.DistributedDataParallel(support.net(), op=hvd.Sum)
    with pytest.raises(ValueError, match="hook"):
        with_sums.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    with_sums(torch.ones(1, 4)).sum().backward()
    support.assert_same_everywhere(hvd, [p.grad for p in with_sums.parameters()])


def test_buffers_that_share_their_memory(rank):
    model = support.net(seed=rank)
    model.register_buffer("one", torch.full((3,), float(rank)))
    model.register_buffer("a part", model.one[1:])
    model.register_buffer("same", model.one)
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("every other", torch.full((4,), float(rank))[::2])
    wrapped = hvd.DistributedDataParallel(model)
    for buffer in model.buffers():
        buffer.fill_(rank + 5.0)
    wrapped(torch.ones(1, 4)).sum().backward()
    assert all(buffer.eq(5.0).all() for buffer in model.buffers())


def test_lazy_parameters_are_refused():
    lazy = nn.LazyLinear(2)
    for call in (hvd.DistributedDataParallel, lambda model: hvd.broadcast_parameters(model, 0),
                 lambda model: hvd.broadcast_parameters(model.state_dict(), 0),
                 lambda model: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)),
                 lambda model: hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())):
        with pytest.raises(ValueError, match="'(allreduce.noname.0|weight|bias)' of a lazy module is not initialized"):
            call(lazy)
    lazy(torch.ones(1, 3))
    hvd.broadcast_parameters(lazy, 0)


def test_after_the_session_it_says_so(rank):
    wrapped = hvd.DistributedDataParallel(support.net())
    support.reinit(hvd)
    with pytest.raises(hvd.NotInitializedError):
        wrapped(torch.ones(1, 4))


def test_one_of_an_elastic_job_is_not_used_before_run(monkeypatch):
    monkeypatch.setattr(_C, "is_elastic", True)
    monkeypatch.setattr(_C, "is_deferred", lambda: True)
    wrapped = hvd.DistributedDataParallel(support.net(seed=0))
    with pytest.raises(hvd.NotInitializedError, match=r"when elastic\.run\(\) begins: make it part of the state"):
        wrapped(torch.zeros(1, 4))
