#!/usr/bin/env bash
# gpu_rehearsal.sh: makes the bundle for a machine with a GPU and runs all that is run there, in a root that is as bare as that
# machine: no network, no CUDA, no MPI and none of the libraries that the bundle brings; its Python has the torch of .venv. The GPU
# alone is missing, and each step that needs one has to say so. Needs root, nvcc, and what `bootstrap.sh --benchmarks` installs;
# code 77 means that it cannot run here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cannot() { printf 'gpu_rehearsal.sh: %s\n' "$*"; exit 77; }
[ "$(id -u)" = 0 ] || cannot "makes mounts, which only root may"
[ -d .venv-bench ] || cannot "no Python here imports torch: bash bootstrap.sh --cuda --benchmarks"
bash benchmarks/gpu/bundle.sh build/gpu

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{usr,etc,proc,dev,tmp,run,root,out,repo/build,opt/bin,opt/torch}
for folder in bin sbin lib lib64; do [ ! -e "/$folder" ] || ln -s "usr/$folder" "$root/$folder"; done
git ls-files -co --exclude-standard -z | xargs -0 -I{} sh -c '[ ! -f "$1" ] || printf "%s\\0" "$1"' _ {} |
  tar --null -T - -cf - | tar -C "$root/repo" -xf -
cp -r build/gpu "$root/repo/build/"
cp -r .venv-bench "$root/opt/bench"
python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix, sys.base_prefix + "/bin/python3", sys.path[-1])')
read -r prefix python packages <<<"$python"
cat >"$root/opt/bin/python3" <<END
#!/bin/sh
export PYTHONPATH=/opt/torch:/opt/bench/packages LD_LIBRARY_PATH=/opt/bench/stubs\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
exec $python "\$@"
END
chmod +x "$root/opt/bin/python3"

unshare --mount --pid --net --ipc --uts --fork --kill-child bash -c '
  set -euo pipefail
  root=$1 prefix=$2 packages=$3
  mount --make-rprivate /
  mount --rbind /usr "$root/usr"
  mount --rbind /etc "$root/etc"
  mount --rbind /dev "$root/dev"
  mount -t proc proc "$root/proc"
  mount -t tmpfs tmpfs "$root/dev/shm"
  case $prefix in
    /usr | /usr/*) ;;
    *) mkdir -p "$root$prefix" && mount --bind "$prefix" "$root$prefix" ;;
  esac
  mount --bind "$packages" "$root/opt/torch"
  ip link set lo up
  for folder in "$root"/usr/local/cuda* "$root"/usr/lib/*/openmpi; do
    if [ -d "$folder" ] && [ ! -L "$folder" ]; then mount -t tmpfs tmpfs "$folder"; fi
  done
  for name in mpirun.openmpi orterun mpiexec.hydra $(cd "$root/repo/build/gpu" && ls lib openmpi/lib); do
    for file in "$root"/usr/bin/$name "$root"/usr/lib/*-linux-gnu/$name; do
      if [ -f "$file" ]; then mount --bind /dev/null "$(readlink -f "$file")"; fi
    done
  done
  exec chroot "$root" env -i -C /repo PATH=/opt/bin:/usr/sbin:/usr/bin OUT=/out bash -c "
    for part in 1 2 3; do bash benchmarks/gpu/hour.sh \$part || exit; done
    ! SIRTAKI_TEST_GPU=required bash benchmarks/gpu/hour.sh --out /out/required 1 \"test-*\" || exit
    ! $4 -B benchmarks/gpu/hour.py --out /out/without 1 || exit
    exec python3 -B - <<END
import sys
sys.path.insert(0, \"benchmarks/gpu\")
import hour
from steps import Step
machine = hour.Machine(\"build/gpu\")
hangs = Step(\"ranks-that-hang\", 5, [\"bash\", \"tests/support/mpirun.sh\", \"2\", \"sleep\", \"98765\"])
print(hour.run_part(\"4\", [hangs], machine, \"/out\", \"/tmp\", 60))
END
  "' _ "$root" "$prefix" "$packages" "$python" </dev/null

cat "$root"/out/part*.md
mkdir "$root/logs"
tar -C "$root/logs" -xf "$root/out/part4-logs.tar.gz"
python3 - "$root/out" "$root/logs" <<'PYTHON'
import glob
import json
import sys

out, logs = sys.argv[1:]
steps = [step for path in sorted(glob.glob(f"{out}/part[123].json")) for step in json.load(open(path))["steps"]]
assert len(steps) > 40, len(steps)
for step in steps:
    state, says = step["state"], step["says"]
    assert state in ("ok", "NO GPU") or (state == "SKIP" and says.startswith("there is no ")), step
    assert state == "ok" or says, step
assert [step["state"] for step in steps[:2]] == ["ok", "ok"], "machine and libraries"
required = json.load(open(f"{out}/required/part1.json"))["steps"]
assert len(required) == 5 and {step["state"] for step in required} == {"FAILED"}, required
# Without LibTorch, what needs none of it is begun all the same.
without = {step["name"]: step for step in json.load(open(f"{out}/without/part1.json"))["steps"]}
assert {name for name, step in without.items() if step["state"] == "NO GPU"} == {"test-device", "pack"}, without
assert without["libraries"]["state"] == "FAILED" and without["test-training_mpi_test-1"]["says"].startswith("missing for"), without
hung = json.load(open(f"{out}/part4.json"))["steps"]
assert [step["state"] for step in hung] == ["HUNG"], hung
stacks = open(f"{logs}/ranks-that-hang.log").read()
assert stacks.count(": sleep 98765") == 2, "the stacks of the two ranks:\n" + stacks
print(f"gpu_rehearsal.sh: {len(steps)} steps, each as it has to be without a GPU")
PYTHON
