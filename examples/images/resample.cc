#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "images/image.h"

namespace examples {
namespace {

constexpr float kMean[kColours] = {0.485f, 0.456f, 0.406f};
constexpr float kDeviation[kColours] = {0.229f, 0.224f, 0.225f};

// The weights with which one pixel of the result takes from a line of `length` pixels.
struct Taps {
  int first = 0;
  std::vector<float> weights;
};

std::vector<Taps> make_taps(double from, double extent, int length, int side) {
  const double scale = extent / side;
  const double reach = std::max(scale, 1.0);  // a smaller one would leave pixels out
  std::vector<Taps> all(static_cast<std::size_t>(side));
  for (int i = 0; i < side; ++i) {
    const double centre = from + (i + 0.5) * scale;
    Taps& taps = all[static_cast<std::size_t>(i)];
    taps.first = std::clamp(static_cast<int>(std::floor(centre - reach)), 0, length - 1);
    const int last =
        std::clamp(static_cast<int>(std::ceil(centre + reach)), taps.first, length - 1);
    double sum = 0;
    for (int j = taps.first; j <= last; ++j) {
      const double weight = std::max(0.0, 1 - std::abs(j + 0.5 - centre) / reach);
      taps.weights.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (float& weight : taps.weights) weight /= static_cast<float>(sum);
  }
  return all;
}

}  // namespace

void resample(const Image& image, const Box& box, int side, bool flip, float* planes) {
  const std::vector<Taps> across = make_taps(box.x, box.width, image.width, side);
  const std::vector<Taps> down = make_taps(box.y, box.height, image.height, side);
  const auto width = static_cast<std::size_t>(side);
  // First the lines that are needed are scaled to their new width, then their columns.
  const int top = down.front().first;
  const int bottom = down.back().first + static_cast<int>(down.back().weights.size());
  std::vector<float> lines(static_cast<std::size_t>(bottom - top) * width * kColours);
  float* to = lines.data();
  for (int y = top; y < bottom; ++y) {
    const std::uint8_t* line = image.pixels.data() + static_cast<std::size_t>(y) *
                                                         static_cast<std::size_t>(image.width) *
                                                         kColours;
    for (std::size_t x = 0; x < width; ++x) {
      const Taps& taps = across[flip ? width - 1 - x : x];
      const std::uint8_t* from = line + static_cast<std::size_t>(taps.first) * kColours;
      for (int colour = 0; colour < kColours; ++colour) {
        float sum = 0;
        for (std::size_t i = 0; i < taps.weights.size(); ++i) {
          sum += taps.weights[i] * from[i * kColours + static_cast<std::size_t>(colour)];
        }
        *to++ = sum;
      }
    }
  }
  for (std::size_t y = 0; y < width; ++y) {
    const Taps& taps = down[y];
    const float* from =
        lines.data() + static_cast<std::size_t>(taps.first - top) * width * kColours;
    for (std::size_t x = 0; x < width; ++x) {
      for (std::size_t colour = 0; colour < kColours; ++colour) {
        float sum = 0;
        for (std::size_t i = 0; i < taps.weights.size(); ++i) {
          sum += taps.weights[i] * from[(i * width + x) * kColours + colour];
        }
        planes[(colour * width + y) * width + x] = (sum / 255 - kMean[colour]) / kDeviation[colour];
      }
    }
  }
}

}  // namespace examples
