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

// Rank 0 runs a backward(), and the others make a call. Both fail, and the group with them; the next
// session trains. `submits` is how errors name the call.
void ExpectCircle(const std::function<void()>& call, const std::string& submits,
                  const std::function<void()>& backward) {
  try {
    rank() == 0 ? backward() : call();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("rank 0 has not submitted " + submits + " and waits for "),
                      HasSubstr("weight"), HasSubstr("and waits for " + submits + "; "),
                      HasSubstr("calls synchronize() of the optimizer"),
                      HasSubstr("adds 0 times the module's output to its loss")));
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

void ExpectCircleOfAnOptimizer(const std::function<void()>& call, const std::string& submits) {
  init(InitOptions().set("stall_warning", "500ms"));
  Part part("part");
  ExpectCircle(call, submits, [&] { part.Loss(1).backward(); });
}

TEST(WaitingRanksTest, ABackwardAndTheCallOfARankThatMeetsNoGradient) {
  ExpectCircleOfAnOptimizer([] { allreduce(torch::ones({2}), AllreduceOptions().name("loss")); },
                            "\"loss\"");
}

TEST(WaitingRanksTest, ABackwardAndABroadcast) {
  ExpectCircleOfAnOptimizer([] { broadcast(torch::ones({2}), 1, BroadcastOptions().name("w")); },
                            "\"w\"");
}

TEST(WaitingRanksTest, ABackwardAndABarrier) {
  ExpectCircleOfAnOptimizer([] { barrier(); }, "unnamed call #0");
}

TEST(WaitingRanksTest, ABackwardAndTheCheckOfParameters) {
  const auto model = torch::nn::Linear(2, 2);
  ExpectCircleOfAnOptimizer([&] { check_parameters(*model); }, "check_parameters");
}

TEST(WaitingRanksTest, BackwardsThatMeetDifferentOptimizers) {
  init(InitOptions().set("stall_warning", "500ms"));
  Part a("a");
  Part b("b");
  try {
    (rank() == 0 ? a : b).Loss(1).backward();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("ranks wait for each other"),
                                    HasSubstr("they use average_at \"step\", or one backward()")));
  }
  shutdown();
}

TEST(WaitingRanksTest, ABackwardOfAModuleAndACall) {
  init(InitOptions().set("stall_warning", "500ms"));
  DistributedDataParallel model(torch::nn::Linear(2, 2));
  ExpectCircle([] { allreduce(torch::ones({2}), AllreduceOptions().name("loss")); }, "\"loss\"",
               [&] {
                 model.forward(torch::ones({1, 2})).sum().backward();
               });
}

}  // namespace
}  // namespace sirtaki::tests
