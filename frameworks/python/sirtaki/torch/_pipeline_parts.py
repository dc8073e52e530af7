"""The stages, or the layers, that a pipeline is made of: which there are, what they weigh, and how a stage calls them."""

from __future__ import annotations

import bisect
import copy
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Sequence, Set, Tuple, Union

import torch

Tensors = Union[torch.Tensor, Sequence[torch.Tensor]]
Stages = Union[torch.nn.Sequential, Mapping[str, Callable[..., Any]], Sequence[Callable[..., Any]]]
StageFunction = Callable[[List[torch.Tensor]], List[torch.Tensor]]


def tensors_in(value: Any, what: str) -> List[torch.Tensor]:
    if value is None:
        return []
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            cure = "; give train_batch() its iter() for the next batch" if isinstance(tensor, torch.utils.data.DataLoader) else ""
            raise TypeError(f"{what}: there is a {type(tensor).__name__} where a tensor has to be; allowed are a tensor and a "
                            f"tuple of tensors{cure}")
    return tensors


def one_or_all(tensors: Sequence[torch.Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _in_a_row(layers: Sequence[Callable[..., Any]], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def stage_function(parts: Sequence[Callable[..., Any]], stage: int, are_layers: bool) -> StageFunction:
    """Layers hand on what they return, as in a Sequential; a stage gets its inputs one by one. It keeps these parts alone: the
    layers of other ranks may go."""
    what = f"what stage {stage} has returned"
    if are_layers:
        return lambda inputs: tensors_in(_in_a_row(parts, one_or_all(inputs)), what)
    return lambda inputs: tensors_in(parts[0](*inputs), what)


class Parts:
    """The stages or layers of the unsplit model, by their names; what is not built yet is built when it is asked for."""

    def __init__(self, stages: Stages, are_layers: bool) -> None:
        pairs: Iterable[Tuple[str, Any]]
        if isinstance(stages, torch.nn.Sequential):
            if type(stages).forward is not torch.nn.Sequential.forward:
                raise TypeError(f"stages is a {type(stages).__name__} with a forward() of its own, which stages do not call: give "
                                "its layers as a list, and make what it does beside them a layer")
            pairs = stages._modules.items()
        elif isinstance(stages, Mapping):
            pairs = stages.items()
        elif isinstance(stages, (list, tuple)):
            pairs = ((str(number), stage) for number, stage in enumerate(stages))
        else:
            raise TypeError(f"stages is a {type(stages).__name__}; it must be a torch.nn.Sequential, or a list or dictionary of "
                            "functions that make a stage each")
        self.are_layers = are_layers
        self._makers: Dict[str, Any] = dict(pairs)
        self.names = list(self._makers)
        for name, make in self._makers.items():
            if not callable(make):
                raise TypeError(f"stage {name!r} is a {type(make).__name__}; it must be a function that makes a stage, or a "
                                "module")

    def make(self, number: int) -> Callable[..., Any]:
        maker = self._makers[self.names[number]]
        made: Callable[..., Any] = maker if isinstance(maker, torch.nn.Module) else maker()
        if not callable(made):
            raise TypeError(f"the factory of stage {self.names[number]!r} has made a {type(made).__name__}; it has to make a "
                            "module, or another function of tensors")
        return made

    # ---- tied parameters ----

    def number_of(self, parameter: str) -> int:
        layer = parameter.partition(".")[0]
        if layer not in self.names:
            raise ValueError(f"ties: there is no layer {layer!r} for {parameter!r}; there are {', '.join(self.names)}")
        return self.names.index(layer)

    def numbered(self, parameter: str) -> str:
        """The library's name of a parameter, which has a number in the place of the layer's name."""
        return f"{self.number_of(parameter)}.{parameter.partition('.')[2]}"

    def ties_between(self, ties: Sequence[Sequence[str]], begins: Sequence[int]) -> List[List[str]]:
        """Those of several stages, each by one name a stage."""
        between = []
        for tie in ties:
            by_stage = {bisect.bisect(begins, self.number_of(name)): name for name in reversed(tie)}
            if len(by_stage) > 1:
                between.append([self.numbered(name) for name in tie if name in by_stage.values()])
        return between

    def refuse_untied(self, ties: Sequence[Sequence[str]], begins: Sequence[int]) -> None:
        """Each rank would train its own copy of a parameter that stages share, and nothing would notice."""
        twins: Dict[int, List[str]] = {}
        for layer, made in self._makers.items():
            if isinstance(made, torch.nn.Module):
                for rest, parameter in made.named_parameters():
                    twins.setdefault(id(parameter), []).append(f"{layer}.{rest}")
        for names in twins.values():
            stages = self._stages_of(names, begins)
            if len(stages) > 1 and all(self._stages_of([n for n in tie if n in names], begins) != stages for tie in ties):
                raise ValueError(f"{names[0]!r} and {names[-1]!r} are one parameter in the model and lie in different stages; "
                                 "give the pipeline the ties between them")

    def _stages_of(self, names: Sequence[str], begins: Sequence[int]) -> Set[int]:
        return {bisect.bisect(begins, self.number_of(name)) for name in names}

    # ---- weights ----

    def weights(self, partition: str, sample: Any) -> List[float]:
        # Layers that are built to be looked at change no layer that is built to be trained.
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            if partition == "parameters":
                return [self._parameters_of(number) for number in range(len(self.names))]
            if partition == "time":
                return self._times(one_or_all(tensors_in(sample, "sample")))
        return [1.0] * len(self.names)

    def _parameters_of(self, number: int) -> float:
        with torch.device("meta"):  # which takes no memory
            made = self.make(number)
        parameters = made.parameters() if isinstance(made, torch.nn.Module) else ()
        return float(sum(parameter.numel() for parameter in parameters))

    def _times(self, value: Any) -> List[float]:
        times = []
        for number in range(len(self.names)):
            layer = copy.deepcopy(self.make(number))  # running statistics stay what they are
            runs = []
            for _ in range(4):  # the first one also prepares
                given = [tensor.detach().requires_grad_(tensor.is_floating_point()).clone()  # no leaf: it may be changed in place
                         for tensor in tensors_in(value, "a layer")]
                begin = _now(given)
                returned = layer(one_or_all(given))
                made = tensors_in(returned, f"what layer {self.names[number]!r} has returned")
                roots = [tensor for tensor in made if tensor.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
                runs.append(_now(made) - begin)
            times.append(sorted(runs[1:])[1])
            value = one_or_all([tensor.detach() for tensor in made])
        return times


def _now(tensors: Sequence[torch.Tensor]) -> float:
    for tensor in tensors:
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
