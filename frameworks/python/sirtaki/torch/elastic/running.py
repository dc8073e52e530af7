"""elastic.run: calls a training function again after an error, from what was committed last."""

from __future__ import annotations

import functools
import re
from typing import Any, Callable, TypeVar

import sirtaki.torch as hvd
from sirtaki.torch._library import _C
from sirtaki.torch.amp import forget_unscaled
from sirtaki.torch.session import _init_again

from .state import State

Function = TypeVar("Function", bound=Callable[..., Any])

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


def _peer_was_lost(error: RuntimeError) -> bool:
    return isinstance(error, hvd.PeerLostError) or str(error).startswith("peer lost: ")


def is_elastic() -> bool:
    """Whether `sirtakirun` has started an elastic job."""
    return _C.is_elastic


def reset() -> None:
    """Leaves the job and joins it again, with the arguments that init() had. Collective: it ends what the others still
    wait for."""
    hvd.shutdown()
    forget_unscaled()
    _init_again()


def run(func: Function) -> Function:
    """Decorates `func(state, ...)` so that it goes on after an error. Before the call, state.save() keeps what it begins
    with, and all ranks get the state of the lowest rank that is farthest by state.step() and state.commit(): of rank 0 at
    the start, and always where the state has a save(), restore() or sync() of its own. Collective.

    When `func` raises HorovodInternalError, on one rank or on all, every rank joins the job again, goes back to its
    last state.step() if nothing is changed since, or else to its last commit (state.restore()), calls the state's reset
    callbacks, takes the state of the farthest and calls `func` again. After HostsUpdatedInterrupt it does the same, but
    restores nothing, unless an optimizer of the state is sharded: then the last commit. Every other exception goes to the
    caller, MismatchError among them, and so does the error that comes three times, in an elastic job ten times, without a
    commit or a step that is farther or the loss of a rank in between.

    In an elastic job it is called once: a rank that comes later would begin with the first training. Within itself it
    raises InvalidArgumentError.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        attempts = _C.ElasticRun()
        state._steps.note_commit(0)
        state._warn_of_missing_models()
        try:
            return _train(attempts, state, lambda: func(state, *args, **kwargs))
        finally:
            attempts.close()

    return wrapper  # type: ignore[return-value]


def _begin(agree: Callable[[], Any], of_all: bool) -> None:
    """Calls ``agree``, which ranks that begin a generation call alike. Where it finds that another rank has come without the
    state of the others, that rank is dropped, and the others go on. ``of_all``: an error that names no rank is that of all."""
    try:
        agree()
    except hvd.SirtakiError as error:
        if not _C.is_elastic or _ends_the_job(error) or (error.rank == -1 and not of_all):
            raise
        # Ranks that come in the place of these would train from nothing, or fail in the same way.
        _C.elastic_tell_cannot_go_on(str(error), error.rank)
        if error.rank in (-1, hvd.rank()) or _C.elastic_generation() == 1:  # nobody has trained yet
            raise
        raise hvd.PeerLostError(f"peer lost: rank {error.rank} cannot take the state of the others: {error}") from error


def _train(attempts: _C.ElasticRun, state: State, train: Callable[[], Any]) -> Any:
    must_save = True
    skip_sync = False
    must_reset = False
    must_restore = False
    must_make = _C.is_elastic  # what was made before
    while True:
        try:
            if must_save:  # what the program has loaded, say, since it made the state
                must_save = False
                state.save()
            if must_reset:
                reset()
            goes_back = must_restore
            if must_restore:  # only now nothing of the job before writes to it any more
                state._go_back()
                must_restore = False
            if must_reset:
                must_reset = False
                _begin(state.on_reset, of_all=False)
            elif must_make:
                _begin(state.reset, of_all=False)
            must_make = False
            if not skip_sync:
                _begin(state._sync_newest, of_all=True)
                state._go_on_with_random(goes_back)
            if _C.is_elastic:
                _C.elastic_tell_state(state._newest_rank)
            return train()
        except hvd.HostsUpdatedInterrupt as interrupt:
            # A rank that has come has nothing yet.
            skip_sync = interrupt.skip_sync and not _C.is_elastic
            must_restore = must_restore or state._restores_at_change()
        except RuntimeError as error:
            if not _ends_the_job(error) or not attempts.goes_on_after_error(_peer_was_lost(error), state._steps.place):
                raise
            must_restore = True
            skip_sync = False
        must_reset = True
