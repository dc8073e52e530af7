"""Every rank runs the same tests in the same order, in one job: `mpirun -np N python -m pytest tests/python`.

A test that fails on one rank alone leaves the others waiting for it: stall_limit then fails the whole job, and the run
ends. Rank 0 prints as pytest does; another rank prints a line, and the rest only when a test failed there.
"""

import io
import math
import os
import random
import sys

import pytest
import torch

import sirtaki.torch as hvd
import support

hvd.init()


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if support.RANK != 0:
        reporter._tw._file = io.StringIO()


SEED = int(os.environ.get("SIRTAKI_TEST_SEED") or random.SystemRandom().randrange(2**32))


def pytest_report_header():
    return f"SIRTAKI_TEST_SEED={SEED}"


def pytest_collection_modifyitems(config, items):
    """Leaves out what a sample has not. Files with samples run on one rank alone, and are whole with SIRTAKI_TEST_SCALE=full.
    With a scale below 1 two ranks run every file, and other numbers of ranks that part of the files."""
    scale = os.environ.get("SIRTAKI_TEST_SCALE", "")
    by_file = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    left_out = set()
    if scale not in ("", "small", "full") and float(scale) < 1 and hvd.size() != 2:
        files = sorted(by_file)
        kept = random.Random(hvd.broadcast_object(SEED)).sample(files, math.ceil(float(scale) * len(files)))
        left_out.update(item for item in items if item.path not in kept)
    for tests in by_file.values():
        mark = tests[0].get_closest_marker("sample")
        if mark and scale != "full" and hvd.size() == 1:
            marked = [item for item in tests if item.get_closest_marker("sample")]
            left_out.update(set(marked) - set(random.Random(SEED).sample(marked, min(mark.args[0], len(marked)))))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    counts = {what: len(reports) for what, reports in reporter.stats.items() if what}
    if support.RANK != 0 and counts.keys() & {"failed", "error"}:
        sys.__stdout__.write(f"---- rank {support.RANK} ----\n{reporter._tw._file.getvalue()}\n")
    verdict = ", ".join(f"{count} {what}" for what, count in counts.items() if what != "deselected")
    sys.__stdout__.write(f"verdict of rank {support.RANK}: {verdict}\n")
    sys.__stdout__.flush()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """After a fault of the job every later call fails with its cause: one report of it is enough."""
    outcome = yield
    if outcome.get_result().failed and call.excinfo is not None:
        error = call.excinfo.value
        if isinstance(error, hvd.HorovodInternalError) and not isinstance(error, hvd.MismatchError):
            item.session.shouldstop = f"the job has failed: {error}"


@pytest.fixture(autouse=True)
def together(request):
    """All ranks begin a test together, and begin the same one."""
    names = hvd.allgather_object(request.node.nodeid, name="together")
    assert len(set(names)) == 1, names
    torch.manual_seed(1234)


@pytest.fixture
def rank():
    return hvd.rank()


@pytest.fixture
def size():
    return hvd.size()
