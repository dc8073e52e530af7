"""_run_rank.py ADDRESS,... PORT: what run() starts on every rank. See _run.py.

A script, not a module: it must ask for the caller's search path before it can import anything of the caller's.
"""

import sys

sys.path.pop(0)  # this folder, whose files are no modules of that name

import multiprocessing.connection  # noqa: E402
import os  # noqa: E402
import pickle  # noqa: E402
import runpy  # noqa: E402
import socket  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

KEY_VARIABLE = "SIRTAKIRUN_KEY"
CONNECT_SECONDS = 30.0
FIRST_PATIENCE = 3.0  # with an address
NOTED_SECONDS = 10.0


def greet(address, port, key, seconds):
    """A connection to the caller, and what it says first; in so many seconds. Each has proven that it knows the key."""
    late = threading.Event()

    def drop():
        late.set()
        try:
            raw.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was quicker

    with socket.socket() as raw:
        raw.settimeout(seconds)
        raw.connect((address, port))
        raw.settimeout(None)
        timer = threading.Timer(seconds, drop)
        timer.daemon = True
        connection = multiprocessing.connection.Connection(os.dup(raw.fileno()))
        timer.start()
        try:
            multiprocessing.connection.answer_challenge(connection, key)
            multiprocessing.connection.deliver_challenge(connection, key)
            greeting = connection.recv()
        except Exception as error:
            connection.close()
            if late.is_set():
                raise TimeoutError("no answer") from error
            raise ConnectionError(f"not the program that called run(): {error or 'it closes the connection'}") from error
        finally:
            timer.cancel()
            timer.join()
    if late.is_set():
        connection.close()
        raise TimeoutError("no answer")
    return connection, greeting


def connect(addresses, port, key):
    """To the first address where the caller answers. More patiently each time: a machine may be busy."""
    deadline = time.monotonic() + CONNECT_SECONDS
    patience = FIRST_PATIENCE
    while True:
        why = []
        for address in addresses:
            try:
                return greet(address, port, key, patience)
            except OSError as error:
                why.append(f"{address}:{port}: {error}")
        if time.monotonic() > deadline:
            sys.exit("the program that called run() cannot be reached: " + "; ".join(why))
        patience *= 2
        time.sleep(0.2)


def own_rank():
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        if os.environ.get(name):
            return int(os.environ[name])
    return 0


def become_main(path):
    """Makes the caller's program this one's, without what it does as a program: its functions were pickled as those of
    __main__. The other name is multiprocessing's, by which the caller knows what is made of its classes here."""
    module = type(sys)("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def pickled(what):
    try:
        import cloudpickle
        return cloudpickle.dumps(what)
    except ImportError:
        return pickle.dumps(what)


def pickled_error(error):
    try:
        again = pickled(error)
        pickle.loads(again)
        return again
    except Exception:
        return None


def main():
    connection, greeting = connect(sys.argv[1].split(","), int(sys.argv[2]), bytes.fromhex(os.environ.pop(KEY_VARIABLE)))
    sys.argv = [greeting["main"] or ""]
    sys.path[:] = greeting["path"] + [folder for folder in sys.path if folder not in greeting["path"]]
    rank = own_rank()
    try:
        payload = connection.recv_bytes()
        if greeting["main"] is not None:
            become_main(greeting["main"])
        fn, args, kwargs = pickle.loads(payload)
        answer = (rank, True, pickled(fn(*args, **kwargs)), "")
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            answer = (rank, True, pickled(None), "")
        else:
            answer = (rank, False, pickled_error(error), traceback.format_exc())
    connection.send(answer)
    if not answer[1]:
        connection.poll(NOTED_SECONDS)  # the caller closes it once it has the cause; the others' errors follow from it
    connection.close()
    if not answer[1]:
        sys.exit(1)  # sirtakirun ends the others


main()
