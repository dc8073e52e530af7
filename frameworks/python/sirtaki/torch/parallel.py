"""A module that averages its gradients over the ranks, for programs that wrap the model and not the optimizer."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Tuple, Type

import torch

from sirtaki.common.exceptions import InvalidArgumentError, MismatchError
from sirtaki.torch._hooks import BucketHook, GradBucket
from sirtaki.torch._library import _C
from sirtaki.torch.compression import Compression, Compressor
from sirtaki.torch.functions import agreed, allgather_object
from sirtaki.torch.optimizer import _Settings, _without_garbage
from sirtaki.torch.process_sets import ProcessSet, _impl_of, global_process_set
from sirtaki.torch.reductions import Adasum, Average


class DistributedDataParallel(torch.nn.Module):
    """Calls ``module``; gradients are averaged over the ranks when backward() returns. The optimizer is a plain one.

    Making one is collective: names, types and shapes are compared, then parameters and buffers broadcast from the lowest
    rank of the process set. Each rank calls backward() equally often, through at least one parameter. Parameters without
    a gradient on some ranks count as zero there; graphs may differ and change, which needs no word from the program.

    ``broadcast_buffers``: each forward() in training first gives all ranks the buffers of the lowest. ``op``,
    ``compression``, ``gradient_predivide_factor``, ``sparse_as_dense`` and ``communication_hook`` are as in
    DistributedOptimizer. The other arguments are those of torch.nn.parallel.DistributedDataParallel and say nothing
    here: a module is where it is, buckets find their size, unused parameters are found always. On a rank outside the
    process set InvalidArgumentError is raised: use the module itself there.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Optional[List[Any]] = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Optional[ProcessSet] = None,
        bucket_cap_mb: Optional[float] = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
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
        del device_ids, output_device, dim, bucket_cap_mb, find_unused_parameters, check_reduction
        del gradient_as_bucket_view, static_graph
        if process_group is not None:
            if not isinstance(process_group, ProcessSet):
                raise ValueError(f"process_group is a {type(process_group).__name__}; a ProcessSet is meant")
            process_set = process_group

        def check() -> None:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module is a {type(module).__name__}; a torch.nn.Module is meant")
            if op == Adasum:
                raise ValueError("op Adasum combines what steps change: it needs DistributedOptimizer")
            if communication_hook is not None and (op != Average or compression is not Compression.none):
                raise ValueError("a communication hook needs op Average and no compression: both are its own to make")

        agreed(check, process_set)
        self.module = module
        self._process_set = process_set
        self._broadcasts_buffers = broadcast_buffers
        self._scopes = 0  # of no_sync
        self._settings = _Settings(
            list(module.named_parameters()),
            compression,
            process_set,
            communication_hook,
            name=name or "",
            op=int(op),
            predivide=float(gradient_predivide_factor),
            passes=1,
            everywhere=False,
            sparse_as_dense=sparse_as_dense,
            check_every=check_parameters_every,
        )
        self._reducer: _C.ModuleReducer
        self._sirtaki_rebuild()

    def _sirtaki_rebuild(self) -> None:
        """Makes the reduction, anew after another init(). Collective."""
        of_ranks = allgather_object(self._broadcasts_buffers, None, self._process_set)
        if any(other != of_ranks[0] for other in of_ranks):
            raise MismatchError(f"DistributedDataParallel: broadcast_buffers differs between the ranks: {of_ranks}")
        self._make_reducer()
        tensors: List[Tuple[str, torch.Tensor]] = [*self.module.named_parameters(), *self.module.named_buffers()]
        if tensors:
            _C.broadcast_parameters(tensors, self._first_rank(), _impl_of(self._process_set))

    def _make_reducer(self) -> None:
        self._reducer = None  # type: ignore[assignment]  # its hooks go first
        settings = self._settings.make()
        self._reducer = _without_garbage(lambda: _C.ModuleReducer(settings))

    def _first_rank(self) -> int:
        return (self._process_set.ranks or [0])[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._reducer.before_forward()
            if self._broadcasts_buffers and self._scopes == 0 and self.module.training:
                self._broadcast_buffers()
        return self.module(*args, **kwargs)

    def _broadcast_buffers(self) -> None:
        if (self._process_set.size() or 1) == 1:
            return
        # Past autograd's version counter: the graph of a forward() before may have kept the buffer.
        buffers = [buffer.data for buffer in self.module.buffers()]
        if buffers:
            _C.grouped_broadcast_(
                buffers, self._first_rank(), self._reducer.prefix + "buffers", _impl_of(self._process_set)
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward() only adds to the gradients of this rank, and forward() broadcasts no buffers; the next
        backward() reduces the sums. All ranks alike."""
        scope = self._reducer.no_sync()
        self._scopes += 1
        try:
            yield
        finally:
            self._scopes -= 1
            scope.close()

    def register_comm_hook(self, state: object, hook: Callable[[object, GradBucket], Any]) -> None:
        """``hook(state, bucket)`` reduces the gradients from now on instead of the library. Collective; once, and not
        beside another op or compression."""
        if self._settings.hook is not None:
            raise InvalidArgumentError("register_comm_hook: there is a communication hook already")
        if self._settings.rest["op"] != Average or self._settings.compression is not Compression.none:
            raise InvalidArgumentError("register_comm_hook needs op Average and no compression")
        self._settings.hook = lambda bucket: hook(state, bucket)
        self._make_reducer()
