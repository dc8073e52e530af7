"""This module has Horovod's name for sirtaki.torch.process_sets."""

from sirtaki.torch.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    is_process_set_included,
    remove_process_set,
)

__all__ = [
    "ProcessSet",
    "add_process_set",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "is_process_set_included",
    "remove_process_set",
]
