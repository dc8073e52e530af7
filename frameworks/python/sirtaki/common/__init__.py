"""These modules have the names that Horovod gives them."""
