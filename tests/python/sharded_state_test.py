"""The state of an optimizer with shard="optimizer", whole and in shards: saved, loaded, and gone on with to the bit."""

import copy
import io

import pytest
import torch

import optimizers
import sirtaki.torch as hvd
import support
from sirtaki.common.exceptions import InvalidArgumentError, MismatchError

NAMES = [name for name in optimizers.names() if name not in ("LBFGS", "SparseAdam")]
LATE = 2  # the step in which a second group comes, and a parameter gets its first gradient


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    """Sums of three ranks have the same bits in two runs only so."""
    hvd.shutdown()
    hvd.init(options={"deterministic": True})
    yield
    support.reinit(hvd)


def waves(shape, phase=0.0):
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + phase).float().reshape(shape)


class Training:
    """Of parameters that lie in memory in several ways, are large enough for four ranks or too small, are in two groups, get
    gradients late or never."""

    def __init__(self, make, only=lambda parameter: True, **arguments):
        weights = {
            "late": waves((40, 5), 0.5), "images": waves((4, 3, 5, 5), 1).contiguous(memory_format=torch.channels_last),
            "columns": waves((31, 9), 2).t(), "small": waves((3,), 3), "scalar": waves((), 4), "never": waves((50, 4), 5),
            "other": waves((7, 33), 6),
        }
        self.parameters = {name: torch.nn.Parameter(weight) for name, weight in weights.items() if only(weight)}
        self.base = make([parameter for name, parameter in self.parameters.items() if name != "other"])
        self.has_second = not isinstance(self.base, torch.optim.Adagrad)  # which makes state for its first groups alone
        if arguments.get("process_set", hvd.global_process_set).included():
            arguments["named_parameters"] = self.parameters.items()
        self.optimizer = hvd.DistributedOptimizer(self.base, **arguments)
        self.steps = 0

    def train(self, steps):
        for _ in range(steps):
            if self.steps == LATE and self.has_second and len(self.optimizer.param_groups) == 1:
                self.optimizer.add_param_group({"params": [self.parameters["other"]], "lr": 0.05})
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for number, (name, parameter) in enumerate(self.parameters.items()):
                if name != "never" and (name not in ("late", "other") or self.steps >= LATE):
                    gradient = waves(parameter.shape, 10 * hvd.rank() + 3 * self.steps + number)
                    loss = loss + (parameter * gradient).sum()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
        return self

    def like(self, other):
        """With its parameters and groups, not its state."""
        for mine, theirs in zip(self.parameters.values(), other.parameters.values()):
            with torch.no_grad():
                mine.copy_(theirs)
        if len(other.optimizer.param_groups) > 1:
            self.optimizer.add_param_group({"params": [self.parameters["other"]], "lr": 0.05})
        self.steps = other.steps
        return self


def maker(name, **arguments):
    return lambda parameters: getattr(torch.optim, name)(
        parameters, lr=0.02, **({"momentum": 0.9} if name == "SGD" else {}), **arguments)


def suits(name):
    return (lambda weight: weight.dim() == 2) if name == "Muon" else lambda weight: True


def assert_same(found, wanted, path="state"):
    """To the bit, with order, types and how tensors lie."""
    assert type(found) is type(wanted) or {type(found), type(wanted)} <= {torch.Tensor, torch.nn.Parameter}, path
    if isinstance(found, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride()), path
        assert torch.equal(found, wanted), path
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size(), path
    elif isinstance(found, dict):
        assert list(found) == list(wanted), path
        for key in found:
            assert_same(found[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(wanted), path
        for place, (mine, other) in enumerate(zip(found, wanted)):
            assert_same(mine, other, f"{path}[{place}]")
    else:
        assert found == wanted, path


def assert_same_parameters(one, other):
    for (name, mine), theirs in zip(one.parameters.items(), other.parameters.values()):
        assert torch.equal(mine, theirs), name


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_state_is_that_of_a_run_without_shards(rank, size, name):
    plain = Training(maker(name), suits(name)).train(LATE + 2)
    sharded = Training(maker(name), suits(name), shard="optimizer").train(LATE + 2)
    wanted = plain.optimizer.state_dict()
    for root in (None, size - 1):
        found = sharded.optimizer.consolidated_state_dict(root)
        if root in (None, rank):
            assert_same(found, wanted)
        else:
            assert found is None
    assert_same(plain.optimizer.consolidated_state_dict(), wanted)
    saved = through_a_file(sharded.optimizer.consolidated_state_dict())
    for arguments in ({}, {"shard": "optimizer"}):
        other = Training(maker(name), suits(name), **arguments).like(sharded)
        other.optimizer.load_state_dict(copy.deepcopy(saved))
        other.train(2)
        if not arguments:
            plain.train(2)
        assert_same_parameters(other, plain)
        assert_same(other.optimizer.consolidated_state_dict(), plain.optimizer.state_dict())
    sharded.train(2)  # what was asked has changed nothing
    assert_same_parameters(sharded, plain)


class OwnState(torch.optim.Optimizer):
    """It looks at whole parameters, and keeps all sorts of things."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "rate": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self):
        self.state["calls"] = {"number": self.state.get("calls", {"number": 0})["number"] + 1, "as": torch.ones(5)}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["nothing"], state["of"] = None, parameter
                state["history"] = [*state.get("history", []), (parameter.grad.norm(), parameter.grad.half() * len(state))]
                rows = parameter.grad.reshape(-1)[:5].clone()
                state["rows"] = {"sum": rows, "empty": torch.zeros(0, 3), "mask": parameter.grad > 0}
                state["twice"] = state["rows"]["sum"]
                state["shape"], state["complex"] = tuple(parameter.shape), torch.tensor([1 - 2j, 3j])
                parameter.add_(state["history"][-1][1].float() * state["history"][0][0], alpha=-group["lr"])


def test_whatever_an_optimizer_of_one_s_own_keeps(rank, size):
    plain = Training(OwnState).train(LATE + 1)
    sharded = Training(OwnState, shard="optimizer").train(LATE + 1)
    for root in (None, 0):
        found = sharded.optimizer.consolidated_state_dict(root)
        if root in (None, rank):
            assert_same(found, plain.optimizer.state_dict())
            assert found["state"][1]["twice"] is found["state"][1]["rows"]["sum"]
            assert found["state"][1]["of"] is sharded.parameters["images"]


def remade():
    raise KeyError("on purpose")


class Awkward:
    def __reduce__(self):
        return remade, ()


def test_no_rank_waits_where_the_state_cannot_be_put_together(rank, size):
    training = Training(OwnState, shard="optimizer").train(LATE + 1)
    for state in training.optimizer.state.values():
        state["awkward"] = Awkward()
    if size > 1 and rank > 0:
        assert training.optimizer.consolidated_state_dict(root_rank=0) is None
    elif size > 1:
        with pytest.raises(KeyError, match="on purpose"):
            training.optimizer.consolidated_state_dict(root_rank=0)
    for state in training.optimizer.state.values():
        state["awkward"] = lambda: None
    if size > 1:
        with pytest.raises(Exception, match="pickle|lambda|local object"):
            training.optimizer.consolidated_state_dict(root_rank=0)


@pytest.mark.parametrize("arguments", [
    {"amsgrad": True, "foreach": False}, {"fused": True}, {"foreach": True}], ids=lambda arguments: next(iter(arguments)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_types_and_ways_to_step(rank, size, dtype, arguments):
    """With a large parameter, and one without elements."""
    def state_of(**more):
        parameters = [torch.nn.Parameter(waves(shape).to(dtype)) for shape in ((123, 457), (0,), (9, 31), (1,))]
        adam = hvd.DistributedOptimizer(torch.optim.AdamW(parameters, **arguments), **more)
        for step in range(3):
            for number, parameter in enumerate(parameters):
                (parameter * waves(parameter.shape, rank + step + number).to(dtype)).sum().backward()
            adam.step()
            adam.zero_grad()
        return adam.consolidated_state_dict() if more else adam.state_dict()

    assert_same(state_of(shard="optimizer"), state_of())


def test_state_that_was_there_before_keeps_its_order(rank, size):
    """Before wrapping, with a step that some parameters had no part in; and it is still whole after wrapping."""
    def state_of(**more):
        parameters = [torch.nn.Parameter(waves((70, 3), number)) for number in range(4)]
        sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        states = []
        for step, names in enumerate(((2,), (1,), (3, 0), (0, 1, 2, 3))):
            if step == 2:
                sgd = hvd.DistributedOptimizer(sgd, **more)
                states.append(sgd.consolidated_state_dict())
            sgd.zero_grad()
            for number in names:
                (parameters[number] * waves((70, 3), step + (rank if step >= 2 else 0))).sum().backward()
            sgd.step()
        return [*states, sgd.consolidated_state_dict() if more else sgd.state_dict()]

    found, wanted = state_of(shard="optimizer"), state_of()
    assert_same(found, wanted)
    assert list(found[1]["state"]) == [2, 1, 0, 3]


def test_what_was_made_is_a_copy_and_goes_to_a_device(rank, size):
    for arguments in ({}, {"shard": "optimizer"}):
        training = Training(maker("Adam"), **arguments).train(3)
        made = training.optimizer.consolidated_state_dict(device="meta")
        assert {value.device.type for state in made["state"].values() for value in state.values()} == {"meta"}
        made = training.optimizer.consolidated_state_dict(device="cpu")
        kept = copy.deepcopy(made)
        training.train(2)
        assert_same(made, kept)


def test_hooks_of_the_state_see_the_whole(rank, size):
    training = Training(maker("Adam"), shard="optimizer").train(3)
    seen = []
    training.optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: seen.append(len(state_dict["state"])))
    training.optimizer.consolidated_state_dict(root_rank=0)
    assert seen == ([6] if rank == 0 else [])
    training.optimizer.register_step_post_hook(lambda *_: training.optimizer.consolidated_state_dict())
    if size > 1:
        with pytest.raises(InvalidArgumentError, match=r"consolidated_state_dict\(\) was called within the step"):
            training.train(1)


def test_the_whole_state_goes_to_another_number_of_ranks(rank, size):
    if size < 3:
        pytest.skip("fewer than 3 ranks")
    few = hvd.add_process_set([1, 2])
    whole = Training(maker("Adam"), shard="optimizer").train(3)
    saved = whole.optimizer.consolidated_state_dict()
    trainings = []
    for arguments in ({}, {"shard": "optimizer"}):
        training = Training(maker("Adam"), process_set=few, **arguments).like(whole)
        training.optimizer.load_state_dict(copy.deepcopy(saved))
        trainings.append(training.train(2))
    assert_same_parameters(*trainings)
    plain, sharded = (training.optimizer for training in trainings)
    assert_same(sharded.consolidated_state_dict(), plain.state_dict())
    found = sharded.consolidated_state_dict(root_rank=2)
    assert (found is not None) == (rank == 2)
    with pytest.raises(InvalidArgumentError, match=r"root_rank is 0; it must be None or a rank of the optimizer's: \[1, 2\]"):
        sharded.consolidated_state_dict(root_rank=0)
    sharded.load_shard_state_dict(copy.deepcopy(sharded.shard_state_dict()))
    hvd.remove_process_set(few)


def test_the_ranks_ask_for_the_same(rank, size):
    training = Training(maker("Adam"), shard="optimizer").train(3)
    ask = training.optimizer.consolidated_state_dict
    for wrong in (size, -1, "0"):
        with pytest.raises(InvalidArgumentError, match="it must be None or a rank of the optimizer's"):
            ask(root_rank=wrong)
    with pytest.raises((InvalidArgumentError, RuntimeError), match="nowhere"):
        ask(device="nowhere" if rank == size - 1 else None)
    if size == 1:
        return
    with pytest.raises(MismatchError, match=r"rank 0 comes with root_rank=0.* rank 1 with root_rank=None"):
        ask(root_rank=None if rank else 0)
    saved = ask()
    if rank == 1:
        training.optimizer.load_state_dict(copy.deepcopy(saved))
    with pytest.raises(MismatchError, match="the state of shards, and rank 1 with .* the state of whole parameters"):
        ask()
    training.optimizer.load_state_dict(copy.deepcopy(saved))
    training.train(1)
    if rank == size - 1:
        shard, _ = training.optimizer._sirtaki_shards.mine[training.parameters["images"]]
        del training.optimizer.state[shard]["exp_avg_sq"]
    with pytest.raises(MismatchError, match=r"state of the optimizer's parameter 1, which has 300 elements, does not fit"):
        ask()


def test_a_rank_that_asks_alone_is_told_what_it_waits_for(rank, size):
    if size == 1:
        pytest.skip("one rank")
    hvd.shutdown()
    hvd.init(options={"deterministic": True, "stall_warning": 1, "stall_limit": 60})
    training = Training(maker("Adam"), shard="optimizer").train(1)
    with pytest.raises(MismatchError, match=r"rank \d has not submitted consolidated_state_dict\(\) of an optimizer"):
        if rank == 0:
            training.optimizer.consolidated_state_dict(root_rank=0)
        else:
            hvd.allreduce(torch.ones(1), name="the next thing")
    hvd.shutdown()
    hvd.init(options={"deterministic": True})


# ---- shards in files of their own ----


@pytest.mark.parametrize("name", ["Adam", "Muon", "Adagrad"])
def test_each_rank_saves_its_shards_and_goes_on_with_them(rank, size, name):
    plain = Training(maker(name), suits(name)).train(LATE + 2)
    sharded = Training(maker(name), suits(name), shard="optimizer").train(LATE + 2)
    saved = through_a_file(sharded.optimizer.shard_state_dict())
    other = Training(maker(name), suits(name), shard="optimizer").like(sharded)
    other.optimizer.load_shard_state_dict(saved)
    assert_same(other.optimizer.consolidated_state_dict(), plain.optimizer.state_dict())
    assert other.base.state is other.optimizer.state and other.base.param_groups is other.optimizer.param_groups
    plain.train(2)
    assert_same_parameters(other.train(2), plain)
    assert_same(other.optimizer.consolidated_state_dict(), plain.optimizer.state_dict())


def test_state_without_shards_is_saved_alike(rank, size):
    before, plain = Training(maker("Adam"), shard="optimizer"), Training(maker("Adam"))
    for training in (before, plain):
        training.optimizer.load_shard_state_dict(through_a_file(training.optimizer.shard_state_dict()))
        training.train(2)
    assert_same_parameters(before, plain)


def test_shards_of_another_memory_format_are_refused(size):
    def optimizer_of(memory_format):
        model = torch.nn.Conv2d(4, 8, 3, bias=False).to(memory_format=memory_format)
        made = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters(), shard="optimizer")
        model(torch.ones(1, 4, 5, 5)).sum().backward()
        made.step()
        return made

    saved = optimizer_of(torch.channels_last).shard_state_dict()
    optimizer_of(torch.channels_last).load_shard_state_dict(saved)
    if size > 1:
        with pytest.raises(InvalidArgumentError, match=r"of weight with the strides \(36, 1, 12, 4\)"):
            optimizer_of(torch.contiguous_format).load_shard_state_dict(saved)


def test_shards_of_others_are_refused_on_all_ranks(rank, size):
    training = Training(maker("Adam"), shard="optimizer").train(3)
    load = training.optimizer.load_shard_state_dict
    saved = copy.deepcopy(training.optimizer.shard_state_dict())
    whole = training.optimizer.consolidated_state_dict()
    with pytest.raises(InvalidArgumentError, match=r"takes what shard_state_dict\(\) has returned"):
        load(whole if rank == size - 1 else saved)
    of_more = rf"this is rank \d of {size}, and the state is of the shards of rank \d of {size + 1}.*consolidated_state_dict\(\)"
    with pytest.raises(InvalidArgumentError, match=of_more):
        load({**saved, "ranks": size + 1})
    if size == 1:
        return
    of_ranks = hvd.allgather_object(saved)
    of_another = f"(the state is of the shards of rank {int(rank == 0)} of {size})|rank 0: this"
    with pytest.raises(InvalidArgumentError, match=of_another):
        load(of_ranks[1 - rank] if rank < 2 else saved)
    with pytest.raises(InvalidArgumentError, match='this optimizer has none: give it shard="optimizer"'):
        Training(maker("Adam")).like(training).optimizer.load_shard_state_dict(saved)
    with pytest.raises(InvalidArgumentError, match="of other shards: .* of nothing .* of columns .*consolidated_state_dict"):
        load({**saved, "shards": saved["shards"][:2]} if rank == 0 else saved)
    with pytest.raises(MismatchError, match=r"different steps.*rank 0: 4, rank 1: 3"):
        load({**saved, "steps": 4} if rank == 0 else saved)
    assert_same(training.optimizer.shard_state_dict(), saved)


def test_files_of_two_runs_after_the_same_number_of_steps_are_refused(rank, size):
    first = Training(maker("Adam"), shard="optimizer").train(3)
    second = Training(maker("Adam"), shard="optimizer").train(3)
    of_first, of_second = (through_a_file(one.optimizer.shard_state_dict()) for one in (first, second))
    if size == 1:
        return
    before = copy.deepcopy(second.optimizer.shard_state_dict())
    with pytest.raises(MismatchError, match=r"different runs.*rank 0: [0-9a-f]{16}, rank 1: [0-9a-f]{16}"):
        second.optimizer.load_shard_state_dict(of_first if rank == 0 else of_second)
    assert_same(second.optimizer.shard_state_dict(), before)
    # Two runs that go on from the same files are two.
    for training in (first, second):
        training.optimizer.load_shard_state_dict(copy.deepcopy(of_first))
        training.train(1)
    of_first, of_second = (through_a_file(one.optimizer.shard_state_dict()) for one in (first, second))
    with pytest.raises(MismatchError, match="different runs"):
        second.optimizer.load_shard_state_dict(of_first if rank == 0 else of_second)
    # Files that are older than the numbers.
    older = {key: value for key, value in of_first.items() if key != "run"}
    second.optimizer.load_shard_state_dict(copy.deepcopy(older))
    with pytest.raises(MismatchError, match="rank 0: none"):
        second.optimizer.load_shard_state_dict(older if rank == 0 else of_first)


def test_another_number_of_passes_keeps_the_state(rank, size):
    trainings = [Training(maker("Adam"), **arguments).train(3) for arguments in ({}, {"shard": "optimizer"})]
    for training in trainings:
        training.optimizer.set_backward_passes_per_step(1)
        training.train(2)
    assert_same_parameters(*trainings)
    assert_same(trainings[1].optimizer.consolidated_state_dict(), trainings[0].optimizer.state_dict())


# ---- elastic ----


@pytest.mark.parametrize("committed", [0, 3])
def test_a_torch_state_commits_and_restores_shards(rank, size, committed):
    training = Training(maker("Adam"), shard="optimizer").train(committed)
    model = torch.nn.ParameterList(training.parameters.values())
    state = hvd.elastic.TorchState(model=model, optimizer=training.optimizer)
    wanted = [parameter.detach().clone() for parameter in training.train(1).parameters.values()]
    for _ in range(2):
        state.restore()
        training.steps = committed
        training.train(1)
        for parameter, before in zip(training.parameters.values(), wanted):
            assert torch.equal(parameter, before)


@pytest.mark.parametrize("name", ["Adam", "Muon"])
def test_elastic_training_goes_on_after_an_error(rank, size, name):
    plain = Training(maker(name), suits(name)).train(6)
    training = Training(maker(name), suits(name), shard="optimizer")
    model = torch.nn.ParameterList(training.parameters.values())
    state = hvd.elastic.TorchState(model=model, optimizer=training.optimizer, step=0)
    begun = []

    @hvd.elastic.run
    def train(state):
        begun.append(state.step)
        while state.step < 6:
            if state.step == 5 and len(begun) == 1 and rank == size - 1:
                raise hvd.HorovodInternalError("on purpose")
            training.steps = state.step
            training.train(1)
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    train(state)
    assert begun == [0, 4]
    assert_same_parameters(training, plain)
    assert_same(training.optimizer.consolidated_state_dict(), plain.optimizer.state_dict())


def test_ranks_that_have_committed_different_steps_are_told(rank, size):
    if size == 1:
        pytest.skip("one rank")
    training = Training(maker("Adam"), shard="optimizer").train(3)
    state = hvd.elastic.TorchState(optimizer=training.optimizer)
    training.train(1)
    if rank == 0:
        state.commit()
    state.restore()
    with pytest.raises(MismatchError, match=r"different steps.*rank 0: 4, rank 1: 3.*consolidated_state_dict"):
        state.sync()


def test_other_shards_than_before_are_refused(rank, size):
    """As if other ranks had joined the job."""
    training = Training(maker("Adam"), shard="optimizer").train(3)
    shards = training.optimizer._sirtaki_shards
    if size == 1:
        return
    if rank == size - 1:
        images = training.parameters["images"]
        shards.mine[images] = (shards.mine[images][0], 7)
    with pytest.raises(InvalidArgumentError, match=r"set up again with other ranks.*consolidated_state_dict\(\)"):
        training.optimizer.set_backward_passes_per_step(1)
    with pytest.raises(hvd.NotInitializedError, match="make a new optimizer"):
        training.train(1)
