// The macros are the headers' version, version() is the library's.
#pragma once

#include "sirtaki/export.h"

#define SIRTAKI_VERSION_MAJOR 0
#define SIRTAKI_VERSION_MINOR 1
#define SIRTAKI_VERSION_PATCH 0

namespace sirtaki {

// Returns the library's version, "0.1.0". May be called at any time.
SIRTAKI_API const char* version() noexcept;

}  // namespace sirtaki
