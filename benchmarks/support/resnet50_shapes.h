// The shapes of ResNet-50's 161 parameters (25.6 M floats), in the order of the model.
#pragma once

#include <cstdint>
#include <vector>

namespace sirtaki::benchmarks {

inline std::vector<std::vector<std::int64_t>> ResNet50Shapes() {
  std::vector<std::vector<std::int64_t>> shapes;
  const auto convolution = [&](std::int64_t out, std::int64_t in, std::int64_t kernel) {
    shapes.push_back({out, in, kernel, kernel});
    shapes.push_back({out});  // batch normalisation: weight and bias
    shapes.push_back({out});
  };
  convolution(64, 3, 7);
  std::int64_t in = 64;
  const int blocks[] = {3, 4, 6, 3};
  for (int stage = 0; stage < 4; ++stage) {
    const std::int64_t width = std::int64_t{64} << stage;
    for (int block = 0; block < blocks[stage]; ++block) {
      convolution(width, in, 1);
      convolution(width, width, 3);
      convolution(4 * width, width, 1);
      if (block == 0) convolution(4 * width, in, 1);
      in = 4 * width;
    }
  }
  shapes.push_back({1000, 2048});
  shapes.push_back({1000});
  return shapes;
}

}  // namespace sirtaki::benchmarks
