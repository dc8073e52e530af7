"""DistributedDataParallel is a module that averages its gradients over the ranks, for programs that wrap the model and
not the optimizer."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Type

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError, NotInitializedError, UnsupportedError
from sirtaki.torch._hooks import BucketHook, GradBucket
from sirtaki.torch._library import _C
from sirtaki.torch._reduction import Settings, without_garbage
from sirtaki.torch._structures import moved, tensors_of
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.functions import agreed, allgather_object, check_initialized
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set
from sirtaki.torch.reductions import Average


class DistributedDataParallel(torch.nn.Module):
    """Calls ``module``, and averages the gradients over the ranks before backward() returns. The optimizer is a plain
    one.

    The constructor is collective: it compares names, types and shapes, then broadcasts parameters and buffers from the
    lowest rank of the process set. Each rank calls backward() equally often after a forward(), through at least one
    parameter. Parameters without a gradient on some ranks count as zero there; graphs may differ and change, and the
    program does not have to say so. With op Sum, compression or a hook backward() must not add to an average: call
    zero_grad() before.

    ``broadcast_buffers``: the constructor and each forward() in training that records a graph first give all ranks the
    buffers of the lowest rank. ``init_sync``: False leaves out the broadcast at the start. ``op``, ``compression``,
    ``gradient_predivide_factor``, ``sparse_as_dense`` and ``communication_hook`` are those of DistributedOptimizer.

    ``device_ids``: one device, to which the arguments of forward() are moved.

    The other arguments are those of torch.nn.parallel.DistributedDataParallel, in its order. Most have no effect: a
    module is where it is, buckets find their size, unused parameters are always found. ``mixed_precision``,
    ``device_mesh``, ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce`` raise UnsupportedError.

    A rank outside the process set raises InvalidArgumentError: use the module itself there. A copy, by copy.deepcopy()
    or pickle, averages nothing, and cannot be trained: wrap its ``module`` again.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Optional[List[Any]] = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Optional[ProcessSet] = None,
        bucket_cap_mb: Optional[float] = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Optional[List[int]] = None,
        *,
        process_set: ProcessSet = global_process_set,
        op: int = Average,
        compression: Type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        communication_hook: Optional[BucketHook] = None,
        name: Optional[str] = None,
        check_parameters_every: int = 0,
    ) -> None:
        super().__init__()
        del output_device, dim, bucket_cap_mb, find_unused_parameters, check_reduction
        del gradient_as_bucket_view, static_graph, skip_all_reduce_unused_params, bucket_cap_mb_list
        refused = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "device_mesh": device_mesh,
        }
        process_set = process_set if process_group is None else process_group

        def device_of_arguments() -> Optional[torch.device]:
            for argument, value in refused.items():
                if value is not None:
                    raise UnsupportedError(f"DistributedDataParallel: {argument} is not supported")
            if not isinstance(process_set, ProcessSet):
                raise ValueError(f"process_group is a {type(process_set).__name__}; it must be a ProcessSet")
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module is a {type(module).__name__}; it must be a torch.nn.Module")
            check_initialized(module.named_parameters())
            if device_ids and len(device_ids) != 1:
                raise ValueError(f"device_ids is {device_ids}; give one device or none: a rank has one")
            return torch.device(device_ids[0]) if device_ids else None

        is_deferred = _C.is_deferred()
        self._device = device_of_arguments() if is_deferred else agreed(device_of_arguments, process_set)
        self.module = module
        self._init_sync = init_sync
        self._process_set = process_set
        self._broadcasts_buffers = broadcast_buffers
        self._scopes = 0  # of no_sync
        self._settings: Optional[Settings] = Settings(
            list(module.named_parameters()),
            compression,
            process_set,
            communication_hook,
            name=name,
            op=op,
            predivide=gradient_predivide_factor,
            passes=1,
            average_at="backward",
            everywhere=False,
            sparse_as_dense=sparse_as_dense,
            check_every=check_parameters_every,
            shard=None,
            by_element=False,
            share_parameters=False,
            shard_over="all",
        )
        self._reducer: Optional[_C.ModuleReducer] = None
        if is_deferred:  # elastic.run() sets it up, and gives all ranks the same state
            return
        self._sirtaki_rebuild()
        tensors: List[Tuple[str, torch.Tensor]] = list(module.named_parameters())
        if broadcast_buffers:
            tensors += module.named_buffers()
        if tensors and init_sync:
            _C.broadcast_parameters(tensors, self._first_rank(), _impl_of(process_set))

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_settings": None, "_reducer": None}

    def _own(self) -> Tuple[Settings, _C.ModuleReducer]:
        if _C.is_elastic and self._settings is not None and self._reducer is None:
            raise NotInitializedError(
                "a DistributedDataParallel of an elastic job is set up when elastic.run() begins: make it part of the state, as in "
                "elastic.TorchState(model=model), and use it in the function that run() calls"
            )
        if self._settings is None or self._reducer is None:
            raise InvalidArgumentError(
                "this copy of a DistributedDataParallel averages no gradients: use its .module, or wrap that again"
            )
        return self._settings, self._reducer

    def _sirtaki_rebuild(self) -> None:
        """Makes the reduction, and again after another init(). A copy has none. It broadcasts nothing: elastic.run() first has
        to find the rank that is farthest. Collective."""
        if self._settings is None:
            return
        mine = (self._broadcasts_buffers, self._init_sync)
        of_ranks = allgather_object(mine, "sirtaki/DistributedDataParallel", self._process_set)
        if any(other != of_ranks[0] for other in of_ranks):
            raise MismatchError(
                f"DistributedDataParallel: broadcast_buffers or init_sync differs between the ranks: {of_ranks}"
            )
        self._make_reducer()

    def _make_reducer(self) -> None:
        assert self._settings is not None
        self._reducer = None  # its hooks go first
        settings = self._settings.agreed()
        self._reducer = without_garbage(lambda: _C.ModuleReducer(settings))

    def _first_rank(self) -> int:
        return (self._process_set.ranks or [0])[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._device is not None:
            args, kwargs = moved(args, self._device), moved(kwargs, self._device)
        if not (torch.is_grad_enabled() and (self.training or self._reducer is not None)):
            return self.module(*args, **kwargs)
        _, reducer = self._own()
        reducer.before_forward(self.module.training)
        if self._broadcasts_buffers and self._scopes == 0 and self.module.training:
            self._broadcast_buffers(reducer.prefix + "buffers")
        output = self.module(*args, **kwargs)
        self._watch_backward(output)
        return output

    def _watch_backward(self, output: Any) -> None:
        """Gradients are averaged at the end of the backward() that comes through the output. Within it there may be others:
        torch.utils.checkpoint has one for each part of the module, with use_reentrant=True. Outputs of other kinds than
        tensors_of() knows, and backward() of what a module keeps besides, end with the first that makes a gradient."""
        weak = weakref.ref(self)  # a graph that is kept does not keep the module's reducer

        @torch.utils.hooks.unserializable_hook
        def begin(_gradient: torch.Tensor) -> None:
            module = weak()
            if module is not None and module._reducer is not None:
                module._reducer.begin_backward()

        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:  # a parameter as it is would keep all hooks that it ever got
                tensor.register_hook(begin)

    def _broadcast_buffers(self, name: str) -> None:
        if (self._process_set.size() or 1) == 1:
            return
        _C.broadcast_buffers(list(self.module.buffers()), self._first_rank(), name, _impl_of(self._process_set))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context backward() only adds to the gradients of this rank, and forward() broadcasts no buffers;
        the next backward() reduces the sums. All ranks must do it alike."""
        _, reducer = self._own()
        scope = reducer.no_sync()
        self._scopes += 1
        try:
            yield
        finally:
            self._scopes -= 1
            scope.close()

    def register_comm_hook(self, state: object, hook: Callable[[object, GradBucket], Any]) -> None:
        """From now on ``hook(state, bucket)`` reduces the gradients instead of the library. Collective; it can be
        called once, and not with another op or compression."""
        settings = self._own()[0]  # and not a reference to the reducer, which ends
        before = settings.hook
        if before is not None:
            raise InvalidArgumentError("register_comm_hook: there is a communication hook already")
        settings.hook = lambda bucket: hook(state, bucket)
        try:
            self._make_reducer()
        except (TypeError, ValueError):  # on all ranks
            settings.hook = before
            self._make_reducer()
            raise
