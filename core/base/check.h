// SIRTAKI_CHECK is for bugs of ours: a broken invariant prints what and where, and terminates. It
// is never for what a user, a peer or the machine can get wrong; those are a Status.
#pragma once

#include <string_view>

namespace sirtaki::core {

[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              std::string_view text);

}  // namespace sirtaki::core

#define SIRTAKI_CHECK(condition, text)                                    \
  do {                                                                    \
    if (!(condition)) {                                                   \
      ::sirtaki::core::CheckFailed(__FILE__, __LINE__, #condition, text); \
    }                                                                     \
  } while (false)
