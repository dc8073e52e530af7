#!/usr/bin/env bash
# train_resnet_test.sh PROGRAM [SIRTAKIRUN]: train_resnet on 2 ranks, on synthetic images and on a folder of images; and
# what it says of bad ones.
set -euo pipefail
program=$1
sirtakirun=${2:-}
. "$(dirname "${BASH_SOURCE[0]}")/support.sh"

# together ARGUMENT...: on 2 ranks, a small net on small images.
small=(--model resnet18 --image-size 32 --batch-size 4 --warmup 1 --device cpu)
together() {
  if [ -z "$sirtakirun" ]; then
    run 2 "${small[@]}" "$@"
    return
  fi
  code=0
  timeout -k 5 200 "$sirtakirun" -np 2 --oversubscribe --launcher "${MPIEXEC:-$(command -v mpirun)}" "$program" "${small[@]}" "$@" \
    >"$scratch/output" 2>&1 </dev/null || code=$?
}
# The variables of the tests' own mpirun, if they run in one, are not for the launcher.
for variable in $(compgen -e | grep -E '^(OMPI|PMIX|PMI|PRTE)_' || true); do unset "$variable"; done

# at_least PERCENT WORDS: of what stands behind the words.
at_least() {
  sed -n "s|.*$2 \([0-9.]*\) %.*|\1|p" "$scratch/output" | awk -v least="$1" '$1 >= least { good = 1 } END { exit !good }' ||
    fail "$2 below $1 %"
}

result() { sed -n 's/.*identical on all ranks, //p' "$scratch/output"; }

# --- synthetic images: it learns, and goes on where it stopped ---
synthetic=(--images 64 --classes 2 --epochs 3 --seed 3)
together "${synthetic[@]}"
expect 0 "synthetic images" "resnet18, float32, on cpu; 64 images of 2 classes; 2 ranks, batches of 4 each" "epoch   3/3" \
  "images per second over all ranks" "parameters identical on all ranks"
at_least 80 "epoch   3/3: .*, accuracy"
whole=$(result)
goes_on() {
  together "${synthetic[@]}" --workers 0 --checkpoint "$scratch/run" --resume --stop-after 2
  expect 0 "without threads that read images" "no checkpoint yet" "epoch   2/3"
  together "${synthetic[@]}" --checkpoint "$scratch/run" --resume
  expect 0 "the third epoch" "resumed after epoch 2" "epoch   3/3"
  [ "$(result)" = "$whole" ] || fail "stopped, and without threads that read images: not the same result, $whole"
}

# --- a folder of images ---
python3 - "$scratch" <<'PYTHON'
import base64
import os
import random
import struct
import sys
import zlib

folder = os.path.join(sys.argv[1], "images")
colours = {"blue": (30, 60, 200), "red": (200, 60, 30)}
dice = random.Random(1)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def ppm(width, height, values):
    return b"P6\n# made by a test\n%d %d\n255\n" % (width, height) + bytes(values)


def png(width, height, values):
    lines = b"".join(b"\0" + bytes(values[3 * width * y:3 * width * (y + 1)]) for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) +
            chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b""))


def values(colour, pixels):
    return [max(0, min(255, value + dice.randint(-25, 25))) for _ in range(pixels) for value in colour]


# 8 x 8 pixels of (198, 101, 50).
JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABALDA4MChAODQ4SERATGCgaGBYWGDEjJR0oOjM9PDkzODdASFxOQERXRTc4UG1RV19iZ2hnPk1xeXBk"
    "eFxlZ2P/2wBDARESEhgVGC8aGi9jQjhCY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2P/wAARCAAIAAgD"
    "ASIAAhEBAxEB/8QAFQABAQAAAAAAAAAAAAAAAAAAAAL/xAAUEAEAAAAAAAAAAAAAAAAAAAAA/8QAFAEBAAAAAAAAAAAAAAAAAAAABf/EABQRAQAA"
    "AAAAAAAAAAAAAAAAAAD/2gAMAwEAAhEDEQA/AJAFmX//2Q==")

for name, colour in colours.items():
    for i in range(12):
        size = dice.randint(20, 60), dice.randint(20, 60)
        write(os.path.join(folder, "ppm", name, f"{i}.ppm"), ppm(*size, values(colour, size[0] * size[1])))
    for i in range(4):
        write(os.path.join(folder, "val", name, f"{i}.ppm"), ppm(40, 30, values(colour, 1200)))
        write(os.path.join(folder, "png", name, f"{i}.PNG"), png(30, 40, values(colour, 1200)))
        write(os.path.join(folder, "jpeg", name, f"{i}.jpeg"), JPEG)
        write(os.path.join(folder, "cut-ppm", name, f"{i}.ppm"), ppm(9, 9, values(colour, 80)))
    write(os.path.join(folder, "ppm", name, "notes.txt"), b"not an image")
    os.mkfifo(os.path.join(folder, "ppm", name, "pipe.jpg"))
    os.symlink("nowhere", os.path.join(folder, "ppm", name, "broken.jpg"))
    for i in range(12):
        write(os.path.join(folder, "renamed", name, f"{i + 1}.ppm"), ppm(1, 1, colour))
    write(os.path.join(folder, "cut-png", name, "a.png"), png(30, 40, values(colour, 1200))[:-40])
    write(os.path.join(folder, "cut-jpeg", name, "a.jpg"), JPEG[:-60])
    write(os.path.join(folder, "text", name, "a.png"), b"not an image")
    write(os.path.join(folder, "few", name, "a.ppm"), ppm(1, 1, colour))
    write(os.path.join(folder, "other", name + "ish", "a.ppm"), ppm(1, 1, colour))
os.makedirs(os.path.join(folder, "ppm-and-nothing", "nothing"))
PYTHON
images=$scratch/images
folder() {
  # Few images, and batch norm's averages over few batches: which epochs end well differs from processor to processor.
  together --data "$images/ppm" --validation "$images/val" --epochs 20 --lr 0.01
  expect 0 "a folder" "24 images of 2 classes" "epoch  20/20" "test accuracy" "parameters identical on all ranks"
  at_least 75 "epoch  1[6-9]/20: .*, test accuracy"
}
# One of the two by seed, with SIRTAKI_TEST_SCALE=full both and more.
for check in $(sample 1 goes_on folder); do "$check"; done
if full; then
  together "${synthetic[@]}" --epochs 4 --dtype bfloat16 --checkpoint "$scratch/run" --resume
  expect 0 "one epoch more, in bfloat16" "bfloat16" "resumed after epoch 3" "epoch   4/4" "parameters identical on all ranks"
  run 0 "${small[@]}" --model resnet50 --images 8 --classes 3 --epochs 1 --steps 1
  expect 0 "ResNet-50 alone" "resnet50" "1 rank" "epoch   1/1"
fi
run 0 --help
expect 0 "--help" "--data DIR" "--device NAME" "PPM"
cp "$scratch/output" "$scratch/help"

# alone FOLDER: one rank on it, one batch of two.
alone() { run 0 "${small[@]}" --batch-size 2 --epochs 1 --data "$images/$1" "${@:2}"; }
for format in $(sample 1 PNG JPEG); do
  folder=$(echo $format | tr '[:upper:]' '[:lower:]')
  alone "$folder"
  if grep -q "PPM.*$format" "$scratch/help"; then
    expect 0 "$format" "8 images of 2 classes" "epoch   1/1"
    alone "cut-$folder"
    expect error "a $format that is cut off" "$images/cut-$folder/" "is a broken $format: "
  else
    expect error "$format, which is not read here" "$images/$folder/" "built without lib$folder"
  fi
done

# --- bad folders ---
# By seed three of them, with SIRTAKI_TEST_SCALE=full all.
cut_ppm() {
  together --data "$images/cut-ppm" --epochs 1
  expect error "a PPM that is cut off" "$images/cut-ppm/" ".ppm: is cut off: 9 x 9 pixels are not all there"
}
no_image() {
  alone text
  expect error "no image" "$images/text/" "a.png: is neither a PPM (P6), a JPEG nor a PNG"
}
missing() {
  together --data "$images/missing"
  expect error "a missing folder" "$images/missing: cannot be read: No such file"
}
empty_class() {
  alone ppm-and-nothing
  expect error "an empty class" "$images/ppm-and-nothing/nothing: a class without images"
}
no_classes() {
  alone few/red
  expect error "no classes" "$images/few/red: has no folders; one for each class is meant"
}
too_few() {
  together --data "$images/few"
  expect 2 "too few images" "2 images are too few for a batch of 4 on each of 2 ranks"
}
other_classes() {
  alone ppm --validation "$images/other"
  expect 2 "other classes to test on" "--validation has other classes than --data"
}
other_folder() {
  each_rank "--data $images/ppm" "--data $images/val" "${small[@]}"
  expect 2 "another folder on rank 1" "different images in --data: 24 images of 2 classes on rank 0, 8 images of 2 classes on rank 1"
}
other_images() {
  each_rank "--data $images/ppm" "--data $images/renamed" "${small[@]}"
  expect 2 "other images on rank 1" "24 images of 2 classes on rank 0, 24 images of 2 classes of other names on rank 1"
}
for check in $(sample 3 cut_ppm no_image missing empty_class no_classes too_few other_classes other_folder other_images); do "$check"; done

# --- its arguments ---
for bad in $(sample 2 "--batch-size=1" "--image-size=31" "--image-size=4097" "--dtype=float16" "--model=resnet34" "--device=gpu" "--workers=-1" "--lr=0"); do
  run 0 "$bad"
  expect 2 "$bad" "${bad%%=*} takes " "'${bad#*=}'"
done
run 0 --validation "$images/val"
expect 2 "--validation alone" "--validation needs --data DIR"
each_rank "--dtype float32" "--dtype bfloat16"
expect 2 "settings that differ" "the ranks have different settings: --dtype float32 on rank 0, --dtype bfloat16 on rank 1"

done_with "train_resnet"
