// RANKS: 2
// More elements than an int can count. Needs 9 GB of memory: only with SIRTAKI_TEST_SCALE=full.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "mpi/communicators.h"
#include "mpi/environment.h"
#include "mpi/port.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/mpi_main.h"
#include "tests/support/test_scale.h"

namespace sirtaki::mpi {
namespace {

using core::Clock;
using core::Status;

constexpr ops::Channel kLarge{core::kWorldSet, fusion::Lane::kLarge};
constexpr std::int64_t kHuge = (std::int64_t{1} << 31) + 5;

class HugeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (tests::ScaledCount(1, 2) < 2) {
      GTEST_SKIP() << "moves 2^31 elements: set SIRTAKI_TEST_SCALE=full";
    }
    const core::TimePoint deadline = Clock::now() + std::chrono::seconds(30);
    ASSERT_TRUE(Environment::Start({}, deadline, &environment_).ok());
    ASSERT_TRUE(Communicators::Make(*environment_, deadline, &communicators_).ok());
    port_ = std::make_unique<Port>(*communicators_, PortOptions());
    backend_ = std::make_unique<ops::wire::WireBackend>(*port_, ops::wire::WireOptions());
  }

  static void ExpectOk(const std::unique_ptr<ops::Completion>& operation) {
    ASSERT_TRUE(operation->Poll());
    EXPECT_TRUE(operation->status().ok()) << operation->status().ToString();
  }

  // A byte that tells positions apart that are a power of two away from each other.
  static std::uint8_t ByteAt(std::int64_t i, int rank) {
    return static_cast<std::uint8_t>(i % 251 + rank);
  }

  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Communicators> communicators_;
  std::unique_ptr<Port> port_;
  std::unique_ptr<ops::wire::WireBackend> backend_;
};

TEST_F(HugeTest, AllReduceInPlace) {
  std::vector<std::uint8_t> values(static_cast<std::size_t>(kHuge));
  for (std::int64_t i = 0; i < kHuge; ++i) {
    values[static_cast<std::size_t>(i)] = ByteAt(i, communicators_->rank());
  }
  ExpectOk(backend_->AllReduce(kLarge, values.data(), kHuge, core::DType::kU8, core::ReduceOp::kSum,
                               {}));
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kHuge; ++i) {
    const auto expected = static_cast<std::uint8_t>(ByteAt(i, 0) + ByteAt(i, 1));
    if (values[static_cast<std::size_t>(i)] != expected) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(HugeTest, BroadcastAndGather) {
  // The parts of two ranks: one has nearly all, the other the rest, and together it is too much for
  // one call.
  const std::vector<std::int64_t> bytes{kHuge - 1000, 1000};
  const int rank = communicators_->rank();
  std::vector<std::uint8_t> all(static_cast<std::size_t>(kHuge));
  const std::int64_t place = rank == 0 ? 0 : bytes[0];
  for (std::int64_t i = place; i < place + bytes[static_cast<std::size_t>(rank)]; ++i) {
    all[static_cast<std::size_t>(i)] = ByteAt(i, 3);
  }
  ExpectOk(backend_->AllGatherV(kLarge, all.data() + place, all.data(), bytes));
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kHuge; ++i) {
    if (all[static_cast<std::size_t>(i)] != ByteAt(i, 3)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);

  if (rank == 1) {
    for (std::int64_t i = 0; i < kHuge; ++i) all[static_cast<std::size_t>(i)] = ByteAt(i, 7);
  }
  ExpectOk(backend_->Broadcast(kLarge, all.data(), kHuge, /*root=*/1));
  for (std::int64_t i = 0; i < kHuge; ++i) {
    if (all[static_cast<std::size_t>(i)] != ByteAt(i, 7)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace sirtaki::mpi
