#include <png.h>

#include <stdexcept>
#include <string>

#include "images/image.h"

namespace examples {

const bool decodes_png = true;

Image decode_png(const std::vector<std::uint8_t>& file) {
  struct Owner {
    png_image png{};
    ~Owner() { png_image_free(&png); }
  } owner;
  png_image& png = owner.png;
  png.version = PNG_IMAGE_VERSION;
  const auto broken = [&] {
    return std::runtime_error(std::string("is a broken PNG: ") + png.message);
  };
  if (png_image_begin_read_from_memory(&png, file.data(), file.size()) == 0) throw broken();
  png.format = PNG_FORMAT_RGB;
  Image image = make_image(png.width, png.height);
  const png_color behind = {255, 255, 255};  // what is transparent lies on white
  if (png_image_finish_read(&png, &behind, image.pixels.data(), 0, nullptr) == 0) throw broken();
  return image;
}

}  // namespace examples
