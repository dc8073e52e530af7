// What a test on a GPU does where there is none.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace sirtaki::tests {

// The running test is skipped with the reason, or fails with SIRTAKI_TEST_GPU=required: on a machine
// that has a GPU, a library that was not found would make all of them pass in silence. The caller
// returns.
inline void SkipWithoutGpu(const std::string& why) {
  const char* const wanted = std::getenv("SIRTAKI_TEST_GPU");
  if (wanted != nullptr && std::string(wanted) == "required") {
    FAIL() << why << "; SIRTAKI_TEST_GPU=required makes that a failure";
  }
  GTEST_SKIP() << why;
}

}  // namespace sirtaki::tests
