"""A DistributedOptimizer averages the gradients over the ranks before it uses them."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar, Union

import torch

from sirtaki.common.exceptions import InvalidArgumentError, NotInitializedError, PendingGradientsError
from sirtaki.torch._consolidated import consolidated
from sirtaki.torch._hooks import BucketHook
from sirtaki.torch._library import _C
from sirtaki.torch._reduction import SHARDS, Named, Settings, without_garbage
from sirtaki.torch._shards import Shards, by_element, check_run, check_steps, is_cut, new_run
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.functions import agreed, check_initialized
from sirtaki.torch.process_sets import ProcessSet, global_process_set
from sirtaki.torch.reductions import Average


Function = TypeVar("Function", bound=Callable[..., Any])


def _untraced(function: Function) -> Function:
    """torch.compile() breaks its graph at the function, as at those of torch's own optimizers."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


class _Outside:
    """In the reducer's place, and its scopes', on a rank outside the process set: there the optimizer is what it was."""

    def step(self, groups: Any, closure: Any, base_step: Callable[[Any, Any], Any]) -> Any:
        return base_step(closure, None)

    def shards(self, groups: Any) -> None:
        return None

    def gradient_shards(self) -> None:
        return None

    def synchronize(self, groups: Any) -> None:
        pass

    before_zero_grad = synchronize

    def is_reducing(self) -> bool:
        return False

    def clip_grad_norm(self, groups: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
        parameters = [parameter for group in groups for parameter in group["params"]]
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite))

    def skip_step(self) -> None:
        pass

    def no_sync(self) -> _Outside:
        return self

    skip_synchronize = no_sync

    def has_local_gradients(self) -> bool:
        return False

    def close(self) -> None:
        pass


class _Gone:
    """In the reducer's place while it is made, and after that has failed: nothing is to be done without it."""

    def __getattr__(self, name: str) -> Any:
        if _C.is_deferred():
            raise NotInitializedError(
                "in an elastic job an optimizer is set up when elastic.run() begins: make it part of the state, as in "
                "elastic.TorchState(optimizer=optimizer), and use it in the function that run() calls"
            )
        if _C.is_elastic:
            raise NotInitializedError(
                "this optimizer is not set up in this generation of the elastic job: give the state that run() is called with "
                "this very optimizer, as in elastic.TorchState(optimizer=optimizer)"
            )
        raise NotInitializedError("the reduction of this optimizer could not be set up: make a new optimizer")


class _DistributedOptimizer:
    """DistributedOptimizer() puts this class before the class of the optimizer that it is given."""

    param_groups: List[Dict[str, Any]]
    state: Any
    _sirtaki_settings: Settings
    _sirtaki_reducer: Union[_C.OptimizerReducer, _Outside, _Gone]
    _sirtaki_stepped: bool
    _sirtaki_synchronized: bool  # by the program, for the next step
    _sirtaki_skips: bool  # within skip_synchronize()
    _sirtaki_made_of: torch.optim.Optimizer
    _sirtaki_shards: Shards

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's GradScaler reads it first in step(). What it does to a gradient leaves no trace that would be found."""
        if self._sirtaki_reducer.is_reducing():
            raise PendingGradientsError(
                "torch's GradScaler would unscale gradients that are being reduced: take hvd.GradScaler, or call "
                "optimizer.synchronize() before its unscale_() and step(), and step() within optimizer.skip_synchronize()"
            )
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = supports

    @property
    def op(self) -> int:
        return self._sirtaki_settings.rest["op"]

    @property
    def process_set(self) -> ProcessSet:
        return self._sirtaki_settings.process_set

    @property
    def backward_passes_per_step(self) -> int:
        return self._sirtaki_settings.rest["passes"]

    @property
    def average_at(self) -> str:
        return self._sirtaki_settings.rest["average_at"]

    @property
    def gradient_predivide_factor(self) -> float:
        return self._sirtaki_settings.rest["predivide"]

    @property
    def sparse_as_dense(self) -> bool:
        return self._sirtaki_settings.rest["sparse_as_dense"]

    @property
    def _parameter_names(self) -> Dict[torch.Tensor, str]:
        """Horovod's name for them, which scripts read."""
        return {parameter: name for name, parameter in self._sirtaki_settings.all_named}

    def __reduce__(self) -> Any:
        # A copy has no part in the reductions of this one: it is the optimizer that this was made of, with its state.
        self._sirtaki_shards.check_whole(self, "copied")  # type: ignore[arg-type]
        return _plain, (type(self._sirtaki_made_of),), self.__getstate__()  # type: ignore[attr-defined]

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        # load_state_dict() makes new groups: schedulers of the optimizer that this was made of go on with them.
        if "_sirtaki_made_of" in self.__dict__:
            self._sirtaki_made_of.__dict__.update(state=self.state, param_groups=self.param_groups)

    def _sirtaki_rebuild(self) -> None:
        """Makes the reduction again: with other settings, or after another init(). Collective."""
        self._sirtaki_reducer = _Gone()  # the hooks of the one before go first
        self._sirtaki_settings.name_added(self.param_groups)
        self._sirtaki_make(self._sirtaki_settings.agreed())

    def _sirtaki_make(self, settings: _C.ReducerSettings) -> None:
        made: Union[_C.OptimizerReducer, _Outside] = _Outside()
        if self.process_set.included() is not False:
            made = without_garbage(lambda: _C.OptimizerReducer(self.param_groups, settings))
        if self._sirtaki_settings.rest["shard"]:
            agreed(lambda: self._sirtaki_shards.follow(self, made), self.process_set)
            self._sirtaki_shards.run = new_run(self.process_set)
        self._sirtaki_reducer = made

    @_untraced
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Waits for the averaged gradients, then makes the optimizer's step. With a closure, which makes the gradients,
        each evaluation of it is followed by synchronize(), and the loss that it returns is averaged over the ranks.
        Collective."""
        self._sirtaki_stepped = True
        self._sirtaki_made_of._opt_called = True  # type: ignore[attr-defined]  # its schedulers look for steps there
        if self._sirtaki_synchronized and not self._sirtaki_skips and self.average_at == "step":
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "it does not average again, but Horovod would; write: with optimizer.skip_synchronize(): "
                "optimizer.step()",
                stacklevel=2,
            )
        self._sirtaki_synchronized = False
        base = super().step  # type: ignore[misc]

        def base_step(wrapped: Any, shards: Any) -> Any:
            if wrapped is None:
                self._sirtaki_make_sparse()
                with self._sirtaki_shards.in_place(self, shards):  # type: ignore[arg-type]
                    return base()  # some optimizers' steps take no argument

            def evaluate() -> Any:
                loss = wrapped()
                self._sirtaki_make_sparse()
                return loss

            return base(evaluate)

        return self._sirtaki_reducer.step(self.param_groups, closure, base_step)

    # The hooks of steps are the optimizer's own, and run where its step is made.
    step.hooked = True  # type: ignore[attr-defined]

    def state_dict(self) -> Dict[str, Any]:
        """The optimizer's; raises InvalidArgumentError if its state is sharded, as it is after the first step(): then
        there is consolidated_state_dict()."""
        self._sirtaki_shards.check_whole(self, "saved")  # type: ignore[arg-type]
        return super().state_dict()  # type: ignore[misc, no-any-return]

    def consolidated_state_dict(
        self, root_rank: Optional[int] = None, *, device: Union[None, str, torch.device] = None
    ) -> Optional[Dict[str, Any]]:
        """Returns a copy of the state as ``state_dict()`` would give it without shards, on all ranks (of the process set), or
        on rank ``root_rank`` of the job and None on the others, which get no tensors then. ``load_state_dict()`` takes it,
        with shards or without, on any number of ranks. With a ``device``, ``"cpu"`` say, tensors go there one by one.
        Collective, also where a single rank wants the state; without shards as well."""
        self._sirtaki_shards.check_not_in_step("consolidated_state_dict()")
        return consolidated(self, root_rank, device, super().state_dict)  # type: ignore[misc]

    def shard_state_dict(self) -> Dict[str, Any]:
        """Returns the state of this rank's shards, for load_shard_state_dict() of the same rank in a job of as many: what
        each rank may save to a file of its own. Its tensors are the optimizer's own. Not collective."""
        self._sirtaki_shards.check_not_in_step("shard_state_dict()")
        return self._sirtaki_shards.saved(self, super().state_dict)  # type: ignore[misc]

    def load_shard_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads what shard_state_dict() has returned. Collective: all ranks raise, and nothing is changed, if that of any
        rank is of another rank, of other shards, of another step, or of another run."""
        shards = self._sirtaki_shards
        shards.check_not_in_step("load_shard_state_dict()")
        agreed(lambda: shards.check(self, state_dict), self.process_set, "sirtaki/load_shard_state_dict() of an optimizer")
        check_steps(state_dict["steps"], self.process_set)
        check_run(state_dict.get("run"), self.process_set)
        agreed(lambda: self._sirtaki_load_shards(state_dict), self.process_set)
        shards.run = new_run(self.process_set)  # two runs may go on from one file

    def _sirtaki_load_shards(self, state_dict: Dict[str, Any]) -> None:
        self._sirtaki_shards.load(self, state_dict, super().load_state_dict)  # type: ignore[misc]

    @_untraced
    def synchronize(self) -> None:
        """Waits until all gradients are averaged. The following step() takes them as they then are. Collective."""
        self._sirtaki_synchronize()
        self._sirtaki_synchronized = True

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self._sirtaki_shards.check_not_in_step("add_param_group()")
        super().add_param_group(param_group)  # type: ignore[misc]

    def _sirtaki_synchronize(self) -> None:
        self._sirtaki_shards.check_not_in_step("synchronize()")
        self._sirtaki_reducer.synchronize(self.param_groups)
        self._sirtaki_make_sparse()

    def _sirtaki_make_sparse(self) -> None:
        """After sparse_as_dense, for the optimizer that takes no dense gradients."""
        if not (self.sparse_as_dense and isinstance(self, torch.optim.SparseAdam)):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)  # rows, as an embedding has them

    @_untraced
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Calls the optimizer's zero_grad(); raises PendingGradientsError, an AssertionError, while gradients are being
        reduced."""
        self._sirtaki_shards.check_not_in_step("zero_grad()")
        try:
            self._sirtaki_reducer.before_zero_grad(self.param_groups)
        except InvalidArgumentError as error:
            if not self._sirtaki_reducer.is_reducing():
                raise
            pending = PendingGradientsError(str(error))
            pending.rank, pending.tensor = error.rank, error.tensor
            raise pending from None
        self._sirtaki_synchronized = False
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context step() takes the gradients as they are on this rank. After synchronize() step() does that
        by itself, with a warning, since Horovod would average again."""
        scope = self._sirtaki_reducer.skip_synchronize()
        self._sirtaki_skips = True
        try:
            yield
        finally:
            self._sirtaki_skips = False
            scope.close()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context backward() only adds to the gradients of this rank; they are reduced with those of the
        first backward() after it, or by step(). All ranks must do it alike."""
        scope = self._sirtaki_reducer.no_sync()
        try:
            yield
        finally:
            scope.close()

    @_untraced
    def skip_step(self) -> None:
        """Begins a new step after one that the program leaves out. It is needed if synchronize() was called for that
        step and zero_grad() will not be: the following backward() then belong to a new step."""
        self._sirtaki_synchronized = False
        self._sirtaki_reducer.skip_step()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of passes. Collective: all ranks call it alike, with no gradients under way, nor kept in shards for
        the next step."""
        if _C.is_deferred():
            self._sirtaki_settings.rest["passes"] = passes
            return
        agreed(self._sirtaki_check_no_shards, self.process_set)
        before = self._sirtaki_settings.rest["passes"]
        self._sirtaki_settings.rest["passes"] = passes
        try:
            self._sirtaki_rebuild()
        except (TypeError, ValueError):  # on all ranks
            self._sirtaki_settings.rest["passes"] = before
            self._sirtaki_rebuild()
            raise

    def _sirtaki_check_no_shards(self) -> None:
        """The next reducer would not have them, and its step would do nothing."""
        if not isinstance(self._sirtaki_reducer, _Gone) and self._sirtaki_reducer.gradient_shards():
            raise InvalidArgumentError(
                "set_backward_passes_per_step() was called while averages are kept in shards, which a new reduction would not "
                "have: call it after step(), or after zero_grad() of the optimizer"
            )

    @_untraced
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Waits for the averaged gradients, scales them so that their norm is at most ``max_norm``, and returns the
        norm that they had: the same on all ranks. Collective."""
        self._sirtaki_shards.check_not_in_step("clip_grad_norm_()")
        return self._sirtaki_reducer.clip_grad_norm(
            self.param_groups, float(max_norm), float(norm_type), error_if_nonfinite
        )


def _plain(base: Type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return base.__new__(base)


def _check_groups(num_groups: int, groups: Union[None, int, Sequence[Sequence[torch.Tensor]]]) -> None:
    """Gradients go together in buckets, whatever the caller would have grouped."""
    if groups is None:
        groups = num_groups
    if isinstance(groups, int):
        if groups >= 0:
            return
    elif isinstance(groups, (list, tuple)):
        if all(isinstance(group, (list, tuple)) and all(isinstance(p, torch.Tensor) for p in group) for group in groups):
            places = [id(parameter) for group in groups for parameter in group]
            if len(set(places)) != len(places):
                raise ValueError("A parameter can only appear once in groups.")
            return
    raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")


def _names(optimizer: torch.optim.Optimizer, named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]]) -> Named:
    if named_parameters is None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named_parameters = [(f"allreduce.noname.{number}", parameter) for number, parameter in enumerate(parameters)]
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in named):
        raise ValueError(
            "named_parameters must be a sequence of tuples (name, parameter), as from "
            "model.named_parameters()."
        )
    check_initialized(named)
    return named


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Optional[Iterable[Tuple[str, torch.Tensor]]] = None,
    compression: Type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Union[None, int, Sequence[Sequence[torch.Tensor]]] = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    name: Optional[str] = None,
    average_at: str = "step",
    communication_hook: Optional[BucketHook] = None,
    check_parameters_every: int = 0,
    compress_within_host: bool = False,
    shard: Optional[str] = None,
    share_parameters: bool = True,
    shard_over: str = "all",
) -> Any:
    """Returns the optimizer with gradients that are averaged over the ranks (of the process set). Collective; on a rank
    outside the set the optimizer does nothing more than the one that it is made of.

    The returned optimizer is an instance of a class derived from the given one's, with the same groups and state, so
    that schedulers, ``state_dict()`` and ``isinstance`` still work; use it in the place of the given one from then on.
    The reduction of each gradient starts as soon as backward() has computed it; step() waits for all of them.

    - ``named_parameters``: the model's. They are compared between the ranks, and named in errors.
    - ``compression``: what gradients travel as; a Compressor of your own is called for each of them. Built-in ones have
      no effect with Adasum.
    - ``backward_passes_per_step``: a gradient is reduced when that many backward() have added to it.
    - ``op``: Average, Sum, or Adasum, which combines what the steps change; see docs/training.md.
    - ``gradient_predivide_factor``: with Average, gradients are divided by this before they are added up, and by the
      rest afterwards.
    - ``num_groups``, ``groups``: Horovod's, without effect: gradients go in buckets of a size that suits.
    - ``sparse_as_dense``: sparse gradients become dense before they are reduced, and stay dense, except for SparseAdam.
    - ``name``: tells several optimizers of a program apart in messages.
    - ``average_at``: ``"step"``, Horovod's rule: step() or synchronize() waits for the averages, and until then gradients
      must not be touched. ``"backward"``: the end of backward() waits for them, so that ``.grad`` is the average when it
      returns and may be clipped, looked at or scaled by any function; synchronize() has nothing to do then, except on
      a rank whose backward() has reached none of the parameters. See docs/training.md.
    - ``communication_hook``: reduces the gradients instead of the library. It is called with a GradBucket for each
      bucket of gradients (in the first step, and for those that go by themselves, for each gradient), starts its
      communication, and returns a Handle, a future of torch, a tensor, or a function without arguments that gives the
      tensor.
    - ``check_parameters_every``: the parameters are compared before the first step, and then before each n-th step, if
      this is n; 0: never.
    - ``compress_within_host``: compresses also if all ranks are on one host, where it saves nothing but can be tested.
    - ``shard``: with ``"optimizer"`` each rank keeps the optimizer's state for its shard of the parameters alone, and
      makes the step of that shard; then all ranks get the shards of all. Optimizers of torch.optim that work element by
      element get a part of each parameter, others whole parameters; LBFGS and sparse gradients are refused.
      ``consolidated_state_dict()`` is in the place of ``state_dict()``. With ``"gradients"`` each rank also keeps its shard
      of the averages alone, and ``.grad`` is None from then on. See docs/sharding.md.
    - ``share_parameters``: the parameters of a sharded optimizer lie once in memory that the ranks share, if they are on
      the CPU, and the ranks that have shards on one host; the program writes to them as ever. False: each rank has its copy.
    - ``shard_over``: the ranks that have one copy of everything together: ``"all"``, or ``"host"``, those of each host,
      while gradients are averaged over all ranks. The latter needs all ranks of the job.

    Raises ValueError on every rank if any rank's arguments or parameters do not fit.
    """

    def settings_of_arguments() -> Settings:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
        if isinstance(optimizer, _DistributedOptimizer):
            raise ValueError("the optimizer is a DistributedOptimizer already")
        if is_cut(optimizer):
            raise ValueError("the optimizer has the state of a sharded one that was made of it: make a new optimizer")
        _check_groups(num_groups, groups)
        of_job = SHARDS[_C.shard_of_job(SHARDS.index(shard))] if shard in SHARDS else shard
        return Settings(
            _names(optimizer, named_parameters),
            compression,
            process_set,
            communication_hook,
            name=name,
            op=op,
            predivide=gradient_predivide_factor,
            passes=backward_passes_per_step,
            average_at=average_at,
            everywhere=compress_within_host,
            sparse_as_dense=sparse_as_dense,
            check_every=check_parameters_every,
            shard=of_job,
            by_element=by_element(optimizer, of_job),
            share_parameters=bool(share_parameters),
            shard_over=shard_over,
        )

    def settings_for_reducer() -> Tuple[Settings, _C.ReducerSettings]:
        settings = settings_of_arguments()
        return settings, settings.checked()

    is_deferred = _C.is_deferred()
    settings, for_reducer = settings_for_reducer() if is_deferred else agreed(settings_for_reducer, process_set)
    if is_deferred and settings.name_added(optimizer.param_groups):
        raise InvalidArgumentError(
            "a parameter of the optimizer has no name in named_parameters: add it there, or leave named_parameters out"
        )
    base = type(optimizer)
    made: Any = type(base.__name__, (_DistributedOptimizer, base), {"__doc__": base.__doc__, "__module__": base.__module__})
    wrapped = made.__new__(made)
    wrapped.__dict__.update(optimizer.__dict__)
    # A scheduler that was made before has put its own in the object, which would make the other optimizer's step.
    wrapped.__dict__.pop("step", None)
    wrapped._sirtaki_made_of = optimizer
    wrapped._sirtaki_settings = settings
    wrapped._sirtaki_shards = optimizer._sirtaki_shards = Shards()  # type: ignore[attr-defined]
    wrapped._sirtaki_stepped = False
    wrapped._sirtaki_synchronized = wrapped._sirtaki_skips = False
    wrapped._sirtaki_reducer = _Gone()
    if not is_deferred:
        wrapped._sirtaki_make(for_reducer)
    return wrapped
