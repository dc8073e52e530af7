"""run() among strangers: connections to the caller's port that are no ranks', and addresses that are not the caller's. On
rank 0 alone, as no rank is started here by sirtakirun: a script stands in for it."""

import os
import sys
import textwrap
import threading

import pytest

import sirtaki.torch as hvd
from sirtaki.torch import _run

pytestmark = pytest.mark.skipif(hvd.size() > 1, reason="starts a rank of its own; once is enough")

# What the scripts share. The last words of the command line: the rank's program, the caller's addresses, its port.
SCRIPT = """#!{python}
import multiprocessing.connection, os, resource, select, socket, struct, subprocess, sys, time
program, port = sys.argv[-5:-2], int(sys.argv[-1])
caller = os.getppid()

def connect():
    connection = socket.create_connection(("127.0.0.1", port), 60)
    connection.settimeout(None)  # MSG_DONTWAIT waits otherwise
    return connection

def is_closed(stranger):
    if not select.select([stranger], [], [], 0)[0]:
        return False
    try:
        while stranger.recv(4096, socket.MSG_DONTWAIT):
            pass
        return True
    except BlockingIOError:
        return False  # it was challenged
    except OSError:
        return True

def await_true(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(what)
        time.sleep(0.05)

def run_rank(addresses):
    return subprocess.run([*program, addresses, str(port)], env={{**os.environ, "RANK": "0"}}, timeout=120).returncode

"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls a function on a rank that the script's body starts, within 240 s; what run() returns."""
    def call(body, func=os.getpid, **arguments):
        script = tmp_path / "sirtakirun"
        script.write_text(SCRIPT.format(python=sys.executable) + textwrap.dedent(body))
        script.chmod(0o755)
        monkeypatch.setattr("sirtaki._launcher.launcher_path", lambda: str(script))
        outcome = []

        def target():
            try:
                outcome.append(hvd.run(func, **arguments))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=target, daemon=True)
        thread.start()
        thread.join(240)
        assert outcome, "run() hangs"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]
    return call


def test_strangers_who_say_nothing_are_few_and_keep_no_rank_out(run, monkeypatch, capfd):
    monkeypatch.setattr(_run, "GREETING_SECONDS", 1000.0)
    assert run("""
        def threads():
            return int(next(line for line in open(f"/proc/{caller}/status") if line.startswith("Threads:")).split()[1])
        before = threads()
        strangers = [connect() for _ in range(130)]
        await_true(lambda: sum(not is_closed(stranger) for stranger in strangers) <= 80, "they are kept")
        await_true(lambda: threads() <= before + 90, "each has a thread")
        sys.exit(run_rank("127.0.0.1"))
    """, func=int, args=("7",)) == [7]


@pytest.mark.parametrize("words", ["", "stranger.sendall(struct.pack('!i', 32) + b'half')",
                                   "stranger.sendall(struct.pack('!i', 16) + bytes(16))",
                                   "stranger.sendall(struct.pack('!i', 2**31 - 1))",
                                   "stranger.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')"],
                         ids=["silent", "half", "wrong", "huge", "http"])
def test_a_stranger_is_dropped_in_time(run, monkeypatch, capfd, words):
    monkeypatch.setattr(_run, "GREETING_SECONDS", 0.5)
    with pytest.raises(_run.RankError, match="ended with code 9"):
        run(f"""
            stranger = connect()
            {words}
            await_true(lambda: is_closed(stranger), "it is kept")
            sys.exit(9)
        """)
    assert "Traceback" not in capfd.readouterr().err


def test_a_stranger_who_says_a_byte_at_a_time_is_dropped_too(run, monkeypatch):
    monkeypatch.setattr(_run, "GREETING_SECONDS", 0.5)
    with pytest.raises(_run.RankError, match="ended with code 9"):
        run("""
            stranger = connect()
            stranger.sendall(struct.pack("!i", 200))
            def goes_on():
                try:
                    stranger.sendall(b"x")
                except OSError:
                    return False
                return not is_closed(stranger)
            for _ in range(150):
                if not goes_on():
                    sys.exit(9)
                time.sleep(0.1)
            sys.exit("it is kept")
        """)


def test_where_no_file_can_be_opened_the_caller_waits_and_goes_on(run):
    """Then ranks get through when that is over, and the caller is not busy until then."""
    assert run("""
        limits = resource.prlimit(caller, resource.RLIMIT_NOFILE)
        def ticks():  # of processor time, 100 a second
            words = open(f"/proc/{caller}/stat").read().rsplit(")", 1)[1].split()
            return int(words[11]) + int(words[12])
        resource.prlimit(caller, resource.RLIMIT_NOFILE, (3, limits[1]))
        strangers = [connect() for _ in range(4)]
        before = ticks()
        time.sleep(4)
        busy = ticks() - before
        resource.prlimit(caller, resource.RLIMIT_NOFILE, limits)
        sys.exit(f"busy for {busy}0 ms" if busy > 100 else run_rank("127.0.0.1"))
    """, func=int, args=("8",)) == [8]


def test_the_rank_takes_the_address_that_knows_the_key(run):
    """Of the others one says nothing, one says something else, one proves nothing, and one closes."""
    assert run("""
        import threading
        seen = set()
        def listen(last, answer):
            listener = socket.create_server((f"127.0.0.{last}", port))
            def serve():
                while True:
                    connection = listener.accept()[0]
                    seen.add(last)
                    try:
                        answer(connection)
                    except OSError:
                        pass
            threading.Thread(target=serve, daemon=True).start()
        kept = []
        listen(2, kept.append)
        listen(3, lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\\r\\n"))
        def wrong(connection):
            with multiprocessing.connection.Connection(connection.detach()) as liar:
                liar.send_bytes(b"#CHALLENGE#" + bytes(20))
                liar.recv_bytes(256)
                liar.send_bytes(b"#WELCOME#")
                liar.recv_bytes(256)
                liar.send_bytes(bytes(16))
                liar.recv_bytes(256)
        listen(4, wrong)
        listen(5, lambda connection: connection.close())
        code = run_rank("127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5,127.0.0.1")
        sys.exit(code if code else None if seen == {2, 3, 4, 5} else f"asked: {seen}")
    """, func=int, args=("9",)) == [9]
