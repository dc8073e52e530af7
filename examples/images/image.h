// Reads pictures from files into memory. Knows nothing of LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace examples {

// Red, green and blue of each pixel, row after row from the top.
struct Image {
  int width = 0;
  int height = 0;
  std::vector<std::uint8_t> pixels;
};

constexpr int kColours = 3;

// Reads a PPM (P6), JPEG or PNG file, told apart by content, not by name. Throws a
// std::runtime_error that begins with the path. Any thread may call it.
Image read_image(const std::string& path);

// Decoders of whole files; they throw a std::runtime_error that says what is wrong. If the program
// was built without the library for a format, its decoder always throws, and `decodes_…` is false.
Image decode_ppm(const std::vector<std::uint8_t>& file);
Image decode_jpeg(const std::vector<std::uint8_t>& file);
Image decode_png(const std::vector<std::uint8_t>& file);
extern const bool decodes_jpeg;
extern const bool decodes_png;

// Makes a black image of this size. Throws std::runtime_error for a size that no picture has.
Image make_image(std::int64_t width, std::int64_t height);

// A part of an image, in pixels, which may begin and end within one.
struct Box {
  double x = 0;
  double y = 0;
  double width = 0;
  double height = 0;
};

// Scales `box` of the image to side x side, each pixel the mean of what it covers with a weight
// that falls off linearly; mirrored if `flip`. Writes 3 planes (red, green, blue) of side * side
// numbers: (value / 255 - mean) / deviation, with the mean and deviation that ImageNet's colours
// have.
void resample(const Image& image, const Box& box, int side, bool flip, float* planes);

}  // namespace examples
