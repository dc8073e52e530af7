"""What a DistributedOptimizer tells of itself, what copies of it are, and arguments that are wrong on one rank alone."""

import copy
import io

import pytest
import torch

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank has no peers to tell")


def distributed(model, **kwargs):
    return hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.named_parameters(), **kwargs)


def test_it_tells_its_settings():
    optimizer = distributed(support.net(), op=hvd.Sum, backward_passes_per_step=3, name=None)
    assert optimizer.op == hvd.Sum and optimizer.process_set is hvd.global_process_set
    assert optimizer.backward_passes_per_step == 3
    assert optimizer.gradient_predivide_factor == 1.0 and not optimizer.sparse_as_dense
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2


def test_one_that_could_not_be_made_anew_makes_no_steps(rank, monkeypatch):
    optimizer = distributed(support.net())

    def agreed():
        raise hvd.PeerLostError("peer lost: rank 9 is lost")

    monkeypatch.setattr(optimizer._sirtaki_settings, "agreed", agreed)
    with pytest.raises(hvd.PeerLostError):
        optimizer.set_backward_passes_per_step(2)
    for act in (optimizer.step, optimizer.zero_grad, optimizer.synchronize):
        with pytest.raises(hvd.NotInitializedError, match="make a new optimizer"):
            act()


def test_a_copy_is_a_plain_optimizer_with_the_state(rank, size):
    model = support.net()
    optimizer = distributed(model)
    support.loss_of(model, support.batches(rank)[0]).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    for other in (copy.deepcopy(optimizer), torch.load(file, weights_only=False)):
        assert type(other) is torch.optim.Adam
        for parameter, mine in zip(other.param_groups[0]["params"], model.parameters()):
            assert parameter is not mine and torch.equal(parameter, mine)
            assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[mine]["exp_avg"])
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()  # without a word to the peers
    again = hvd.DistributedOptimizer(copy.deepcopy(optimizer))
    assert again.param_groups[0]["lr"] == 0.01
    optimizer.zero_grad()
    support.loss_of(model, support.batches(rank)[1]).backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, model.parameters())


def test_a_parameter_is_in_one_group_only():
    model = support.net()
    weight = model[0].weight
    for groups in ([[weight], [weight]], [[weight, weight]]):
        with pytest.raises(ValueError, match="only appear once"):
            distributed(model, groups=groups)
    distributed(model, groups=[[weight], [model[2].weight]])


@SEVERAL
@pytest.mark.parametrize("arguments", [
    {"backward_passes_per_step": 0}, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}, {"num_groups": -1}, {"op": 99},
    {"check_parameters_every": 1.5}, {"communication_hook": lambda bucket: bucket.buffer(), "op": hvd.Sum},
    {"name": 7},
], ids=lambda arguments: " ".join(arguments))
def test_what_is_wrong_on_one_rank_is_told_to_all(rank, size, arguments):
    model = support.net()
    with pytest.raises(ValueError) as caught:
        distributed(model, **(arguments if rank == size - 1 else {}))
    if rank != size - 1:
        assert isinstance(caught.value, hvd.InvalidArgumentError) and f"rank {size - 1}" in str(caught.value)
    with pytest.raises((TypeError, ValueError)):
        hvd.DistributedOptimizer(model if rank == 0 else torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(ValueError):
        hvd.DistributedDataParallel(model, op=hvd.Adasum if rank == 0 else hvd.Average)
    for wrong in ({"op": "average"}, {"gradient_predivide_factor": "2x"}, {"device_mesh": 1}, {"process_group": "all"}):
        with pytest.raises((NotImplementedError, TypeError, ValueError)) as caught:
            hvd.DistributedDataParallel(model, **(wrong if rank == 0 else {}))
        assert rank == 0 or "rank 0" in str(caught.value)
    distributed(model)


@SEVERAL
def test_what_is_wrong_on_one_rank_does_not_meet_the_program_s_own_calls(rank, size):
    model = support.net()

    def names():
        yield "first", model[0].weight
        raise RuntimeError("what the generator found")

    for wrong in ({"process_set": None}, {"named_parameters": names()}, {"compression": "fp16"}, {"communication_hook": 5}):
        arguments = wrong if rank == size - 1 else {}
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **arguments)
        assert hvd.allgather_object(rank) == list(range(size))
    with pytest.raises((TypeError, ValueError)):
        hvd.broadcast_optimizer_state(None if rank == 0 else torch.optim.SGD(model.parameters(), 0.1), 0)
    assert hvd.allgather_object(rank) == list(range(size))


def test_adasum_with_compression(rank, size):
    model = support.net()
    optimizer = distributed(model, op=hvd.Adasum, compression=hvd.Compression.fp16)
    support.loss_of(model, support.batches(rank)[0]).backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, model.parameters())
    mine = torch.full((4,), 3.0)
    result = hvd.allreduce(mine, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert result.dtype == torch.float32
    if size & (size - 1) == 0:
        support.assert_close(result, mine, 1e-3)


@SEVERAL
@pytest.mark.parametrize("passes", [lambda rank: 0, lambda rank: 2 + rank, lambda rank: 0 if rank == 0 else 2, lambda rank: "2"],
                         ids=["none", "different", "none on one", "a text"])
def test_passes_that_are_refused_leave_the_optimizer_as_it_was(rank, passes):
    model = support.net()
    optimizer = distributed(model)
    with pytest.raises((TypeError, ValueError)):
        optimizer.set_backward_passes_per_step(passes(rank))
    assert optimizer.backward_passes_per_step == 1
    optimizer.zero_grad()
    support.loss_of(model, support.batches(rank)[0]).backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, model.parameters())


@SEVERAL
def test_zero_grad_says_what_it_refuses(rank):
    model, other = support.net(), torch.nn.Linear(2, 2)
    optimizer = distributed(model)
    with_sums = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1), op=hvd.Sum)
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(hvd.InvalidArgumentError) as caught:
        optimizer.zero_grad()
    assert not isinstance(caught.value, AssertionError)
    del with_sums
    again = support.net()
    pending = distributed(again)
    support.loss_of(again, support.batches(rank)[0]).backward()
    with pytest.raises(hvd.PendingGradientsError) as caught:
        pending.zero_grad()
    assert caught.value.code == "invalid argument" and caught.value.rank == rank and caught.value.tensor
    pending.step()


@SEVERAL
def test_parameters_that_are_none_on_one_rank_are_told_to_all(rank):
    for call in (hvd.broadcast_parameters, lambda what, _: hvd.check_parameters(what)):
        with pytest.raises(ValueError) as caught:
            call([("weight", torch.ones(2) if rank else "a text")], 0)
        assert "'weight'" in str(caught.value)


def test_parameters_of_two_modules_may_have_the_same_names(rank):
    first, second = support.net(seed=rank), support.net(seed=rank + 10)
    hvd.broadcast_parameters(list(first.named_parameters()) + list(second.named_parameters()), root_rank=0)
    for model, seed in ((first, 0), (second, 10)):
        assert all(map(torch.equal, model.parameters(), support.net(seed=seed).parameters()))


def test_a_fused_optimizer_by_adasum_skips_the_step_with_all(rank, size):
    model = support.net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, fused=True),
                                         model.named_parameters(), op=hvd.Adasum)
    scaler = hvd.GradScaler("cpu", init_scale=1024.0)
    x, y = support.batches(rank)[0]
    if rank == size - 1:
        y = y * float("inf")
    optimizer.zero_grad()
    scaler.scale(support.loss_of(model, (x, y))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(torch.equal, model.parameters(), before))
    support.assert_same_everywhere(hvd, model.parameters())
