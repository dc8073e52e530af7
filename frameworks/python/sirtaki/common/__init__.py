"""What does not depend on torch; under the names that Horovod has for it."""
