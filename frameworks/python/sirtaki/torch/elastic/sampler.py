"""ElasticSampler is a sampler that knows which part of an epoch is done."""

from __future__ import annotations

import math
import random
from typing import Any, Dict, Iterator, List, Sized

import torch.utils.data

import sirtaki.torch as hvd


class ElasticSampler(torch.utils.data.Sampler):
    """Shares out the samples of an epoch that are not done yet, equally many to each rank; the last ones may be given
    twice.

    Put it into a TorchState, call record_batch() after each batch, and set_epoch() at the end of each epoch: then a
    training that is restored, or goes on from state_dict() with another number of ranks, goes on within the epoch. An
    iterator, which a data loader makes for each epoch, goes on with the shares that it began with.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0  # of all ranks together, in this epoch
        self.num_replicas = 1
        self.rank = 0
        self.remaining_indices: List[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: another order, nothing of it done. Call it after an epoch: called before one that was half
        done, it would do that half again."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has done a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> Dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shares out again what remains, among the ranks that there are now."""
        self.num_replicas = hvd.size()
        self.rank = hvd.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num:]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        remaining = self.remaining_indices
        places = range(self.rank, self.total_size, self.num_replicas)
        return iter([remaining[place % len(remaining)] for place in places])

    def __len__(self) -> int:
        return self.num_samples
