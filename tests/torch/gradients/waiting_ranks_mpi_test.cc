// RANKS: 2 3
// Ranks that wait for each other, one in a backward(), learn it with the first stall, and all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "tests/torch/gradients/part.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The first rank's call and that of the others. It has failed, and the group with it; the next
// session trains.
void ExpectCircle(const std::function<void()>& first, const std::function<void()>& others) {
  try {
    rank() == 0 ? first() : others();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0 has not submitted \"loss\" and waits for "),
                                    HasSubstr("weight"), HasSubstr("and waits for \"loss\"; "),
                                    HasSubstr("calls synchronize() of the optimizer")));
  }
  shutdown();
  init();
  Part part("afterwards");
  part.optimizer.zero_grad();
  part.Loss(static_cast<float>(rank())).backward();
  part.ExpectGradient(static_cast<float>(size() - 1) / 2);
  part.optimizer.step();
  shutdown();
}

void ReduceLoss() { allreduce(torch::ones({2}), AllreduceOptions().name("loss")); }

TEST(WaitingRanksTest, ABackwardAndTheCallOfARankThatMeetsNoGradient) {
  init(InitOptions().set("stall_warning", "500ms"));
  Part part("part");
  ExpectCircle([&] { part.Loss(1).backward(); }, ReduceLoss);
}

}  // namespace
}  // namespace sirtaki::tests
