#include <stdexcept>

#include "images/image.h"

namespace examples {

const bool decodes_jpeg = false;

Image decode_jpeg(const std::vector<std::uint8_t>&) {
  throw std::runtime_error(
      "is a JPEG, and this program was built without libjpeg (Debian: libjpeg-dev)");
}

}  // namespace examples
