// SIRTAKI_API marks what the shared library offers; everything else in it is hidden.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define SIRTAKI_API __attribute__((visibility("default")))
#else
#define SIRTAKI_API
#endif
