#include "core/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace sirtaki::core {

void CheckFailed(const char* file, int line, const char* condition, std::string_view text) {
  // stdio, not the log: the log may be what is broken.
  std::fprintf(stderr, "sirtaki: bug: %s:%d: %.*s (%s is false)\n", file, line,
               static_cast<int>(text.size()), text.data(), condition);
  std::abort();
}

}  // namespace sirtaki::core
