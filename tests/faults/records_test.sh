#!/usr/bin/env bash
# What the ranks leave behind when something goes wrong, and what sirtakirun --explain makes of it.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
sirtakirun=${2:-}
[ -x "$sirtakirun" ] || { echo 'SKIPPED: built without sirtakirun' >&2; exit 77; }
folder=$(mktemp -d)
trap 'clean_up; rm -rf "$folder"' EXIT
options=(--sirtaki-ping-interval=0.2 --sirtaki-stall-warning=0.5)

# recorded NAME FLAGS RANKS WHAT VICTIM [OPTION...]: a run in the background, with a folder of records of its name.
recorded() { losing "$@" "${options[@]}" --sirtaki-flight-records="$folder/$1"; }
explained() {
  lost "$1"
  "$sirtakirun" --explain "$folder/$1" >"$folder/text" || fail 'no explanation'
  cat "$folder/text"
}
says() { grep -qE "$1" "$folder/text" || fail "the explanation does not say '$1'"; }

# Found with the first warning, when the ranks have been quiet for long enough to be told apart from busy ones.
losing swaps "" 3 swaps 1 --sirtaki-peer-timeout=30 --sirtaki-stall-limit=60 --sirtaki-stall-warning=2 \
  --sirtaki-flight-records="$folder/swaps"
recorded absent "" 3 absent 1 --sirtaki-peer-timeout=30 --sirtaki-stall-limit=12
survive=$(flag_to_survive) || survive=
[ -z "$survive" ] || recorded killed "$survive" 3 killed 1 --sirtaki-peer-timeout=12
recorded stopped "" 3 stopped 1 --sirtaki-peer-timeout=12
# One that would go on: it is for SIGTERM.
recorded terminated "" 2 absent 1 --sirtaki-peer-timeout=100 --sirtaki-timeline="$folder/traces"

# --- the order of calls differs at one of three ranks: one sentence ---
explained swaps
says '^The group failed: mismatch: ranks wait for each other'
says '^The ranks call in a different order in the world: ranks 0, 2 called all-reduce.*"step6" \(call 7\) where rank 1 called all-reduce.*"step7" \(call 7\), and each side waits for the other.s\.$'

# --- a rank that submits nothing ---
explained absent
says '^The group failed: .*"step5" has waited .* for rank 1, longer than stall_limit'
says '^Ranks 0, 2 wait in all-reduce.*"step5" of the world for .*; rank 1 has not called it\.$'
says '^  Rank 1 on .* made its last call there, "step4" \(call 5\), .*and waits for nobody: it is in the program.s own code\.$'

# --- a rank that is gone, and one that stands still until it is ended with the others ---
if [ -n "$survive" ]; then
  explained killed
  says '^Records of ranks 0, 2 of 3; rank 1 has left none'
  says '^The group failed: .*rank 1 is lost'
fi
explained stopped
says '^The group failed: .*rank 1 is lost'
says '^Ranks 0, 2 wait in all-reduce.*"step5" of the world'

# --- SIGTERM, and a run that was cut off ---
within 90 grep -q '"step5".*not submitted by rank 1' "$runs/terminated" || fail 'rank 1 is not waited for'
process=$(sed -n 's/^rank 0 is process \([0-9]*\)$/\1/p' "$runs/terminated")
kill -TERM "$process" || fail 'rank 0 is not there'
lost terminated
grep -q '"why":"SIGTERM"' "$folder/terminated/flight-0.json" || fail 'no record of SIGTERM'
for rank in 0 1; do
  python3 -c 'import json, sys; json.load(open(sys.argv[1]))' "$folder/traces/rank-$rank.json" || fail "the timeline of rank $rank"
done
grep -q step5 "$folder/traces/rank-0.json" || fail 'SIGTERM cuts off the end of the timeline'
