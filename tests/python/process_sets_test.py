"""Sets of ranks: made and removed together, apart from each other, refused to who is not in them."""

import pickle

import pytest
import torch

import sirtaki.torch as hvd
import support


def test_the_global_set_is_all_ranks(rank, size):
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0 and everybody.included() is True
    assert everybody.size() == size and everybody.rank() == rank
    assert list(everybody.ranks) == list(range(size))


def test_a_set_averages_among_its_ranks(rank, size):
    even = hvd.add_process_set([r for r in range(size) if r % 2 == 0])
    odd = hvd.add_process_set(hvd.ProcessSet([r for r in range(size) if r % 2 == 1] or [0]))
    assert isinstance(even, hvd.ProcessSet) and even.process_set_id > 0
    assert even.process_set_id != odd.process_set_id
    for chosen in (even, odd):
        members = list(chosen.ranks)
        assert chosen.included() == (rank in members)
        if not chosen.included():
            with pytest.raises(ValueError):
                hvd.allreduce(torch.ones(1), process_set=chosen)
            continue
        assert chosen.size() == len(members) and chosen.rank() == members.index(rank)
        mine = torch.full((2,), float(rank))
        assert hvd.allreduce(mine, process_set=chosen)[0].item() == sum(members) / len(members)
        assert hvd.allgather(torch.tensor([rank]), process_set=chosen).tolist() == members
        assert hvd.broadcast(mine, members[-1], process_set=chosen)[0].item() == members[-1]
        assert hvd.alltoall(torch.full((len(members),), rank), process_set=chosen).tolist() == members
        total = hvd.reducescatter(torch.ones(len(members)), op=hvd.Sum, process_set=chosen)
        assert total.tolist() == [len(members)]
        assert hvd.grouped_allreduce([mine, mine], op=hvd.Sum, process_set=chosen)[1][0].item() == sum(members)
        assert hvd.allgather_object(rank, process_set=chosen) == members
        assert hvd.broadcast_object(rank, root_rank=members[0], process_set=chosen) == members[0]
        hvd.barrier(process_set=chosen)
    assert hvd.remove_process_set(even) is True
    assert hvd.remove_process_set(odd) is True
    assert even.process_set_id is None
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(1), process_set=even)
    assert hvd.remove_process_set(even) is False


def test_the_global_set_cannot_be_removed():
    assert hvd.remove_process_set(hvd.global_process_set) is False
    hvd.barrier()


def test_sets_are_known_by_their_numbers(rank, size):
    others = hvd.get_process_set_ids_and_ranks()  # other tests leave some
    assert others[0] == list(range(size))
    one = hvd.add_process_set([size - 1])
    assert hvd.get_process_set_ids_and_ranks() == {**others, one.process_set_id: [size - 1]}
    assert hvd.is_process_set_included(one.process_set_id) == (rank == size - 1)
    assert hvd.is_process_set_included(0) is True
    with pytest.raises(ValueError):
        hvd.is_process_set_included(12345)
    with pytest.raises(ValueError):
        hvd.add_process_set(one)  # a second time
    hvd.remove_process_set(one)
    unknown = hvd.ProcessSet([0])
    assert unknown.process_set_id is None and unknown.size() is None and unknown.rank() is None
    assert unknown.included() is (rank == 0)
    with pytest.raises(ValueError):
        hvd.allreduce(torch.ones(1), process_set=unknown)


def test_sets_of_this_host(rank, size):
    here, across = hvd.local_process_set(), hvd.cross_process_set()
    assert list(here.ranks) == list(range(size)) and list(across.ranks) == [rank]
    assert hvd.local_process_set() is here and hvd.cross_process_set() is across
    for one in (here, across):
        assert hvd.is_process_set_included(one.process_set_id)
        assert hvd.get_process_set_ids_and_ranks()[one.process_set_id] == one.ranks
        assert pickle.loads(pickle.dumps(one)) is one
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=here).item() == size
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=across).item() == 1


def test_a_set_of_ranks_that_are_not_there_is_refused(size):
    with pytest.raises(ValueError):
        hvd.add_process_set([0, size + 5])
    with pytest.raises(ValueError):
        hvd.add_process_set([])


def test_a_set_that_ranks_disagree_on_is_refused(rank, size):
    if size > 1:
        with pytest.raises(hvd.MismatchError):
            hvd.add_process_set([0] if rank == 0 else [1])


def test_an_optimizer_of_a_set_averages_among_its_ranks(rank, size):
    members = list(range((size + 1) // 2))
    first = hvd.add_process_set(members)
    if first.included():
        model = support.net(seed=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
                                             process_set=first)
        for batch in support.batches(rank):
            optimizer.zero_grad()
            support.loss_of(model, batch).backward()
            optimizer.step()
        alone = support.net(seed=0)
        plain = torch.optim.SGD(alone.parameters(), 0.1)
        for batch in support.joined(len(members)):
            plain.zero_grad()
            support.loss_of(alone, batch).backward()
            plain.step()
        for found, wanted in zip(model.parameters(), alone.parameters()):
            support.assert_close(found, wanted, 1e-5)
        hvd.broadcast_parameters(model.state_dict(), root_rank=members[0], process_set=first)
        hvd.broadcast_optimizer_state(optimizer, root_rank=members[0], process_set=first)
        hvd.check_parameters(model, process_set=first)
    hvd.remove_process_set(first)


@pytest.mark.skipif(hvd.size() == 1, reason="every rank is in every set")
def test_an_optimizer_of_a_set_is_a_plain_one_outside_it(rank, size):
    first = hvd.add_process_set([0])
    model, alone = support.net(seed=0), support.net(seed=0)
    plain = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
                                         model.named_parameters(), process_set=first)
    for batch in support.batches(rank):
        for one, of in ((optimizer, model), (plain, alone)):
            one.zero_grad()
            support.loss_of(of, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert optimizer.clip_grad_norm_(0.1) == pytest.approx(norm.item(), rel=1e-5)
        plain.step()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    with optimizer.no_sync():
        optimizer.zero_grad()
    assert optimizer.step(lambda: 3.5) == 3.5
    for found, wanted in zip(model.parameters(), alone.parameters()):
        support.assert_close(found, wanted, 1e-5)
    hvd.remove_process_set(first)


def test_a_mesh_has_a_set_for_each_row(rank, size):
    pipe = 2 if size % 2 == 0 else 1
    mesh = hvd.mesh({"data": -1, "pipe": pipe, "tensor": 1})
    assert isinstance(mesh, hvd.Mesh) and mesh.axes == {"data": size // pipe, "pipe": pipe, "tensor": 1}
    assert (mesh.coordinate("data"), mesh.coordinate("pipe"), mesh.coordinate("tensor")) == (rank // pipe, rank % pipe, 0)
    for axis in mesh.axes:
        row = mesh.ranks(axis)
        assert len(row) == mesh.size(axis) and row[mesh.coordinate(axis)] == rank
        assert mesh.set(axis).ranks == sorted(row) and mesh.set(axis) in mesh.sets(axis)
        total = hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum, process_set=mesh.set(axis))
        assert total.tolist() == [float(sum(row))] * 2
        assert sorted(r for one in mesh.sets(axis) for r in one.ranks) == list(range(size))
    assert mesh.set("data").process_set_id in hvd.get_process_set_ids_and_ranks()
    for wrong in (mesh.size, mesh.coordinate, mesh.ranks, mesh.set, mesh.sets):
        with pytest.raises(ValueError, match="allowed is data, pipe, tensor"):
            wrong("pip")
    assert all(hvd.remove_process_set(one) for axis in mesh.axes for one in mesh.sets(axis))
    with pytest.raises(ValueError, match=f"multiply to {size}"):
        hvd.mesh({"data": 1, "pipe": 1} if size > 1 else {})
    if size > 1:
        with pytest.raises(hvd.MismatchError, match="the axes of mesh"):
            hvd.mesh({"data" if rank == 0 else "pipe": size})
