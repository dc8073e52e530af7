"""elastic.run: calls a training function again after an error, from what was committed last."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, TypeVar

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch._reduction import Deferral
from sirtaki.torch.session import _init_again

from .state import State

Function = TypeVar("Function", bound=Callable[..., Any])

# So many errors in a row without a commit between them, and the last one is the caller's: what fails every time would
# otherwise fail for ever.
_MOST_FAILURES = 3

# An error within backward() comes through autograd, which keeps its text alone: how core/base/status.cc begins those of a job.
_OF_THE_JOB = re.compile(r"(peer lost|timed out|aborted|backend failure|protocol error|shut down): ")

# A rank's end is told with these words: with as many ranks as before the job cannot be joined again, unless it is elastic.
_PROCESS_ENDED = "the program exited"


def _ends_the_job(error: RuntimeError) -> bool:
    """Whether no later call can succeed before the job was joined again, and then may. A mismatch is no such error: what
    the ranks call is wrong, and would be again."""
    if _PROCESS_ENDED in str(error) and not _C.is_elastic:
        return False
    if isinstance(error, hvd.SirtakiError):
        return isinstance(error, hvd.HorovodInternalError) and not isinstance(error, hvd.MismatchError)
    return type(error) is RuntimeError and _OF_THE_JOB.match(str(error)) is not None


def reset() -> None:
    """Leaves the job and joins it again, with the arguments that init() had. Collective: it ends what the others still
    wait for."""
    hvd.shutdown()
    _init_again()


def run(func: Function) -> Function:
    """Decorates `func(state, ...)` so that it goes on after an error. Before the call, state.sync() gives all ranks
    what rank 0 has. Collective.

    When `func` raises HorovodInternalError, on one rank or on all, every rank goes back to its last commit
    (state.restore()), joins the job again, calls the state's reset callbacks and then `func` again. After
    HostsUpdatedInterrupt it does the same, but restores nothing. Every other exception goes to the caller,
    MismatchError among them, and so does the error that comes three times without a commit in between.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        failures = 0
        commits = state.commits
        skip_sync = False
        must_reset = False
        must_make = _C.is_elastic
        Deferral.is_in_force = False
        while True:
            try:
                if must_reset:
                    reset()
                    must_reset = False
                    state.on_reset()
                elif must_make:
                    state.reset()
                must_make = False
                if not skip_sync:
                    state.sync()
                if _C.is_elastic:
                    _C.elastic_tell_state()
                return func(state, *args, **kwargs)
            except hvd.HostsUpdatedInterrupt as interrupt:
                # A rank that has come has nothing yet.
                skip_sync = interrupt.skip_sync and not _C.is_elastic
            except RuntimeError as error:
                if not _ends_the_job(error):
                    raise
                failures = 1 if state.commits != commits else failures + 1
                commits = state.commits
                # In an elastic job other ranks' ends are no failures of the program.
                if failures >= _MOST_FAILURES and not _C.is_elastic:
                    raise
                if hvd.is_initialized():  # else it was lost while it joined, and has restored before
                    state.restore()
                skip_sync = False
            must_reset = True

    return wrapper  # type: ignore[return-value]
