#include <stdexcept>

#include "images/image.h"

namespace examples {

const bool decodes_png = false;

Image decode_png(const std::vector<std::uint8_t>&) {
  throw std::runtime_error(
      "is a PNG, and this program was built without libpng (Debian: libpng-dev)");
}

}  // namespace examples
