"""Scripts that import Horovod run as they are where a user says so. In processes of their own."""

import os
import subprocess
import sys
import textwrap

import pytest

import sirtaki.torch as hvd
import support
from sirtaki._launcher import launcher_path
from sirtaki.horovod import FOLDER

pytestmark = pytest.mark.skipif(hvd.size() > 1, reason="starts processes of its own; once is enough")


def run(*arguments, **environment):
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], env=support.without_mpi() | environment,
                          capture_output=True, text=True, timeout=240)


def script(folder, body, name="train.py"):
    file = folder / name
    file.write_text(textwrap.dedent(body))
    return file


SCRIPT = """
    import multiprocessing
    import sys
    import horovod
    import horovod.torch as hvd
    import horovod.torch.elastic.state
    import torch
    from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
    from horovod.common.process_sets import global_process_set
    from horovod.common.util import env, gpu_available, is_iterable, nccl_built, split_list
    from horovod.torch.compression import Compression
    from horovod.torch.elastic import run
    from horovod.torch.functions import broadcast_object, broadcast_optimizer_state
    from horovod.torch.mpi_ops import Average, allreduce, rank, synchronize
    from horovod.torch.optimizer import DistributedOptimizer
    from horovod.torch.sync_batch_norm import SyncBatchNorm

    def child(queue):
        import horovod.torch
        queue.put(horovod.torch.__name__)

    if __name__ == "__main__":
        import sirtaki.torch
        hvd.init()
        assert hvd is sirtaki.torch and horovod.torch is hvd and horovod.torch.mpi_ops is sirtaki.torch.mpi_ops
        assert hvd.__spec__.name == "sirtaki.torch" and allreduce is hvd.allreduce
        assert allreduce(torch.ones(2)).tolist() == [1.0, 1.0] and rank() == 0
        assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and is_iterable("") and not is_iterable(1)
        with env(SOME_NAME="x", PATH=None):
            import os
            assert os.environ["SOME_NAME"] == "x" and "PATH" not in os.environ
        assert "PATH" in os.environ and "SOME_NAME" not in os.environ
        try:
            import horovod.spark
        except ModuleNotFoundError as error:
            print(error)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print("child:", queue.get(timeout=120))
        process.join()
        print(sys.argv[1:], sys.path[0], __spec__, sys.flags.optimize, horovod.__version__)
"""


def test_a_script_runs_without_a_changed_line(tmp_path):
    file = script(tmp_path, SCRIPT)
    done = run("-m", "sirtaki.horovod", file, "--epochs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    missing, child, last = done.stdout.splitlines()[-3:]
    assert "no module horovod.spark" in missing and "migrating-from-horovod.md" in missing
    assert child == "child: sirtaki.torch"
    assert last == f"['--epochs', '3'] {tmp_path} None 0 0.28.1"


def test_the_arguments_are_those_of_python(tmp_path):
    script(tmp_path, "import sys, horovod.torch; print(sys.argv[1:], __name__, sys.flags.optimize)", "module.py")
    done = run("-m", "sirtaki.horovod", "-O", "-m", "module", "x", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    assert done.stdout.split() == ["['x']", "__main__", "1"], done.stdout + done.stderr
    for options in (["-OO", "-m", "sirtaki.horovod"], ["-OOm", "sirtaki.horovod"], ["-OOmsirtaki.horovod"]):
        done = run(*options, script(tmp_path, "import sys; print(sys.flags.optimize, sys.argv[1:])"), "y")
        assert done.stdout.split() == ["2", "['y']"], done.stdout + done.stderr
    done = run("-m", "sirtaki.horovod", script(tmp_path, "raise SystemExit(7)"))
    assert done.returncode == 7
    done = run("-m", "sirtaki.horovod")
    assert done.returncode != 0 and "usage:" in done.stderr


def test_sirtakirun_as_horovod(tmp_path):
    try:
        launcher = launcher_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    file = script(tmp_path, """
        import sys, torch, horovod.torch as hvd
        hvd.init()
        print("sum", hvd.allreduce(torch.ones(2) * hvd.rank(), op=hvd.Sum).tolist(), sys.argv[1:])
    """)
    command = [launcher, "--as-horovod", "-np", "2", "--oversubscribe", sys.executable, "-W", "ignore", str(file), "x"]
    done = subprocess.run(command, env=support.without_mpi(), cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.count("sum [1.0, 1.0] ['x']") == 2, done.stdout + done.stderr


def test_nobody_else_finds_it(tmp_path):
    done = run(script(tmp_path, "import sirtaki.torch, horovod.torch"))
    assert done.returncode != 0 and "ModuleNotFoundError: No module named 'horovod'" in done.stderr


def test_it_does_not_take_the_place_of_a_horovod(tmp_path):
    (tmp_path / "horovod").mkdir()
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    file = script(tmp_path, "import horovod.torch")
    assert run("-m", "sirtaki.horovod", file, PYTHONPATH=path).returncode == 0  # a folder of that name is no Horovod
    script(tmp_path / "horovod", "", "__init__.py")
    done = run("-m", "sirtaki.horovod", file, PYTHONPATH=path)
    assert done.returncode != 0
    assert str(tmp_path / "horovod" / "__init__.py") in done.stderr and "pip uninstall horovod" in done.stderr
    # Nor where its folder comes first.
    done = run("-c", "import horovod", PYTHONPATH=f"{FOLDER}{os.pathsep}{path}")
    assert done.returncode != 0 and "ImportError: Horovod itself is installed" in done.stderr
