"""This module has Horovod's name for sirtaki.torch.process_sets."""

from sirtaki.torch.process_sets import *  # noqa: F403
from sirtaki.torch.process_sets import __all__
