"""Pipelines that are used in another way than they are meant to be: right numbers all the same, or an error with a cure."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd

PAIRS = pytest.mark.skipif(hvd.size() != 2, reason="a stage on each of two ranks")
WIDTH, MICRO_BATCHES = 6, 4


def layers(count=4):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def tied():
    made = layers()
    made[3].weight = made[0].weight
    return made


def data():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def pipeline(stages=None, loss_fn=nn.functional.mse_loss, **kwargs):
    return hvd.Pipeline(layers() if stages is None else stages, loss_fn, **{"micro_batches": MICRO_BATCHES, **kwargs})


class Counts(nn.Module):
    """Hands on what it counts up in its next forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = layers(1)[0]
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return self.linear(x), self.count


class Scales(nn.Module):
    def forward(self, x, count):
        return x * count


@PAIRS
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_buffer_that_is_written_again_arrives_as_it_was(schedule):
    first, (batch, target) = Counts(), data()
    parts = zip(batch.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES))
    wanted = sum(nn.functional.mse_loss(Scales()(*first(x)), t).item() for x, t in parts) / MICRO_BATCHES
    model = pipeline([Counts, Scales], schedule=schedule)
    assert model.train_batch(batch, target) == pytest.approx(wanted, rel=1e-6)


@PAIRS
@pytest.mark.parametrize("how", ["loaded", "by hand"])
def test_a_tied_parameter_that_is_replaced_stays_tied(how):
    ties, (batch, target) = [["0.weight", "3.weight"]], data()
    model = pipeline(tied(), ties=ties)
    if how == "loaded":
        model.load_state_dict({name: value + 0.5 for name, value in tied().state_dict().items()}, assign=True)
    else:
        layer = next(each for name, each in model.named_modules() if name in ("0", "3"))
        layer.weight = nn.Parameter(layer.weight.detach().clone())
    whole = tied()
    if how == "loaded":
        whole.load_state_dict({name: value + 0.5 for name, value in tied().state_dict().items()})
    for x, t in zip(batch.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES)):
        (nn.functional.mse_loss(whole(x), t) / MICRO_BATCHES).backward()
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1e9).item()
    model.train_batch(batch, target)
    mine = next(parameter for name, parameter in model.named_parameters() if name in ("0.weight", "3.weight"))
    torch.testing.assert_close(mine.grad, whole[0].weight.grad, atol=1e-6, rtol=1e-6)
    assert model.clip_grad_norm_(torch.optim.SGD(model.parameters(), 0.1), 1e9) == pytest.approx(wanted, rel=1e-5)


def test_a_parameter_of_another_shape_is_refused():
    model = pipeline()
    layer = next(model.children())
    layer.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    with pytest.raises(ValueError, match="make the pipeline again"):
        model.clip_grad_norm_(torch.optim.SGD(model.parameters(), 0.1), 1.0)


@pytest.mark.parametrize("returned", [None, 1.0, (torch.ones(()), "a metric")])
def test_a_loss_that_is_no_tensor_is_refused(returned):
    if hvd.size() > 1:
        pytest.skip("an error of the loss ends the job")
    with pytest.raises(TypeError, match="loss_fn has returned a .*one tensor"):
        pipeline(loss_fn=lambda output, target: returned).train_batch(*data())


def test_a_loader_is_refused_with_the_cure():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    model = pipeline()
    with pytest.raises(TypeError, match=r"DataLoader.*iter\(\)"):
        model.train_batch(loader)
    assert model.train_batch(iter(loader)) > 0


def test_evaluation_without_a_target_gives_outputs_alone():
    model, (batch, target) = pipeline(), data()
    loss, outputs = model.evaluate_batch(batch)
    assert math.isnan(loss) and (outputs is not None) == model.is_last
    wanted = model.evaluate_batch(batch, target)
    assert not math.isnan(wanted[0]) and (outputs is None or torch.equal(outputs, wanted[1]))


@PAIRS
def test_the_state_of_another_stages_optimizer_is_refused():
    model = pipeline()
    optimizer = torch.optim.Adam(model.parameters())
    model.train_batch(*data())
    optimizer.step()
    with pytest.raises(hvd.MismatchError, match="of stage 0 of the pipeline"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.raises(hvd.MismatchError, match="optimizer_options"):
        hvd.DistributedOptimizer(optimizer, model.named_parameters())


@PAIRS
def test_clipping_is_of_all_stages_and_optimizers():
    mesh = hvd.mesh({"data": 1, "pipe": 2})
    model = pipeline(mesh=mesh)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
                                         **model.optimizer_options())
    model.train_batch(*data())
    with pytest.raises(ValueError, match="clip_grad_norm_ of the pipeline"):
        optimizer.clip_grad_norm_(1.0)
    wanted = model.clip_grad_norm_(optimizer, 1e9)
    mine = list(model.parameters())
    several = [torch.optim.SGD(mine[:1], 0.1), torch.optim.SGD(mine[1:], 0.1)]
    assert model.clip_grad_norm_(several, wanted / 2) == pytest.approx(wanted, rel=1e-5)
    assert model.clip_grad_norm_(several, 1e9) == pytest.approx(wanted / 2, rel=1e-4)


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_a_copy_is_refused_with_what_to_do_instead(make):
    with pytest.raises(hvd.UnsupportedError, match="load_state_dict|full_state_dict"):
        make(pipeline())
