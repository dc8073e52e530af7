// Reductions between hosts, whichever way they go, against naive loops. Run by reductions_test.sh.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "core/config/config.h"
#include "session/session.h"
#include "tests/support/half_reference.h"
#include "tests/support/mpi_main.h"
#include "tests/support/test_scale.h"

namespace sirtaki::session {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;

// Sizes that fill neither a chunk nor a slice of one, and several chunks.
constexpr std::int64_t kCounts[] = {1, 20001, 300007};
constexpr std::int64_t kLong = 1500003;

class ReductionsBetweenHosts : public testing::TestWithParam<core::HierarchyMode> {
 protected:
  void SetUp() override {
    StartOptions options;  // those of the environment: by TCP or MPI, as the launcher tells
    options.parsed = core::ParseConfig({}, options.environment, {}, &options.config, nullptr);
    options.config.hierarchy = GetParam();
    const Status status = Session::CreateOfProcess(options, &session_);
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  void TearDown() override {
    if (!session_) return;
    EXPECT_TRUE(session_->Shutdown("the test is over").ok());
  }

  int rank() const { return session_->topology().rank; }
  int size() const { return session_->topology().size; }

  // In place, and the same bits everywhere.
  template <typename T>
  void Reduce(DType dtype, ReduceOp op, std::vector<T>* values,
              core::SetNumber set = core::kWorldSet) {
    auto signature = std::make_shared<core::Signature>();
    signature->reduction = op;
    signature->dtype = dtype;
    signature->shape = {static_cast<std::int64_t>(values->size())};
    auto work = std::make_shared<core::Work>();
    work->request.key = core::Key::Named(set, "t" + std::to_string(calls_[set]++));
    work->request.asked = std::move(signature);
    work->input = work->output = values->data();
    Status status = session_->Submit(work, /*will_wait=*/true);
    if (status.ok()) status = session_->Wait(*work->handle);
    work->handle->Observe();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  template <typename T>
  void ExpectSameBits(const std::vector<T>& values) {
    const std::uint64_t mine = core::Digest(values.data(), values.size() * sizeof(T));
    EXPECT_EQ(mine, OfRank0(mine));
  }

  // What rank 0 has, told by MPI, which the library is out of meanwhile.
  std::uint64_t OfRank0(std::uint64_t value) {
    EXPECT_TRUE(session_->PauseMedium(core::TimePoint::max()).ok());
    MPI_Bcast(&value, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    EXPECT_TRUE(session_->ResumeMedium(core::TimePoint::max()).ok());
    return value;
  }

  static std::vector<std::int64_t> Counts(bool with_long) {
    std::vector<std::int64_t> counts(std::begin(kCounts), std::end(kCounts));
    if (with_long) counts.push_back(kLong);
    return counts;
  }

  static int Given(int rank, std::int64_t i) { return static_cast<int>(i * 7 % 13) - 6 + rank; }

  // A few of the cases of a type, by seed; with SIRTAKI_TEST_SCALE=full all.
  template <typename T>
  void Check(DType dtype, std::mt19937_64& random, const std::function<T(double)>& encode) {
    const int one_in = tests::ScaledCount(4, 1);
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin}) {
      for (const std::int64_t count : Counts(dtype == DType::kF32)) {
        if (random() % static_cast<unsigned>(one_in) != 0) continue;
        SCOPED_TRACE(std::string(core::ReduceOpName(op)) + " of " + std::to_string(count) + " " +
                     std::string(core::DTypeName(dtype)));
        std::vector<T> values;
        for (std::int64_t i = 0; i < count; ++i) values.push_back(encode(Given(rank(), i)));
        ASSERT_NO_FATAL_FAILURE(Reduce(dtype, op, &values));
        std::int64_t wrong = 0;
        for (std::int64_t i = 0; i < count; ++i) {
          double expected = op == ReduceOp::kMin ? Given(0, i) : 0;
          for (int r = 0; r < size() && op != ReduceOp::kMin; ++r) expected += Given(r, i);
          if (op == ReduceOp::kAverage) expected /= size();
          if (values[static_cast<std::size_t>(i)] != encode(expected)) ++wrong;
        }
        EXPECT_EQ(wrong, 0);
        ExpectSameBits(values);
      }
    }
  }

  std::shared_ptr<Session> session_;
  std::map<core::SetNumber, int> calls_;
};

INSTANTIATE_TEST_SUITE_P(Ways, ReductionsBetweenHosts,
                         testing::Values(core::HierarchyMode::kAuto, core::HierarchyMode::kOff),
                         [](const auto& made) {
                           return std::string(made.param == core::HierarchyMode::kAuto ? "Auto"
                                                                                       : "Off");
                         });

TEST_P(ReductionsBetweenHosts, TheLogSaysWhichWayTheyGo) {
  const core::Topology& topology = session_->topology();
  std::map<int, int> ranks;
  for (const int host : topology.host_of_rank) ++ranks[host];
  ASSERT_GE(ranks.size(), 2U) << "the ranks are on one host";
  bool several = false;
  for (const auto& [host, count] : ranks) several |= count > 1;
  const bool by_hosts = GetParam() != core::HierarchyMode::kOff && several;
  const std::string expected =
      std::string("all-reduce between hosts: ") + (by_hosts ? "hierarchical" : "flat");
  EXPECT_NE(session_->description().find(expected), std::string::npos) << session_->description();
  const char* medium = std::getenv("SIRTAKI_TEST_MEDIUM");
  if (medium != nullptr && std::string_view(medium) == "tcp") {
    EXPECT_NE(session_->description().find("TCP, met at "), std::string::npos)
        << session_->description();
  }
}

TEST_P(ReductionsBetweenHosts, AreWhatNaiveLoopsGive) {
  const std::uint64_t seed = OfRank0(tests::TestSeed());
  const std::string name = testing::UnitTest::GetInstance()->current_test_info()->name();
  std::mt19937_64 random(seed + core::Digest(name.data(), name.size()));
  Check<float>(DType::kF32, random, [](double x) { return static_cast<float>(x); });
  Check<double>(DType::kF64, random, [](double x) { return x; });
  Check<std::uint16_t>(DType::kF16, random,
                       [](double x) { return tests::kFloat16.Encode(static_cast<float>(x)); });
  Check<std::uint16_t>(DType::kBF16, random,
                       [](double x) { return tests::kBFloat16.Encode(static_cast<float>(x)); });
  Check<std::int32_t>(DType::kI32, random, [](double x) { return static_cast<std::int32_t>(x); });
  Check<std::int8_t>(DType::kI8, random, [](double x) { return static_cast<std::int8_t>(x); });
}

// The order of adding shows in these.
TEST_P(ReductionsBetweenHosts, GiveTheSameBitsToAll) {
  for (const std::int64_t count : Counts(true)) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < count; ++i) {
      values.push_back(std::sin(static_cast<float>(i + 1) * static_cast<float>(rank() + 1)) *
                       std::pow(10.0F, static_cast<float>((i + rank()) % 15 - 7)));
    }
    ASSERT_NO_FATAL_FAILURE(Reduce(DType::kF32, ReduceOp::kSum, &values));
    ExpectSameBits(values);
  }
}

// Every set of more than one rank, one after the other and then all at once.
TEST_P(ReductionsBetweenHosts, WorkOnSetsThatComeAndGo) {
  std::vector<std::pair<core::SetNumber, core::RankRanges>> sets;
  for (unsigned bits = 3; bits < 1U << size(); ++bits) {
    core::RankRanges members;
    for (int r = 0; r < size(); ++r) {
      if ((bits >> r & 1) != 0) members.Add(r);
    }
    if (members.Count() < 2) continue;
    core::SetNumber set = 0;
    const Status status =
        session_->AddSet(members, core::Clock::now() + std::chrono::seconds(30), &set);
    ASSERT_TRUE(status.ok()) << status.ToString();
    sets.emplace_back(set, members);
    if (bits % 3 == 0) {
      ASSERT_TRUE(session_->RemoveSet(set, core::Clock::now() + std::chrono::seconds(30)).ok());
      sets.pop_back();
    }
  }
  for (const auto& [set, members] : sets) {
    if (!members.Contains(rank())) continue;
    std::vector<float> values(100003, static_cast<float>(rank() + 1));
    ASSERT_NO_FATAL_FAILURE(Reduce(DType::kF32, ReduceOp::kSum, &values, set));
    float expected = 0;
    for (const int r : members.ToVector()) expected += static_cast<float>(r + 1);
    for (const float value : values) ASSERT_EQ(value, expected) << members.ToString();
  }
  for (const auto& [set, members] : sets) {
    ASSERT_TRUE(session_->RemoveSet(set, core::Clock::now() + std::chrono::seconds(30)).ok());
  }
}

}  // namespace
}  // namespace sirtaki::session
