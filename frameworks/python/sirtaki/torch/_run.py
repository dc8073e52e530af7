"""run() calls a function on N ranks from a program or a notebook, and returns their results.

The caller listens on a socket and starts `sirtakirun`, which starts a small program on every rank (_run_rank.py). That
program asks the caller for the function, calls it, and hands back the result or the exception. A key, which travels in
a variable of the ranks' environment, says who may talk on the socket: each message is proven by it, in both directions,
before anything is unpickled (Channel in _run_rank.py).
"""

from __future__ import annotations

import errno
import fcntl
import io
import multiprocessing.connection
import os
import pickle
import secrets
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

from sirtaki.torch._run_rank import HELLO_BYTES, KEY_VARIABLE, Channel

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

LAST_LINES = 20  # of the ranks' output, in an error
END_SECONDS = 60.0  # for sirtakirun to end the ranks
GRACE_SECONDS = 5.0  # for a result that is on its way when sirtakirun has ended
GREETERS = 64  # connections that have not proven that they know the key, besides one of each rank
GREETING_SECONDS = 10.0  # for a connection to prove it
ACCEPT_AGAIN_SECONDS = 1.0  # after there was no room for a connection
SIOCGIFADDR = 0x8915  # Linux's question for the address of an interface


class RankError(RuntimeError):
    """A rank has failed, and its error cannot be raised here: it ended without a word, or its exception cannot be
    pickled. `rank` is its number, or -1 where nobody can say."""

    def __init__(self, text: str, rank: int = -1):
        super().__init__(text)
        self.rank = rank

    def __reduce__(self):
        return (RankError, (str(self), self.rank))


class RemoteTraceback(Exception):
    """The cause of an exception that a rank has raised: its traceback there, as text."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Optional[Mapping[str, Any]] = None,
    num_proc: int = 1,
    min_num_proc: Optional[int] = None,
    max_num_proc: Optional[int] = None,
    slots: Optional[int] = None,
    reset_limit: Optional[int] = None,
    cooldown_range: Optional[Tuple[int, int]] = None,
    hosts: Optional[str] = None,
    hostfile: Optional[str] = None,
    host_discovery_script: Optional[str] = None,
    start_timeout: Optional[float] = None,
    ssh_port: Optional[int] = None,
    ssh_identity_file: Optional[str] = None,
    disable_cache: Optional[bool] = None,
    output_filename: Optional[str] = None,
    verbose: Optional[bool] = None,
    use_gloo: Optional[bool] = None,
    use_mpi: Optional[bool] = None,
    mpi_args: Optional[str] = None,
    network_interface: Optional[str] = None,
    network_interfaces: Union[str, Sequence[str], None] = None,
    executable: Optional[str] = None,
    np: Optional[int] = None,
    min_np: Optional[int] = None,
    max_np: Optional[int] = None,
    *,
    oversubscribe: bool = False,
    env: Optional[Mapping[str, str]] = None,
    launcher_args: Sequence[str] = (),
) -> List[Any]:
    """Calls `func(*args, **kwargs)` on `num_proc` ranks and returns the results, a list by rank.

    `func` calls `init()` itself. It, its arguments and its result are pickled: by cloudpickle if that is installed,
    which takes functions of notebooks too; else by pickle, which takes functions of modules and of the program's own
    file. The output of the ranks appears here, each line behind the number of its rank.

    num_proc (or np), hosts, hostfile, start_timeout, ssh_port, ssh_identity_file, disable_cache, output_filename,
    mpi_args, network_interface(s), oversubscribe: the flags of sirtakirun. verbose: prints its command line.
    executable: the ranks' Python; default: this one. env: variables that the ranks have besides this process's.
    launcher_args: more flags of sirtakirun. use_gloo: sirtakirun starts the ranks itself (--no-mpi), and they talk over
    TCP; use_mpi: it is an error if there is no MPI (--mpi); by default there may be one.

    If `func` raises on a rank, the others are ended and the exception is raised here, with the rank's traceback as its
    cause. RankError is raised if that cannot be, or if a rank ends without a result; ValueError or NotImplementedError
    for wrong arguments. The arguments of elastic jobs (min_num_proc, max_num_proc, slots, reset_limit,
    cooldown_range, host_discovery_script) are refused.
    """
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other: give one of them")
    _refuse(min_num_proc=min_num_proc, max_num_proc=max_num_proc, min_np=min_np, max_np=max_np,
            slots=slots, reset_limit=reset_limit, cooldown_range=cooldown_range,
            host_discovery_script=host_discovery_script)
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile both name the hosts: give one of them")
    ranks = num_proc if np is None else np
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"{'num_proc' if np is None else 'np'} is {ranks!r}; it must be a whole number of 1 or more")
    flags = ["-np", str(ranks)]
    for flag, value in (("--hosts", hosts), ("--hostfile", hostfile), ("--start-timeout", start_timeout),
                        ("--ssh-port", ssh_port), ("--ssh-identity-file", ssh_identity_file),
                        ("--output-filename", output_filename), ("--mpi-args", mpi_args),
                        ("--network-interfaces", _interfaces(network_interface, network_interfaces))):
        if value is not None:
            flags += [flag, str(value)]
    flags += ["--no-mpi"] if use_gloo else ["--mpi"] if use_mpi else []
    flags += ["--disable-cache"] if disable_cache else []
    flags += ["--oversubscribe"] if oversubscribe else []
    call = _Call(func, tuple(args), dict(kwargs or {}), ranks)
    return call.run(flags + list(launcher_args), executable or sys.executable, env or {},
                    local=hosts is None and hostfile is None, verbose=bool(verbose))


def _refuse(**elastic) -> None:
    given = [name for name, value in elastic.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: run() has a fixed number of ranks; leave "
                                  f"{'it' if len(given) == 1 else 'them'} out. sirtakirun --elastic has jobs in which it "
                                  "changes")


def _interfaces(one: Optional[str], several: Union[str, Sequence[str], None]) -> Optional[str]:
    if one is not None and several is not None:
        raise ValueError("network_interface and network_interfaces are the same: give one of them")
    given = one if one is not None else several
    return given if given is None or isinstance(given, str) else ",".join(given)


class _MainPickler(pickle.Pickler):
    """Notices what the other side will look for in `__main__`, which there is another program."""

    def __init__(self, file):
        super().__init__(file)
        self.needs_main = False

    def reducer_override(self, value):
        if getattr(value, "__module__", None) == "__main__":
            self.needs_main = True
        return NotImplemented


def _dump_call(what: Any) -> Tuple[bytes, Optional[str]]:
    """The call, pickled, and the file that must be `__main__` where it is unpickled, if any."""
    buffer = io.BytesIO()
    pickler = _MainPickler(buffer)
    try:
        if cloudpickle is not None:
            return cloudpickle.dumps(what), None
        pickler.dump(what)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        advice = "" if cloudpickle is not None else ": define the function at the top of a module, or install cloudpickle"
        raise ValueError(f"the function or its arguments cannot be pickled ({error}){advice}") from error
    if not pickler.needs_main:
        return buffer.getvalue(), None
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main is None or not os.path.isfile(main):
        raise ValueError("a function typed in, as in a notebook, cannot be sent without cloudpickle: install it, or "
                         "define the function in a module")
    return buffer.getvalue(), os.path.abspath(main)


def _without_values(command: Sequence[str]) -> List[str]:
    """The command as it may be printed: values of variables may be secret, also among words for the launcher."""
    printed = []
    for two_before, before, word in zip(["", "", *command], ["", *command], command):
        if before in ("--mpi-args", "--binding-args"):
            printed.append(shlex.join(_without_values(shlex.split(word))))
            continue
        if two_before.lstrip("-") in ("env", "genv") and "=" not in before:  # MPICH's: NAME value
            printed.append("...")
            continue
        flag = next((flag for flag in ("--export=", "-x") if word.startswith(flag) and word != flag), "")
        name, equals, _ = word[len(flag):].partition("=")
        secret = equals and (flag or before.lstrip("-") in ("x", "export", "env", "genv", "mca_base_env_list"))
        printed.append(f"{flag}{name}=..." if secret else word)
    return printed


def _interface_addresses() -> List[str]:
    """The IPv4 addresses of this host's interfaces, without the loopback: its name may have none but 127.0.1.1."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("40s", name.encode()))
            except OSError:  # it has none
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _addresses(local: bool) -> List[str]:
    """Where the ranks may reach this process."""
    if local:
        return ["127.0.0.1"]
    found = [socket.gethostname(), *_interface_addresses()]
    try:
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        pass
    return list(dict.fromkeys(found + ["127.0.0.1"]))


class _Greeters:
    """The connections that have not proven that they know the key. They are few, and each is dropped after a while, so
    that strangers cannot keep ranks out. Each is served by a thread, which ends soon after its connection was dropped."""

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.Lock()
        self._of: Dict[socket.socket, Tuple[float, threading.Thread]] = {}  # until when, and by whom; the oldest first

    def add(self, connection: socket.socket, thread: threading.Thread) -> None:
        with self._lock:
            self._of[connection] = (time.monotonic() + GREETING_SECONDS, thread)
            too_many = len(self._of) > self._most
        if too_many:
            self.drop_oldest()

    def remove(self, connection: socket.socket) -> bool:
        """False if it was dropped before."""
        with self._lock:
            return self._of.pop(connection, None) is not None

    def patience(self) -> Optional[float]:
        """The seconds until the next one is to be dropped; None if there is none."""
        with self._lock:
            for until, _ in self._of.values():
                return max(0.001, until - time.monotonic())
        return None

    def drop_late(self) -> None:
        now = time.monotonic()
        while self._drop_first(lambda until: until <= now):
            pass

    def drop_all(self) -> None:
        while self._drop_first(lambda _: True):
            pass

    def drop_oldest(self) -> bool:
        """Drops the oldest one, and waits until its file is closed. False if there is none."""
        thread = self._drop_first(lambda _: True)
        if thread is not None:
            thread.join(ACCEPT_AGAIN_SECONDS)
        return thread is not None

    def _drop_first(self, is_due: Callable[[float], bool]) -> Optional[threading.Thread]:
        with self._lock:
            for connection, (until, thread) in self._of.items():
                if not is_due(until):
                    return None
                del self._of[connection]
                try:
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
                except OSError:
                    pass  # the other end was quicker
                return thread
        return None


class _Call:
    """One call of run(): the listener, the launcher, and what has come back."""

    def __init__(self, fn, args, kwargs, ranks: int):
        self._payload, main = _dump_call((fn, args, kwargs))
        self._greeting = {"main": main, "path": [os.path.abspath(folder or os.curdir) for folder in sys.path]}
        self._ranks = ranks
        self._lock = threading.Lock()
        self._results: Dict[int, Any] = {}
        self._errors: List[Tuple[int, Optional[bytes], str]] = []  # rank, the pickled exception, text; as they came
        self._over = threading.Event()
        self._greeters = _Greeters(GREETERS + ranks)
        self._serving: List[threading.Thread] = []  # ranks
        self._arrived: Set[threading.Thread] = set()  # those threads that have a result, and are about to take it
        self._lines: List[str] = []

    def run(self, flags, python, env, local, verbose) -> List[Any]:
        from sirtaki._launcher import launcher_path

        launcher = launcher_path()
        key = secrets.token_bytes(32)
        environment = {**os.environ, **env, KEY_VARIABLE: key.hex()}
        with socket.create_server(("127.0.0.1" if local else "", 0), backlog=max(16, self._ranks)) as server:
            exports = [word for name in (KEY_VARIABLE, *env) for word in ("-x", name)]
            command = [launcher, *flags, *exports, python, "-u",
                       os.path.join(os.path.dirname(os.path.abspath(__file__)), "_run_rank.py"),
                       ",".join(_addresses(local)), str(server.getsockname()[1])]
            if verbose:
                print(" ".join(map(shlex.quote, _without_values(command))), file=sys.stderr, flush=True)
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, errors="replace")
            accepting = threading.Thread(target=self._accept, args=(server, key), name="sirtaki.run", daemon=True)
            accepting.start()
            try:
                code = self._follow(process)
            except BaseException:  # Ctrl-C: sirtakirun ends the ranks
                process.terminate()
                try:
                    process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
            finally:
                self._over.set()
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread
                accepting.join(GRACE_SECONDS)
                self._greeters.drop_all()
        self._await_results()
        return self._verdict(code)

    # ---- what comes back ----

    def _accept(self, server, key: bytes) -> None:
        while not self._over.is_set():
            self._greeters.drop_late()
            try:
                server.settimeout(self._greeters.patience())
                accepted, _ = server.accept()
            except socket.timeout:
                continue
            except OSError as error:
                self._make_room(gone=error.errno == errno.ECONNABORTED)
                continue
            thread = threading.Thread(target=self._serve, args=(accepted, key), name="sirtaki.run rank", daemon=True)
            self._greeters.add(accepted, thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give
                self._greeters.remove(accepted)
                accepted.close()
                self._make_room()

    def _make_room(self, gone: bool = False) -> None:
        """After a connection that could not be taken, which waits unless it is gone: it would be ready all the time."""
        if not gone and not self._over.is_set() and not self._greeters.drop_oldest():
            self._over.wait(ACCEPT_AGAIN_SECONDS)

    def _serve(self, accepted: socket.socket, key: bytes) -> None:
        connection = None
        try:
            try:
                connection = multiprocessing.connection.Connection(os.dup(accepted.fileno()))
                channel = Channel(connection, key, "caller")
                rank = int(channel.receive(HELLO_BYTES))
                is_known = True
            except Exception:  # whatever a stranger has said
                is_known = False
            in_time = self._greeters.remove(accepted)
            accepted.close()  # there is another file of it
            if is_known and in_time:
                self._serve_rank(channel, rank)
        finally:
            if connection is not None:
                connection.close()

    def _serve_rank(self, channel: Channel, rank: int) -> None:
        with self._lock:
            self._serving.append(threading.current_thread())
        try:
            channel.send(pickle.dumps(self._greeting))
            channel.send(self._payload)
            answer = channel.receive()
        except ValueError as error:
            self._take(rank, False, None, f"its answer was changed on the way: {error}")
        except (OSError, EOFError):
            return  # the rank has ended; sirtakirun says how
        else:
            self._arrived.add(threading.current_thread())
            try:
                good, value, text = pickle.loads(answer)
            except Exception as error:
                good, value, text = False, None, f"its answer cannot be read here: {error}"
            self._take(rank, good, value, text)  # before the connection closes: then the rank ends

    def _take(self, rank: int, good: bool, value: Any, text: str) -> None:
        failure: Optional[Tuple[int, Optional[bytes], str]] = None
        if good:
            try:
                value = pickle.loads(value)
            except Exception as error:
                failure = (rank, None, f"its result cannot be unpickled here: {error}")
        else:
            failure = (rank, value, text)
        with self._lock:
            if failure is None:
                self._results[rank] = value
            else:
                self._errors.append(failure)

    def _await_results(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        with self._lock:
            threads = list(self._serving)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread in self._arrived:  # a large result takes its time
                thread.join()

    # ---- what is printed ----

    def _follow(self, process) -> int:
        """Copies the output until sirtakirun ends. Through sys.stdout: in a notebook that is the cell."""
        copies = [threading.Thread(target=self._copy, args=(stream, to), daemon=True)
                  for stream, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))]
        for copy in copies:
            copy.start()
        code = process.wait()
        for copy in copies:
            copy.join(GRACE_SECONDS)
        return code

    def _copy(self, stream, to) -> None:
        with stream:
            for line in stream:
                with self._lock:
                    self._lines = self._lines[1 - LAST_LINES:] + [line]
                to.write(line)
                to.flush()

    # ---- the end ----

    def _verdict(self, code: int) -> List[Any]:
        with self._lock:
            if self._errors:
                _raise_here(*self._errors[0])
            missing = [rank for rank in range(self._ranks) if rank not in self._results]
            if not missing:  # and what else may have gone wrong was printed
                return [self._results[rank] for rank in range(self._ranks)]
            lines = "".join("  " + line for line in self._lines)
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} returned no result; "
        raise RankError(f"{who}sirtakirun ended with code {code}" + (f"; its last lines:\n{lines}" if lines else ""),
                        missing[0] if len(missing) == 1 else -1)


def _raise_here(rank: int, pickled: Optional[bytes], text: str) -> None:
    error: Optional[BaseException] = None
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception:
            error = None  # an exception whose constructor wants more than its text
    if not isinstance(error, Exception):
        raise RankError(f"rank {rank}: {text}", rank)
    raise error from RemoteTraceback(f"on rank {rank}:\n{text}")
