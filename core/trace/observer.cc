#include "core/trace/observer.h"

namespace sirtaki::core::trace {

std::uint32_t ThisThreadNumber() {
  static std::atomic<std::uint32_t> last{0};
  static thread_local const std::uint32_t number = ++last;
  return number;
}

}  // namespace sirtaki::core::trace
