"""DistributedOptimizer and broadcast_optimizer_state with every optimizer of torch.optim."""

import copy

import pytest
import torch

import optimizers
import sirtaki.torch as hvd
import support


def test_the_list_is_torch_s():
    assert {"SGD", "Adam", "AdamW", "LBFGS", "Muon", "SparseAdam", "Adagrad", "RMSprop"} <= set(optimizers.names())


@pytest.mark.parametrize("name", optimizers.names())
def test_it_trains_as_one_process_with_the_joined_batch(rank, size, name):
    model, alone = optimizers.model_for(name), optimizers.model_for(name)
    plain = optimizers.make(name, alone.parameters())
    optimizer = hvd.DistributedOptimizer(optimizers.make(name, model.parameters()), model.named_parameters())
    assert isinstance(optimizer, getattr(torch.optim, name)) and type(optimizer).__name__ == name
    for mine, whole in zip(support.batches(rank), support.joined(size)):
        optimizers.step(name, model, optimizer, mine)
        optimizers.step(name, alone, plain, whole)
    support.assert_same_everywhere(hvd, model.parameters())
    tolerance = 2e-2 if name == "Muon" else 1e-7  # Muon computes in bfloat16
    for found, wanted in zip(model.parameters(), alone.parameters()):
        support.assert_close(found, wanted, tolerance)


def flat(state):
    """A state_dict as a list of (path, value)."""
    if isinstance(state, dict):
        return [(f"{key}.{path}", value) for key in state for path, value in flat(state[key])]
    if isinstance(state, (list, tuple)):
        return [("type", type(state).__name__)] + [(f"{i}.{path}", value) for i, item in enumerate(state)
                                                   for path, value in flat(item)]
    return [("", state)]


def assert_equal_states(found, wanted):
    found, wanted = flat(found), flat(wanted)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, mine), (_, other) in zip(found, wanted):
        assert type(mine) is type(other), path
        equal = torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
        assert equal, f"{path}: {mine} and {other}"


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("name", optimizers.names())
def test_its_state_is_broadcast(rank, size, name, wrapped):
    """The root has made steps, with a learning rate of its own; the others are new, as after a resume."""
    root = size - 1
    model = optimizers.model_for(name)
    optimizer = optimizers.make(name, model.parameters(), lr=0.01 * (rank + 1))
    if rank == root:
        for batch in support.batches(rank, steps=2):
            optimizers.step(name, model, optimizer, batch)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    wanted = hvd.broadcast_object(copy.deepcopy(optimizer.state_dict()), root_rank=root)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert_equal_states(optimizer.state_dict(), wanted)
    # And it goes on from there, alike on all ranks.
    optimizers.step(name, model, optimizer, support.batches(rank if wrapped else 0, steps=1)[0])
    support.assert_same_everywhere(hvd, model.parameters())


def test_a_state_that_is_broadcast_lies_as_its_parameter_does(rank, size):
    """torch's fused steps go by addresses on the CPU: with a state that lies otherwise they make wrong numbers."""
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    batch = torch.randn(2, 3, 5, 5)
    if rank == 0:
        model(batch).pow(2).mean().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state[model.weight]["exp_avg"].stride() == model.weight.stride()
    for part in range(2):
        optimizer.zero_grad()
        if rank == part % size:  # on the others the gradient arrives where there is none
            model(batch).pow(2).mean().backward()
        optimizer.step()
        assert model.weight.grad.stride() == model.weight.stride()
    support.assert_same_everywhere(hvd, model.parameters())


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_a_state_without_steps_is_broadcast_and_makes_none(rank, name):
    model = optimizers.model_for(name)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optimizers.make(name, model.parameters(), lr=0.01 * (rank + 1))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(map(torch.equal, model.parameters(), before))
    assert optimizer.param_groups[0]["lr"] == (0.5 if name == "LBFGS" else 0.01)


def test_a_state_of_nothing_is_broadcast(rank, size):
    hvd.broadcast_parameters({}, root_rank=0)
    hvd.broadcast_parameters([], root_rank=0)
    tensor = torch.full((3,), float(rank + 1))
    hvd.broadcast_parameters({"a": None, "b": tensor, "c": None}, root_rank=0)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    if size > 1:
        with pytest.raises(hvd.MismatchError):
            hvd.broadcast_parameters({"a": None if rank == 0 else tensor, "b": tensor}, root_rank=0)


@pytest.mark.parametrize("frozen", [1, 4])
def test_parameters_without_gradients_are_left_alone(rank, frozen):
    model = support.net()
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1 * (rank + 1), momentum=0.9))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
    for parameter in model.parameters():
        # Scripts that were written for Horovod find zeros.
        assert parameter.grad is None or torch.count_nonzero(parameter.grad) == 0
        assert (parameter.grad is not None) == parameter.requires_grad
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def sparse_model():
    torch.manual_seed(1)
    return torch.nn.ModuleDict({"sparse": torch.nn.Embedding(5, 2, sparse=True), "dense": torch.nn.Embedding(5, 2)})


@pytest.mark.parametrize("kind", ["SGD", "SGD without model", "SparseAdam"])
def test_gradients_of_zeros_are_sparse_where_the_parameter_s_are(kind):
    model = sparse_model()
    parameters = list(model.parameters()) if kind != "SparseAdam" else list(model["sparse"].parameters())
    optimizer = getattr(torch.optim, kind.split()[0])(parameters, lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=None if "without" in kind else model)
    assert model["sparse"].weight.grad.is_sparse == ("without" not in kind)
    assert torch.count_nonzero(model["sparse"].weight.grad.to_dense()) == 0
    model["sparse"](torch.tensor([1, 2])).sum().backward()  # which adds to it
    optimizer.step()


@pytest.mark.parametrize("root_has_steps", [False, True])
def test_gradients_of_zeros_are_made_where_the_root_has_no_state(rank, size, root_has_steps):
    """Whatever the others have."""
    root = size - 1
    model = support.net()
    optimizer = torch.optim.Adam(model.parameters())
    if (rank == root) == root_has_steps:
        support.loss_of(model, support.batches(rank, steps=1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    assert bool(optimizer.state) == root_has_steps
    assert all((parameter.grad is None) == root_has_steps for parameter in model.parameters())


def test_none_in_a_state_is_broadcast(rank):
    model = support.net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": None, "note": rank}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(state == {"momentum_buffer": None, "note": 0} for state in optimizer.state.values())


def test_options_of_every_group_and_type_arrive(rank, size):
    model = support.net()
    optimizer = torch.optim.Adam([
        {"params": model[0].parameters(), "lr": 0.1 * (rank + 1), "betas": (0.5 + 0.1 * rank, 0.9)},
        {"params": model[2].parameters(), "lr": torch.tensor(0.3 + rank), "amsgrad": rank == 0, "note": f"of {rank}"},
    ])
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first, second = optimizer.param_groups
    assert first["lr"] == 0.1 and first["betas"] == (0.5, 0.9) and isinstance(first["betas"], tuple)
    assert isinstance(second["lr"], torch.Tensor) and second["lr"].item() == pytest.approx(0.3)
    assert second["amsgrad"] is True and second["note"] == "of 0"


def test_an_optimizer_of_another_shape_is_refused(rank, size):
    if size == 1:
        return
    model = torch.nn.Linear(2, 2 + rank)
    optimizer = torch.optim.Adam(model.parameters())
    support.loss_of(model, (torch.ones(1, 2), torch.ones(1, 2 + rank))).backward()
    optimizer.step()
    with pytest.raises((hvd.MismatchError, ValueError)):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.raises(ValueError):
        hvd.broadcast_optimizer_state(optimizer, root_rank=size)
