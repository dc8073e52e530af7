// The settings on train_resnet's command line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>

#include "flags.h"
#include "images/image.h"

namespace resnet {

constexpr char kHelp[] =
    "train_resnet: trains a ResNet on images, synthetic ones if there is no --data.\n"
    "  --data DIR         a folder with one folder of images a class: %s\n"
    "  --validation DIR   the same, with the same classes, to test on\n"
    "  --model NAME       resnet50 or resnet18 (resnet50)\n"
    "  --device NAME      cpu, cuda, or auto: cuda if every rank has a GPU of its own (auto)\n"
    "  --dtype TYPE       of the forward pass: float32 or bfloat16 (float32)\n"
    "  --epochs N         passes over the images (90)\n"
    "  --steps N          ends an epoch after N steps (0: all images)\n"
    "  --batch-size N     images in a batch of one rank (64)\n"
    "  --image-size N     pixels a side, 32 to 4096 (224)\n"
    "  --lr X             learning rate for 256 images a step; scaled to those of all ranks (0.1)\n"
    "  --warmup N         epochs in which it grows from that of one rank, at most a fifth of all "
    "(5)\n"
    "  --workers N        threads of a rank that read images (2)\n"
    "  --images N         synthetic images in an epoch (12800)\n"
    "  --classes N        of the synthetic images (1000)\n"
    "  --seed N           of the order, the cuts and the initial weights (1)\n"
    "  --checkpoint DIR   saves the run in this folder after every epoch\n"
    "  --resume           goes on with what --checkpoint has saved\n"
    "  --stop-after N     ends after N epochs, for a job that has only so much time (0: never)\n"
    "  --help             this text\n"
    "Options of the library are given as --sirtaki-name=value.\n";

struct Settings {
  std::string data;
  std::string validation;
  std::string model = "resnet50";
  std::string device = "auto";
  std::string dtype = "float32";
  std::int64_t epochs = 90;
  std::int64_t steps = 0;
  std::int64_t batch_size = 64;
  std::int64_t image_size = 224;
  double lr = 0.1;
  std::int64_t warmup = 5;
  std::int64_t workers = 2;
  std::int64_t images = 12800;
  std::int64_t classes = 1000;
  std::int64_t seed = 1;
  std::string checkpoint;
  bool resume = false;
  std::int64_t stop_after = 0;
  bool help = false;
};

inline Settings parse_arguments(int argc, char** argv) {
  using examples::parse_choice;
  using examples::parse_count;
  Settings settings;
  using Value = const std::string&;
  const examples::Flags flags = {
      {"--data", [&](Value, Value v) { settings.data = v; }},
      {"--validation", [&](Value, Value v) { settings.validation = v; }},
      {"--model",
       [&](Value f, Value v) {
         settings.model = parse_choice(f, v, {"resnet18", "resnet50"});
       }},
      {"--device",
       [&](Value f, Value v) {
         settings.device = parse_choice(f, v, {"cpu", "cuda", "auto"});
       }},
      {"--dtype",
       [&](Value f, Value v) {
         settings.dtype = parse_choice(f, v, {"float32", "bfloat16"});
       }},
      {"--epochs", [&](Value f, Value v) { settings.epochs = parse_count(f, v, 1); }},
      {"--steps", [&](Value f, Value v) { settings.steps = parse_count(f, v, 0); }},
      {"--batch-size", [&](Value f, Value v) { settings.batch_size = parse_count(f, v, 2); }},
      {"--image-size",
       [&](Value f, Value v) { settings.image_size = parse_count(f, v, 32, 4096); }},
      {"--lr", [&](Value f, Value v) { settings.lr = examples::parse_positive(f, v); }},
      {"--warmup", [&](Value f, Value v) { settings.warmup = parse_count(f, v, 0); }},
      {"--workers", [&](Value f, Value v) { settings.workers = parse_count(f, v, 0); }},
      {"--images", [&](Value f, Value v) { settings.images = parse_count(f, v, 1); }},
      {"--classes", [&](Value f, Value v) { settings.classes = parse_count(f, v, 1); }},
      {"--seed", [&](Value f, Value v) { settings.seed = parse_count(f, v, 0); }},
      {"--checkpoint", [&](Value, Value v) { settings.checkpoint = v; }},
      {"--stop-after", [&](Value f, Value v) { settings.stop_after = parse_count(f, v, 0); }},
  };
  examples::parse_flags(
      argc, argv, flags,
      {{"--help", &settings.help}, {"-h", &settings.help}, {"--resume", &settings.resume}});
  if (settings.resume && settings.checkpoint.empty()) {
    throw examples::UsageError(
        "--resume needs --checkpoint DIR, where it finds the run to go on with");
  }
  if (!settings.validation.empty() && settings.data.empty()) {
    throw examples::UsageError("--validation needs --data DIR, with the images to train on");
  }
  return settings;
}

// The settings that must be the same on all ranks, a line each. Folders are not among them: they
// may lie elsewhere on another host.
inline std::string describe(const Settings& settings) {
  const auto given = [](bool is) { return is ? "given" : "not given"; };
  std::ostringstream text;
  text << "--data " << given(!settings.data.empty()) << "\n--validation "
       << given(!settings.validation.empty()) << "\n--model " << settings.model << "\n--device "
       << settings.device << "\n--dtype " << settings.dtype << "\n--epochs " << settings.epochs
       << "\n--steps " << settings.steps << "\n--batch-size " << settings.batch_size
       << "\n--image-size " << settings.image_size << "\n--lr " << settings.lr << "\n--warmup "
       << settings.warmup << "\n--images " << settings.images << "\n--classes " << settings.classes
       << "\n--seed " << settings.seed << "\n--checkpoint " << given(!settings.checkpoint.empty())
       << "\n--resume " << given(settings.resume) << "\n--stop-after " << settings.stop_after
       << "\n--help " << given(settings.help) << "\n";
  return text.str();
}

inline void print_help() {
  std::string formats = "PPM";
  if (examples::decodes_jpeg) formats += ", JPEG";
  if (examples::decodes_png) formats += ", PNG";
  std::printf(kHelp, formats.c_str());
}

}  // namespace resnet
