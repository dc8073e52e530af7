"""run(): ranks from a program, and their results back. On rank 0 alone: it starts jobs of its own."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

import sirtaki.torch as hvd
import support
from sirtaki._launcher import launcher_path
from sirtaki.torch import _run

pytestmark = [pytest.mark.skipif(hvd.size() > 1, reason="starts ranks of its own; once is enough"),
              pytest.mark.sample(3)]


WITHOUT = "import sys\nsys.modules['cloudpickle'] = None  # as if it were not installed\n"


def program(tmp_path, body, cloudpickle):
    """Runs a program in a file of its own, as a user has it; its output, by lines."""
    if cloudpickle:
        pytest.importorskip("cloudpickle")
    file = tmp_path / "program.py"
    file.write_text(("" if cloudpickle else WITHOUT) + textwrap.dedent(body))
    done = subprocess.run([sys.executable, str(file)], env=support.without_mpi(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("cloudpickle", [False, True], ids=["pickle", "cloudpickle"])
def test_results_and_errors_come_back_by_rank(tmp_path, cloudpickle):
    lines = program(tmp_path, """
        import traceback
        import sirtaki.torch as hvd
        import torch

        class Result:
            def __init__(self, rank):
                self.rank = rank

        def train(base, factor=1):
            hvd.init()
            print("from rank", hvd.rank(), flush=True)
            total = hvd.allreduce(torch.full((2,), float(base * factor + hvd.rank())), op=hvd.Sum)
            return hvd.rank(), total, Result(hvd.rank())

        def fail():
            hvd.init()
            if hvd.rank() == 1:
                raise KeyError("what rank 1 looked for")
            hvd.barrier()

        def leave():
            import os
            os._exit(7)

        if __name__ == "__main__":
            results = hvd.run(train, args=(5,), kwargs={"factor": 2}, np=2, use_gloo=False, use_mpi=False, oversubscribe=True)
            print([(rank, total.tolist(), result.rank) for rank, total, result in results])
            try:
                hvd.run(fail, num_proc=2, oversubscribe=True)
            except KeyError as error:
                print("caught", error, repr("".join(traceback.format_exception(error))))
            try:
                hvd.run(leave, np=1)
            except RuntimeError as error:
                print("ended", repr(str(error)))
    """, cloudpickle)
    assert "[(0, [21.0, 21.0], 0), (1, [21.0, 21.0], 1)]" in lines
    assert any("from rank 0" in line for line in lines) and any("from rank 1" in line for line in lines)
    caught = next(line for line in lines if line.startswith("caught"))
    assert "what rank 1 looked for" in caught and "on rank 1" in caught and "in fail" in caught
    ended = next(line for line in lines if line.startswith("ended"))
    assert "rank 0 returned no result" in ended and "code 7" in ended


def test_functions_of_no_file_need_cloudpickle(tmp_path):
    body = """
        import sirtaki.torch as hvd
        cell = {"__name__": "__main__"}   # a notebook's functions are in no file
        exec("def train(add):\\n    hvd.init()\\n    return hvd.rank() + add + more", {"hvd": hvd, "more": 100, **cell}, cell)
        if __name__ == "__main__":
            del __file__
            try:
                print(hvd.run(cell["train"], args=(10,), np=2, oversubscribe=True))
                print(hvd.run(lambda: "from a lambda"))
            except ValueError as error:
                print("refused:", error)
    """
    assert program(tmp_path, body, cloudpickle=True)[-2:] == ["[110, 111]", "['from a lambda']"]
    assert program(tmp_path, body, cloudpickle=False)[-1].startswith("refused:")


def test_ranks_elsewhere_get_the_addresses_of_the_interfaces():
    """The host's name may have none but 127.0.1.1, as on Debian."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    wanted = {address for address in found if "." in address}
    given = _run._addresses(local=False)
    assert wanted <= set(given)
    assert given[-1] == "127.0.0.1"


def test_arguments_that_are_refused():
    for arguments in ({"min_np": 1}, {"max_np": 4}, {"min_num_proc": 1}, {"max_num_proc": 4}, {"slots": 2},
                      {"reset_limit": 3}, {"cooldown_range": (1, 2)}, {"host_discovery_script": "hosts.sh"}):
        with pytest.raises(NotImplementedError, match=next(iter(arguments))):
            hvd.run(print, **arguments)
    for arguments in ({"use_gloo": True, "use_mpi": True}, {"np": 0}, {"num_proc": 0},
                      {"network_interface": "a", "network_interfaces": "b"}):
        with pytest.raises(ValueError):
            hvd.run(print, **arguments)
    with pytest.raises(ValueError, match="cannot be pickled"):
        import _thread
        hvd.run(print, args=(_thread.allocate_lock(),))


def stays(rank):
    """For a program: this rank is there, after the library's own end, until the launcher ends it, as it does when another
    rank has ended badly. That one has the time that it needs to tell what it was told."""
    return textwrap.dedent(f"""
        import ctypes
        import os
        if os.environ["RANK"] == "{rank}":
            libc = ctypes.CDLL(None)
            libc.on_exit(libc.pause, None)
    """)


def on_two_ranks(file, *flags):
    return subprocess.run([launcher_path(), "-np", "2", *(flags or ["--oversubscribe"]), sys.executable, str(file)],
                          env=support.without_mpi(), capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("first", ["", "import mpi4py.MPI"], ids=["alone", "after mpi4py"])
@pytest.mark.parametrize("end,told", [("raise KeyError('a label')", "KeyError|with code 1"), ("sys.exit(3)", "with code 3")],
                         ids=["exception", "exit"])
def test_a_rank_that_fails_does_not_wait_and_the_others_are_told(tmp_path, first, end, told):
    if first:
        support.mpi_of_mpi4py()
        if end.startswith("sys.exit"):
            pytest.skip("mpi4py ends MPI before the exit code is known")
    file = tmp_path / "program.py"
    file.write_text(stays(1) + textwrap.dedent(f"""
        import sys
        {first}
        import torch
        import sirtaki.torch as hvd
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            {end}
        try:
            hvd.allreduce(torch.ones(1), name="what rank 1 never calls")
        except hvd.AbortedError as error:
            print("told:", error, flush=True)
            raise
    """))
    done = on_two_ranks(file)
    assert done.returncode != 0
    line = next((line for line in done.stdout.splitlines() if "told:" in line), "")
    assert re.search(told, line), done.stdout + done.stderr


@pytest.mark.parametrize("first, end", [("", "raise FileNotFoundError('part 0 is missing')"), ("", "return"),
                                        ("from mpi4py import MPI", "raise FileNotFoundError('part 0 is missing')")],
                         ids=["exception", "return", "exception after mpi4py"])
def test_elastic_does_not_wait_for_a_rank_that_has_ended(tmp_path, first, end):
    if first:
        support.mpi_of_mpi4py()
    file = tmp_path / "program.py"
    file.write_text(stays(0) + textwrap.dedent(f"""
        {first}
        import time
        import torch
        import sirtaki.torch as hvd

        @hvd.elastic.run
        def train(state):
            if hvd.rank() == 0:
                {end}
            hvd.allreduce(torch.ones(1), name="what rank 0 never calls")

        hvd.init()
        state = hvd.elastic.ObjectState(step=0)
        begin = time.monotonic()
        try:
            train(state)
        except hvd.HorovodInternalError as error:
            print("told:", "soon" if time.monotonic() - begin < 60 else "late", error, flush=True)
            raise
    """))
    done = on_two_ranks(file)
    assert done.returncode != 0
    assert re.search("told: soon .*the program exited", done.stdout), done.stdout + done.stderr


def test_a_job_that_elastic_has_brought_to_its_end_has_ended_well(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent("""
        import torch
        import sirtaki.torch as hvd

        calls = []

        @hvd.elastic.run
        def train(state):
            calls.append(1)
            while state.step < 4:
                if state.step == 2 and len(calls) == 1 and hvd.rank() == 1:
                    hvd.abort("a fault on purpose")
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
                state.step += 1
                state.commit()
            return state.step

        if __name__ == "__main__":
            hvd.init(options={"flight_records": "off", "log_level": "error"})
            print("done:", train(hvd.elastic.ObjectState(step=0)), flush=True)
    """))
    done = on_two_ranks(file)
    assert done.returncode == 0 and done.stdout.count("done: 4") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("method,flags", [("spawn", []), ("forkserver", []), ("spawn", ["--no-mpi"])],
                         ids=["spawn", "forkserver", "over TCP"])
def test_a_worker_that_is_spawned_is_no_rank(tmp_path, method, flags):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent("""
        import multiprocessing
        import sirtaki.torch as hvd

        try:
            hvd.init()
        except ValueError as error:
            print("refused:", error, flush=True)

        if __name__ == "__main__":
            worker = multiprocessing.get_context("METHOD").Process(target=print, args=("a worker",))
            worker.start()
            worker.join(200)
            hvd.barrier()
            print("exit code", worker.exitcode, flush=True)
    """).replace("METHOD", method))
    done = on_two_ranks(file, *flags)
    assert done.returncode == 0 and done.stdout.count("exit code 0") == 2, done.stdout + done.stderr
    assert done.stdout.count("refused:") == 2 and "__main__" in done.stdout


def test_the_printed_command_has_no_values_of_variables():
    from sirtaki.torch._run import _without_values
    command = ["sirtakirun", "-x", "A=secret", "-x", "B", "--export=C=secret", "-xD=secret", "python", "x=y"]
    assert _without_values(command) == ["sirtakirun", "-x", "A=...", "-x", "B", "--export=C=...", "-xD=...", "python",
                                        "x=y"]
    for words, printed in {"-x A=secret": "-x A=...", "--x 'A=sec ret' --mca pml ob1": "--x A=... --mca pml ob1",
                           "-genv A secret -env B=secret -n 2": "-genv A ... -env B=... -n 2",
                           "--mca mca_base_env_list 'A=secret;B=secret'": "--mca mca_base_env_list A=...",
                           "--export=ALL,A=secret": "--export=ALL,A=..."}.items():
        assert _without_values(["--mpi-args", words, "python"]) == ["--mpi-args", printed, "python"]
