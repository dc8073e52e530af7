"""Who this rank is, what is built in, and calls before init()."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import sirtaki
import sirtaki.torch as hvd
import support


def test_topology_is_that_of_mpirun(rank, size):
    assert rank == int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    assert size == int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))
    assert 0 <= hvd.local_rank() < hvd.local_size() <= size
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    assert hvd.local_size() == size and hvd.cross_size() == 1  # one host
    assert hvd.is_homogeneous() is True
    assert hvd.is_initialized() is True


def test_what_is_built_in_has_the_types_that_scripts_test():
    assert hvd.mpi_built() is True and hvd.mpi_enabled() is True
    assert hvd.mpi_threads_supported() is False  # whatever thread level MPI has: docs/mpi.md
    assert hvd.gloo_built() is False and hvd.gloo_enabled() is False
    for absent in (hvd.ddl_built, hvd.ccl_built, hvd.rocm_built):
        assert absent() is False
    assert isinstance(hvd.cuda_built(), bool)
    assert isinstance(hvd.nccl_built(), int)  # Horovod's is a version number, 0 without
    assert hvd.xla_built() is False and hvd.gpu_available() == torch.cuda.is_available()
    assert [hvd.num_rank_is_power_2(n) for n in (0, 1, 2, 3, 4)] == [False, True, True, False, True]
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH")


class WhoAsks(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        try:
            hvd.allreduce(torch.ones(1))
        except ValueError as error:
            assert "fork" in str(error)
        else:
            raise AssertionError("a worker is no rank")
        return torch.tensor([hvd.is_initialized(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()])


def test_workers_of_a_data_loader_know_their_rank(rank, size):
    loader = torch.utils.data.DataLoader(WhoAsks(), num_workers=1, multiprocessing_context="fork", timeout=200)
    for told in loader:
        assert told[0].tolist() == [1, rank, size, hvd.local_rank(), hvd.cross_size()]


def test_version_is_the_library_s():
    assert sirtaki.__version__.split(".")[0].isdigit()


def test_init_again_changes_nothing(rank, size):
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)


def test_calls_after_shutdown_are_refused_until_the_next_init(rank, size):
    hvd.shutdown()
    try:
        assert hvd.is_initialized() is False
        hvd.shutdown()  # nothing
        for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
                    hvd.is_homogeneous, lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_object(1),
                    hvd.barrier, hvd.join):
            with pytest.raises(ValueError, match="init"):
                ask()
        with pytest.raises(hvd.NotInitializedError):
            hvd.DistributedOptimizer(torch.optim.SGD(support.net().parameters(), 0.1))
    finally:
        hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@pytest.mark.skipif(hvd.size() > 1, reason="in a process of its own; once is enough")
def test_options_and_horovod_s_variables_are_taken(tmp_path):
    """A job of one rank each, made by a process of its own without mpirun."""
    script = ("import os; os.environ['HOROVOD_STALL_CHECK_TIME_SECONDS'] = 'soon'\n"
              "import sirtaki.torch as hvd\n"
              "try:\n    hvd.init()\nexcept hvd.SirtakiError as error:\n    print('refused', error)\n"
              "os.environ['HOROVOD_STALL_CHECK_TIME_SECONDS'] = '33'\n"
              "try:\n    hvd.init(options={'fusion_byte': 1})\nexcept hvd.SirtakiError as error:\n    print('refused', error)\n"
              "hvd.init(options={'fusion_bytes': '1M', 'autotune': False, 'stall_limit': 50.5})\n"
              "print('started', hvd.rank(), hvd.size())\n"
              "hvd.shutdown()\n"
              "os.environ.update(HOROVOD_TIMELINE=os.environ['TEST_TIMELINE'], HOROVOD_FUSION_THRESHOLD='many')\n"
              "try:\n    hvd.init()\nexcept hvd.SirtakiError as error:\n    print('refused', error)\n"
              "os.environ['HOROVOD_FUSION_THRESHOLD'] = '1048576'\n"
              "hvd.init()\nhvd.mark('by a variable')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_", "SIRTAKI_S"))}
    environment["TEST_TIMELINE"] = str(tmp_path / "timeline.json")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused") and "STALL" in lines[0].upper() and "soon" in lines[0], lines
    assert lines[1].startswith("refused") and "fusion_byte" in lines[1], lines
    assert lines[2] == "started 0 1", lines
    assert lines[3].startswith("refused") and "HOROVOD_FUSION_THRESHOLD" in lines[3] and "many" in lines[3], lines
    assert "by a variable" in (tmp_path / "timeline.json").read_text()


def test_init_takes_process_sets(rank, size):
    hvd.shutdown()
    first, everybody = hvd.ProcessSet([0]), hvd.ProcessSet(range(size))
    try:
        hvd.init(process_sets=[first])
        assert first.included() == (rank == 0)
        assert first.process_set_id is not None and first.process_set_id > 0
        if first.included():
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, process_set=first).sum().item() == 2
        assert everybody.process_set_id is None
        again = hvd.ProcessSet([0])
        hvd.init(process_sets=[again])  # nothing new: another object for the same set
        assert again.process_set_id == first.process_set_id
    finally:
        support.reinit(hvd)
    assert first.process_set_id is None and again.process_set_id is None
    assert hvd.remove_process_set(hvd.add_process_set(first))
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    support.reinit(hvd)


def test_init_refuses_what_is_no_communicator():
    for arguments in ({"comm": "world"}, {"process_sets": "static"}):
        with pytest.raises(ValueError):
            hvd.init(**arguments)
    with pytest.raises(ValueError):
        hvd.ProcessSet("all")


def test_mpi_is_paused_and_resumed():
    hvd.pause_mpi(60.0)
    with pytest.raises(ValueError, match="paused already"):
        hvd.pause_mpi()
    waits = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    hvd.resume_mpi(60.0)
    assert hvd.synchronize(waits).tolist() == [float(hvd.size())] * 3
    with pytest.raises(ValueError, match="not paused"):
        hvd.resume_mpi()


def test_every_public_name_of_horovod_s_is_there_and_all_are_used_by_a_test():
    """What a script for horovod.torch 0.28 may ask for."""
    names = """Adasum Average Compression DistributedOptimizer Max Min ProcessSet Product Sum SyncBatchNorm
        add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async
        allreduce_async_ alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_
        broadcast_object broadcast_object_fn broadcast_optimizer_state broadcast_parameters ccl_built cross_rank
        cross_size cuda_built ddl_built elastic global_process_set gloo_built gloo_enabled grouped_allgather
        grouped_allgather_async grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_
        grouped_reducescatter grouped_reducescatter_async init is_homogeneous is_initialized join local_rank local_size
        mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async
        remove_process_set rocm_built run shutdown size sparse_allreduce_async start_timeline stop_timeline
        synchronize""".split()
    missing = [name for name in names if not hasattr(hvd, name)]
    assert not missing
    assert not [name for name in hvd.__all__ if not hasattr(hvd, name)]
    modules = {name for name, value in vars(hvd).items() if inspect.ismodule(value)}
    assert {name for name in vars(hvd) if not name.startswith("_")} - modules - {"annotations", "Any", "TYPE_CHECKING"} \
        <= set(hvd.__all__)
    tests = "".join(file.read_text() for file in pathlib.Path(__file__).parent.glob("*.py"))
    assert not [name for name in hvd.__all__ if not re.search(rf"\bhvd\.{name}\b", tests)]
    assert callable(sirtaki.run) and sirtaki.run is hvd.run
    for name in ("State", "ObjectState", "TorchState", "ElasticSampler", "run"):
        assert hasattr(hvd.elastic, name)
    from sirtaki.torch.functions import (allgather_object, broadcast_object, broadcast_object_fn,  # noqa: F401
                                         broadcast_optimizer_state, broadcast_parameters)
    assert broadcast_optimizer_state is hvd.broadcast_optimizer_state


def test_the_declarations_of_the_library_are_what_it_has():
    """Programs and this module are checked by _C.pyi."""
    declared = ast.parse(pathlib.Path(sirtaki.__file__).with_name("_C.pyi").read_text()).body

    def names_of(body):
        return {one.target.id if isinstance(one, ast.AnnAssign) else one.name for one in body
                if isinstance(one, (ast.AnnAssign, ast.FunctionDef, ast.ClassDef))}

    def public(names):
        return {name for name in names if not name.startswith("_")}

    library = sirtaki._C
    assert public(names_of(declared)) == public(vars(library))
    for one in declared:
        if isinstance(one, ast.ClassDef):
            assert public(names_of(one.body)) == public(vars(getattr(library, one.name))), one.name
