"""DistributedOptimizer: its arguments, what it refuses, and the habits of training scripts."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
import support

SEVERAL = pytest.mark.skipif(hvd.size() == 1, reason="one rank reduces nothing")


def distributed(model, lr=0.1, **kwargs):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr), model.named_parameters(), **kwargs)


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()


def trained_alone(size, steps=3, lr=0.1):
    model = support.net()
    train(model, torch.optim.SGD(model.parameters(), lr), support.joined(size, steps))
    return model


def assert_trained(model, wanted, tolerance=1e-5):
    support.assert_same_everywhere(hvd, model.parameters())
    for found, parameter in zip(model.parameters(), wanted.parameters()):
        support.assert_close(found, parameter, tolerance)


# ---- what it is ----


def test_it_is_the_optimizer_that_it_was_made_of(rank):
    model = support.net()
    base = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}],
                           lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD) and isinstance(optimizer, torch.optim.Optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert optimizer.param_groups[0]["momentum"] == 0.9
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, support.batches(rank, 1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]
    saved = optimizer.state_dict()
    assert len(saved["state"]) == 4
    other_model = support.net()
    other = torch.optim.SGD([{"params": other_model[0].parameters()}, {"params": other_model[2].parameters()}], lr=1.0)
    other = hvd.DistributedOptimizer(other, other_model.named_parameters())
    other.load_state_dict(saved)
    assert other.param_groups[1]["lr"] == 0.25 and len(other.state) == 4
    train(other_model, other, support.batches(rank, 1))
    support.assert_same_everywhere(hvd, other_model.parameters())


def test_it_has_the_state_that_the_optimizer_had(rank):
    model = support.net()
    base = torch.optim.Adam(model.parameters())
    support.loss_of(model, support.batches(0)[0]).backward()
    base.step()
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    assert all(optimizer.state[p]["step"].item() == 1 for p in model.parameters())


def test_it_averages_the_gradients(rank, size):
    model = support.net()
    train(model, distributed(model), support.batches(rank))
    assert_trained(model, trained_alone(size))


def test_names_may_be_left_out(rank, size):
    model = support.net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    train(model, optimizer, support.batches(rank))
    assert_trained(model, trained_alone(size))


def test_gradients_may_be_kept_and_looked_at(rank, size):
    model = support.net()
    optimizer = distributed(model)
    kept = []
    for batch in support.batches(rank):
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()
        kept += [(p.grad, p.grad.clone()) for p in model.parameters()]
    del optimizer
    support.assert_same_everywhere(hvd, [gradient for gradient, _ in kept])
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)


# ---- its arguments ----


def test_op_sum_adds_up(rank, size):
    model = support.net()
    train(model, distributed(model, lr=0.1 / size, op=hvd.Sum), support.batches(rank))
    assert_trained(model, trained_alone(size))


@pytest.mark.parametrize("arguments", [
    {"gradient_predivide_factor": 2.0}, {"num_groups": 2}, {"groups": 2}, {"compression": hvd.Compression.fp16},
    {"compression": hvd.Compression.bf16}, {"name": "mine"}, {"check_parameters_every": 1}], ids=str)
def test_arguments_that_change_the_way_and_not_the_result(rank, size, arguments):
    model = support.net()
    train(model, distributed(model, **arguments), support.batches(rank))
    assert_trained(model, trained_alone(size))


def test_groups_of_parameters(rank, size):
    model = support.net()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    train(model, distributed(model, groups=groups), support.batches(rank))
    assert_trained(model, trained_alone(size))


@pytest.mark.parametrize("compression,tolerance", [(hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)])
def test_compression_within_a_host_rounds_gradients(rank, size, compression, tolerance):
    model = support.net()
    train(model, distributed(model, compression=compression, compress_within_host=True), support.batches(rank))
    assert_trained(model, trained_alone(size), tolerance)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_compression_of_one_s_own(rank, size):
    calls = []

    class Halved(hvd.Compressor):
        @staticmethod
        def compress(tensor):
            calls.append(tensor.shape)
            return tensor / 2, tensor.dtype

        @staticmethod
        def decompress(tensor, ctx):
            return tensor.to(ctx) * 2

    model = support.net()
    train(model, distributed(model, compression=Halved), support.batches(rank))
    assert_trained(model, trained_alone(size))
    assert bool(calls) == (size > 1)


def test_compression_derived_from_a_built_in_one_is_one_s_own(rank, size):
    calls = []

    class Counting(hvd.Compression.fp16):
        @classmethod
        def compress(cls, tensor):
            calls.append(tensor.shape)
            return super().compress(tensor)

    assert hvd.allreduce(torch.ones(3), compression=Counting).dtype == torch.float32 and len(calls) == 1
    model = support.net()
    train(model, distributed(model, compression=Counting), support.batches(rank))
    assert (len(calls) > 1) == (size > 1)


def test_zero_grad_is_called_as_the_optimizer_has_it(rank):
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    model = support.net()
    optimizer = hvd.DistributedOptimizer(Own(model.parameters(), 0.1), model.named_parameters())
    support.loss_of(model, support.batches(rank)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_adasum_leaves_equal_parameters(rank, size):
    model = support.net()
    train(model, distributed(model, op=hvd.Adasum), support.batches(rank))
    support.assert_same_everywhere(hvd, model.parameters())
    # The same batch everywhere: the ranks' steps are parallel, and average to one's own.
    model, alone = support.net(), support.net()
    train(model, distributed(model, op=hvd.Adasum), support.batches(0))
    train(alone, torch.optim.SGD(alone.parameters(), 0.1), support.batches(0))
    if size & (size - 1) == 0:
        assert_trained(model, alone)


@pytest.mark.parametrize("passes", [1, 3])
def test_backward_passes_add_up(rank, size, passes):
    model, alone = support.net(), support.net()
    optimizer = distributed(model, backward_passes_per_step=passes)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    mine, whole = support.batches(rank, 6), support.joined(size, 6)
    for begin in range(0, 6, passes):
        optimizer.zero_grad()
        plain.zero_grad()
        for i in range(begin, begin + passes):
            (support.loss_of(model, mine[i]) / passes).backward()
            (support.loss_of(alone, whole[i]) / passes).backward()
        optimizer.step()
        plain.step()
    assert_trained(model, alone)


def test_backward_passes_can_be_set_later(rank, size):
    model = support.net()
    optimizer = distributed(model)
    train(model, optimizer, support.batches(rank, 1))
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    for batch in support.batches(rank, 2):
        support.loss_of(model, batch).backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, model.parameters())


def test_no_sync_keeps_gradients_to_this_rank(rank, size):
    model, alone = support.net(), support.net()
    optimizer = distributed(model)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    mine, whole = support.batches(rank, 4), support.joined(size, 4)
    for begin in (0, 2):
        optimizer.zero_grad()
        plain.zero_grad()
        with optimizer.no_sync():
            support.loss_of(model, mine[begin]).backward()
        support.loss_of(model, mine[begin + 1]).backward()
        optimizer.step()
        for i in (begin, begin + 1):
            support.loss_of(alone, whole[i]).backward()
        plain.step()
    assert_trained(model, alone)


# ---- synchronize, clipping, scaling ----


def test_synchronize_then_clip_then_step_without_averaging_again(rank, size):
    model, alone = support.net(), support.net()
    optimizer = distributed(model)
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    for mine, whole in zip(support.batches(rank), support.joined(size)):
        optimizer.zero_grad()
        support.loss_of(model, mine).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        support.loss_of(alone, whole).backward()
        support.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1), 1e-5)
        plain.step()
    assert_trained(model, alone)


def test_clip_grad_norm_of_its_own(rank, size):
    model, alone = support.net(), support.net()
    optimizer = distributed(model)
    optimizer.zero_grad()
    support.loss_of(model, support.batches(rank)[0]).backward()
    found = optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    plain = torch.optim.SGD(alone.parameters(), 0.1)
    support.loss_of(alone, support.joined(size)[0]).backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    plain.step()
    assert float(found) == pytest.approx(float(wanted), rel=1e-4)
    assert_trained(model, alone)


def test_a_closure_is_averaged_with_its_loss(rank, size):
    model = support.net()
    optimizer = distributed(model)

    def closure():
        optimizer.zero_grad()
        loss = support.loss_of(model, support.batches(rank)[0])
        loss.backward()
        return loss

    with torch.no_grad():
        mean = hvd.allreduce(support.loss_of(model, support.batches(rank)[0]).detach())
    support.assert_close(torch.as_tensor(optimizer.step(closure)).detach(), mean, 1e-5)
    assert_trained(model, trained_alone(size, steps=1))


@pytest.mark.parametrize("give", [lambda loss: loss, float, lambda loss: None], ids=["tensor", "number", "nothing"])
def test_step_gives_what_kind_of_loss_its_closure_gives(rank, size, give):
    model = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

    def closure():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        return give(torch.tensor(rank + 1.0))

    loss = optimizer.step(closure)
    assert type(loss) is type(give(torch.tensor(0.0)))
    assert loss is None or float(loss) == (size + 1) / 2


def scaled_step(scaler, optimizer, own):
    if own:
        scaler.step(optimizer)
    else:  # Horovod's recipe, with torch's scaler
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("own", [True, False], ids=["ours", "torch's"])
def test_a_gradient_scaler_on_the_cpu(rank, size, own):
    model = support.net()
    optimizer = distributed(model)
    scaler = hvd.GradScaler("cpu", init_scale=1024.0) if own else torch.amp.GradScaler("cpu", init_scale=1024.0)
    for batch in support.batches(rank):
        optimizer.zero_grad()
        scaler.scale(support.loss_of(model, batch)).backward()
        scaled_step(scaler, optimizer, own)
    assert_trained(model, trained_alone(size))
    assert scaler.get_scale() == 1024.0


@SEVERAL
def test_torch_s_gradient_scaler_without_synchronize_is_refused(rank):
    model = support.net()
    optimizer = distributed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
    with pytest.raises(hvd.PendingGradientsError, match="take hvd.GradScaler"):
        scaler.step(optimizer)
    optimizer.synchronize()
    scaled_step(scaler, optimizer, own=False)
    support.assert_same_everywhere(hvd, list(model.parameters()))


def test_a_gradient_scaler_with_adasum_and_a_rank_that_leaves_out_a_batch(rank, size):
    if size & (size - 1):
        pytest.skip("Adasum takes 2, 4, 8, … ranks")
    models = [support.net(), support.net()]
    for model, scaler in zip(models, (None, hvd.GradScaler("cpu", init_scale=1024.0))):
        optimizer = distributed(model, op=hvd.Adasum)
        for step, batch in enumerate(support.batches(rank)):
            optimizer.zero_grad()
            if size == 1 or step > 1 or rank != size - 1:
                loss = support.loss_of(model, batch)
                (scaler.scale(loss) if scaler else loss).backward()
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
    assert all(map(torch.allclose, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("own", [True, False], ids=["ours", "torch's"])
def test_an_infinite_gradient_of_one_rank_skips_the_step_of_all(rank, size, own):
    model = support.net()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = distributed(model)
    scaler = hvd.GradScaler("cpu", init_scale=1024.0) if own else torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = support.batches(rank)[0]
    if rank == size - 1:
        y = y * float("inf")
    optimizer.zero_grad()
    scaler.scale(support.loss_of(model, (x, y))).backward()
    scaled_step(scaler, optimizer, own)
    assert all(map(torch.equal, model.parameters(), before))
    assert scaler.get_scale() == 512.0
    optimizer.zero_grad()
    scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
    scaled_step(scaler, optimizer, own)
    assert_trained(model, trained_alone(size, steps=1))


@SEVERAL
@pytest.mark.parametrize("fused", [False, True])
def test_scales_that_differ_are_an_error_on_all_ranks(rank, fused):
    model = support.net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), fused=fused), model.named_parameters())
    scaler = hvd.GradScaler("cpu", init_scale=1024.0 * (1 + rank))

    def step():
        optimizer.zero_grad()
        scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
        scaler.step(optimizer)
        scaler.update()

    with pytest.raises(hvd.MismatchError, match="different scales, from 1024.0 to"):
        step()
    optimizer.synchronize()
    scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), root_rank=0))
    step()
    support.assert_same_everywhere(hvd, list(model.parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_outside_the_optimizer_s_process_set(rank, size, fused):
    alone = hvd.add_process_set([0])
    model = support.net()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), fused=fused), model.named_parameters(), process_set=alone)
    scaler = hvd.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    for _ in range(1 + rank):
        scaler.scale(support.loss_of(model, support.batches(rank)[0])).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0 * 2 ** (1 + rank)
    hvd.remove_process_set(alone)


@SEVERAL
def test_a_hook_of_the_program_s_own_hides_no_gradient(rank, size):
    model = support.net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    for at in ("step", "backward"):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.0), model.named_parameters(), average_at=at)
        for kind in (torch.double, torch.float):
            optimizer.zero_grad()
            model.to(kind)
            (sum(parameter.sum() for parameter in model.parameters()) * (rank + 1)).backward()
            optimizer.synchronize()
            for parameter in model.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, 2 * (size + 1) / 2))
            with optimizer.skip_synchronize():
                optimizer.step()
        del optimizer


@SEVERAL
def test_a_scaler_of_a_process_set_skips_the_steps_of_its_ranks_together(rank):
    model = support.net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # each rank's own
    before = [p.detach().clone() for p in model.parameters()]
    scaler = hvd.GradScaler("cpu", init_scale=1024.0, process_set=hvd.global_process_set)
    scaler.scale(support.loss_of(model, support.batches(rank)[0]) * (float("inf") if rank == 0 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, model.parameters(), before)) and scaler.get_scale() == 512.0


def test_bfloat16_parameters_and_autocast(rank, size):
    model = support.net(dtype=torch.bfloat16)
    optimizer = distributed(model)
    for x, y in support.batches(rank):
        optimizer.zero_grad()
        support.loss_of(model, (x.bfloat16(), y.bfloat16())).backward()
        optimizer.step()
    assert_trained(model.float(), trained_alone(size), 5e-2)
    model = support.net()
    optimizer = distributed(model)
    for x, y in support.batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        nn.functional.mse_loss(output.float(), y).backward()
        optimizer.step()
    assert_trained(model, trained_alone(size), 2e-2)


# ---- graphs that change, parameters that come and go ----


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_both_kinds(rank, size, to_none):
    model = support.net()
    optimizer = distributed(model)
    for batch in support.batches(rank):
        optimizer.zero_grad(set_to_none=to_none)
        support.loss_of(model, batch).backward()
        optimizer.step()
    assert_trained(model, trained_alone(size))
    optimizer.zero_grad(set_to_none=to_none)
    assert all((p.grad is None) == to_none for p in model.parameters())


def test_a_parameter_that_some_ranks_do_not_use_counts_as_zero_there(rank, size):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    nobody = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, nobody], 1.0),
                                         [("used", used), ("unused", unused), ("nobody", nobody)])
    for _ in range(3):
        optimizer.zero_grad()
        loss = (2 * used).sum()
        if rank == 0:
            loss = loss + unused.sum()
        loss.backward()
        optimizer.step()
    assert used.tolist() == [1 - 3 * 2.0] * 3
    support.assert_close(unused.detach(), torch.full((3,), 1 - 3.0 / size))
    assert nobody.tolist() == [1.0] * 3
    assert nobody.grad is None or torch.count_nonzero(nobody.grad) == 0


def test_freezing_unfreezing_and_adding_parameters(rank, size):
    model = support.net()
    late = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1),
                                         list(model.named_parameters()) + [("late", late)])
    frozen = model[0].weight.detach().clone()
    model[0].weight.requires_grad_(False)
    train(model, optimizer, support.batches(rank, 1))
    assert torch.equal(model[0].weight, frozen)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, support.batches(rank, 1))
    assert not torch.equal(model[0].weight, frozen)
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    for _ in range(2):
        optimizer.zero_grad()
        (late * (rank + 1)).sum().backward()
        optimizer.step()
    support.assert_close(late.detach(), torch.full((3,), -2 * (size + 1) / 2))
    support.assert_same_everywhere(hvd, list(model.parameters()) + [late])


def test_two_optimizers_as_in_a_gan(rank, size):
    generator, critic = support.net(1), support.net(2)
    of_generator = distributed(generator, name="generator")
    of_critic = distributed(critic, name="critic", backward_passes_per_step=2)
    for x, y in support.batches(rank):
        made = generator(x)
        of_critic.zero_grad()
        critic(torch.cat([y, y[:, :1]], 1)).mean().backward()
        critic(torch.cat([made, made[:, :1]], 1).detach()).mean().neg().backward()
        of_critic.step()
        of_generator.zero_grad()
        with of_critic.no_sync():
            critic(torch.cat([made, made[:, :1]], 1)).mean().backward()
        of_generator.step()
        of_critic.zero_grad()
    support.assert_same_everywhere(hvd, list(generator.parameters()) + list(critic.parameters()))


def test_two_optimizers_without_names(rank, size):
    first, second = support.net(1), support.net(1)
    optimizers = [distributed(first), distributed(second)]
    for batch in support.batches(rank):
        for model, optimizer in zip((first, second), optimizers):
            optimizer.zero_grad()
            support.loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    support.assert_same_everywhere(hvd, first.parameters())


def test_skip_step_gives_up_what_was_computed(rank, size):
    model = support.net()
    optimizer = distributed(model)
    before = [p.detach().clone() for p in model.parameters()]
    support.loss_of(model, support.batches(rank)[0]).backward()
    optimizer.synchronize()
    optimizer.skip_step()
    assert all(map(torch.equal, model.parameters(), before))
    train(model, optimizer, support.batches(rank))
    assert_trained(model, trained_alone(size))


# ---- sparse gradients ----


def embedding(dense=False):
    table = nn.Embedding(10, 2, sparse=not dense)
    with torch.no_grad():
        table.weight.copy_(torch.arange(20.0).reshape(10, 2))
    return table


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(rank, size, as_dense):
    table, wanted = embedding(), embedding(dense=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.5), table.named_parameters(),
                                         sparse_as_dense=as_dense)
    plain = torch.optim.SGD(wanted.parameters(), 0.5)
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([rank, step, 9])).square().sum().backward()
        optimizer.step()
        plain.zero_grad()
        (sum(wanted(torch.tensor([r, step, 9])).square().sum() for r in range(size)) / size).backward()
        plain.step()
    support.assert_same_everywhere(hvd, table.parameters())
    support.assert_close(table.weight, wanted.weight, 1e-5)
    assert as_dense or size == 1 or table.weight.grad.is_sparse


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_adam(rank, size, as_dense):
    table, wanted = embedding(), embedding()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters()), 0.5), sparse_as_dense=as_dense)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    plain = torch.optim.SparseAdam(list(wanted.parameters()), 0.5)
    for step in range(3):
        optimizer.zero_grad()
        table(torch.tensor([rank, step, 9])).square().sum().backward()
        if step == 1:
            optimizer.synchronize()
            assert table.weight.grad.is_sparse
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        plain.zero_grad()
        (sum(wanted(torch.tensor([r, step, 9])).square().sum() for r in range(size)) / size).backward()
        plain.step()
    support.assert_same_everywhere(hvd, table.parameters())
    support.assert_close(table.weight, wanted.weight, 1e-5)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_adam_with_a_closure(rank, size, as_dense, op):
    if op == hvd.Adasum and size & (size - 1):
        pytest.skip("Adasum takes 2, 4, 8, … ranks")
    table = embedding()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(table.parameters()), 0.5), op=op,
                                         sparse_as_dense=as_dense)

    def closure():
        optimizer.zero_grad()
        loss = table(torch.tensor([rank, 9])).square().sum()
        loss.backward()
        return loss

    before = table.weight.detach().clone()
    for _ in range(2):
        optimizer.step(closure)
    support.assert_same_everywhere(hvd, table.parameters())
    changed = (table.weight != before).any(1)
    assert changed.nonzero().flatten().tolist() == [*range(size), 9]


# ---- hooks ----


def test_a_communication_hook_replaces_the_reduction(rank, size):
    seen = []

    def doubled(bucket):
        assert isinstance(bucket, hvd.GradBucket)
        seen.append((bucket.name(), tuple(bucket.parameter_names())))
        assert bucket.buffer().dim() == 1 and bucket.index() >= 0
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        assert all(any(p is mine for mine in known) for p in bucket.parameters())
        handle = hvd.allreduce_async(bucket.buffer(), name=bucket.name() + "/mine", op=hvd.Average)
        assert isinstance(handle, hvd.Handle)
        return lambda: hvd.synchronize(handle) * 2

    model = support.net()
    known = list(model.parameters())
    optimizer = distributed(model, lr=0.05, communication_hook=doubled)
    train(model, optimizer, support.batches(rank))
    if size > 1:
        assert_trained(model, trained_alone(size))
        assert {name for _, names in seen for name in names} == {name for name, _ in model.named_parameters()}
    added = nn.Linear(4, 3)
    optimizer.add_param_group({"params": added.parameters()})
    known += added.parameters()
    optimizer.zero_grad()
    added(support.batches(rank)[0][0]).sum().backward()
    optimizer.step()
    support.assert_same_everywhere(hvd, added.parameters())


@SEVERAL
def test_a_hook_may_return_a_handle_or_a_tensor(rank, size):
    def by_handle(bucket):
        return hvd.allreduce_async(bucket.buffer(), name=bucket.name() + "/handle")

    model = support.net()
    train(model, distributed(model, communication_hook=by_handle), support.batches(rank))
    assert_trained(model, trained_alone(size))

    model = support.net()
    train(model, distributed(model, communication_hook=lambda bucket: torch.zeros_like(bucket.buffer())),
          support.batches(rank))
    assert all(map(torch.equal, model.parameters(), support.net().parameters()))


def test_a_hook_that_reaches_its_optimizer_does_not_keep_it(rank, size):
    def trained_by_a_hook_that_knows_it():
        reached = {}

        def hook(bucket):
            assert reached["optimizer"] is not None
            return hvd.allreduce_async(bucket.buffer(), name=bucket.name())

        model = support.net()
        reached["optimizer"] = distributed(model, communication_hook=hook)
        train(model, reached["optimizer"], support.batches(rank))
        assert_trained(model, trained_alone(size))
        return weakref.ref(reached["optimizer"])

    alive = trained_by_a_hook_that_knows_it()
    gc.collect()
    assert alive() is None


@SEVERAL
@pytest.mark.parametrize("made_before", [False, True])
def test_garbage_of_ranks_that_collect_it_at_other_times(rank, size, made_before):
    """An optimizer in a circle is gone when Python notices, and its buckets with it."""
    model = support.net()
    batches = list(support.batches(rank))
    first = distributed(model)
    first.circle = first
    train(model, first, batches)
    gc.disable()
    try:
        del first
        if rank != 0 and not made_before:
            gc.collect()
        optimizer = distributed(model)
        if rank != 0 and made_before:
            gc.collect()
        train(model, optimizer, batches)
    finally:
        gc.enable()
    support.assert_same_everywhere(hvd, model.parameters())


# ---- what it refuses ----


def test_names_must_fit():
    model = support.net()

    def make(named, **kwargs):
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), named, **kwargs)

    with pytest.raises(ValueError, match="tuple"):
        make(list(model.parameters()))
    with pytest.raises(ValueError, match="unique|duplicate|twice"):
        make([("same", p) for p in model.parameters()])
    with pytest.raises(ValueError, match="name"):
        make(list(model.named_parameters())[:-1])
    with pytest.raises(ValueError, match="predivide"):
        make(model.named_parameters(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError):
        make(model.named_parameters(), backward_passes_per_step=0)
    with pytest.raises((ValueError, NotImplementedError)):
        make(model.named_parameters(), op=hvd.Max)
    with pytest.raises((ValueError, TypeError)):
        hvd.DistributedOptimizer(model)


@SEVERAL
def test_parameters_that_differ_between_ranks_are_a_mismatch(rank):
    model = nn.Linear(2, 2 + rank % 2)
    with pytest.raises(hvd.MismatchError):
        distributed(model)
    model = support.net()
    with pytest.raises(hvd.MismatchError):
        distributed(model, backward_passes_per_step=1 + rank % 2)


@SEVERAL
def test_parameters_that_drift_apart_are_noticed_when_asked_for(rank):
    model = support.net(seed=rank % 2)
    optimizer = distributed(model, check_parameters_every=1)
    with pytest.raises(hvd.MismatchError):
        train(model, optimizer, support.batches(rank))


@SEVERAL
def test_zero_grad_while_gradients_travel_is_an_assertion_error(rank):
    model = support.net()
    optimizer = distributed(model)
    support.loss_of(model, support.batches(rank)[0]).backward()
    with pytest.raises(AssertionError) as caught:
        optimizer.zero_grad()
    assert isinstance(caught.value, hvd.PendingGradientsError)
    optimizer.step()
    optimizer.zero_grad()


@SEVERAL
def test_a_second_backward_before_the_step_is_refused(rank):
    model = support.net()
    optimizer = distributed(model)
    support.loss_of(model, support.batches(rank)[0]).backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step"):
        support.loss_of(model, support.batches(rank)[1]).backward()
    optimizer.step()
    train(model, optimizer, support.batches(rank))  # it goes on
    support.assert_same_everywhere(hvd, model.parameters())


def test_step_after_synchronize_warns_and_does_not_average_again(rank, size):
    model = support.net()
    optimizer = distributed(model)
    for batch in support.batches(rank)[:2]:
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
            optimizer.step()
    assert_trained(model, trained_alone(size, steps=2))


def test_what_needs_no_warning_gives_none(rank):
    model = support.net()
    optimizer = distributed(model)
    scaler = hvd.GradScaler("cpu", init_scale=4.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in range(4):
            loss = support.loss_of(model, support.batches(rank)[0])
            (scaler.scale(loss) if way == 2 else loss).backward()
            if way == 0:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            elif way == 1:  # a step that is left out
                optimizer.synchronize()
            elif way == 2:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()


def test_step_without_backward_steps_with_what_is_there(rank, size):
    model = support.net()
    optimizer = distributed(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    for parameter, old in zip(model.parameters(), before):
        support.assert_close(parameter.detach(), old - 0.1 * (size - 1) / 2)


def test_optimizers_are_taken_away_without_a_trace(rank, size):
    """A model that another optimizer takes over."""
    model = support.net()
    optimizer = distributed(model)
    train(model, optimizer, support.batches(rank, 1))
    del optimizer
    plain = torch.optim.SGD(model.parameters(), 0.1)
    train(model, plain, support.batches(0, 2)[1:])
    support.assert_same_everywhere(hvd, model.parameters())
    model = support.net()
    for _ in range(3):
        optimizer = distributed(model)
    train(model, optimizer, support.batches(rank))
    assert_trained(model, trained_alone(size))


def test_it_is_not_wrapped_twice():
    optimizer = distributed(support.net())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


def test_a_scheduler_that_was_made_before_goes_on(rank):
    model = support.net()
    base = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(base, model.named_parameters())
    train(model, optimizer, support.batches(rank, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it notices that a step was made
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    support.assert_same_everywhere(hvd, model.parameters())


def test_hooks_of_steps_run_once(rank):
    model = support.net()
    optimizer = distributed(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, support.batches(rank, 1))
    assert calls == ["before", "after"]


def test_a_step_within_a_compiled_function_breaks_the_graph(rank):
    model = support.net()
    plain = support.net()
    optimizer, of_plain = distributed(model), distributed(plain)

    def train_step(model, optimizer, batch):
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()

    compiled = torch.compile(train_step, backend="eager")
    for batch in support.batches(rank, 2):
        compiled(model, optimizer, batch)
        train_step(plain, of_plain, batch)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    support.assert_same_everywhere(hvd, model.parameters())


def test_the_names_of_parameters_can_be_read(rank):
    model = support.net()
    assert distributed(model)._parameter_names == {p: name for name, p in model.named_parameters()}
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    names = hvd.DistributedOptimizer(torch.optim.SGD(groups, 0.1))._parameter_names
    assert len(set(names.values())) == 4
    assert hvd.allgather_object(sorted(names.values()))[0] == sorted(names.values())
