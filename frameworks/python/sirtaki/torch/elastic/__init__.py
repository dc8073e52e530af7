"""Elastic training goes on after an error: it commits what is reached, and goes back to it when a collective has
failed, with the ranks that there are then.

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            ...
            state.epoch += 1
            state.commit()

    train(state)

Under `sirtakirun --elastic` ranks and hosts come and go: docs/elastic.md. Otherwise the number of ranks is fixed: when a
rank is lost for good the job ends, and `sirtakirun --max-restarts` starts it again from a checkpoint.
"""

from .running import is_elastic, reset, run
from .sampler import ElasticSampler
from .state import (LRSchedulerStateHandler, ModelStateHandler, ObjectState, OptimizerStateHandler, SamplerStateHandler,
                    State, StateHandler, TorchState, get_handler_registry, set_handler_registry)

__all__ = ["ElasticSampler", "LRSchedulerStateHandler", "ModelStateHandler", "ObjectState", "OptimizerStateHandler",
           "SamplerStateHandler", "State", "StateHandler", "TorchState", "get_handler_registry", "is_elastic",
           "reset", "run", "set_handler_registry"]
