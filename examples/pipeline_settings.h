// The settings of the programs that come in two versions: unsplit, and as a pipeline.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "flags.h"

namespace examples {

struct MicroBatchSettings {
  std::int64_t batch_size = 32;
  std::int64_t image_size = 64;    // pixels on each side
  std::int64_t micro_batches = 4;  // of a batch
  std::int64_t steps = 10;

  MicroBatchSettings& parse(int argc, char** argv) {
    using Value = const std::string&;
    try {
      parse_flags(
          argc, argv,
          {{"--batch-size", [&](Value f, Value v) { batch_size = parse_count(f, v, 1); }},
           {"--image-size", [&](Value f, Value v) { image_size = parse_count(f, v, 32); }},
           {"--micro-batches", [&](Value f, Value v) { micro_batches = parse_count(f, v, 1); }},
           {"--steps", [&](Value f, Value v) { steps = parse_count(f, v, 1); }}},
          {});
    } catch (const UsageError& error) {
      std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
      std::exit(2);
    }
    return *this;
  }
};

}  // namespace examples
