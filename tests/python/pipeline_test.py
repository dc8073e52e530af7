"""Pipeline: what its gradients, names, states and optimizers are, against the unsplit model in one process."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank has all stages")
WIDTH, ROWS, MICRO_BATCHES = 6, 8, 4
LAYERS = 8  # enough for two stages on each of 4 ranks


def layer(number):
    """The same on every rank that makes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + number)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def unsplit():
    return nn.Sequential(*(layer(number) for number in range(LAYERS)))


def data(seed=5, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def in_one_process(model, batch, target, loss_fn=nn.functional.mse_loss, micro_batches=MICRO_BATCHES):
    """The same micro-batches, by accumulation."""
    total = 0.0
    for part, wanted in zip(batch.chunk(micro_batches), target.chunk(micro_batches)):
        loss = loss_fn(model(part), wanted) / micro_batches
        loss.backward()
        total += loss.item()
    return total


def pipeline(stages=None, **kwargs):
    return hvd.Pipeline(unsplit() if stages is None else stages, kwargs.pop("loss_fn", nn.functional.mse_loss),
                        **{"micro_batches": MICRO_BATCHES, **kwargs})


def assert_same_gradients(model, whole, tolerance=1e-6):
    wanted = dict(whole.named_parameters())
    named = dict(model.named_parameters())
    assert named
    for name, parameter in named.items():
        support.assert_close(parameter.grad, wanted[name].grad, tolerance)


# ---- gradients ----


@pytest.mark.parametrize("schedule, stages_per_rank", [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_gradients_are_those_of_one_process(rank, size, schedule, stages_per_rank):
    model = pipeline(schedule=schedule, stages_per_rank=stages_per_rank)
    whole, (batch, target) = unsplit(), data()
    wanted = in_one_process(whole, batch, target)
    loss = model.train_batch(batch, target)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for name, parameter in model.named_parameters():  # the same sums in the same order: the same bits
        assert torch.equal(parameter.grad, dict(whole.named_parameters())[name].grad), name
    assert model.stages == list(range(rank, size * stages_per_rank, size))
    assert hvd.allreduce(torch.tensor(len(list(model.parameters()))), op=hvd.Sum) == 2 * LAYERS


def test_a_second_batch_adds_to_the_gradients(rank):
    model, whole = pipeline(), unsplit()
    for seed in (5, 6):
        batch, target = data(seed)
        in_one_process(whole, batch, target)
        model.train_batch(batch, target)
    assert_same_gradients(model, whole)


def test_only_the_ends_of_the_pipeline_need_the_batch(rank):
    model, whole, (batch, target) = pipeline(), unsplit(), data()
    in_one_process(whole, batch, target)
    model.train_batch(batch if model.is_first else None, target if model.is_last else None)
    assert_same_gradients(model, whole)


def test_batches_of_an_iterator(rank):
    model, whole = pipeline(), unsplit()
    batches = iter([data(5), data(6)])
    for seed in (5, 6):
        in_one_process(whole, *data(seed))
        model.train_batch(batches)
    assert_same_gradients(model, whole)
    with pytest.raises(StopIteration):
        model.train_batch(batches)


def test_a_schedule_of_one_s_own(rank, size):
    forward = [f"F{{0}}.{number}" for number in range(MICRO_BATCHES)]
    backward = [f"B{{0}}.{number}" for number in range(MICRO_BATCHES)]
    text = "\n".join(f"rank {r}: " + " ".join(forward + backward).format(r) for r in range(size))
    model, whole, (batch, target) = pipeline(schedule=text), unsplit(), data()
    in_one_process(whole, batch, target)
    model.train_batch(batch, target)
    assert_same_gradients(model, whole)


# ---- stages ----


def test_each_rank_builds_only_its_own_stages(rank, size):
    built = []

    def factory(number):
        def make():
            built.append(number)
            return layer(number)
        return make

    model = pipeline([factory(number) for number in range(size)])
    assert built == [rank] and [name for name, _ in model.named_parameters()] == [f"{rank}.0.weight", f"{rank}.0.bias"]


@SEVERAL
def test_the_layers_of_other_ranks_are_let_go(rank, size):
    whole = unsplit()
    others = [weakref.ref(each) for each in whole]
    model = pipeline(whole)
    del whole
    gc.collect()
    assert [number for number, other in enumerate(others) if other() is not None] == [int(name) for name in model._modules]
    model.train_batch(*data())


def test_layers_are_cut_by_their_parameters_without_being_built(rank, size):
    """The last layer is as heavy as all others together."""
    built = []

    def make(number):
        built.append((number, torch.empty(0).device.type))
        return nn.Linear(WIDTH, WIDTH * (LAYERS if number == LAYERS - 1 else 1))

    torch.manual_seed(4)
    factories = {f"part{number}": (lambda number=number: make(number)) for number in range(LAYERS)}
    model = pipeline(factories, partition="parameters", loss_fn=lambda output, target: output.mean())
    mine = [number for number, device in built if device != "meta"]
    assert list(model._modules) == [f"part{number}" for number in mine]
    if size > 1:
        assert (LAYERS - 1 in mine) == (rank == size - 1) and (rank < size - 1 or mine == [LAYERS - 1])
    batch, target = data()
    model.train_batch(batch, target)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layers_are_cut_by_their_time(rank, size):
    """The measurement leaves alone the statistics of a normalisation, and the draws of dropout."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)) for _ in range(LAYERS)]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    model = pipeline(nn.Sequential(*layers), partition="time", sample=data(rows=ROWS // MICRO_BATCHES)[0])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(buffer.abs().sum() == 0 for name, buffer in model.named_buffers() if name.endswith(("running_mean", "tracked")))
    assert hvd.allreduce(torch.tensor(len(model._modules)), op=hvd.Sum) == LAYERS and len(model._modules) >= 1


def test_tuples_and_skip_connections_by_name(rank, size):
    """Stage 0 hands on two tensors, and two more past the stages between to the last one."""
    stages = max(3, size)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(0)

        def forward(self, x):
            y = self.layer(x)
            return y, 2 * y, y.sin(), y.cos()

    class Middle(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layer = layer(number)

        def forward(self, a, b):
            return self.layer(a), b + a

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer(stages - 1)

        def forward(self, a, b, sine, cosine):
            return self.layer(a * sine) + b * cosine, a

    made = [First, *(lambda number=number: Middle(number) for number in range(1, stages - 1)), Last]

    def loss_fn(outputs, target):
        return nn.functional.mse_loss(outputs[0], target) + outputs[1].square().mean()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            for number, make in enumerate(made):
                self.add_module(str(number), make())

        def forward(self, x):
            first, *middle, last = self.children()
            a, b, sine, cosine = first(x)
            for stage in middle:
                a, b = stage(a, b)
            return last(a, b, sine, cosine)

    whole, (batch, target) = Whole(), data()
    in_one_process(whole, batch, target, loss_fn)
    model = pipeline(made, loss_fn=loss_fn, schedule="gpipe" if stages > size else "1f1b",
                     skips=[("sine", 0, stages - 1), ("cosine", 0, stages - 1)])
    model.train_batch(batch, target)
    assert_same_gradients(model, whole)


def test_layers_hand_on_what_they_return(rank, size):
    """As in a Sequential: a tuple, here with a tensor that has no gradient."""
    class Layer(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number, self.layer = number, layer(number)

        def forward(self, given):
            if self.number == 0:
                return self.layer(given), given > 0
            a, positive = given
            return (self.layer(a), positive) if self.number < LAYERS - 1 else torch.where(positive, self.layer(a), a)

    whole, (batch, target) = nn.Sequential(*(Layer(number) for number in range(LAYERS))), data()
    in_one_process(whole, batch, target)
    model = pipeline([lambda number=number: Layer(number) for number in range(LAYERS)], partition="uniform")
    model.train_batch(batch, target)
    assert_same_gradients(model, whole)


@pytest.mark.parametrize("how", ["plain", "recompute"])
def test_tied_parameters(rank, size, how):
    """The last layer has the first one's weight."""
    def layers(tied):
        made = [nn.Linear(WIDTH, WIDTH, bias=False), *(layer(number) for number in range(1, LAYERS - 1)),
                nn.Linear(WIDTH, WIDTH, bias=False)]
        with torch.no_grad():
            made[0].weight.copy_(torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) / 50)
        if tied:
            made[-1].weight = made[0].weight
        return nn.Sequential(*made)

    whole, (batch, target) = layers(tied=True), data()
    in_one_process(whole, batch, target)
    names = ["0.weight", f"{LAYERS - 1}.weight"]
    model = pipeline(layers(tied=False), ties=[names], recompute=range(size) if how == "recompute" else ())
    model.train_batch(batch, target)
    for name, parameter in model.named_parameters():
        unsplit_name = names[0] if name in names else name
        support.assert_close(parameter, dict(whole.named_parameters())[unsplit_name])
        support.assert_close(parameter.grad, dict(whole.named_parameters())[unsplit_name].grad)


@SEVERAL
def test_a_layer_that_is_there_twice_needs_a_tie(rank, size):
    shared = layer(0)
    net = nn.Sequential(shared, *(layer(number) for number in range(1, LAYERS - 1)), shared)
    last = LAYERS - 1
    with pytest.raises(ValueError, match="are one parameter in the model and lie in different stages"):
        pipeline(net)
    model = pipeline(net, ties=[[f"0.0.{name}", f"{last}.0.{name}"] for name in ("weight", "bias")])
    model.train_batch(*data())


def test_recomputed_stages_run_forward_twice(rank):
    calls = []

    class Counting(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layer = layer(number)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            calls.append(torch.is_grad_enabled())
            return self.dropout(self.layer(x))

    found = []
    for recompute in ((), (rank,)):
        every = sum(hvd.allgather_object(list(recompute)), [])
        calls.clear()
        torch.manual_seed(3)
        model = pipeline([lambda number=number: Counting(number) for number in range(hvd.size())], recompute=every)
        model.train_batch(*data())
        assert len(calls) == MICRO_BATCHES * (2 if recompute else 1)
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*found):
        assert torch.equal(plain, again)


def test_evaluation(rank, size):
    model, whole, (batch, target) = pipeline().eval(), unsplit().eval(), data()
    assert not model.training and not any(module.training for module in model.modules())
    loss, outputs = model.evaluate_batch(batch, target)
    with torch.no_grad():
        wanted = whole(batch)
    assert loss == pytest.approx(nn.functional.mse_loss(wanted, target).item(), rel=1e-6)
    assert (outputs is not None) == model.is_last
    if outputs is not None:
        assert not outputs.requires_grad
        support.assert_close(outputs, wanted)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- copies of the pipeline, and optimizers ----


@pytest.fixture
def mesh(size):
    made = hvd.mesh({"data": -1, "pipe": 2 if size % 2 == 0 else 1})
    yield made
    gc.collect()
    for row in (row for axis in made.axes for row in made.sets(axis)):
        hvd.remove_process_set(row)


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_copies_clipping_and_shards(rank, mesh, shard):
    copies, copy_number = mesh.size("data"), mesh.coordinate("data")
    model, whole = pipeline(mesh=mesh), unsplit()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.named_parameters(), shard=shard,
                                         **model.optimizer_options())
    alone = torch.optim.Adam(whole.parameters(), 0.01)
    for step in range(3):
        batch, target = data(step, rows=copies * ROWS)
        alone.zero_grad()
        in_one_process(whole, batch, target, micro_batches=copies * MICRO_BATCHES)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        alone.step()
        optimizer.zero_grad()
        rows = slice(copy_number * ROWS, (copy_number + 1) * ROWS)
        model.train_batch(batch[rows], target[rows])
        norm = model.clip_grad_norm_(optimizer, 0.05)
        assert norm == pytest.approx(wanted.item(), rel=1e-5) and norm > 0.05
        optimizer.step()
    for name, parameter in model.named_parameters():
        support.assert_close(parameter, dict(whole.named_parameters())[name], 1e-5)
    hvd.check_parameters(model, process_set=mesh.set("data"))
    state = model.full_optimizer_state_dict(optimizer)
    for found, of_whole in zip(state["state"].values(), alone.state_dict()["state"].values()):
        support.assert_close(found["exp_avg"], of_whole["exp_avg"], 1e-5)


@pytest.mark.parametrize("distributed", [True, False])
def test_all_stages_make_a_step_or_none(rank, size, mesh, distributed):
    """An infinite gradient on the last rank alone. The loss is scaled by the last stages, and all divide by the scale."""
    scaler = hvd.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    model = pipeline(mesh=mesh, loss_fn=lambda output, target: scaler.scale(nn.functional.mse_loss(output, target)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **model.optimizer_options())
    mine = next(model.parameters())
    factors = {"now": 1.0}
    mine.register_hook(lambda gradient: gradient * factors["now"])
    concerned = distributed or size - 1 in mesh.ranks("pipe")  # copies that do not average are models of their own
    for step in range(3):
        factors["now"] = float("inf") if step == 1 and rank == size - 1 else 1.0
        before = mine.detach().clone()
        optimizer.zero_grad()
        model.train_batch(*data())
        scaler.step(optimizer)
        scaler.update()
        skipped = step == 1 and concerned
        assert scaler.get_scale() == (4.0 if step >= 1 and concerned else 8.0)
        assert torch.equal(mine, before) == skipped
        gradients = [parameter.grad for parameter in model.parameters()]
        assert skipped or all(gradient.isfinite().all() for gradient in gradients)


def test_copies_of_tied_parameters(rank, mesh):
    """Gradients are summed over the stages, and then averaged over the copies."""
    copies, copy_number = mesh.size("data"), mesh.coordinate("data")
    names = ["0.0.weight", f"{LAYERS - 1}.0.weight"]
    model, whole = pipeline(mesh=mesh, ties=[names]), unsplit()
    whole[-1][0].weight = whole[0][0].weight
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model.named_parameters(),
                                         **model.optimizer_options())
    alone = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    for step in range(3):
        batch, target = data(step, rows=copies * ROWS)
        alone.zero_grad()
        in_one_process(whole, batch, target, micro_batches=copies * MICRO_BATCHES)
        wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
        alone.step()
        optimizer.zero_grad()
        rows = slice(copy_number * ROWS, (copy_number + 1) * ROWS)
        model.train_batch(batch[rows], target[rows])
        assert model.clip_grad_norm_(optimizer, 0.05) == pytest.approx(wanted.item(), rel=1e-5)
        optimizer.step()
    parameters = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        support.assert_close(parameter, parameters[names[0] if name in names else name], 1e-5)


def test_clipping_with_an_optimizer_of_torch(rank):
    model, whole, (batch, target) = pipeline(), unsplit(), data()
    in_one_process(whole, batch, target)
    model.train_batch(batch, target)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    assert model.clip_grad_norm_(optimizer, 0.01) == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(model, whole)


@pytest.mark.parametrize("kind", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
                                  "SGD"])
def test_optimizers_of_torch(rank, kind):
    model, whole = pipeline(), unsplit()
    mine, alone = (getattr(torch.optim, kind)(each.parameters(), lr=0.01) for each in (model, whole))
    for step in range(2):
        for optimizer in (mine, alone):
            optimizer.zero_grad()
        in_one_process(whole, *data(step))
        model.train_batch(*data(step))
        mine.step()
        alone.step()
    for name, parameter in model.named_parameters():
        support.assert_close(parameter, dict(whole.named_parameters())[name], 1e-5)


def test_lbfgs_is_refused_by_name(rank):
    model = pipeline()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="LBFGS looks at all parameters"):
        optimizer.step(lambda: model.train_batch(*data()))
    other = nn.Linear(2, 1)

    def loss():
        value = other(torch.ones(1, 2)).square().sum()
        value.backward()
        return value
    torch.optim.LBFGS(other.parameters()).step(loss)  # of no pipeline


# ---- states ----


def test_the_state_is_that_of_the_unsplit_model_and_goes_into_another_number_of_stages(rank, size):
    model, whole = pipeline(), unsplit()
    mine, alone = (torch.optim.Adam(each.parameters(), 0.01) for each in (model, whole))
    in_one_process(whole, *data())
    model.train_batch(*data())
    mine.step()
    alone.step()
    state, optimizer_state = model.full_state_dict(), model.full_optimizer_state_dict(mine)
    assert list(state) == list(whole.state_dict())
    assert list(optimizer_state["state"]) == list(alone.state_dict()["state"])
    assert optimizer_state["param_groups"] == alone.state_dict()["param_groups"]

    other = unsplit()
    other.load_state_dict(state)
    other_optimizer = torch.optim.Adam(other.parameters(), 0.5)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer_state))  # torch's optimizers go on with the tensors that they load
    more = pipeline(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))),
                    schedule="interleaved_1f1b", stages_per_rank=2)
    more.load_state_dict(state)
    more_optimizer = torch.optim.Adam(more.parameters(), 0.5)
    more.load_optimizer_state_dict(more_optimizer, optimizer_state)
    for each, optimizer in ((whole, alone), (other, other_optimizer)):
        optimizer.zero_grad()
        in_one_process(each, *data(6))
        optimizer.step()
    more_optimizer.zero_grad()
    more.train_batch(*data(6))
    more_optimizer.step()
    wanted = dict(whole.named_parameters())
    for each in (other, more):
        for name, parameter in each.named_parameters():
            support.assert_close(parameter, wanted[name])


def test_the_state_on_one_rank(rank, size):
    model = pipeline()
    state = model.full_state_dict(root_rank=size - 1)
    optimizer_state = model.full_optimizer_state_dict(torch.optim.SGD(model.parameters(), 0.1), root_rank=size - 1)
    assert (state is not None) == (rank == size - 1) == (optimizer_state is not None)
    if state is not None:
        for name, value in unsplit().state_dict().items():
            assert torch.equal(state[name], value)


def test_a_tied_parameter_is_one_in_the_unsplit_optimizer(rank, size):
    names = [["0.0.weight", f"{LAYERS - 1}.0.weight"]]
    model = pipeline(ties=names)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.train_batch(*data())
    optimizer.step()
    whole = unsplit()
    whole[-1][0].weight = whole[0][0].weight
    alone = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    in_one_process(whole, *data())
    alone.step()
    state = model.full_optimizer_state_dict(optimizer)
    assert list(state["state"]) == list(alone.state_dict()["state"]) and len(state["state"]) == 2 * LAYERS - 1
    again = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.load_optimizer_state_dict(again, state)
    for parameter in model.parameters():
        assert torch.equal(again.state[parameter]["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9)])
def test_tied_parameters_on_one_rank_have_states_of_their_own_when_they_are_loaded(kind):
    def trained(steps, state=None, optimizer_state=None):
        model = pipeline(ties=[["0.0.weight", "1.0.weight"]])
        if state is not None:
            model.load_state_dict(state)
        optimizer = kind(model.parameters(), 0.05)
        if optimizer_state is not None:
            model.load_optimizer_state_dict(optimizer, optimizer_state)
        for step in range(*steps):
            optimizer.zero_grad()
            model.train_batch(*data(step))
            optimizer.step()
        return model.full_state_dict(), model.full_optimizer_state_dict(optimizer)

    through, _ = trained((0, 5))
    again, _ = trained((2, 5), *trained((0, 2)))
    assert all(torch.equal(again[name], value) for name, value in through.items())


def test_a_state_that_has_a_tied_parameter_once_is_loaded_into_all_places():
    model = pipeline(ties=[["0.0.weight", f"{LAYERS - 1}.0.weight"]])
    state = {name: value for name, value in unsplit().state_dict().items() if name != f"{LAYERS - 1}.0.weight"}
    state["0.0.weight"] = torch.full((WIDTH, WIDTH), 7.0)
    model.load_state_dict(state)
    whole = model.full_state_dict()
    assert torch.equal(whole[f"{LAYERS - 1}.0.weight"], state["0.0.weight"])


def test_a_model_with_a_forward_of_its_own_and_a_root_that_does_not_exist_are_refused(size):
    class Scaled(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 10

    with pytest.raises(TypeError, match="a forward\\(\\) of its own"):
        pipeline(Scaled(*unsplit()))
    model = pipeline()
    with pytest.raises(hvd.InvalidArgumentError, match="root rank 99 is not in the job"):
        model.full_state_dict(root_rank=99)


@pytest.mark.parametrize("names", [("weight", "other"), ("other", "weight")])
def test_a_parameter_that_is_tied_within_a_layer_is_one_in_the_unsplit_optimizer(names):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))
            self.other = self.weight

        def forward(self, x):
            return x @ self.weight @ self.other

    def layers():
        return nn.Sequential(Twice(), *(layer(number) for number in range(1, LAYERS)))

    model = pipeline(layers(), ties=[[f"0.{name}" for name in names]])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.train_batch(*data())
    optimizer.step()
    whole = layers()
    alone = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    in_one_process(whole, *data())
    alone.step()
    state = model.full_optimizer_state_dict(optimizer)
    wanted = alone.state_dict()["state"]
    assert list(state["state"]) == list(wanted)
    assert all(torch.allclose(state["state"][n]["momentum_buffer"], wanted[n]["momentum_buffer"], atol=1e-6) for n in wanted)


def test_the_state_of_parts_of_layers_is_refused(size):
    """It would pass for that of the whole layers."""
    made = hvd.mesh({"pipe": -1, "tensor": 2 if size % 2 == 0 else 1})
    layers = [lambda: hvd.ColumnParallelLinear(WIDTH, WIDTH, gather_output=True, process_set=made.set("tensor"))] * made.size("pipe")
    model = pipeline(layers, mesh=made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.train_batch(*data())
    optimizer.step()
    if made.size("tensor") == 1:
        assert len(model.full_optimizer_state_dict(optimizer)["state"]) == 2 * made.size("pipe")
    else:
        with pytest.raises(hvd.InvalidArgumentError, match="a part of a parameter that is split over ranks"):
            model.full_optimizer_state_dict(optimizer)
    del model, layers
    gc.collect()
    for row in (row for axis in made.axes for row in made.sets(axis)):
        hvd.remove_process_set(row)


def test_states_that_do_not_fit_are_refused(rank):
    model = pipeline()
    state = model.full_state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key.*nobody"):
        model.load_state_dict({**state, "nobody.weight": torch.ones(1)})
    mine = next(iter(model.state_dict()))
    with pytest.raises(RuntimeError, match="Missing key.*" + mine):
        model.load_state_dict({name: value for name, value in state.items() if name != mine})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match="parameters in its groups"):
        model.load_optimizer_state_dict(optimizer, torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1).state_dict())
    with pytest.raises(ValueError, match="not the pipeline's"):
        model.full_optimizer_state_dict(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))


# ---- what is refused, on all ranks of the row ----


@pytest.mark.parametrize("arguments, error, text", [
    ({"schedule": "gpip"}, ValueError, "the nearest known is gpipe"),
    ({"partition": "evenly"}, ValueError, "uniform, parameters, time"),
    ({"partition": "time"}, ValueError, "sample"),
    ({"loss_fn": 3}, TypeError, "loss_fn is a int"),
    ({"stages": 3}, TypeError, "stages is a int"),
    ({"stages": [3]}, TypeError, "stage '0' is a int"),
    ({"micro_batches": 0}, ValueError, "micro"),
    ({"ties": [["0.0.weight", "nobody.weight"]]}, ValueError, "no layer 'nobody'"),
    ({"skips": [("back", 1, 0)]}, ValueError, "back"),
], ids=lambda value: "")
def test_wrong_arguments_are_refused(rank, arguments, error, text):
    with pytest.raises(error, match=text):
        pipeline(**arguments)


@SEVERAL
def test_what_is_wrong_on_one_rank_is_told_to_all(rank, size):
    with pytest.raises(TypeError if rank == 0 else ValueError, match="loss_fn is a int"):
        pipeline(loss_fn=3 if rank == 0 else nn.functional.mse_loss)

    class Wrong(Exception):
        pass

    def factory():
        raise Wrong("no such weights")
    with pytest.raises(Wrong if rank == size - 1 else ValueError, match="no such weights"):
        pipeline([*(lambda number=number: layer(number) for number in range(size - 1)), factory])
    with pytest.raises(hvd.MismatchError):
        pipeline(micro_batches=4 if rank == 0 else 2)


def test_a_pipeline_is_not_called(rank):
    model = pipeline()
    with pytest.raises(hvd.UnsupportedError, match="train_batch"):
        model(data()[0])
    with pytest.raises(ValueError, match="no copies to average over"):
        model.optimizer_options()


def test_the_report(rank, size):
    model = pipeline()
    model.train_batch(*data())
    report = model.report()
    assert isinstance(report, hvd.PipelineReport)
    assert report.peak_activations == min(MICRO_BATCHES, size - rank) == report.most_kept
    assert 0 <= report.waited < 1
    assert report.bubble == pytest.approx(1 - MICRO_BATCHES / (MICRO_BATCHES + size - 1))
    assert report.schedule.startswith("rank 0:") and f"F{MICRO_BATCHES - 1}" in report.picture


def test_pipelines_end_when_python_lets_them_go(rank):
    model = pipeline()
    first = next(model.parameters())
    weak = weakref.ref(first)
    model.train_batch(*data())
    del model, first
    gc.collect()
    assert weak() is None
    again = pipeline()  # its messages are not taken for those of the one before
    again.train_batch(*data())
    assert again.stages == [rank]
