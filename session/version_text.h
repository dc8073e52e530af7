// The library's version, for texts.
#pragma once

#include <string>

#include "sirtaki/version.h"

namespace sirtaki::session {

// "0.1.0"
inline std::string VersionText() {
  return std::to_string(SIRTAKI_VERSION_MAJOR) + "." + std::to_string(SIRTAKI_VERSION_MINOR) + "." +
         std::to_string(SIRTAKI_VERSION_PATCH);
}

}  // namespace sirtaki::session
