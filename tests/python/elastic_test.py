"""elastic: commit, restore, sync and run, with ranks that stay."""

import pathlib
import re
import warnings

import pytest
import torch

import sirtaki.torch as hvd
import support
from sirtaki.torch._library import _C


def training(rank):
    model = support.net(seed=rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
                                         model.named_parameters())
    return model, optimizer


def one_step(model, optimizer, batch):
    optimizer.zero_grad()
    support.loss_of(model, batch).backward()
    optimizer.step()


# ---- states ----


def test_an_object_state_is_committed_and_restored():
    state = hvd.elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, epoch=3, seen=[1])
    assert (state.epoch, state.seen) == (3, [1])
    state.epoch, state.seen = 4, [1, 2]
    state.commit()
    state.epoch = 9
    state.seen.append(3)  # not a copy
    state.restore()
    assert (state.epoch, state.seen) == (4, [1, 2])
    state.seen.append(3)
    state.restore()
    assert state.seen == [1, 2]


def test_a_state_is_rank_0_s_after_sync(rank):
    state = hvd.elastic.ObjectState(epoch=rank + 5, name=f"rank {rank}")
    state.sync()
    assert (state.epoch, state.name) == (5, "rank 0")
    state.epoch = 9
    state.restore()
    assert state.epoch == 5


def test_a_torch_state_holds_model_optimizer_scheduler_and_sampler(rank, size):
    model, optimizer = training(rank)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    sampler = hvd.elastic.ElasticSampler(range(40), seed=2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, batch=rank)
    assert state.model is model and state.optimizer is optimizer and state.sampler is sampler
    state.sync()
    support.assert_same_everywhere(hvd, model.parameters())
    assert state.batch == 0
    one_step(model, optimizer, support.batches(rank)[0])
    scheduler.step()
    sampler.record_batch(0, 2)
    state.batch = 1
    state.commit()
    committed = [p.detach().clone() for p in model.parameters()]
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    one_step(model, optimizer, support.batches(rank)[1])
    scheduler.step()
    sampler.set_epoch(1)
    state.batch = 2
    state.restore()
    assert all(map(torch.equal, model.parameters(), committed))
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], m) for p, m in zip(model.parameters(), momentum))
    assert optimizer.param_groups[0]["lr"] == 0.05 and scheduler.last_epoch == 1
    assert (sampler.epoch, sampler.processed_num, state.batch) == (0, 2 * size, 1)


def test_a_gradient_scaler_stays_the_object_that_the_program_has(rank):
    model, optimizer = training(rank)
    scaler = hvd.GradScaler("cpu", init_scale=float(2 + rank))
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scaler=scaler)
    state.sync()
    assert state.scaler is scaler and scaler.get_scale() == 2.0 and state._takes_newest()
    scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
    scaler.unscale_(optimizer)  # of a step that is not made
    state.restore()
    optimizer.zero_grad()
    scaler.scale(support.loss_of(model, support.batches(rank)[0]) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    state.restore()
    assert state.scaler is scaler and scaler.get_scale() == 2.0


def test_a_model_may_have_a_state_beside_its_tensors(rank):
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = Counting(2, 2)
    model.seen = rank + 5
    state = hvd.elastic.TorchState(model=model)
    state.sync()
    assert model.seen == 5
    support.assert_same_everywhere(hvd, model.parameters())


@pytest.mark.parametrize("kind", [hvd.GradScaler, torch.amp.GradScaler])
def test_a_scaler_may_be_disabled(rank, kind):
    model, optimizer = training(rank)
    scaler = kind("cpu", enabled=False)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scaler=scaler)
    state.sync()
    state.restore()
    scaler.load_state_dict(scaler.state_dict())
    hvd.elastic.reset()
    state.reset()
    one_step(model, optimizer, support.batches(rank)[0])


def test_another_model_may_take_the_place():
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1))
    other = torch.nn.Linear(2, 2)
    state.model = other
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other and torch.equal(other.weight, weight)


def test_a_state_may_have_no_model_and_kinds_of_one_s_own():
    class Box:
        def __init__(self, value):
            self.value = value

    class BoxHandler(hvd.elastic.StateHandler):
        def save(self):
            self.kept = self.value.value

        def restore(self):
            self.value.value = self.kept

        def sync(self):
            self.value.value = hvd.broadcast_object(self.value.value)
            self.save()

    registry = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([(Box, BoxHandler)] + registry)
    try:
        state = hvd.elastic.TorchState(box=Box(hvd.rank()))
    finally:
        hvd.elastic.set_handler_registry(registry)
    assert state.model is None
    state.sync()
    assert state.box.value == 0
    state.box.value = 7
    state.commit()
    state.box.value = 8
    state.restore()
    assert state.box.value == 7


def test_a_state_of_one_s_own_must_say_how():
    state = hvd.elastic.State(hvd.broadcast_object, hvd.rank)
    for act in (state.save, state.restore, state.sync, state.commit):
        with pytest.raises(NotImplementedError):
            act()


# ---- the sampler ----


@pytest.mark.parametrize("samples", [0, 1, 7, 24])
def test_a_sampler_gives_every_sample_to_somebody(rank, size, samples):
    sampler = hvd.elastic.ElasticSampler(range(samples), seed=4)
    shares = hvd.allgather_object(list(sampler))
    assert len({len(share) for share in shares}) == 1 and len(sampler) == len(shares[0]) == -(-samples // size)
    assert {index for share in shares for index in share} == set(range(samples))
    again = list(sampler)
    sampler.set_epoch(1)
    assert samples < 24 or list(sampler) != again


def test_a_sampler_goes_on_where_the_epoch_was_left(rank, size):
    sampler = hvd.elastic.ElasticSampler(range(10 * size), shuffle=False)
    done = list(sampler)[:4]
    for batch in range(2):
        sampler.record_batch(batch, 2)
    saved = sampler.state_dict()
    other = hvd.elastic.ElasticSampler(range(10 * size), shuffle=False)
    other.load_state_dict(saved)
    rest = list(other)
    everything = [i for share in hvd.allgather_object(done + rest) for i in share]
    assert sorted(everything) == list(range(10 * size))


def test_a_data_loader_takes_the_sampler(rank, size):
    data = torch.arange(12.0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=hvd.elastic.ElasticSampler(data))
    count = sum(len(batch) for batch in loader)
    assert count == -(-12 // size)


# ---- run ----


def test_run_gives_all_ranks_the_state_and_returns_the_result(rank):
    state = hvd.elastic.ObjectState(epoch=rank)

    @hvd.elastic.run
    def train(state, extra, keyword=None):
        """What it does."""
        return state.epoch, extra, keyword

    assert train(state, 2, keyword=3) == (0, 2, 3)
    assert train.__name__ == "train" and train.__doc__ == "What it does."


def test_torch_s_default_device_is_not_where_the_state_travels(rank):
    model, optimizer = training(rank)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=rank)
    with torch.device("meta"):  # a GPU would do the same
        assert hvd.elastic.run(lambda state: state.epoch)(state) == 0
    support.assert_same_everywhere(hvd, list(model.parameters()))


def test_a_scheduler_that_was_made_before_wrapping_goes_on_after_a_restore():
    model = support.net()
    base = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, scheduler=scheduler)
    one_step(model, optimizer, support.batches(hvd.rank())[0])
    scheduler.step()
    state.commit()
    state.restore()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.025
    assert base.state is optimizer.state


def test_run_makes_no_more_calls_for_more_parts(size):
    """Ranks that are there wait at each call for those that come."""
    model, optimizer = training(0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parts = dict(scheduler=scheduler, sampler=hvd.elastic.ElasticSampler(range(10)), text="a", number=1)

    def calls_of(state):
        before = hvd.metrics()["calls"]
        hvd.elastic.run(lambda state: None)(state)
        return hvd.metrics()["calls"] - before

    few, all_of_them = (calls_of(hvd.elastic.TorchState(model=model, optimizer=optimizer, **more)) for more in ({}, parts))
    assert few == all_of_them
    assert few > 0 or size == 1


def test_states_of_another_make_up_are_an_error_on_all_ranks(rank, size):
    if size == 1:
        pytest.skip("one rank")
    state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 2 if rank == 0 else 3), number=rank)
    with pytest.raises(hvd.MismatchError, match=r"rank 0 has .*weight.*\(2, 2\).*rank 1 has .*\(3, 2\)"):
        hvd.elastic.run(lambda state: None)(state)
    assert state.number == rank


def test_run_goes_back_to_what_it_began_with(rank):
    """A program may load a checkpoint when it has made the state."""
    state = hvd.elastic.TorchState(model=support.net(seed=1), at=0)
    loaded = support.net(seed=0)
    state.model.load_state_dict(loaded.state_dict())
    state.at = 7
    state._handlers["model"].sync = lambda: fail_once()
    synchronize = hvd.elastic.state.ModelStateHandler.sync
    calls = []

    def fail_once():
        state._handlers["model"].sync = lambda: synchronize(state._handlers["model"])
        raise hvd.HorovodInternalError("on purpose")

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        assert all(map(torch.equal, state.model.parameters(), loaded.parameters()))

    train(state)
    assert calls == [7]


@pytest.mark.parametrize("failing", ["all", "last"])
def test_run_goes_back_to_the_commit_after_an_error(rank, size, failing):
    """An error on one rank ends what the others wait for."""
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    resets, begun = [], []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])

    @hvd.elastic.run
    def train(state):
        begun.append(state.step)
        while state.step < 5:
            if state.step == 3 and len(begun) == 1 and (failing == "all" or rank == size - 1):
                raise hvd.HorovodInternalError("on purpose")
            one_step(state.model, state.optimizer, support.batches(rank, 5)[state.step])
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return state.step

    assert train(state) == 5
    assert begun == [0, 2] and resets == [size]
    alone = support.net(seed=0)
    plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for batch in support.joined(size, 5):
        one_step(alone, plain, batch)
    support.assert_same_everywhere(hvd, model.parameters())
    for found, wanted in zip(model.parameters(), alone.parameters()):
        support.assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("who", ["all", "last", "first"])
@pytest.mark.parametrize("when", ["before it", "within it"])
@pytest.mark.parametrize("wrapped", ["optimizer", "module"])
def test_run_goes_back_to_the_last_step(rank, size, who, when, wrapped):
    """All state is that of a rank that is farthest, and that no optimizer's step has changed since."""
    model, optimizer = training(0)
    if wrapped == "module":
        model = hvd.DistributedDataParallel(support.net(seed=0))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    norm = torch.nn.BatchNorm1d(4, affine=False)  # counts what it has seen
    teacher = support.net(seed=1).requires_grad_(False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    state = hvd.elastic.TorchState(model=model, norm=norm, teacher=teacher, optimizer=optimizer, scheduler=scheduler,
                                   at=0, begun=[])
    calls = []
    drawn = {}
    torch.manual_seed(rank)
    fails = {"all": True, "last": rank == size - 1, "first": rank == 0}[who]

    def pass_by(place):
        if fails and place == when and state.at == 3 and len(calls) == 1:
            raise hvd.HorovodInternalError("on purpose")

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        while state.at < 6:
            state.begun.append(state.at)
            optimizer.zero_grad()
            batch = support.batches(rank, 6)[state.at]
            norm(batch[0])
            follow(teacher, model)
            drawn[state.at] = torch.rand(1).item()
            loss = support.loss_of(model, batch)
            pass_by("before it")
            loss.backward()
            optimizer.step()
            pass_by("within it")
            scheduler.step()
            state.at += 1
            state.step()
            if state.at == 2:
                state.commit()

    train(state)
    if when == "before it":
        again = 3
    else:  # whoever was within it has no such state; the others were farther
        again = 2 if who == "all" or size == 1 else 4
    assert calls == [0, again]
    assert state.begun == list(range(6)) and scheduler.last_epoch == 6
    assert norm.num_batches_tracked == 6
    torch.manual_seed(rank)
    assert [drawn[at] for at in range(6)] == [torch.rand(1).item() for _ in range(6)]
    support.assert_same_everywhere(hvd, model.parameters())
    alone = support.net(seed=0)
    one = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(one, 2, gamma=0.5)
    alone_teacher = support.net(seed=1)
    for batch in support.joined(size, 6):
        follow(alone_teacher, alone)
        one_step(alone, one, batch)
        schedule.step()
    for found, wanted in zip([*model.parameters(), *teacher.parameters()], [*alone.parameters(), *alone_teacher.parameters()]):
        support.assert_close(found, wanted, 1e-5)


def follow(teacher, model):
    """The forward() of some models does this."""
    for followed, parameter in zip(teacher.parameters(), model.parameters()):
        followed.data.lerp_(parameter.data, 0.5)


def test_draws_go_on_from_the_commit_before():
    """All ranks may go back to it where shards of the last one are lost."""
    state = hvd.elastic.TorchState(at=0)
    for _ in range(3):
        state.commit()
        drawn = torch.rand(1).item()
    before = torch.get_rng_state()
    state.commit()
    torch.rand(1)
    state._steps.note_commit(state._steps.place - 1)
    state._go_on_with_random(goes_back=True)
    assert torch.rand(1).item() == drawn and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("steps", [-1, True, "20", 2.0])
def test_copies_are_made_at_a_number_of_steps(steps):
    state = hvd.elastic.TorchState(at=0)
    with pytest.raises(ValueError, match="it is a number of steps, 0 for each commit"):
        state.copy_shards = steps
    assert state.copy_shards == 0
    for right in (None, 0, 20):
        state.copy_shards = right
        assert state.copy_shards == right


def test_draws_go_on_where_they_are_not_kept():
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, at=0)
    state.keep_random_state = False
    drawn = []
    torch.manual_seed(0)

    @hvd.elastic.run
    def train(state):
        drawn.append(torch.rand(1).item())
        if len(drawn) == 1:
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    torch.manual_seed(0)
    assert drawn == [torch.rand(1).item() for _ in range(2)]


@pytest.mark.parametrize("what", ["nothing", "the weights are set", "the optimizer's parameters are in no model"])
def test_a_step_counts_until_its_parameters_change(rank, what):
    model, optimizer = training(0)
    optimizer.zero_grad()
    given = model if "no model" not in what else None
    state = hvd.elastic.TorchState(model=given, optimizer=optimizer, at=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        if len(calls) > 1:
            return
        one_step(model, optimizer, support.batches(rank)[0])
        state.at = 1
        state.step()
        if what == "the weights are set":
            with torch.no_grad():
                model[0].weight.zero_()
        raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [0, 1 if what == "nothing" else 0]
    if what == "the weights are set":
        assert all(map(torch.equal, model.parameters(), support.net(seed=0).parameters()))


def test_a_step_counts_after_a_second_fault(rank):
    """The root of a sync() that has broken off is still where it was."""
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, at=0)
    handler = state._handlers["optimizer"]
    synchronize = handler.sync
    calls = []

    def fail_once():
        handler.sync = synchronize
        raise hvd.HorovodInternalError("on purpose, when the model was sent")

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        if len(calls) == 1:
            one_step(model, optimizer, support.batches(rank)[0])
            state.at = 1
            state.step()
            handler.sync = fail_once
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [0, 1]
    support.assert_same_everywhere(hvd, model.parameters())


def test_a_buffer_that_another_has_replaced_comes_back(rank):
    model, optimizer = training(0)
    model[1].register_buffer("longer", torch.zeros(1), persistent=False)
    model[1].register_buffer("later", None, persistent=False)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, at=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        if len(calls) == 1:
            state.at = 1
            state.step()
            model[1].longer = torch.ones(2)
            model[1].later = torch.ones(2)
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [0, 1]
    assert model[1].longer.tolist() == [0] and model[1].later is None


def job_has_failed():
    try:
        _C.check_job()
    except hvd.HorovodInternalError:
        return True
    return False


def test_a_step_that_all_have_made_is_kept_when_the_job_fails_behind_it(rank, size):
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, at=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        while state.at < 2:
            one_step(model, optimizer, support.batches(rank, 2)[state.at])
            state.at += 1
            if len(calls) == 1:
                hvd.barrier()  # all have made it
                if rank == size - 1:
                    hvd.abort("on purpose")
                support.await_true(job_has_failed)
            state.step()

    train(state)
    assert calls == [0, 1]
    support.assert_same_everywhere(hvd, model.parameters())


def test_a_rank_that_has_received_a_part_of_a_state_is_at_no_step(rank, size):
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, at=0)
    first = [parameter.detach().clone() for parameter in model.parameters()]
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        if len(calls) > 1:
            return
        one_step(model, optimizer, support.batches(rank)[0])
        state.at += 1
        if rank > 0:
            state.step()
        synchronize, state._handlers["optimizer"].sync = state._handlers["optimizer"].sync, fail
        try:
            state.sync()
        finally:
            state._handlers["optimizer"].sync = synchronize

    def fail():
        raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [0, 0]
    assert all(map(torch.equal, model.parameters(), first))


def test_a_state_with_a_save_of_its_own_goes_back_to_its_commit(rank):
    class Counting(hvd.elastic.TorchState):
        kept = 0

        def save(self):
            super().save()
            self.kept = self.at

        def restore(self):
            super().restore()
            assert self.at == self.kept

    model, optimizer = training(0)
    state = Counting(model=model, optimizer=optimizer, at=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append((state.at, state.kept))
        if len(calls) == 1:
            state.at = 1
            state.commit()
            state.at = 2
            state.step()
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [(0, 0), (1, 1)]


class Around(torch.optim.Optimizer):
    """Some libraries wrap an optimizer like this."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    def step(self, closure=None):
        self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def test_a_step_is_not_kept_with_an_optimizer_that_tells_of_none():
    model, optimizer = training(0)
    state = hvd.elastic.TorchState(model=model, optimizer=Around(optimizer), at=1)
    state.commit()
    state.at = 2
    state.step()
    state._go_back()
    assert state.at == 1


class CannotTravel:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("on purpose")


def test_a_state_that_cannot_be_given_is_an_error_on_all_ranks(rank, size):
    if size == 1:
        pytest.skip("one rank")
    state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 2), value=CannotTravel())
    with pytest.raises(TypeError if rank == 0 else ValueError, match="on purpose"):
        hvd.elastic.run(lambda state: None)(state)
    hvd.barrier()  # nobody waits elsewhere


def test_ranks_with_other_tied_parameters_are_told_so(rank, size):
    if size == 1:
        pytest.skip("one rank")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    if rank == 0:
        model[1].weight = model[0].weight
    with pytest.raises(hvd.MismatchError, match="number of tensors of models"):
        hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState(model=model))


def test_ranks_with_other_samples_or_names_are_told_so(rank, size):
    if size == 1:
        pytest.skip("one rank")
    for given, text in (({"sampler": hvd.elastic.ElasticSampler(range(40 + rank))}, "41 samples"),
                        ({("epoch" if rank == 0 else "epochs"): 0}, "epochs")):
        with pytest.raises(hvd.MismatchError, match=text):
            hvd.elastic.run(lambda state: None)(hvd.elastic.TorchState(**given))


def test_a_value_with_the_name_of_a_method_is_refused():
    with pytest.raises(hvd.InvalidArgumentError, match="'commit'.*another name"):
        hvd.elastic.TorchState(commit=1)
    assert hvd.elastic.TorchState(step=1).step == 1


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


def test_a_step_that_keeps_nothing_says_why_once(rank):
    model, optimizer = training(0)
    others = [
        (hvd.elastic.TorchState(optimizer=optimizer), 'the optimizer "optimizer" has a parameter that no model of the state has'),
        (hvd.elastic.TorchState(model=model), "a model of it trains a parameter that no optimizer of the state has"),
        (hvd.elastic.TorchState(model=model, optimizer=Around(optimizer)), "has no hooks"),
    ]
    for state, why in others:
        said = warnings_of(state.step)
        assert len(said) == (1 if rank == 0 else 0) and all(why in text and "step() keeps nothing" in text for text in said)
        assert warnings_of(state.step) == []
    assert warnings_of(hvd.elastic.TorchState(model=model, optimizer=optimizer).step) == []


def test_run_warns_of_an_optimizer_whose_model_the_state_does_not_have(rank):
    model, optimizer = training(0)
    train = hvd.elastic.run(lambda state: None)
    said = warnings_of(lambda: train(hvd.elastic.TorchState(adam=optimizer)))
    assert len(said) == (1 if rank == 0 else 0)
    assert all('the optimizer "adam" has a parameter that no model of the state has' in text for text in said)
    assert warnings_of(lambda: train(hvd.elastic.TorchState(model=model, adam=optimizer))) == []


def test_a_step_is_not_kept_where_an_optimizer_may_change_unseen(rank):
    model, optimizer = training(0)
    other = torch.nn.Linear(2, 2)  # in no optimizer of the state
    state = hvd.elastic.TorchState(model=model, other=other, optimizer=optimizer, at=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.at)
        state.at += 1
        state.step()
        if len(calls) == 1:
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == [0, 0]


def test_run_lets_go_the_gradients_of_a_step_that_was_not_made(rank, size):
    model, optimizer = training(0)
    wrapped = hvd.DistributedDataParallel(support.net(seed=0))
    around = torch.nn.Sequential(wrapped)  # one within another module is made again, too
    plain = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, around=around, plain=plain, step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        while state.step < 2:
            for each, its in ((model, optimizer), (around, plain)):
                support.loss_of(each, support.batches(rank, 2)[state.step]).backward()
            if state.step == 1 and len(calls) == 1:
                raise hvd.HorovodInternalError("on purpose")
            for its in (optimizer, plain):
                its.step()
                its.zero_grad()
            state.step += 1
            state.commit()

    train(state)
    assert calls == [0, 1]
    alone = support.net(seed=0)
    one = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    for batch in support.joined(size, 2):
        one_step(alone, one, batch)
    for trained in (model, wrapped.module):
        support.assert_same_everywhere(hvd, trained.parameters())
        for found, wanted in zip(trained.parameters(), alone.parameters()):
            support.assert_close(found, wanted, 1e-5)


def test_run_makes_no_gradients(rank):
    model = support.net(seed=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append([parameter.grad for parameter in model.parameters()])
        if len(calls) == 1:
            support.loss_of(model, support.batches(rank)[0]).backward()
            raise hvd.HorovodInternalError("on purpose")

    train(state)
    assert calls == 2 * [4 * [None]]


def test_run_within_run_is_refused(rank):
    state = hvd.elastic.ObjectState(step=0)
    inner = hvd.elastic.run(lambda state: state.step)

    @hvd.elastic.run
    def train(state):
        with pytest.raises(hvd.InvalidArgumentError, match=r"within another run\(\)"):
            inner(state)
        return 3

    assert train(state) == 3
    assert inner(state) == 0  # one after the other they may be


def test_parameters_that_were_added_are_made_again(rank, size):
    model, optimizer = training(0)
    added = []

    def add():
        added.append(torch.nn.Parameter(torch.zeros(2)))
        optimizer.add_param_group({"params": [added[-1]]})

    add()
    optimizer.set_backward_passes_per_step(1)
    add()
    optimizer.zero_grad()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        if len(calls) == 2:
            add()
        optimizer.zero_grad()
        loss = support.loss_of(model, support.batches(rank)[0])
        (loss + (rank + 1) * sum(parameter.sum() for parameter in added)).backward()
        optimizer.synchronize()
        assert all(parameter.grad[0].item() == (size + 1) / 2 for parameter in added)
        with optimizer.skip_synchronize():
            optimizer.step()
        if len(calls) < 3:
            raise hvd.HostsUpdatedInterrupt()

    train(state)
    assert len(calls) == 3 and len(added) == 3
    support.assert_same_everywhere(hvd, added)


def test_reset_joins_as_init_did(rank, size):
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    hvd.init(process_sets=[first], options={"stall_limit": 33})
    hvd.elastic.reset()
    assert first.included() == (rank == 0) and first.process_set_id in hvd.get_process_set_ids_and_ranks()
    hvd.init(process_sets=[first], options={"stall_limit": 33})  # nothing: they are what it has
    support.reinit(hvd)


def test_run_restores_nothing_when_hosts_change(rank, size):
    state = hvd.elastic.ObjectState(step=0)
    begun = []

    @hvd.elastic.run
    def train(state):
        begun.append(state.step)
        if len(begun) == 1:
            state.step = 4
            raise hvd.HostsUpdatedInterrupt()
        return state.step

    assert train(state) == 4 and begun == [0, 4]


def test_run_gives_up_what_fails_every_time(rank):
    state = hvd.elastic.ObjectState(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        raise hvd.HorovodInternalError("always")

    with pytest.raises(hvd.HorovodInternalError, match="always"):
        train(state)
    assert len(calls) == 3


def test_run_leaves_other_errors_alone(rank, size):
    state = hvd.elastic.ObjectState(step=0)

    @hvd.elastic.run
    def train(state, error):
        raise error

    for error in (KeyError("mine"), RuntimeError("mine"), hvd.MismatchError("mismatch: shapes")):
        with pytest.raises(type(error)):
            train(state, error)


# How texts begin, in the library's own words: by the order of the codes.
BASE = pathlib.Path(__file__).parents[2] / "core" / "base"
CODES = re.findall(r"^  k(\w+)", re.search(r"enum class StatusCode.*?};", (BASE / "status.h").read_text(), re.DOTALL)[0], re.MULTILINE)
NAMES = re.findall(r'"([^"]+)"', re.search(r"kNames\[\] = {(.*?)}", (BASE / "status.cc").read_text(), re.DOTALL)[1])
assert len(CODES) == len(NAMES) == 13
OF_THE_JOB = [dict(zip(CODES, NAMES))[code] for code in ("ShutDown", "PeerLost", "TimedOut", "Aborted", "Backend", "Protocol")]


@pytest.mark.parametrize("kind", OF_THE_JOB)
def test_an_error_within_backward_is_the_job_s_too(rank, kind):
    """Autograd keeps the text of such an error, not its type."""
    state = hvd.elastic.ObjectState(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(f"{kind}: rank 2 has not answered a ping")
        return len(calls)

    assert train(state) == 2
