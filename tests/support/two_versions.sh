#!/usr/bin/env bash
# A program in two versions, unsplit and as a pipeline. To be sourced; `fail` is the caller's.
#
#   few_changes UNSPLIT PIPELINE          at most ten lines of code in the one source are others in the other
#   same_training UNSPLIT PIPELINE NAME   the lines "step N: loss X" of two outputs tell of the same training, which learns

code_of() { sed -e '/^ *\/\//d' -e '/^"""/,/"""$/d' -e '/^ *$/d' "$1"; }

few_changes() {
  local side changed
  for side in '<' '>'; do
    changed=$(diff <(code_of "$1") <(code_of "$2") | grep -c "^$side") || true
    [ "$changed" -ge 1 ] && [ "$changed" -le 10 ] || fail "${2##*/}: $changed lines $side, not 1 to 10, are others than those of ${1##*/}"
  done
}

losses() { sed -n 's/.*\(step [0-9]*: loss\)/\1/p' "$1"; }   # sirtakirun says whose line it is

same_training() {
  paste <(losses "$1") <(losses "$2") |
    awk '{ d = $4 - $8; near = $4 > 0 && d < 1e-3 * $4 && -d < 1e-3 * $4 && $2 == $6; bad += !near
           if (NR == 1) first = $8
           last = $8 }
         END { exit !(NR >= 3 && !bad && last < 0.8 * first) }' ||
    fail "$3: not the losses of the unsplit program, which fall: $(paste -s -d ' ' "$1")"
}
