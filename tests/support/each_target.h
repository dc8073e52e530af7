// Tests under every instruction set that this machine and the compiler have: what the kernels
// choose at run time is forced to each in turn.
//
//   class KernelsTest : public tests::EachTargetTest {};
//   TEST_P(KernelsTest, ...) {...}
//   INSTANTIATE_TEST_SUITE_P(Targets, KernelsTest, tests::Targets(), tests::TargetOf);
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>
#include <string>

namespace sirtaki::tests {

// 0: all that there are, as in a program.
inline void UseTarget(std::int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

class EachTargetTest : public ::testing::TestWithParam<std::int64_t> {
 protected:
  EachTargetTest() { UseTarget(GetParam()); }
  ~EachTargetTest() override { UseTarget(0); }
};

inline auto Targets() { return ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()); }

inline std::string TargetOf(const ::testing::TestParamInfo<std::int64_t>& info) {
  return hwy::TargetName(info.param);
}

}  // namespace sirtaki::tests
