#include "images/image.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {
namespace {

constexpr std::int64_t kMostPixels = std::int64_t{1} << 28;

std::vector<std::uint8_t> read_file(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot be opened: " + std::string(std::strerror(errno)));
  std::vector<std::uint8_t> file{std::istreambuf_iterator<char>(stream), {}};
  if (stream.bad()) throw std::runtime_error("cannot be read");
  return file;
}

bool begins(const std::vector<std::uint8_t>& file, const std::vector<std::uint8_t>& with) {
  return file.size() >= with.size() && std::equal(with.begin(), with.end(), file.begin());
}

// Reads a number of a PPM's header, and the one byte after it.
int header_number(const std::vector<std::uint8_t>& file, std::size_t* at, const char* what) {
  const auto byte = [&] { return *at < file.size() ? file[*at] : std::uint8_t{0}; };
  const auto blank = [&] { return byte() == ' ' || (byte() >= '\t' && byte() <= '\r'); };
  while (blank() || byte() == '#') {
    if (byte() == '#') {
      while (*at < file.size() && byte() != '\n') ++*at;
    }
    ++*at;
  }
  int number = 0;
  const std::size_t begin = *at;
  while (byte() >= '0' && byte() <= '9' && number < 10000000) {
    number = 10 * number + (byte() - '0');
    ++*at;
  }
  if (*at == begin || !blank()) {
    throw std::runtime_error(std::string("is no whole PPM: no ") + what + " in its header");
  }
  ++*at;
  return number;
}

}  // namespace

Image make_image(std::int64_t width, std::int64_t height) {
  if (width < 1 || height < 1 || width > kMostPixels / height) {
    throw std::runtime_error("has " + std::to_string(width) + " x " + std::to_string(height) +
                             " pixels; at least 1 and at most 2^28 are read");
  }
  Image image;
  image.width = static_cast<int>(width);
  image.height = static_cast<int>(height);
  image.pixels.resize(static_cast<std::size_t>(width * height) * kColours);
  return image;
}

Image decode_ppm(const std::vector<std::uint8_t>& file) {
  std::size_t at = 2;
  const int width = header_number(file, &at, "width");
  const int height = header_number(file, &at, "height");
  const int brightest = header_number(file, &at, "brightest value");
  if (brightest < 1 || brightest > 255) {
    throw std::runtime_error("is a PPM with values up to " + std::to_string(brightest) +
                             "; up to 255 are read");
  }
  // Before memory is taken for it: the header may say anything.
  if (std::int64_t{width} * height * kColours > static_cast<std::int64_t>(file.size() - at)) {
    throw std::runtime_error("is cut off: " + std::to_string(width) + " x " +
                             std::to_string(height) + " pixels are not all there");
  }
  Image image = make_image(width, height);
  for (std::uint8_t& value : image.pixels) {
    value = static_cast<std::uint8_t>(std::min<int>(file[at++], brightest) * 255 / brightest);
  }
  return image;
}

Image read_image(const std::string& path) {
  try {
    const std::vector<std::uint8_t> file = read_file(path);
    if (begins(file, {'P', '6'})) return decode_ppm(file);
    if (begins(file, {0xff, 0xd8})) return decode_jpeg(file);
    if (begins(file, {0x89, 'P', 'N', 'G'})) return decode_png(file);
    throw std::runtime_error(file.empty() ? "is empty" : "is neither a PPM (P6), a JPEG nor a PNG");
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

}  // namespace examples
