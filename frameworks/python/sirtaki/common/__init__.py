"""Modules under the names that Horovod has for them."""
