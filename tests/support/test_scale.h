// How much a random test does, and from which seed.
//
//   SIRTAKI_TEST_SCALE   unset or "small": the small count; "full": the full one; a number: that many
//                        times the small one, at least 1
//   SIRTAKI_TEST_SEED    the seed that a failing test printed
#pragma once

#include <cstdint>

namespace sirtaki::tests {

int ScaledCount(int small, int full);

// A seed for this test: the one that was asked for, else another one each time. Printed, so that a
// failure can be repeated.
std::uint64_t TestSeed();

}  // namespace sirtaki::tests
