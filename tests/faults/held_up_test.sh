#!/usr/bin/env bash
# A rank that does not come, named with the tensor that the others wait for: by the warning, by --explain, by the
# advice at the end and in the merged timeline.
# shellcheck source=tests/faults/faults.sh
. "$(dirname "$0")/faults.sh"
sirtakirun=${2:-}
[ -x "$bindir/hold_up" ] && [ -x "$sirtakirun" ] || { echo 'SKIPPED: built without LibTorch or sirtakirun' >&2; exit 77; }
program=hold_up
folder=$(mktemp -d)
trap 'clean_up; rm -rf "$folder"' EXIT

records() { [ "$(find "$folder/records" -name 'flight-?.json' 2>/dev/null | wc -l)" = "$1" ]; }

SIRTAKI_TEST_SECONDS=200 bash "$here/../support/mpirun.sh" 3 "$bindir/hold_up" 1 "$folder/go" --sirtaki-stall-warning=4 \
  --sirtaki-timeline="$folder/traces" --sirtaki-flight-records="$folder/records" --sirtaki-summary \
  --sirtaki-metrics-file="$folder/metrics.csv" >"$output" 2>&1 &
job=$!
# On a busy machine rank 1 may be late before that, too.
warned() { sed '1,/^held up$/d' "$output" | grep -E 'warning.*not submitted by rank 1'; }
within 90 warned || fail 'no warning'
tensor=$(warned | sed -nE '$s/.*\[warning\].*the gradients of ("[^"]*").* have waited.* not submitted by rank 1.*/\1/p')
case $tensor in '"0.weight"' | '"0.bias"' | '"2.weight"' | '"2.bias"') ;; *) fail "the warning names no tensor: $tensor" ;; esac

# Until the records are of one moment, which a busy machine may not give at once.
explained() {
  rm -f "$folder"/records/flight-?.json
  for process in $(sed -n 's/^rank [0-9]* is process \([0-9]*\)$/\1/p' "$output"); do kill -USR1 "$process"; done
  within 90 records 3 || fail 'SIGUSR1 leaves no records of all ranks'
  "$sirtakirun" --explain "$folder/records" >"$folder/explained" || fail 'no explanation'
  cat "$folder/explained"
  grep -F "(the gradients of $tensor" "$folder/explained" |
    grep -qE '^Ranks 0, 2 wait in all-reduce of the 4 tensors of bucket .* rank 1 has not called it'
}
within 90 explained || fail "the explanation does not name rank 1 and $tensor"
bucket=$(sed -nE 's/^Ranks 0, 2 wait .*(bucket [0-9]+ of arena [0-9]+) .*/\1/p' "$folder/explained")
grep -qE '^Records of all 3 ranks \(SIGUSR1, [-0-9]+ [:0-9]+ UTC( to .*)?\)\.$' "$folder/explained" || fail 'not of all ranks'
grep -qE '^  Rank 1 on .*waits for nobody: it is in the program.s own code\.$' "$folder/explained" || fail 'not what rank 1 does'

touch "$folder/go"
wait "$job" || fail "hold_up ends with $?"
grep -qE '^The others wait for rank 1, up to [0-9]+ % of their time' "$output" || fail 'no advice about rank 1'
[ "$(grep -cE '^ +[012] +40 ' "$output")" = 3 ] || fail 'the table is not of all ranks'
for rank in 0 1 2; do
  tail -n 1 "$folder/metrics.$rank.csv" | grep -qE "^[0-9.]+,$rank,40," || fail "metrics of rank $rank"
done

"$sirtakirun" --merge-timelines "$folder/traces" | grep -qx "3 ranks in $folder/traces/timeline.json" || fail 'not merged'
python3 - "$folder/traces/timeline.json" "$bucket" "$tensor" <<'END' || fail 'the merged timeline does not show it'
import json, sys
events = json.load(open(sys.argv[1]))
bucket, tensor = sys.argv[2:]
held = max((e for e in events if e.get("name") == "held up"), key=lambda e: e["dur"])
assert held["pid"] == 2 and held["dur"] > 5e5, held
waits = {}
for begin in (e for e in events if e.get("cat") == "negotiate" and e["ph"] == "b"):
    end = next(e for e in events if e["ph"] == "e" and e["pid"] == begin["pid"] and e["id2"] == begin["id2"])
    if begin["ts"] < held["ts"] + held["dur"] < end["ts"]:
        waits.setdefault(begin["pid"], []).append(begin["name"].strip('"'))
assert set(waits) == {1, 3}, waits
assert all(bucket in names for names in waits.values()), (bucket, waits)
assert {e["pid"] for e in events if e["name"].startswith(f"{bucket} holds ") and tensor in e["name"]} == {1, 2, 3}
stalls = [e for e in events if e.get("cat") == "stall"]
assert any(bucket in e["name"] for e in stalls), stalls
END
