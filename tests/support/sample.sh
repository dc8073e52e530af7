#!/usr/bin/env bash
# What a script runs of a long list: all of it with SIRTAKI_TEST_SCALE=full, else a sample. To be sourced.
#
#   full                      succeeds with SIRTAKI_TEST_SCALE=full
#   sample COUNT CHOICE...    prints COUNT of the choices, or with SIRTAKI_TEST_SCALE=full all of them, a line each and in
#                             the order given
#   SIRTAKI_TEST_SEED         the seed of the samples, which a test prints; set, it repeats them

SIRTAKI_TEST_SEED=${SIRTAKI_TEST_SEED:-$SRANDOM}
export SIRTAKI_TEST_SEED
printf 'SIRTAKI_TEST_SEED=%s\n' "$SIRTAKI_TEST_SEED"

full() { [ "${SIRTAKI_TEST_SCALE:-}" = full ]; }

# In a subshell, each time from the same seed: what one sample has does not depend on those before it.
sample() (
  count=$1
  shift
  RANDOM=$SIRTAKI_TEST_SEED
  left=$#
  for choice in "$@"; do   # each with the chance that is left
    if full || [ $((RANDOM % left)) -lt "$count" ]; then
      printf '%s\n' "$choice"
      count=$((count - 1))
    fi
    left=$((left - 1))
  done
)
