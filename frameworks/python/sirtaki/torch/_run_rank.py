"""_run_rank.py ADDRESS,... PORT: what run() starts on every rank. See _run.py.

A script, which must ask for the caller's search path before it can import anything of the caller's. _run.py imports it for
what both ends share.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose files are no modules of that name

import hmac  # noqa: E402
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
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = 16  # at most: the rank's number


class Channel:
    """A connection on which each message follows its proof, an HMAC-SHA256 by the run's key.

    The proof covers who says the message, two numbers that the ends have drawn for this connection alone, how many
    messages the sender has said before, and the message. So nobody without the key can pass off as one end what the
    other end has said, or what either has said elsewhere or earlier. Messages are not encrypted."""

    def __init__(self, connection, key, role):
        """`role`: "caller" or "rank", this end's. Draws and exchanges the numbers."""
        self._connection = connection
        self._key = key
        own = os.urandom(NONCE_BYTES)
        connection.send_bytes(own)
        theirs = connection.recv_bytes(NONCE_BYTES)
        if len(theirs) != NONCE_BYTES:
            raise ConnectionError("it does not begin as run() does")
        is_caller = role == "caller"
        numbers = own + theirs if is_caller else theirs + own
        self._own = (b"caller:" if is_caller else b"rank:") + numbers
        self._theirs = (b"rank:" if is_caller else b"caller:") + numbers
        self._said = self._heard = 0

    def send(self, message):
        self._connection.send_bytes(self._proof(self._own, self._said, message))
        self._connection.send_bytes(message)
        self._said += 1

    def receive(self, most=None):
        """The other end's next message; ValueError if it is not proven to be that."""
        proof = self._connection.recv_bytes(PROOF_BYTES)
        message = self._connection.recv_bytes(most)
        if not hmac.compare_digest(proof, self._proof(self._theirs, self._heard, message)):
            raise ValueError("a message is not proven by the run's key")
        self._heard += 1
        return message

    def _proof(self, origin, number, message):
        mac = hmac.new(self._key, origin + number.to_bytes(8, "big"), "sha256")
        mac.update(message)
        return mac.digest()

    def poll(self, seconds):
        return self._connection.poll(seconds)

    def close(self):
        self._connection.close()


def greet(address, port, key, seconds):
    """A channel to the caller, and what the caller says first, within `seconds`. Each has proven that it knows the key."""
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
            channel = Channel(connection, key, "rank")
            channel.send(str(own_rank()).encode())
            greeting = pickle.loads(channel.receive())
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
    return channel, greeting


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
    channel, greeting = connect(sys.argv[1].split(","), int(sys.argv[2]), bytes.fromhex(os.environ.pop(KEY_VARIABLE)))
    sys.argv = [greeting["main"] or ""]
    sys.path[:] = greeting["path"] + [folder for folder in sys.path if folder not in greeting["path"]]
    try:
        payload = channel.receive()
        if greeting["main"] is not None:
            become_main(greeting["main"])
        fn, args, kwargs = pickle.loads(payload)
        answer = (True, pickled(fn(*args, **kwargs)), "")
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            answer = (True, pickled(None), "")
        else:
            answer = (False, pickled_error(error), traceback.format_exc())
    channel.send(pickle.dumps(answer))
    if not answer[0]:
        channel.poll(NOTED_SECONDS)  # the caller closes it once it has the cause; the others' errors follow from it
    channel.close()
    if not answer[0]:
        sys.exit(1)  # sirtakirun ends the others


if __name__ == "__main__":
    main()
