"""Timeline, metrics and marks."""

import json
import os

import pytest
import torch

import sirtaki.torch as hvd
import support


def test_a_timeline_is_written_and_names_the_tensors(rank, size, tmp_path):
    folder = str(tmp_path / "traces")
    hvd.start_timeline(folder)
    hvd.mark("a moment")
    hvd.allreduce(torch.ones(10), name="seen in the timeline")
    hvd.stop_timeline()
    file = os.path.join(folder, f"rank-{rank}.json")
    with open(file) as text:
        assert json.load(text)
    with open(file) as text:
        content = text.read()
    assert "a moment" in content
    if size > 1:
        assert "seen in the timeline" in content
    hvd.start_timeline(folder, mark_cycles=True)
    hvd.stop_timeline()


def test_a_timeline_that_cannot_be_written_is_an_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with pytest.raises(RuntimeError):
        hvd.start_timeline(str(blocked / "traces"))


def test_metrics_count_what_was_done(rank, size):
    before = hvd.metrics()
    assert isinstance(before, dict)
    for turn in range(3):
        hvd.allreduce(torch.ones(1000), name="counted")
    after = hvd.metrics()
    if size > 1:
        assert after["calls"] - before["calls"] == 3
        assert after["bytes"] - before["bytes"] == 3 * 4000
    model = support.net()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for batch in support.batches(rank):
        optimizer.zero_grad()
        support.loss_of(model, batch).backward()
        optimizer.step()
    if size > 1:
        assert hvd.metrics()["steps"] - after["steps"] == 3
    json.dumps(hvd.metrics())  # as a program would log it


def test_a_timeline_in_a_file_is_rank_0_s(rank, tmp_path):
    """The file is written where Horovod writes it."""
    file = tmp_path / "timeline.json"
    hvd.start_timeline(str(file))
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.stop_timeline()
    assert file.exists() == (rank == 0)


def test_memory_is_told_of(rank):
    use = hvd.memory_use()
    assert use["in_use_bytes"] >= 0 and use["peak_bytes"] >= use["in_use_bytes"]
    hvd.release_memory()


def test_an_optimizer_is_made_where_the_log_is_detailed():
    """At the level info the library describes what it makes; it knows neither options nor state of Python's optimizers."""
    hvd.shutdown()
    hvd.init(options={"log_level": "info"})
    try:
        model = torch.nn.Linear(2, 1)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        hvd.shutdown()
        hvd.init()
