// Limits that differ from batch to batch.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/host/host_lanes.h"
#include "tests/support/fake_backend.h"
#include "tests/support/run_cases.h"

namespace sirtaki::ops {
namespace {

// Operations that the lanes need for a batch of four tensors of 40 bytes.
int OperationsOfABatch(HostLanes& lanes, tests::FakeBackend& backend, const core::Limits& limits) {
  const int before = backend.operations();
  std::array<std::array<float, 10>, 4> tensors{};
  core::RunBatch batch = SmallBatch(1);
  batch.limits = limits;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto work = std::make_shared<core::Work>();
    work->input = work->output = tensors[i].data();
    work->handle = std::make_shared<core::HandleState>();
    core::RunItem item;
    item.key = core::Key::Named(core::kWorldSet, std::to_string(i));
    item.signature = std::make_shared<const core::Signature>(core::Signature{.shape = {10}});
    item.work = std::move(work);
    batch.items.push_back(std::move(item));
  }
  lanes.Start(std::move(batch), core::Clock::now());
  RunToIdle(lanes);
  return backend.operations() - before;
}

TEST(HostLanesLimitsTest, ABatchIsPlannedByItsOwn) {
  tests::FakeBackend backend;
  HostLanesOptions options;
  HostLanes lanes(options, backend);
  EXPECT_EQ(OperationsOfABatch(lanes, backend, {}), 1);
  EXPECT_EQ(OperationsOfABatch(lanes, backend,
                               {.fusion_bytes = 80, .small_bytes = 1024, .chunk_bytes = 4096}),
            2)
      << "two tensors in each group";
  EXPECT_EQ(OperationsOfABatch(lanes, backend,
                               {.fusion_bytes = 0, .small_bytes = 1024, .chunk_bytes = 4096}),
            4)
      << "each alone";
  EXPECT_EQ(OperationsOfABatch(lanes, backend,
                               {.fusion_bytes = 160, .small_bytes = 0, .chunk_bytes = 4096}),
            1)
      << "on the large lane";
  EXPECT_EQ(OperationsOfABatch(lanes, backend,
                               {.fusion_bytes = 160, .small_bytes = 0, .chunk_bytes = 64}),
            3)
      << "in chunks of 64 bytes";
}

}  // namespace
}  // namespace sirtaki::ops
