#include "tests/conformance/join_rounds.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace sirtaki::tests::conformance {
namespace {

using Numbers = std::vector<std::int64_t>;

at::Tensor ToTensor(const Numbers& numbers) {
  auto tensor = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<std::int64_t>());
  return tensor;
}

Numbers ToNumbers(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  const auto* const first = flat.const_data_ptr<std::int64_t>();
  return {first, first + flat.numel()};
}

// One round on one rank.
class JoinRound {
 public:
  JoinRound(const ProcessSet& process_set, int round)
      : process_set_(process_set),
        round_(round),
        members_(process_set.ranks()),
        me_(sirtaki::rank()) {}

  void Run() {
    int batches = 0;
    for (; batches < BatchesOf(me_); ++batches) {
      batch_ = batches;
      RunBatch();
      if (::testing::Test::HasFailure()) break;  // the others cannot go on either
    }
    const int last = join(JoinOptions().process_set(process_set_));
    CheckLast(last);
  }

 private:
  // Two to five of them, another number for each rank and round, sometimes the same for two.
  int BatchesOf(int rank) const { return 1 + (rank * 3 + round_ * 2 + rank * round_) % 5; }

  // The members that have a batch like this one.
  std::vector<int> Present() const {
    std::vector<int> present;
    for (int member : members_) {
      if (BatchesOf(member) > batch_) present.push_back(member);
    }
    return present;
  }

  // What `rank` gives in this batch.
  std::int64_t Value(int rank) const { return 100 * (rank + 1) + 10 * batch_ + round_ % 7; }

  std::string Where(const char* what) const {
    return std::string(what) + " of batch " + std::to_string(batch_) + " of round " +
           std::to_string(round_) + " on rank " + std::to_string(me_);
  }

  void RunBatch() {
    Reductions();
    Gathers();
    AllToAll();
    Broadcasts();
  }

  template <typename Options>
  Options Named(const char* name) const {
    return Options().name(name).process_set(process_set_);
  }
  template <typename Options>
  Options Unnamed() const {
    return Options().process_set(process_set_);
  }

  void Reductions() {
    const std::vector<int> present = Present();
    std::int64_t sum = 0;
    std::int64_t greatest = 0;
    std::int64_t product = 1;
    for (int member : present) {
      sum += Value(member);
      greatest = std::max(greatest, Value(member));
      product *= Value(member);
    }
    const at::Tensor mine = ToTensor({Value(me_), 2 * Value(me_)});
    const auto all_reduced = [&](AllreduceOptions options) {
      return ToNumbers(allreduce(mine, options));
    };
    EXPECT_EQ(all_reduced(Unnamed<AllreduceOptions>().op(ReduceOp::Sum)), (Numbers{sum, 2 * sum}))
        << Where("an unnamed sum");
    // All of the set count, as they do in the even part.
    const auto size = static_cast<std::int64_t>(members_.size());
    EXPECT_EQ(all_reduced(Named<AllreduceOptions>("average").op(ReduceOp::Average)),
              (Numbers{sum / size, 2 * sum / size}))
        << Where("an average");
    EXPECT_EQ(all_reduced(Named<AllreduceOptions>("maximum").op(ReduceOp::Max)),
              (Numbers{greatest, 2 * greatest}))
        << Where("a maximum");
    EXPECT_EQ(all_reduced(Unnamed<AllreduceOptions>().op(ReduceOp::Product))[0], product)
        << Where("an unnamed product");
    const auto group = grouped_allreduce({mine, ToTensor({Value(me_)})},
                                         Named<AllreduceOptions>("group").op(ReduceOp::Sum));
    EXPECT_EQ(ToNumbers(group[0]), (Numbers{sum, 2 * sum})) << Where("a group's first");
    EXPECT_EQ(ToNumbers(group[1]), Numbers{sum}) << Where("a group's second");
    Scattered(sum);
  }

  // One row for each member: those of the ones that have joined go nowhere.
  void Scattered(std::int64_t sum) {
    const Numbers rows(members_.size(), Value(me_));
    const auto options = Unnamed<ReducescatterOptions>().op(ReduceOp::Sum);
    EXPECT_EQ(ToNumbers(reducescatter(ToTensor(rows), options)), Numbers{sum})
        << Where("an unnamed reduce-scatter");
  }

  void Gathers() {
    Numbers all;
    for (int member : Present()) all.insert(all.end(), 1 + member % 2, Value(member));
    const at::Tensor mine = ToTensor(Numbers(1 + static_cast<std::size_t>(me_ % 2), Value(me_)));
    EXPECT_EQ(ToNumbers(allgather(mine, Named<AllgatherOptions>("rows"))), all)
        << Where("an all-gather");
    EXPECT_EQ(ToNumbers(allgather(mine, Unnamed<AllgatherOptions>())), all)
        << Where("an unnamed all-gather");
  }

  void AllToAll() {
    Numbers mine;
    for (int member : members_) mine.push_back(1000 * Value(me_) + member);
    const AlltoallResult result = alltoall(ToTensor(mine), Named<AlltoallOptions>("exchange"));
    Numbers expected;
    Numbers rows;
    const std::vector<int> present = Present();
    for (int member : members_) {
      const bool there = std::find(present.begin(), present.end(), member) != present.end();
      rows.push_back(there ? 1 : 0);
      if (there) expected.push_back(1000 * Value(member) + me_);
    }
    EXPECT_EQ(ToNumbers(result.tensor), expected) << Where("an all-to-all");
    EXPECT_EQ(result.received_splits, rows) << Where("an all-to-all's rows");
  }

  // From each member in turn: from one that has joined it fails on all others, which go on.
  void Broadcasts() {
    const std::vector<int> present = Present();
    for (int root : members_) {
      const bool there = std::find(present.begin(), present.end(), root) != present.end();
      for (const char* const name : {"broadcast", "grouped broadcast", ""}) {
        const auto options =
            *name != 0 ? Named<BroadcastOptions>(name) : Unnamed<BroadcastOptions>();
        const at::Tensor mine = ToTensor({Value(me_)});
        const bool grouped = std::string(name) == "grouped broadcast";
        try {
          const auto got = grouped ? broadcast({mine, mine + 1}, root, options)
                                   : std::vector{broadcast(mine, root, options)};
          EXPECT_TRUE(there) << Where("a broadcast from a rank that has joined");
          EXPECT_EQ(ToNumbers(got.front()), Numbers{Value(root)}) << Where("a broadcast");
          EXPECT_EQ(ToNumbers(got.back()), Numbers{Value(root) + (grouped ? 1 : 0)})
              << Where("a broadcast");
        } catch (const Error& error) {
          EXPECT_FALSE(there) << Where("a broadcast") << ": " << error.what();
          EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
          const std::string text = "rank " + std::to_string(root) + ", has joined";
          EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        }
      }
    }
  }

  // The rank that came last, the same everywhere: one of those with the most batches.
  void CheckLast(int last) {
    int most = 0;
    for (int member : members_) most = std::max(most, BatchesOf(member));
    EXPECT_EQ(BatchesOf(last), most) << "round " << round_ << ": rank " << last << " came last";
    const auto all = ToNumbers(allgather(ToTensor({last}), Unnamed<AllgatherOptions>()));
    EXPECT_EQ(all, Numbers(members_.size(), last)) << "round " << round_ << " on rank " << me_;
  }

  const ProcessSet& process_set_;
  const int round_;
  const std::vector<int> members_;
  const int me_;
  int batch_ = 0;
};

}  // namespace

void RunJoinRounds(const ProcessSet& process_set, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    JoinRound(process_set, round).Run();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace sirtaki::tests::conformance
