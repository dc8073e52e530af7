"""Scripts that import Horovod run as they are where a user says so. In processes of their own."""

import os
import subprocess
import sys
import textwrap

import pytest

import sirtaki
import sirtaki.torch as hvd
import support
from sirtaki._launcher import launcher_path
from sirtaki.horovod import FOLDER

pytestmark = pytest.mark.skipif(hvd.size() > 1, reason="starts processes of its own; once is enough")


# Where an installed package is, none is set.
PACKAGES = os.environ.get("PYTHONPATH") or os.path.dirname(os.path.dirname(sirtaki.__file__))


def run(*arguments, cwd=None, **environment):
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, arguments)], env=support.without_mpi() | environment,
                          capture_output=True, text=True, timeout=240, cwd=cwd)


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
            assert os.environ["SOME_NAME"] == "x" and "PATH" in os.environ
        assert "PATH" in os.environ and "SOME_NAME" not in os.environ
        try:
            import horovod.spark
        except ModuleNotFoundError as error:
            print(error)
        import importlib.util
        assert importlib.util.find_spec("horovod.tensorflow") is None
        assert importlib.util.find_spec("horovod.torch.nope") is None
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
    assert missing == "No module named 'horovod.spark'"
    assert child == "child: sirtaki.torch"
    assert last == f"['--epochs', '3'] {tmp_path} None 0 0.28.1"


def test_the_arguments_are_those_of_python(tmp_path):
    script(tmp_path, "import sys, horovod.torch; print(sys.argv[1:], __name__, sys.flags.optimize)", "module.py")
    done = run("-m", "sirtaki.horovod", "-O", "-m", "module", "x", PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGES}")
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


def test_it_is_imported_again(tmp_path):
    done = run("-m", "sirtaki.horovod", script(tmp_path, """
        import importlib, sys
        import horovod, horovod.torch as hvd
        assert importlib.reload(horovod) is horovod
        del sys.modules["horovod"]
        import horovod.torch as again
        print(again is hvd, [type(finder).__name__ for finder in sys.meta_path].count("_Same"))
    """))
    assert done.stdout.split() == ["True", "1"], done.stdout + done.stderr


@pytest.mark.parametrize("before", ["", "{}:", ":{}", "{}"])
def test_the_path_of_the_user_is_kept(tmp_path, before):
    """An empty entry is the current folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    script(here, "", "in_current_folder.py")
    file = script(there, "import os, in_current_folder; print(os.environ['PYTHONPATH'])")
    path = (before or "{}").format(PACKAGES)
    done = run("-m", "sirtaki.horovod", file, cwd=here, PYTHONPATH=path)
    if ":" in before:
        assert done.stdout.split() == [f"{path}:{FOLDER}"], done.stdout + done.stderr
    else:
        assert "No module named 'in_current_folder'" in done.stderr


def test_nobody_else_finds_it(tmp_path):
    done = run(script(tmp_path, "import sirtaki.torch, horovod.torch"))
    assert done.returncode != 0 and "ModuleNotFoundError: No module named 'horovod'" in done.stderr


def test_it_does_not_take_the_place_of_a_horovod(tmp_path):
    (tmp_path / "horovod").mkdir()
    path = f"{tmp_path}{os.pathsep}{PACKAGES}"
    file = script(tmp_path, "import horovod.torch")
    assert run("-m", "sirtaki.horovod", file, PYTHONPATH=path).returncode == 0  # a folder of that name is no Horovod
    script(tmp_path / "horovod", "", "__init__.py")
    done = run("-m", "sirtaki.horovod", file, PYTHONPATH=path)
    assert done.returncode != 0
    assert str(tmp_path / "horovod" / "__init__.py") in done.stderr and "pip uninstall horovod" in done.stderr
    # Nor where its folder comes first.
    done = run("-c", "import horovod", PYTHONPATH=f"{FOLDER}{os.pathsep}{path}")
    assert done.returncode != 0 and "ImportError: Horovod itself is installed" in done.stderr


def test_it_does_not_take_the_place_of_an_editable_horovod(tmp_path):
    """Its finder is put into sys.meta_path by a file that Python reads at its start."""
    (tmp_path / "elsewhere").mkdir()
    place = script(tmp_path / "elsewhere", "", "__init__.py")
    script(tmp_path, f"""
        import importlib.util, sys
        class Finder:
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return importlib.util.spec_from_file_location(name, {str(place)!r}) if name == "horovod" else None
        sys.meta_path.append(Finder)
    """, "sitecustomize.py")
    done = run("-m", "sirtaki.horovod", script(tmp_path, ""), PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGES}")
    assert done.returncode != 0 and f"Horovod itself is installed ({place})" in done.stderr, done.stderr


def test_the_helpers_do_as_horovod_s():
    from sirtaki.common.util import (env, get_average_backwards_compatibility_fun, is_iterable,
                                     is_version_greater_equal_than)

    class ByItem:
        def __getitem__(self, place):
            raise IndexError

    before = os.environ.get("PYTHONPATH")
    assert is_iterable(ByItem()) and not is_iterable(1)
    with env(PYTHONPATH=None, SIRTAKI_SOMETHING="x"):
        assert os.environ["SIRTAKI_SOMETHING"] == "x" and os.environ.get("PYTHONPATH") == before
    assert "SIRTAKI_SOMETHING" not in os.environ
    for version, is_later in {"2.1.0": True, "2.1.0a0+32f93b1": False, "2.1.0rc1": False, "2.1.0+cu118": True,
                              "2.1.0.post1": True, "2.1": True, "2.0.9": False, "2.10.0": True}.items():
        assert is_version_greater_equal_than(version, "2.1.0") == is_later, version
    with pytest.raises(ValueError):
        is_version_greater_equal_than("2.1.0", "2.1")
    op_of = get_average_backwards_compatibility_fun(hvd)
    assert op_of(None, None) == hvd.Average and op_of(hvd.Max, None) == hvd.Max
    with pytest.warns(DeprecationWarning):
        assert (op_of(None, True), op_of(None, False)) == (hvd.Average, hvd.Sum)
    with pytest.raises(ValueError, match="supersedes average"):
        op_of(hvd.Sum, True)
