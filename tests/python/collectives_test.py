"""Every collective and its forms: values from closed forms, shapes, types, names and handles."""

import warnings

import pytest
import torch

import sirtaki.torch as hvd
import support

ALL = support.INTEGERS + support.FLOATS + support.COMPLEX


def rows_of(rank, width=2, dtype=torch.float32):
    """rank + 1 rows, each full of the rank."""
    return torch.full((rank + 1, width), rank, dtype=dtype)


# ---- all-reduce ----


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_allreduce_sums_every_type(rank, size, dtype):
    mine = torch.arange(12, dtype=torch.int64).reshape(3, 4).to(dtype) * (rank + 1)
    wanted = torch.arange(12, dtype=torch.int64).reshape(3, 4).to(dtype) * support.ranks_sum(size)
    before = mine.clone()
    result = hvd.allreduce(mine, op=hvd.Sum)
    assert result.dtype == dtype and torch.equal(result, wanted) and torch.equal(mine, before)
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)), wanted)
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", support.FLOATS + support.COMPLEX, ids=str)
def test_allreduce_averages_by_default(rank, size, dtype):
    mine = torch.full((5,), 2 * (rank + 1), dtype=dtype)
    assert torch.equal(hvd.allreduce(mine), torch.full((5,), size + 1, dtype=dtype))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Average), torch.full((5,), size + 1, dtype=dtype))


def test_allreduce_of_min_max_product_and_bits(rank, size):
    mine = torch.tensor([rank, -rank, rank + 1])
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [0, 1 - size, 1]
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [size - 1, 0, size]
    factorial = 1
    for i in range(1, size + 1):
        factorial *= i
    assert hvd.allreduce(mine, op=hvd.Product)[2].item() == factorial
    bit = torch.tensor([1 << rank])
    assert hvd.allreduce(bit, op=hvd.BitOr).item() == (1 << size) - 1
    assert hvd.allreduce(bit, op=hvd.BitXor).item() == (1 << size) - 1
    assert hvd.ReduceOp(7) is hvd.BitOr
    assert hvd.allreduce(bit, op=hvd.BitAnd).item() == (1 if size == 1 else 0)
    assert hvd.allreduce(torch.tensor([rank == 0]), op=hvd.Max).item() is True


def test_adasum_averages_what_is_parallel_and_adds_what_is_orthogonal(rank, size):
    if size & (size - 1) == 0:
        parallel = hvd.allreduce(torch.full((4,), 3.0), op=hvd.Adasum)
        support.assert_close(parallel, torch.full((4,), 3.0))
    orthogonal = torch.zeros(8)
    orthogonal[rank] = 1
    wanted = torch.zeros(8)
    wanted[:size] = 1
    support.assert_close(hvd.allreduce(orthogonal, op=hvd.Adasum), wanted)


def test_allreduce_takes_the_old_argument_average(rank, size):
    mine = torch.full((2,), float(rank + 1))
    assert hvd.allreduce(mine, average=True)[0].item() == (size + 1) / 2
    assert hvd.allreduce(mine, average=False)[0].item() == support.ranks_sum(size)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="average"):
            call(mine, average=True, op=hvd.Sum)


def test_allreduce_scales_before_and_after(rank, size):
    mine = torch.full((3,), float(rank + 1), dtype=torch.float64)
    result = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    support.assert_close(result, torch.full((3,), 1.5 * support.ranks_sum(size), dtype=torch.float64))
    result = hvd.synchronize(hvd.allreduce_async_(mine, op=hvd.Sum, prescale_factor=2.0))
    support.assert_close(result, torch.full((3,), 2.0 * support.ranks_sum(size), dtype=torch.float64))
    pair = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum, postscale_factor=0.25)
    assert [t[0].item() for t in pair] == [size / 4, size / 4]


@pytest.mark.parametrize("dtype", support.INTEGERS, ids=str)
def test_factors_of_integers_truncate(rank, size, dtype):
    mine, halves = torch.tensor([3, 5, 20], dtype=dtype), torch.tensor([1, 2, 10])
    wanted = (halves * size * 0.75).to(dtype)
    factors = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 0.75}
    assert torch.equal(hvd.allreduce(mine, **factors), wanted)
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, **factors)), wanted)
    assert all(torch.equal(result, wanted) for result in hvd.grouped_allreduce([mine, mine], **factors))
    assert torch.equal(hvd.reducescatter(mine.repeat(size, 1), **factors), wanted.reshape(1, 3))
    assert torch.equal(hvd.grouped_reducescatter([mine.repeat(size, 1)], **factors)[0], wanted.reshape(1, 3))
    assert torch.equal(mine, torch.tensor([3, 5, 20], dtype=dtype))
    assert torch.equal(hvd.allreduce(mine, postscale_factor=0.5), halves.to(dtype))  # of the sum, before it is divided
    assert torch.equal(hvd.allreduce_(mine, op=hvd.Max, prescale_factor=0.5), halves.to(dtype))
    large = torch.full((300_000,), 7, dtype=dtype)
    assert torch.equal(hvd.allreduce(large, op=hvd.Min, prescale_factor=0.5), torch.full_like(large, 3))
    if dtype.is_signed:
        assert hvd.allreduce(-mine, op=hvd.Min, postscale_factor=0.5).tolist() == [0, -1, -5]


def test_allreduce_of_a_view_leaves_what_lies_between(rank, size):
    whole = torch.zeros(4, 6)
    view = whole[:, ::2]
    view += rank + 1
    hvd.allreduce_(view, op=hvd.Sum)
    assert torch.equal(whole[:, ::2], torch.full((4, 3), float(support.ranks_sum(size))))
    assert torch.count_nonzero(whole[:, 1::2]) == 0
    assert hvd.allreduce(torch.ones(3, 4).t(), op=hvd.Sum).shape == (4, 3)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4, 5, 6)], ids=str)
def test_allreduce_keeps_any_shape(size, shape):
    result = hvd.allreduce(torch.ones(shape), op=hvd.Sum)
    assert torch.equal(result, torch.full(shape, float(size)))


def test_grouped_allreduce_has_all_forms(rank, size):
    def fresh():
        return [torch.full((n + 1,), float(rank), dtype=dtype)
                for n, dtype in enumerate((torch.float32, torch.float64, torch.float16))]

    wanted = [torch.full_like(t, size * (size - 1) / 2) for t in fresh()]

    def check(results):
        assert isinstance(results, (list, tuple)) and all(map(torch.equal, results, wanted))

    check(hvd.grouped_allreduce(fresh(), op=hvd.Sum))
    check(hvd.synchronize(hvd.grouped_allreduce_async(fresh(), op=hvd.Sum, name="group")))
    mine = fresh()
    check(hvd.grouped_allreduce_(mine, op=hvd.Sum))
    check(mine)
    mine = fresh()
    hvd.synchronize(hvd.grouped_allreduce_async_(mine, op=hvd.Sum))
    check(mine)
    with pytest.raises(ValueError, match="empty"):
        hvd.grouped_allreduce([], op=hvd.Sum)
    support.assert_close(hvd.grouped_allreduce(fresh())[0], torch.full((1,), (size - 1) / 2))


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_gives_back_the_type_that_it_got(size, compression):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
        mine = torch.full((7,), 2, dtype=dtype)
        result = hvd.allreduce(mine, op=hvd.Sum, compression=compression)
        assert result.dtype == dtype and torch.equal(result, mine * size)
    small, context = compression.compress(torch.ones(3))
    assert small.dtype == {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[
        next(name for name in ("none", "fp16", "bf16") if getattr(hvd.Compression, name) is compression)]
    assert compression.decompress(small, context).dtype == torch.float32
    rows = hvd.reducescatter(torch.ones(size, 2), op=hvd.Sum, compression=compression)
    assert torch.equal(rows, torch.full((1, 2), float(size)))


def test_sparse_allreduce_adds_rows_up(rank, size):
    def mine():
        return torch.sparse_coo_tensor(torch.tensor([[rank, size]]), torch.tensor([[1.0, 2.0], [1.0, 1.0]]),
                                       (size + 1, 2))

    handle = hvd.sparse_allreduce_async(mine(), name="embedding", op=hvd.Sum)
    total = hvd.synchronize(handle).to_dense()
    assert torch.equal(total[:size], torch.tensor([[1.0, 2.0]] * size))
    assert torch.equal(total[size], torch.tensor([float(size), float(size)]))
    average = hvd.sparse_allreduce_async(mine(), name="embedding", op=hvd.Average)().to_dense()
    support.assert_close(average, total / size)


# ---- moving ----


@pytest.mark.parametrize("dtype", ALL + [torch.bool], ids=str)
def test_allgather_joins_rows_of_different_numbers(rank, size, dtype):
    wanted = torch.cat([rows_of(r, dtype=dtype) for r in range(size)])
    assert torch.equal(hvd.allgather(rows_of(rank, dtype=dtype)), wanted)
    assert torch.equal(hvd.synchronize(hvd.allgather_async(rows_of(rank, dtype=dtype), name="rows")), wanted)


def test_allgather_of_scalars_makes_a_row_each(rank, size):
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_grouped_allgather(rank, size):
    tensors = [rows_of(rank), rows_of(rank, 3, torch.int64)]
    wanted = [torch.cat([rows_of(r) for r in range(size)]),
              torch.cat([rows_of(r, 3, torch.int64) for r in range(size)])]
    assert all(map(torch.equal, hvd.grouped_allgather(tensors), wanted))
    assert all(map(torch.equal, hvd.synchronize(hvd.grouped_allgather_async(tensors, name="g")), wanted))


@pytest.mark.parametrize("dtype", ALL + [torch.bool], ids=str)
def test_broadcast_gives_the_root_s_tensor(rank, size, dtype):
    for root in range(size):
        mine = torch.full((2, 3), rank, dtype=dtype)
        wanted = torch.full((2, 3), root, dtype=dtype)
        assert torch.equal(hvd.broadcast(mine, root), wanted)
        assert torch.equal(mine, torch.full((2, 3), rank, dtype=dtype))
        assert hvd.broadcast_(mine, root_rank=root) is mine and torch.equal(mine, wanted)


def test_broadcast_has_all_forms(rank, size):
    root = size - 1
    mine = torch.full((2,), float(rank))
    assert hvd.synchronize(hvd.broadcast_async(mine, root, name="b")).tolist() == [root, root]
    assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine and mine.tolist() == [root, root]
    pair = [torch.full((2,), float(rank)), torch.full((3,), rank)]
    assert [t[0].item() for t in hvd.grouped_broadcast(pair, root)] == [root, root]
    assert [t[0].item() for t in hvd.synchronize(hvd.grouped_broadcast_async(pair, root))] == [root, root]
    hvd.synchronize(hvd.grouped_broadcast_async_(pair, root))
    hvd.grouped_broadcast_(pair, root)
    assert [t[0].item() for t in pair] == [root, root]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16], ids=str)
def test_alltoall_without_splits_deals_equal_parts(rank, size, dtype):
    result = hvd.alltoall(torch.arange(2 * size).to(dtype) + 100 * rank)
    wanted = torch.cat([torch.tensor([2 * rank, 2 * rank + 1]) + 100 * sender for sender in range(size)]).to(dtype)
    assert isinstance(result, torch.Tensor) and torch.equal(result, wanted)


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda splits: torch.tensor(splits, dtype=torch.int32)])
def test_alltoall_with_splits_tells_how_many_came(rank, size, kind):
    splits = [i + 1 for i in range(size)]  # i + 1 rows for rank i
    rows = torch.full((sum(splits), 2), float(rank))
    result, received = hvd.alltoall(rows, splits=kind(splits), name="a2a")
    assert received.dtype == torch.int32 and received.tolist() == [rank + 1] * size
    assert torch.equal(result, torch.cat([torch.full((rank + 1, 2), float(r)) for r in range(size)]))
    again, received = hvd.synchronize(hvd.alltoall_async(rows, splits=kind(splits)))
    assert torch.equal(again, result) and received.tolist() == [rank + 1] * size


def test_alltoall_async_gives_a_pair_without_splits_too(rank, size):
    result, received = hvd.synchronize(hvd.alltoall_async(torch.full((size, 2), float(rank))))
    assert result[:, 0].tolist() == list(range(size)) and received.tolist() == [1] * size


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reducescatter_gives_each_rank_its_rows(rank, size, dtype):
    mine = torch.arange(2 * size, dtype=torch.int64).reshape(2 * size, 1).expand(2 * size, 3).to(dtype)
    wanted = mine[2 * rank:2 * rank + 2] * size
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), wanted)
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum, name="rs")), wanted)
    support.assert_close(hvd.reducescatter(mine.double()), wanted.double() / size)  # Average
    pair = hvd.grouped_reducescatter([mine, mine], op=hvd.Sum)
    assert all(torch.equal(t, wanted) for t in pair)
    assert torch.equal(hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=hvd.Sum))[0], wanted)


def test_reducescatter_of_rows_that_do_not_divide_gives_the_first_ranks_more(rank, size):
    mine = torch.ones(size + 1, 2)
    rows = hvd.reducescatter(mine, op=hvd.Sum)
    assert rows.shape[0] == (2 if rank == 0 else 1) and torch.all(rows == size)
    scaled = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert torch.all(scaled == 2 * size)


def test_messages_between_two_ranks(rank, size):
    following, before = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3)
    sending = hvd.isend(torch.full((3,), float(rank)), following, tag=7)
    hvd.recv_(got, before, tag=7)
    hvd.synchronize(sending)
    assert got.tolist() == [before] * 3
    receiving = hvd.irecv(got, before)
    hvd.send(torch.full((3,), float(rank + 10)), following)
    hvd.synchronize(receiving)
    assert got.tolist() == [before + 10] * 3


# ---- waiting ----


def test_barriers(rank):
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)
    hvd.monitored_barrier(30)


def test_handles_are_polled_waited_for_and_asked_again(rank, size):
    handle = hvd.allreduce_async(torch.ones(4), op=hvd.Sum, name="polled")
    support.await_true(lambda: hvd.poll(handle))
    result = hvd.synchronize(handle)
    assert torch.equal(result, torch.full((4,), float(size)))
    other = hvd.allreduce_async(torch.ones(4), op=hvd.Sum)
    assert other.wait()[0].item() == size and other.done() is True


def test_named_calls_may_be_made_in_any_order(rank, size):
    names = [f"tensor {i}" for i in range(20)]
    mine = names[rank * 5 % 20:] + names[:rank * 5 % 20]
    handles = {name: hvd.allreduce_async(torch.full((3,), float(names.index(name))), op=hvd.Sum, name=name)
               for name in mine}
    for i, name in enumerate(names):
        assert hvd.synchronize(handles[name])[0].item() == i * size


def test_many_threads_may_call(rank, size):
    """Calls of a name of its own in each: the GIL is free while one waits."""
    import threading
    results = {}

    def call(i):
        for turn in range(5):
            results[i, turn] = hvd.allreduce(torch.full((100,), float(i)), op=hvd.Sum, name=f"thread {i}")[0].item()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {(i, turn): i * size for i in range(4) for turn in range(5)}


def test_a_wait_leaves_the_gil_to_other_threads(rank, size):
    """Rank 0 waits for what another thread of its own makes the others send."""
    import threading
    if size == 1:
        return
    done = []

    def wait():
        done.append(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="held").item())

    waiter = threading.Thread(target=wait)
    if rank == 0:
        waiter.start()
        hvd.allreduce(torch.ones(1), name="go")  # only possible if the waiter has left the GIL
        waiter.join(60)
    else:
        hvd.allreduce(torch.ones(1), name="go")
        wait()
    assert done == [size]


# ---- objects ----


def test_objects(rank, size):
    value = {"rank": rank, "list": [1, "two", None], "tensor": torch.full((2,), rank)}
    got = hvd.broadcast_object(value, root_rank=size - 1)
    assert got["rank"] == size - 1 and got["list"] == [1, "two", None] and got["tensor"].tolist() == [size - 1] * 2
    assert hvd.broadcast_object(value if rank == 0 else None, name="named")["rank"] == 0
    assert hvd.broadcast_object_fn(root_rank=0)(rank) == 0
    assert hvd.allgather_object("x" * (rank * 1000)) == ["x" * (r * 1000) for r in range(size)]
    assert hvd.allgather_object((rank, None), name="pairs") == [(r, None) for r in range(size)]


def test_metric_average(rank, size):
    assert hvd.metric_average(float(rank), name="loss") == pytest.approx((size - 1) / 2)
    weighted = sum(r * (r + 1) for r in range(size)) / support.ranks_sum(size)
    assert hvd.metric_average(float(rank), weight=rank + 1.0, name="accuracy") == pytest.approx(weighted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = torch.tensor(float(rank), requires_grad=True)  # as a training step has it
        assert hvd.metric_average(loss, name="loss") == pytest.approx((size - 1) / 2)
    mean = hvd.metric_average(torch.tensor([rank, 2.0 * rank]))
    support.assert_close(mean.double(), torch.tensor([(size - 1) / 2, size - 1.0], dtype=torch.float64))


def test_broadcast_parameters_takes_state_dicts_lists_and_modules(rank, size):
    model = support.net(seed=rank)
    wanted = [p.detach() for p in support.net(seed=0).parameters()]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert all(map(torch.equal, model.parameters(), wanted))
    model = support.net(seed=rank)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=0)
    assert all(map(torch.equal, model.parameters(), wanted))
    model = support.net(seed=rank)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    assert all(map(torch.equal, model.parameters(), wanted))
    with pytest.raises(ValueError):
        hvd.broadcast_parameters(3.0, root_rank=0)


def test_check_parameters_finds_a_bit_that_differs(rank, size):
    model = support.net(seed=0)
    hvd.check_parameters(model)
    with torch.no_grad():
        model[0].weight[0, 0] += rank * 1e-3
    if size > 1:
        with pytest.raises(hvd.MismatchError, match="0.weight"):
            hvd.check_parameters(model)


def test_seeds_differ_by_rank_or_are_equal(rank, size):
    seeds = hvd.allgather_object(hvd.seed_all(5))
    assert len(set(seeds)) == size
    draws = hvd.allgather(torch.rand(1, 4))
    assert len({tuple(row.tolist()) for row in draws}) == size
    hvd.seed_all(5, different_per_rank=False)
    draws = hvd.allgather(torch.rand(1, 4))
    assert len({tuple(row.tolist()) for row in draws}) == 1


# ---- dropped handles ----

DROPPED = {
    "allreduce": lambda name: hvd.allreduce_async(torch.ones(3), name=name),
    "allreduce_": lambda name: hvd.allreduce_async_(torch.ones(3), name=name),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce_async([torch.ones(3)], name=name),
    "grouped_allreduce_": lambda name: hvd.grouped_allreduce_async_([torch.ones(3)], name=name),
    "sparse_allreduce": lambda name: hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), name=name, op=hvd.Sum),
    "allgather": lambda name: hvd.allgather_async(torch.ones(3), name=name),
    "grouped_allgather": lambda name: hvd.grouped_allgather_async([torch.ones(3)], name=name),
    "broadcast": lambda name: hvd.broadcast_async(torch.ones(3), 0, name=name),
    "broadcast_": lambda name: hvd.broadcast_async_(torch.ones(3), 0, name=name),
    "grouped_broadcast": lambda name: hvd.grouped_broadcast_async([torch.ones(3)], 0, name=name),
    "alltoall": lambda name: hvd.alltoall_async(torch.ones(12), name=name),
    "reducescatter": lambda name: hvd.reducescatter_async(torch.ones(12), name=name),
    "grouped_reducescatter": lambda name: hvd.grouped_reducescatter_async([torch.ones(12)], name=name),
}


@pytest.mark.parametrize("kind", DROPPED)
def test_a_dropped_handle_keeps_its_name_until_this_rank_has_waited(rank, size, kind):
    start = DROPPED[kind]
    for of_rank_zero in (True, False):  # before the others have called it, and after
        if (rank == 0) == of_rank_zero:
            start("dropped")
            for _ in range(2):
                with pytest.raises(hvd.DuplicateNameError, match='"dropped'):
                    start("dropped")
        hvd.barrier()
    hvd.synchronize(start("dropped"))
    start("dropped")
    with pytest.raises(hvd.DuplicateNameError):
        hvd.synchronize(start("dropped"))
    hvd.synchronize(start("another"))
    hvd.synchronize(start("dropped"))


def test_the_name_of_a_handle_that_was_polled_is_free(rank):
    for _ in range(2):
        handle = hvd.allreduce_async(torch.ones(3), name="polled")
        support.await_true(lambda: hvd.poll(handle))
        del handle


def test_dropped_handles_without_a_wait_are_not_kept_for_ever(rank):
    tensor = torch.ones(3)
    for number in range(300):
        hvd.allreduce_async_(tensor[:1], name=f"never waited for {number}")
    hvd.allreduce_async_(tensor[1:2], name="never waited for 0")  # the oldest are let go
    hvd.barrier()
