#include "core/engine/engine_fault.h"

#include <gtest/gtest.h>

namespace sirtaki::core {
namespace {

TEST(EngineFaultTest, TheFirstStaysUntilTheRanksHaveAgreed) {
  EngineFault fault;
  EXPECT_TRUE(fault.status().ok());
  EXPECT_FALSE(fault.known());
  EXPECT_TRUE(fault.Set({StatusCode::kBackend, "first"}));
  EXPECT_FALSE(fault.Set({StatusCode::kBackend, "second"}));
  EXPECT_EQ(fault.status().message(), "first");
  fault.Agree({StatusCode::kAborted, "agreed"});
  EXPECT_EQ(fault.status().message(), "agreed");
  EXPECT_FALSE(fault.Set({StatusCode::kBackend, "third"}));
}

TEST(EngineFaultTest, AgreeingOnAnEarlierOneGoesBackToNoStageBefore) {
  EngineFault fault;
  fault.Agree({StatusCode::kAborted, "agreed"});
  EXPECT_TRUE(fault.known());
  EXPECT_FALSE(fault.failed());
  fault.NoteFailed();
  EXPECT_TRUE(fault.failed());
  EXPECT_FALSE(fault.told());
  fault.NoteTold();
  fault.Agree({StatusCode::kAborted, "an earlier one"});
  EXPECT_TRUE(fault.known() && fault.failed() && fault.told());
  EXPECT_EQ(fault.status().message(), "an earlier one");
}

}  // namespace
}  // namespace sirtaki::core
