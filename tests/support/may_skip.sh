#!/usr/bin/env bash
# Tests that a machine may lack the means for, by their names: any other that is skipped counts as failed, in .ci/run and in
# tests/full.sh. To be sourced.
# shellcheck disable=SC2034  # the script that sources this reads it
may_skip='^(gpu\.|mpi\.huge_test|lint\.dockerfile|example\.(train_resnet_gpu|horovod_line)_test|bench\.memory)'
