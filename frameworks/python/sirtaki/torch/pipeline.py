"""A pipeline runs the stages of a model on several ranks, and micro-batches of a batch at the same time."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sirtaki.common.exceptions import InvalidArgumentError, NotInitializedError, UnsupportedError
from sirtaki.torch._library import _C
from sirtaki.torch._mesh import Mesh
from sirtaki.torch._pipeline_parts import Parts, StageFunction, Stages, Tensors, one_or_all, stage_function, tensors_in
from sirtaki.torch._pipeline_state import (
    WholeGroups, groups_of, merged_optimizer_states, merged_states, part_of_optimizer_state, part_of_state, with_all_tied,
)
from sirtaki.torch._shards import parameters_of
from sirtaki.torch.functions import agreed
from sirtaki.torch.process_sets import ProcessSet, _existing, _impl_of, global_process_set
from sirtaki.torch.tensor_parallel import whole_state_dict

__all__ = ["Pipeline", "PipelineReport"]


class PipelineReport(NamedTuple):
    """What is known of a pipeline's schedule, and of the batches on this rank."""

    schedule: str  # as a text
    picture: str  # drawn with passes of equal times
    bubble: float  # the mean share of the time that ranks wait, with such passes
    peak_activations: int  # micro-batches that this rank keeps at most, as the checker says
    most_kept: int  # that it has kept in the last training batch
    waited: float  # the share of the time of training batches, except the first, that it has waited


def _share(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Gives the module one parameter in the places of these names."""
    for name in names[1:]:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(names[0]))


class Pipeline(torch.nn.Module):
    """Cuts a model into stages, runs each of them on one rank, and divides each batch into micro-batches::

        mesh = hvd.mesh({"data": -1, "pipe": 2})
        model = hvd.Pipeline(net, torch.nn.CrossEntropyLoss(), micro_batches=8, mesh=mesh)   # net: a torch.nn.Sequential
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(),
                                             **model.optimizer_options())
        for batch, target in loader:
            optimizer.zero_grad()
            loss = model.train_batch(batch, target)
            optimizer.step()

    It is a module with the layers of this rank alone, under the names that they have in the unsplit model. The constructor
    and the functions that run, clip, save or load are collective over the row of ranks that have the stages.

    ``stages``: a Sequential, which is cut; or a list, or a dictionary by name, of functions that each make a stage, or with
    ``partition`` a layer, and are called on its rank alone. A stage is a module, or any function, that takes tensors one by one
    and returns a tensor or a tuple of them. A layer takes what the one before it has returned, as in a Sequential.

    ``loss_fn(output, target)`` gives the mean loss of a micro-batch; of several outputs or targets it gets tuples.

    - ``micro_batches``: a batch is cut into that many equal parts along dimension 0.
    - ``schedule``: "1f1b", "gpipe", "interleaved_1f1b", or the text of a schedule of one's own.
    - ``mesh``, ``pipe``, ``data``: stages lie along the axis ``pipe`` of the mesh, copies of the pipeline along ``data``, if
      there is such an axis. ``process_set``: without a mesh, the ranks of the stages, in ascending order.
    - ``partition``: cuts layers by their number ("uniform"), the number of their parameters ("parameters"), or their times on the
      first rank ("time"), measured with ``sample``, the inputs of a micro-batch. ``stages_per_rank``: of layers that are cut.
    - ``placing``: each stage's place in the row; None: stage modulo ranks.
    - ``recompute``: the numbers of stages that keep their inputs alone, and run forward again in the backward pass.
    - ``skips``: (name, from, to) each: the stage ``from`` returns one more tensor for each behind its others, in the order given,
      and the stage ``to`` gets it behind its other inputs.
    - ``ties``: lists of names of named_parameters() that are one parameter of the model in several stages: they begin alike, and
      their gradients are added up over the stages.
    - ``timeout``: seconds after which a message that is not there fails the job; the error names stage and micro-batch.
    - ``name``: tells several pipelines of a program apart in messages.

    What a stage or the loss raises on a rank leaves train_batch() there as it is, and ends the job: the other ranks raise an
    AbortedError that names stage and micro-batch. torch.optim.LBFGS cannot train a pipeline. See docs/model-parallel.md.
    """

    def __init__(
        self,
        stages: Stages,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        micro_batches: int = 1,
        schedule: str = "1f1b",
        mesh: Optional[Mesh] = None,
        pipe: str = "pipe",
        data: str = "data",
        process_set: ProcessSet = global_process_set,
        partition: Optional[str] = None,
        sample: Optional[Tensors] = None,
        stages_per_rank: int = 1,
        placing: Optional[Sequence[int]] = None,
        recompute: Sequence[int] = (),
        skips: Sequence[Tuple[str, int, int]] = (),
        ties: Sequence[Sequence[str]] = (),
        timeout: float = 1800.0,
        name: str = "pipeline",
    ) -> None:
        super().__init__()
        if _C.is_deferred():
            raise NotInitializedError("a Pipeline has no part in an elastic job before elastic.run() begins: make it in the "
                                      "function that run() calls")
        self._process_set = process_set if mesh is None else mesh.set(pipe)
        if partition is None and isinstance(stages, torch.nn.Sequential):
            partition = "uniform"

        def checked() -> Tuple[Parts, _C.PipelineOptions]:
            if partition == "time" and sample is None:
                raise ValueError("partition 'time' needs sample, the inputs of a micro-batch, to measure with")
            if not callable(loss_fn):
                raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; it must be a function of output and target")
            parts = Parts(stages, are_layers=partition is not None)
            return parts, options([[parts.numbered(of_stage) for of_stage in tie] for tie in ties])

        def options(numbered_ties: List[List[str]]) -> _C.PipelineOptions:
            return _C.PipelineOptions(
                micro_batches=micro_batches, schedule=schedule, partition=partition or "", stages_per_rank=stages_per_rank,
                placing=list(placing or ()), recompute=list(recompute), skips=[(skip, begin, end) for skip, begin, end in skips],
                ties=numbered_ties, timeout=float(timeout), name=name, process_set=_impl_of(self._process_set),
                mesh=None if mesh is None else (mesh._impl, pipe, data))

        parts, before_cut = agreed(checked, self._process_set)
        self._names = parts.names
        self._ties = [list(tie) for tie in ties]
        self._shared: List[List[str]] = []  # names that are one parameter in a stage
        raised: List[Exception] = []  # by this rank's factories: they leave as they are, and the others are told

        def calling(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                try:
                    return function(*args)
                except Exception as error:
                    raised.append(error)
                    raise
            return call

        def make(stage: int) -> Tuple[StageFunction, List[Tuple[str, torch.Tensor]]]:
            parts.refuse_untied(ties, begins)
            numbers = range(begins[stage], [*begins[1:], len(parts.names)][stage])
            made = [parts.make(number) for number in numbers]
            named: List[Tuple[str, torch.Tensor]] = []
            for number, part in zip(numbers, made):
                if isinstance(part, torch.nn.Module):
                    self.add_module(parts.names[number], part)
            for tie in ties:  # within a stage it is one parameter, as in the unsplit model
                self._shared.append([name for name in tie if parts.number_of(name) in numbers])
                _share(self, self._shared[-1])
            for number, part in zip(numbers, made):
                if isinstance(part, torch.nn.Module):
                    named += [(f"{number}.{rest}", parameter) for rest, parameter in part.named_parameters()]
            return stage_function(made, stage, parts.are_layers), named

        def loss(outputs: List[torch.Tensor], targets: List[torch.Tensor]) -> torch.Tensor:
            found = loss_fn(one_or_all(outputs), one_or_all(targets))
            if not isinstance(found, torch.Tensor):
                raise TypeError(f"loss_fn has returned a {type(found).__name__}; it has to return one tensor, the mean loss of "
                                "the micro-batch, without anything beside it")
            return found

        try:
            begins: List[int] = _C.cut_layers(before_cut, len(parts.names),
                                              calling(lambda: parts.weights(partition or "", sample)))
            self._core = _C.Pipeline(options(parts.ties_between(ties, begins)), begins, calling(make), loss)
        except Exception as error:
            if raised and error is not raised[0]:
                raise raised[0] from None
            raise
        self._of_core = self._numbered()
        _refuse_lbfgs(self)

    # ---- what it is made of ----

    @property
    def stages(self) -> List[int]:
        """The numbers of this rank's stages, ascending."""
        return self._core.stages

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, whose inputs train_batch() is given."""
        return self._core.is_first

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and so needs the targets."""
        return self._core.is_last

    def report(self) -> PipelineReport:
        """Returns the schedule, what it costs, and what this rank has kept in the last batch. Not collective."""
        return PipelineReport(**self._core.report())

    def optimizer_options(self) -> Dict[str, Any]:
        """Returns the arguments of a DistributedOptimizer that averages over the copies of the pipeline, once for each batch,
        while its last micro-batch runs backward. Raises ValueError without a mesh that has such an axis: one copy needs none."""
        arguments = self._core.optimizer_options()
        return {**arguments, "process_set": _existing(arguments["process_set"])}

    # ---- what it was made of, and is now ----

    def _numbered(self) -> List[Tuple[str, torch.Tensor]]:
        """Its parameters as the core has them, by the numbers of layers."""
        numbers = {name: number for number, name in enumerate(self._names)}
        return [(f"{numbers[name]}.{rest}", parameter) for name, module in self._modules.items()
                if module is not None and name in numbers for rest, parameter in module.named_parameters()]

    def _follow(self) -> None:
        """Parameters may have been replaced, as by load_state_dict(assign=True), or by hand."""
        now = self._numbered()
        if len(now) == len(self._of_core) and all(new is old for (_, new), (_, old) in zip(now, self._of_core)):
            return
        self._core.replace_parameters(now)
        self._of_core = now

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UnsupportedError("a Pipeline cannot be copied, since all ranks make one: for a moving average copy its parameters(); "
                               "else make another one, and load_state_dict(pipeline.state_dict())")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError("a Pipeline cannot be pickled: save its full_state_dict(), which the unsplit model loads too")

    # ---- training ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError("a Pipeline is not called: use train_batch() or evaluate_batch(), on all ranks that have stages")

    def train_batch(self, inputs: Any = None, target: Optional[Tensors] = None) -> float:
        """Runs all micro-batches forward and backward, adds to the gradients those of the whole batch's mean loss, and returns
        that loss on every rank of the row.

        The rank of the first stage gives the inputs and that of the last one the target; other ranks may give nothing.
        ``inputs`` may be an iterator instead, which all ranks give: its next item is the pair of inputs and target. The shapes
        and types that stages hand on are those of the first micro-batch for ever."""
        self._follow()
        return self._core.train_batch(*self._batch(inputs, target))

    def evaluate_batch(self, inputs: Any = None, target: Optional[Tensors] = None) -> Tuple[float, Any]:
        """Runs the micro-batches forward alone, without gradients; eval() is for the program to call. Returns the loss on every
        rank, and the outputs of the last stage on its rank, None on others. Without a target the loss is NaN."""
        self._follow()
        loss, outputs = self._core.evaluate_batch(*self._batch(inputs, target))
        return loss, one_or_all(outputs) if outputs else None

    @staticmethod
    def _batch(inputs: Any, target: Any) -> Tuple[List[torch.Tensor], List[torch.Tensor]]:
        if hasattr(inputs, "__next__"):
            inputs, target = next(inputs)
        return tensors_in(inputs, "inputs"), tensors_in(target, "target")

    def clip_grad_norm_(
        self, optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer]], max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> float:
        """Scales the gradients of all stages so that their norm is at most ``max_norm``, and returns the norm that they had; a
        tied parameter counts once. The optimizer is this rank's; or a list of several that it has, as many on all ranks."""
        self._follow()
        given: List[Tuple[Optional[_C.OptimizerReducer], List[Any]]] = []
        for one in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer):
            reducer = getattr(one, "_sirtaki_reducer", None)
            if isinstance(reducer, _C.OptimizerReducer):
                given.append((reducer, one.param_groups))
            else:
                given.append((None, parameters_of(one)))
        return self._core.clip_grad_norm(given, float(max_norm), float(norm_type), error_if_nonfinite)

    # ---- state ----

    def full_state_dict(self, root_rank: Optional[int] = None) -> Optional[Dict[str, Any]]:
        """Returns what state_dict() of the unsplit model would, on the CPU, on all ranks of the row, or on rank ``root_rank`` of
        the job and None on the others. It loads into the unsplit model, and into a pipeline of another number of stages. With
        layers that are split over ranks it is collective over these as well."""
        return merged_states(whole_state_dict(self, "cpu"), self._names, self._process_set, root_rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads this rank's layers, of the state of the whole model or of these layers. Not collective."""
        part = part_of_state(with_all_tied(state_dict, self._ties), list(self._modules), self._names)
        loaded = super().load_state_dict(part, strict=strict, assign=assign)
        for names in self._shared if assign else ():
            _share(self, names)
        return loaded

    def _groups(self, optimizer: torch.optim.Optimizer) -> Tuple[Any, WholeGroups]:
        names: Dict[torch.Tensor, str] = {parameter: name for name, parameter in self.named_parameters()}
        groups = agreed(lambda: groups_of(optimizer, names), self._process_set)
        return groups, WholeGroups(groups, list(names.values()), self._names, self._ties, self._process_set)

    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, root_rank: Optional[int] = None
    ) -> Optional[Dict[str, Any]]:
        """Returns the state of the stages' optimizers as state_dict() of the unsplit model's optimizer would, if that has the
        same groups with their parameters in the order of the model; on ranks as full_state_dict(). Of a sharded optimizer it is
        collective over the copies of the pipeline as well."""
        groups, whole = self._groups(optimizer)
        state = getattr(optimizer, "consolidated_state_dict", optimizer.state_dict)()
        return merged_optimizer_states(state, groups, whole, self._process_set, root_rank)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Dict[str, Any]) -> None:
        """Loads what belongs to this rank's parameters of the state of the unsplit model's optimizer, as
        full_optimizer_state_dict() gives it."""
        groups, whole = self._groups(optimizer)
        optimizer.load_state_dict(agreed(lambda: part_of_optimizer_state(state_dict, groups, whole), self._process_set))


# ---- optimizers that cannot ----

_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
_hooked: List[Any] = []  # when the first pipeline is made


def _refuse(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for pipeline in _pipelines:
        if not mine.isdisjoint(pipeline.parameters()):
            raise InvalidArgumentError("LBFGS looks at all parameters at once, and a rank of a pipeline has those of its stages: "
                                       "use another optimizer")


def _refuse_lbfgs(pipeline: Pipeline) -> None:
    if not _hooked:
        _hooked.append(register_optimizer_step_pre_hook(_refuse))
    _pipelines.add(pipeline)
