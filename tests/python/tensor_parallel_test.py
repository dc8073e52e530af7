"""Split layers: what the unsplit ones compute, their gradients, their state, and what they refuse."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd
import support


def pair(seed, make_whole, make_parts):
    """The unsplit layer and the split one, drawn from equal generators."""
    torch.manual_seed(seed)
    whole = make_whole()
    torch.manual_seed(seed)
    return whole, make_parts()


def test_layers_start_as_the_unsplit_ones_to_the_bit(size):
    torch.manual_seed(3)
    whole = nn.ModuleList([nn.Linear(5, 6 * size), nn.Linear(size + 1, 4, bias=False), nn.Embedding(size + 3, 2, 1)])
    after = torch.rand(2)
    torch.manual_seed(3)
    parts = nn.ModuleList([hvd.ColumnParallelLinear(5, 6 * size, blocks=3, unit=2),
                           hvd.RowParallelLinear(size + 1, 4, bias=False), hvd.ParallelEmbedding(size + 3, 2, 1)])
    assert torch.equal(torch.rand(2), after)
    state = hvd.whole_state_dict(parts)
    assert list(state) == list(whole.state_dict())
    assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
    assert all(value.is_meta for value in hvd.whole_state_dict(parts, "meta").values())
    before = parts[1].weight.detach().clone()
    with torch.no_grad():
        parts[1].weight.zero_()
    assert torch.equal(state["1.weight"], whole[1].weight), "a copy, of one moment"
    with torch.no_grad():
        parts[1].weight.copy_(before)
    assert hvd.is_split(parts[0].weight) and not hvd.is_split(whole[0].weight)
    torch.manual_seed(4)
    nn.init.normal_(whole[1].weight)
    torch.manual_seed(4)
    hvd.fill_whole(parts[1].weight, nn.init.normal_)
    assert torch.equal(hvd.whole_of(parts[1].weight), whole[1].weight)


def test_what_is_whole_is_alike_with_generators_that_differ(rank, size):
    torch.manual_seed(5)
    first = nn.Linear(6, 4)
    torch.manual_seed(5 + rank)
    assert torch.equal(hvd.RowParallelLinear(6, 4).bias, first.bias)
    assert hvd.RowParallelLinear(6, 4, device="meta").bias.is_meta


@pytest.mark.parametrize("gather", [False, True])
def test_gradients_in_double(size, gather):
    column = hvd.ColumnParallelLinear(3, size + 1, dtype=torch.float64, gather_output=gather)
    row = hvd.RowParallelLinear(size + 1, 2, dtype=torch.float64, input_is_parallel=not gather)
    torch.manual_seed(1)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def net(x):
        return row(torch.tanh(column(x)))

    assert torch.autograd.gradcheck(net, (x,))
    assert torch.autograd.gradgradcheck(net, (x,))


def test_second_derivatives_through_the_gradient_of_a_weight(size):
    whole, parts = pair(5, lambda: nn.Linear(3, size + 1, dtype=torch.float64),
                        lambda: hvd.ColumnParallelLinear(3, size + 1, dtype=torch.float64))
    found = []
    for layer in (whole, parts):
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
        gradient, = torch.autograd.grad(layer(x).square().sum(), layer.weight, create_graph=True)
        gradient.square().sum().backward()
        found.append((x.grad, layer.weight.grad if layer is whole else hvd.allgather(layer.weight.grad)))
    support.assert_close(found[1][0], found[0][0], 1e-9)
    support.assert_close(found[1][1], found[0][1], 1e-9)


def test_complex_weights_have_the_gradients_of_the_unsplit_layer(size):
    whole, parts = pair(6, lambda: nn.Linear(2, size, dtype=torch.complex64),
                        lambda: hvd.ColumnParallelLinear(2, size, dtype=torch.complex64))
    found = []
    for layer in (whole, parts):
        x = torch.tensor([[1 + 2j, 3 - 1j]], requires_grad=True)
        layer(x).abs().square().sum().backward()
        found.append((x.grad, layer.weight.grad if layer is whole else hvd.allgather(layer.weight.grad)))
    for ours, theirs in zip(found[1], found[0]):
        support.assert_close(torch.view_as_real(ours), torch.view_as_real(theirs), 1e-4)


def test_recomputation_that_stops_early(size):
    """Activation checkpointing ends it by an exception, in the last layer that keeps something."""
    block = nn.Sequential(hvd.ColumnParallelLinear(4, 4 * size), nn.Tanh(), hvd.RowParallelLinear(4 * size, 4))
    x = torch.ones(2, 4, requires_grad=True)
    wanted = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    found = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).square().sum(), [x, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_of_the_loss_in_double(size, smoothing):
    words = hvd.ParallelEmbedding(size + 4, 3, dtype=torch.float64)
    loss = hvd.ParallelCrossEntropy(size + 4, reduction="none", label_smoothing=smoothing)
    torch.manual_seed(1)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, size + 3, -100, 2])
    assert torch.autograd.gradcheck(lambda x: loss(words.logits(x), target), (x,))
    if size > 1:
        gradient, = torch.autograd.grad(loss(words.logits(x), target).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
            gradient.sum().backward()


def test_a_mesh_learns_what_one_process_does(size):
    mesh = hvd.mesh({"data": 2 if size == 4 else 1, "tensor": -1})
    across, alike = mesh.set("tensor"), mesh.set("data")

    def parts():
        return nn.Sequential(hvd.ParallelEmbedding(size + 9, 6, process_set=across),
                             hvd.ColumnParallelLinear(6, size + 5, process_set=across), nn.Tanh(),
                             hvd.RowParallelLinear(size + 5, 6, process_set=across))

    def whole():
        return nn.Sequential(nn.Embedding(size + 9, 6), nn.Linear(6, size + 5), nn.Tanh(), nn.Linear(size + 5, 6))

    alone, model = pair(7, whole, parts)
    alone.double(), model.double()
    loss = hvd.ParallelCrossEntropy(size + 9, process_set=across)
    hvd.broadcast_parameters(model, alike.ranks[0], process_set=alike)
    sgd, plain = torch.optim.SGD(model.parameters(), 0.5), torch.optim.SGD(alone.parameters(), 0.5)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), process_set=alike)
    for step in range(3):
        torch.manual_seed(step)
        ids, targets = torch.randint(size + 9, (2, 2 * mesh.size("data"), 5))
        plain.zero_grad()
        wanted = F.cross_entropy(F.linear(alone(ids), alone[0].weight).flatten(0, 1), targets.flatten())
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        plain.step()
        optimizer.zero_grad()
        share = slice(2 * mesh.coordinate("data"), 2 * mesh.coordinate("data") + 2)
        found = loss(model[0].logits(model(ids[share])), targets[share])
        found.backward()
        support.assert_close(optimizer.clip_grad_norm_(0.1), norm.item(), 1e-9)
        optimizer.step()
        support.assert_close(hvd.metric_average(found.item()), wanted.item(), 1e-9)
    support.assert_close(hvd.whole_state_dict(model), dict(alone.state_dict()), 1e-9)

    # A new model takes the unsplit one's state, and its own.
    fresh = parts().double()
    fresh.load_state_dict(alone.state_dict())
    support.assert_close(hvd.whole_state_dict(fresh), dict(alone.state_dict()), 0)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(ids), model(ids))


def test_autocast_computes_in_bfloat16_and_keeps_gradients_in_float32(size):
    whole, parts = pair(
        2, lambda: nn.Sequential(nn.Linear(8, 8 * size), nn.ReLU(), nn.Linear(8 * size, 4)),
        lambda: nn.Sequential(hvd.ColumnParallelLinear(8, 8 * size), nn.ReLU(), hvd.RowParallelLinear(8 * size, 4)))
    loss = hvd.ParallelCrossEntropy(4 * size)
    x = torch.randn(3, 8)
    outputs = []
    for model in (whole, parts):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs.append(model(x))
        outputs[-1].float().square().sum().backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    support.assert_close(outputs[1].float(), outputs[0].float(), 0.05)
    assert parts[0].weight.grad.dtype == torch.float32
    support.assert_close(hvd.allgather(parts[0].weight.grad), whole[0].weight.grad, 0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert loss(outputs[1].detach(), torch.tensor([0, 1, 2])).dtype == torch.float32


def test_a_copy_is_a_layer_of_its_own(size):
    layer = hvd.ColumnParallelLinear(3, size + 1)
    twin = copy.deepcopy(layer)
    assert hvd.is_split(twin.weight)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(torch.ones(1, 3)), twin.bias.unsqueeze(0))
    assert torch.equal(hvd.whole_of(twin.bias), hvd.whole_of(layer.bias))
    with pytest.raises(TypeError, match="cannot be pickled: save whole_state_dict"):
        pickle.dumps(layer)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_scaler_skips_the_step_of_all_parts(rank, size, fused, wrapped):
    layer = hvd.ColumnParallelLinear(3, 2 * size)
    each = hvd.mesh({"data": 1, "tensor": -1}).set("data")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, fused=fused)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, layer.named_parameters(), process_set=each)
    before = layer.weight.detach().clone()
    scaler = hvd.GradScaler("cpu")
    scaler.scale(layer(torch.ones(1, 3)).sum()).backward()
    if rank == 0:
        layer.weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() == 32768


def test_parts_are_known_in_every_form_of_their_state(rank, size):
    model = nn.Sequential(hvd.ColumnParallelLinear(3, 2 * size), hvd.RowParallelLinear(2 * size, 3))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert hvd.is_split(model[0].weight) and hvd.is_split(model[1].weight) and not hvd.is_split(model[1].bias)
    assert hvd.is_split(model.state_dict()["0.weight"]) and not hvd.is_split(model.state_dict()["1.bias"])
    twin = hvd.ColumnParallelLinear(3, 2 * size)
    twin.weight = model[0].weight
    twin.float()
    del twin
    gc.collect()
    assert hvd.is_split(model[0].weight)


def test_parts_are_not_taken_from_another_rank(size):
    layer = hvd.ColumnParallelLinear(3, 2 * size)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    each = hvd.mesh({"data": 1, "tensor": -1}).set("data")
    hvd.broadcast_parameters(layer.state_dict(), each.ranks[0], process_set=each)
    hvd.broadcast_optimizer_state(optimizer, each.ranks[0], process_set=each)
    if size == 1:
        return
    with pytest.raises(hvd.MismatchError, match="part 1 of"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    with pytest.raises(hvd.MismatchError, match="part 1 of"):
        hvd.broadcast_parameters(layer.state_dict(), 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mean_of_many_losses_in_float16(rank, size, reduction):
    loss = hvd.ParallelCrossEntropy(2 * size, reduction=reduction)
    logits = torch.zeros(8192, 2 * size)
    logits[:, 0] = 10
    target = torch.ones(8192, dtype=torch.long)
    mine = logits[:, 2 * rank:2 * rank + 2].half().requires_grad_()
    found = loss(mine, target)
    assert found.dtype == torch.float16
    support.assert_close(found.float(), F.cross_entropy(logits, target, reduction=reduction), 0.01)
    found.float().sum().backward()
    assert mine.grad.dtype == torch.float16


def test_one_row_of_logits(rank, size):
    logits = torch.arange(2.0 * size)
    found = hvd.ParallelCrossEntropy(2 * size)(logits[2 * rank:2 * rank + 2], torch.tensor(1))
    support.assert_close(found, F.cross_entropy(logits, torch.tensor(1)), 1e-5)


def test_what_it_refuses(rank, size):
    with pytest.raises(ValueError, match=f"out_features is {size - 1}" if size > 1 else "out_features is 0"):
        hvd.ColumnParallelLinear(3, size - 1)
    with pytest.raises(ValueError, match="reduction is 'max'; it must be"):
        hvd.ParallelCrossEntropy(size, reduction="max")
    if size == 1:
        return
    with pytest.raises(hvd.MismatchError, match="RowParallelLinear with bias"):
        hvd.RowParallelLinear(size, 3, bias=rank == 0)
    with pytest.raises(ValueError, match="in_features is 'a'; it must be a whole number"):
        hvd.RowParallelLinear("a" if rank == size - 1 else size, 3)
    layer = hvd.RowParallelLinear(size, 3)
    with pytest.raises(hvd.MismatchError):
        layer(torch.ones(1 + rank, 1))
    gathering = hvd.ColumnParallelLinear(3, size, gather_output=True)
    with pytest.raises(ValueError):
        gathering(torch.ones(1, 2 if rank == 0 else 3))
    with pytest.raises(ValueError, match="input_is_parallel=False"):
        layer(torch.ones(1, size))
    with pytest.raises(ValueError, match="has 4 features.*has to have 3"):
        hvd.ColumnParallelLinear(3, size)(torch.ones(1, 4))
    whole_input = hvd.RowParallelLinear(size, 3, input_is_parallel=False)
    with pytest.raises(ValueError, match=f"must have all {size} features"):
        whole_input(torch.ones(1, size + 1))
    if rank == 0:
        copy.deepcopy(layer)
    with pytest.raises(hvd.MismatchError, match="which all ranks make and copy alike"):
        hvd.RowParallelLinear(size, 3)
    if rank != 0:
        copy.deepcopy(layer)  # the ranks are in step again
    assert hvd.RowParallelLinear(size, 3)(torch.ones(1, 1)).shape == (1, 3)
    with pytest.raises(hvd.MismatchError, match="part 0 of"):
        hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), layer.named_parameters())
