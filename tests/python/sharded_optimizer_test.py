"""An optimizer with shard="optimizer" or "gradients" makes the steps of one without, to the bit."""

import copy
import io

import pytest
import torch

import optimizers
import sirtaki.torch as hvd
import support
from sirtaki.common.exceptions import InvalidArgumentError

NAMES = [name for name in optimizers.names() if name not in ("LBFGS", "SparseAdam")]


def trained(rank, name, steps=6, **arguments):
    model = optimizers.model_for(name)
    optimizer = hvd.DistributedOptimizer(optimizers.make(name, model.parameters()), model.named_parameters(), **arguments)
    for batch in support.batches(rank, steps=steps):
        optimizers.step(name, model, optimizer, batch)
    return model, optimizer


def state_elements(optimizer):
    return sum(value.numel() for state in optimizer.state.values() for value in state.values()
               if isinstance(value, torch.Tensor) and value.dim() > 0)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("name", NAMES)
def test_its_steps_are_those_of_one_without(rank, size, name, shard):
    whole, plain = trained(rank, name)
    sharded, optimizer = trained(rank, name, shard=shard)
    for mine, other in zip(sharded.parameters(), whole.parameters()):
        assert torch.equal(mine, other)
    everywhere = hvd.allgather(torch.tensor([state_elements(optimizer)])).sum()
    if name != "Adafactor":  # its state of a matrix has the matrix's edges
        assert everywhere == state_elements(plain)
    groups = optimizer.param_groups[0]["params"]
    assert all(mine is parameter for mine, parameter in zip(groups, sharded.parameters()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_layers_with_a_closure_and_a_fused_step(rank, size, dtype, fused):
    def train(**arguments):
        torch.manual_seed(0)
        model = torch.nn.Linear(65, 33).to(dtype)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), fused=fused), model.named_parameters(), **arguments)
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(8, 65).to(dtype)

            def closure():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        return list(model.parameters()), losses, optimizer

    whole, losses, plain = train()
    sharded, same_losses, optimizer = train(shard="optimizer")
    assert all(torch.equal(mine, other) for mine, other in zip(sharded, whole))
    assert losses == same_losses
    assert state_elements(optimizer) <= state_elements(plain) / size + 2 * (33 + 64)


def averaged(bucket):
    return hvd.allreduce_async_(bucket.buffer(), name=bucket.name(), op=hvd.Average)


@pytest.mark.parametrize("arguments", [
    {"compression": hvd.Compression.bf16, "compress_within_host": True}, {"communication_hook": averaged},
    {"average_at": "backward"}, {"backward_passes_per_step": 2}], ids=lambda arguments: next(iter(arguments)))
def test_other_arguments_work_beside_it(rank, size, arguments):
    """With a scheduler, and a layer whose weight is another's."""
    def train(**more):
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) * 1.7).reshape(parameter.shape))
        model[2].weight = model[0].weight
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters(), **arguments, **more)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(5):
            optimizer.zero_grad()
            for part in range(arguments.get("backward_passes_per_step", 1)):
                x = torch.cos(torch.arange(64) * (1.1 + rank + 2 * step + part)).reshape(4, 16)
                model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return list(model.parameters())

    for mine, other in zip(train(shard="optimizer"), train()):
        assert torch.equal(mine, other)


def test_state_is_loaded_until_a_step_and_again_after_it(rank, size):
    model, plain = trained(rank, "Adam", steps=2)
    saved = copy.deepcopy((model.state_dict(), plain.state_dict()))

    def goes_on(**arguments):
        model = optimizers.model_for("Adam")
        optimizer = hvd.DistributedOptimizer(optimizers.make("Adam", model.parameters()), model.named_parameters(), **arguments)
        for _ in range(2):
            model.load_state_dict(copy.deepcopy(saved[0]))
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for batch in support.batches(rank, steps=3):
                optimizers.step("Adam", model, optimizer, batch)
        return list(model.parameters())

    for mine, other in zip(goes_on(shard="optimizer"), goes_on()):
        assert torch.equal(mine, other)


def test_adagrad_s_first_state_and_options(rank, size):
    _, optimizer = trained(rank, "Adagrad", shard="optimizer")
    before = state_elements(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25 * (rank + 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert state_elements(optimizer) == before


def test_a_root_that_has_loaded_gives_its_state_and_another_rank_that_has_is_refused(rank, size):
    model, plain = trained(rank, "Adam", steps=2)
    saved = copy.deepcopy(plain.state_dict())
    for loads in range(min(size, 2)):
        _, optimizer = trained(rank, "Adam", shard="optimizer")
        if rank == loads:
            optimizer.load_state_dict(copy.deepcopy(saved))
        if loads > 0:
            with pytest.raises(ValueError, match="another rank has state of whole parameters"):
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            continue
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert_states = [(mine["exp_avg"], other["exp_avg"]) for mine, other in
                         zip(optimizer.state_dict()["state"].values(), saved["state"].values())]
        assert all(torch.equal(mine, other) for mine, other in assert_states)


def test_two_parameters_of_one_memory_have_states_of_their_own(rank, size):
    def train(**arguments):
        memory = torch.arange(200.0)
        parameters = [torch.nn.Parameter(memory.view(200)) for _ in range(2)]
        adam = torch.optim.Adam(parameters, lr=0.1)
        for step in range(2):  # the first makes state of whole parameters
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.full((200,), 1.0 + number)
            adam.step()
        optimizer = hvd.DistributedOptimizer(adam, [("a", parameters[0]), ("b", parameters[1])], **arguments)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full((200,), 3.0 - number)
        optimizer.step()
        return memory

    assert torch.equal(train(shard="optimizer"), train())


def test_hooks_of_the_step_cannot_call_what_needs_whole_parameters(rank, size):
    model, optimizer = trained(rank, "Adam", shard="optimizer")
    calls = [optimizer.zero_grad, optimizer.synchronize, lambda: optimizer.clip_grad_norm_(1.0),
             lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})]
    for call in calls if size > 1 else []:
        hook = optimizer.register_step_post_hook(lambda *_: call())
        with pytest.raises(InvalidArgumentError, match="within the step of a sharded optimizer"):
            optimizers.step("Adam", model, optimizer, support.batches(rank)[0])
        hook.remove()
        optimizers.step("Adam", model, optimizer, support.batches(rank)[0])


def test_an_optimizer_whose_state_was_cut_is_not_wrapped_again(rank, size):
    model = optimizers.model_for("Adam")
    base = optimizers.make("Adam", model.parameters())
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters(), shard="optimizer")
    optimizers.step("Adam", model, optimizer, support.batches(rank)[0])
    if size > 1:
        with pytest.raises(ValueError, match="make a new optimizer"):
            hvd.DistributedOptimizer(base, model.named_parameters())


def test_what_needs_the_whole_state_is_refused(rank, size):
    _, optimizer = trained(rank, "Adam", shard="optimizer")
    for call in (optimizer.state_dict, lambda: copy.deepcopy(optimizer), lambda: torch.save(optimizer, io.BytesIO())):
        if size == 1:
            call()
            continue
        with pytest.raises(InvalidArgumentError, match=r"the state of its shards only. consolidated_state_dict\(\), which all"):
            call()


@pytest.mark.parametrize("average_at", ["step", "backward"])
def test_gradients_are_kept_in_shards_until_a_step_uses_them(rank, size, average_at):
    torch.manual_seed(0)
    model = torch.nn.Linear(65, 33)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard="gradients", average_at=average_at)
    if size == 1:
        model(torch.ones(1, 65)).sum().backward()
        assert model.weight.grad is not None
        return
    model(torch.full((1, 65), float(rank))).sum().backward()
    optimizer.synchronize()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(InvalidArgumentError, match="kept in shards"):  # the step would find no gradients
        optimizer.set_backward_passes_per_step(2)
    mean = (size - 1) / 2
    norm = optimizer.clip_grad_norm_(1e9)
    assert norm == pytest.approx((65 * 33 * mean**2 + 33) ** 0.5)
    assert optimizer.clip_grad_norm_(norm / 2) == pytest.approx(norm)
    before = model.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(before - model.weight, torch.full((33, 65), 0.1 * mean / 2), atol=1e-6)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_knows_of_gradients_in_shards(rank, size, fused):
    def train(**arguments):
        torch.manual_seed(0)
        model = torch.nn.Linear(65, 33)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), fused=fused), model.named_parameters(), **arguments)
        scaler = hvd.GradScaler("cpu", init_scale=1024.0)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 65), 1.0 + rank + step)
            # What is not finite is in a shard of one rank.
            loss = model(x).sum() + (model.weight[32, 64] * float("inf") if step == 2 and rank == 0 else 0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return model, scales

    whole, scales = train()
    sharded, same_scales = train(shard="gradients")
    assert scales == same_scales == [1024.0, 1024.0, 512.0, 512.0]
    for mine, other in zip(sharded.parameters(), whole.parameters()):
        assert torch.equal(mine, other)


def test_an_average_that_no_step_has_used_is_not_added_to(rank, size):
    if size == 1:
        return
    model = torch.nn.Linear(65, 33)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shard="gradients", average_at="backward")
    model(torch.ones(1, 65)).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match="zero_grad.. of the optimizer"):  # autograd's, of the end of backward()
        model(torch.ones(1, 65)).sum().backward()
    optimizer.zero_grad()
    model(torch.ones(1, 65)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("shard", ["parameters", True, 1])
def test_other_values_are_refused(rank, size, shard):
    with pytest.raises(ValueError, match="it must be None, 'optimizer' or 'gradients'"):
        trained(rank, "SGD", shard=shard)


@pytest.mark.parametrize("name, words", [("LBFGS", "LBFGS looks at all parameters"), ("SparseAdam", "sparse gradient")])
def test_optimizers_that_cannot_be_sharded(rank, size, name, words):
    if size == 1 and name == "SparseAdam":
        return trained(rank, name, shard="optimizer")
    with pytest.raises(Exception, match=words):
        trained(rank, name, shard="optimizer")


def is_common(tensor):
    for line in open("/proc/self/maps"):
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "sirtaki parameters" in line
    return False


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("name", ["Adam", "Adafactor"])  # by element, and whole parameters
def test_parameters_lie_once_on_a_host_and_may_be_written_to_in_between(rank, size, name, shard):
    def train(**arguments):
        model = optimizers.model_for(name)
        optimizer = hvd.DistributedOptimizer(optimizers.make(name, model.parameters()), model.named_parameters(), **arguments)
        saved, commons = None, []
        for step, batch in enumerate(support.batches(rank, steps=6)):
            optimizers.step(name, model, optimizer, batch)
            commons.append(all(is_common(parameter) for parameter in model.parameters()))
            if step == 1:
                saved = copy.deepcopy(model.state_dict())
            if step == 2:
                for parameter in model.parameters():
                    parameter.data.clamp_(-0.2, 0.2)
            if step == 3:
                model.load_state_dict(saved)
            if step == 4:
                for parameter in model.parameters():
                    parameter.data = parameter.data * 0.5
        return model, commons

    common, where = train(shard=shard)
    copies, nowhere = train(shard=shard, share_parameters=False)
    assert where == [size > 1] * 6 and not any(nowhere)
    for mine, other in zip(common.parameters(), copies.parameters()):
        assert torch.equal(mine, other)
        assert mine.requires_grad and mine.is_leaf


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_shards_over_hosts_are_those_over_all_on_one_host(rank, size, shard):
    over_all, first = trained(rank, "AdamW", shard=shard)
    over_hosts, second = trained(rank, "AdamW", shard=shard, shard_over="host")
    for mine, other in zip(over_hosts.parameters(), over_all.parameters()):
        assert torch.equal(mine, other)
    assert state_elements(second) == state_elements(first)
    states = [optimizer.consolidated_state_dict()["state"] for optimizer in (first, second)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert torch.equal(state["exp_avg"], states[1][key]["exp_avg"])
    second.load_shard_state_dict(second.shard_state_dict())


def test_shard_over_takes_two_words(rank, size):
    model = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match="must be 'all' or 'host'"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), shard="optimizer", shard_over="hosts")


def test_memory_plan_is_a_table_of_what_each_kind_of_shards_takes(rank, size):
    model = torch.nn.Linear(1024, 1024, bias=False)  # 4 MiB
    plan = {line[:28].strip(): [float(number) for number in line[28:].split()]
            for line in hvd.memory_plan(torch.optim.Adam(model.parameters())).splitlines()[1:-1]}
    assert plan["without shards"] == [4 * size, 4 * size, 8 * size, 16 * size]
    if size > 1:
        assert plan["OptimizerState"] == [4, 4 * size, 8, 12 + 4 * size]
        assert plan["Gradients"] == [4, 4, 8, 16]
