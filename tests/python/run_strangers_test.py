"""run() among strangers: connections to the caller's port that are no ranks', and addresses that are not the caller's. On
rank 0 alone, as no rank is started here by sirtakirun: a script stands in for it."""

import os
import secrets
import socket
import sys
import textwrap
import threading
from multiprocessing.connection import Connection

import pytest

import sirtaki.torch as hvd
from sirtaki.torch import _run, _run_rank

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
        return False  # it was sent a number
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
                                   "for part in (bytes(32), bytes(32), b'0'): "
                                   "stranger.sendall(struct.pack('!i', len(part)) + part)",
                                   "stranger.sendall(struct.pack('!i', 2**31 - 1))",
                                   "stranger.sendall(b'GET / HTTP/1.0\\r\\n\\r\\n')"],
                         ids=["silent", "half", "short", "wrong", "huge", "http"])
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
    """One of the other addresses says nothing, one says something else, one proves nothing, and one closes."""
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
                for part in (bytes(32), bytes(32), b"no pickle"):
                    liar.send_bytes(part)
                liar.recv_bytes(256)
                liar.recv_bytes(256)
                liar.recv_bytes(256)
                liar.recv_bytes(256)
        listen(4, wrong)
        listen(5, lambda connection: connection.close())
        code = run_rank("127.0.0.2,127.0.0.3,127.0.0.4,127.0.0.5,127.0.0.1")
        sys.exit(code if code else None if seen == {2, 3, 4, 5} else f"asked: {seen}")
    """, func=int, args=("9",)) == [9]


# Between two of the program's own ends a stranger passes on what they say, frame by frame, and puts in a pickle that
# makes the file STRANGER where it is unpickled.
RELAY = """
    import pickle
    from multiprocessing.connection import Connection
    class Evil:
        def __reduce__(self):
            return os.mkdir, (os.environ["STRANGER"],)
    evil = pickle.dumps(Evil())
    listener = socket.create_server(("127.0.0.2", port))
    def begin_rank():
        process = subprocess.Popen([*program, "127.0.0.2", str(port)], env={**os.environ, "RANK": "0"},
                                   stdout=sys.stderr)
        return process, Connection(listener.accept()[0].detach())
    def put(to, message):
        try:
            to.send_bytes(message)
        except OSError:
            pass
    def pass_on(source, to):
        try:
            put(to, source.recv_bytes())
        except (OSError, EOFError):
            pass
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A folder that is there if a stranger's code has run."""
    monkeypatch.setenv("STRANGER", str(tmp_path / "stranger"))
    return tmp_path / "stranger"


@pytest.mark.parametrize("other", [1, 0], ids=["another", "itself"])
def test_a_stranger_cannot_prove_himself_to_a_rank_by_what_a_rank_says(other):
    """Each of two ranks is told what the other says, or what it says itself."""
    key = secrets.token_bytes(32)
    errors = []

    def greet():
        try:
            _run_rank.greet("127.0.0.1", listener.getsockname()[1], key, 60)
        except ConnectionError as error:
            errors.append(str(error))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads = [threading.Thread(target=greet, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        ranks = [Connection(listener.accept()[0].detach()) for _ in threads]
        for _ in range(3):  # the number, the proof, and what it proves
            said = [rank.recv_bytes() for rank in ranks]
            for number, rank in enumerate(ranks):
                rank.send_bytes(said[number ^ other])
        for thread in threads:
            thread.join(60)
    assert errors == ["not the program that called run(): a message is not proven by the run's key"] * 2


@pytest.mark.parametrize("proof", ["own", "again", "none"])
def test_a_stranger_between_the_ends_cannot_put_words_in(run, stranger, proof):
    with pytest.raises(_run.RankError, match="its answer was changed on the way") as raised:
        run(RELAY + f"""
    rank, r = begin_rank()
    c = Connection(connect().detach())
    c.send_bytes(r.recv_bytes())
    r.send_bytes(c.recv_bytes())
    hello = [r.recv_bytes(), r.recv_bytes()]
    for part in hello:
        put(c, part)
    for _ in range(4):  # the greeting and the call
        pass_on(c, r)
    own = r.recv_bytes()
    for part in {{"own": [own, evil], "again": hello, "none": [bytes(32), evil]}}["{proof}"]:
        put(c, part)
    c.poll(60)
    r.close()
    rank.wait(120)
    sys.exit(9)
""")
    assert raised.value.rank == 0
    assert not stranger.exists()


def test_a_stranger_between_the_ends_cannot_change_the_call(run, stranger):
    with pytest.raises(ValueError, match="a message is not proven"):
        run(RELAY + """
    rank, r = begin_rank()
    c = Connection(connect().detach())
    c.send_bytes(r.recv_bytes())
    r.send_bytes(c.recv_bytes())
    for _ in range(2):
        pass_on(r, c)
    for _ in range(3):
        pass_on(c, r)
    c.recv_bytes()
    put(r, evil)
    for _ in range(2):
        pass_on(r, c)
    c.close()
    r.close()
    rank.wait(120)
    sys.exit(9)
""")
    assert not stranger.exists()


def test_an_answer_that_cannot_be_read_is_an_error(run):
    """The rank's program is another version's, say: it knows the key."""
    with pytest.raises(_run.RankError, match="rank 3: its answer cannot be read here"):
        run(f"""
            sys.path.insert(0, {os.path.dirname(_run.__file__)!r})
            import _run_rank
            channel = _run_rank.Channel(multiprocessing.connection.Connection(connect().detach()),
                                        bytes.fromhex(os.environ["SIRTAKIRUN_KEY"]), "rank")
            channel.send(b"3")
            channel.receive()
            channel.receive()
            channel.send(b"no pickle")
            channel.poll(60)
            sys.exit(1)
        """)
