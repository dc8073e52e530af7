// RANKS: 1 2 3 4
// Every kind of collective through the lanes over MPI.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/port.h"
#include "ops/host/host_lanes.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/mpi_main.h"
#include "tests/support/run_cases.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::DType;
using core::OpKind;
using core::ReduceOp;
using core::Status;
using ops::Cases;
using ops::RunCase;
using ops::RunSide;

class MpiLanesTest : public testing::Test {
 protected:
  void SetUp() override {
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    Status status = Environment::Start({}, deadline, &environment_);
    ASSERT_TRUE(status.ok()) << status.ToString();
    status = Communicators::Make(*environment_, deadline, &communicators_);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  int rank() const { return communicators_->rank(); }
  int size() const { return communicators_->size(); }

  // Each vector is a batch.
  void Run(const std::vector<Cases>& batches) {
    Port port(*communicators_, {});
    ops::wire::WireBackend backend(port, {});
    ops::HostLanesOptions options{.rank = rank()};
    options.on_failure = [](const Status& why, const std::string& key) {
      ADD_FAILURE() << key << ": " << why.ToString();
    };
    ops::HostLanes lanes(std::move(options), backend);
    for (std::size_t b = 0; b < batches.size(); ++b) {
      std::vector<RunSide> sides(batches[b].size());
      core::RunBatch batch = ops::SmallBatch(size(), b);
      for (std::size_t i = 0; i < sides.size(); ++i) {
        batch.items.push_back(sides[i].MakeItem(batches[b][i], std::to_string(i), rank(), size()));
      }
      lanes.Start(std::move(batch), Clock::now());
      ops::RunToIdle(lanes);
      for (std::size_t i = 0; i < sides.size(); ++i) sides[i].Check(batches[b][i], rank(), size());
    }
  }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
};

TEST_F(MpiLanesTest, ReducesWithEveryOperationInEveryType) {
  std::vector<Cases> batches;
  for (int d = 0; d < core::kDTypeCount; ++d) {
    for (int o = 0; o < core::kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!core::IsDefined(op, dtype) || op == ReduceOp::kAdasum) continue;
      batches.push_back(ops::ReducingCases(op, dtype, size()));
    }
  }
  Run(batches);
}

TEST_F(MpiLanesTest, MovesWhateverTheRows) {
  std::vector<Cases> batches;
  for (const DType dtype : {DType::kF32, DType::kC128, DType::kF8E5M2}) {
    Cases cases;
    for (const std::int64_t count : {0, 1, 700}) {
      cases.push_back(
          {.signature = {
               .kind = OpKind::kBroadcast, .dtype = dtype, .root = size() - 1, .shape = {count}}});
      cases.push_back(
          {.signature = {.kind = OpKind::kAllGatherInto, .dtype = dtype, .shape = {count}}});
    }
    for (const OpKind kind :
         {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
      const int root = core::HasRoot(kind) ? size() / 2 : -1;
      for (const RunCase& c : ops::CasesWithRows(kind, dtype, root, size())) cases.push_back(c);
    }
    batches.push_back(cases);
  }
  Run(batches);
}

TEST_F(MpiLanesTest, JoinedRanksTakePartWithoutTensors) {
  if (size() == 1) GTEST_SKIP() << "somebody has to be left";
  std::vector<Cases> batches;
  for (const DType dtype : {DType::kBF16, DType::kF64}) {
    batches.push_back(ops::ReducingCases(ReduceOp::kMin, dtype, size()));
    for (RunCase& c : batches.back()) {
      if (c.signature.root >= 0) c.signature.root = 0;
    }
    for (const OpKind kind :
         {OpKind::kAllGather, OpKind::kGather, OpKind::kScatter, OpKind::kAllToAll}) {
      batches.push_back(ops::CasesWithRows(kind, dtype, core::HasRoot(kind) ? 0 : -1, size()));
    }
  }
  for (Cases& cases : batches) {
    for (RunCase& c : cases) c.joined = core::RankRanges{size() - 1};
  }
  Run(batches);
}

// Equal gradients are the result, whatever the number of ranks, and so in all bits.
TEST_F(MpiLanesTest, AdasumOfEqualGradientsIsTheGradient) {
  Port port(*communicators_, {});
  ops::wire::WireBackend backend(port, {});
  ops::HostLanes lanes({.rank = rank()}, backend);
  for (const std::int64_t count : {1, 7, 3000}) {
    std::vector<float> gradient(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = static_cast<float>(i % 17) - 7.25f;
    }
    const std::vector<float> before = gradient;
    core::RunItem item;
    item.key = core::Key::Named(core::kWorldSet, "w");
    item.signature = std::make_shared<const core::Signature>(
        core::Signature{.reduction = ReduceOp::kAdasum, .shape = {count}});
    item.work = std::make_shared<core::Work>();
    item.work->input = item.work->output = gradient.data();
    item.work->handle = std::make_shared<core::HandleState>();
    const core::HandlePtr handle = item.work->handle;
    core::RunBatch batch = ops::SmallBatch(size());
    batch.items.push_back(std::move(item));
    lanes.Start(std::move(batch), Clock::now());
    ops::RunToIdle(lanes);
    EXPECT_TRUE(handle->status().ok()) << handle->status().ToString();
    EXPECT_EQ(gradient, before);
  }
}

}  // namespace
}  // namespace sirtaki::mpi
