#include "sirtaki/collectives.h"
#include "sirtaki/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/torch/torch_ranks.h"

namespace sirtaki::tests {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::vector<torch::ScalarType> kNumberTypes = {
    torch::kUInt8, torch::kInt8,     torch::kInt16,   torch::kInt32,  torch::kInt64,
    torch::kHalf,  torch::kBFloat16, torch::kFloat32, torch::kFloat64};

AllreduceOptions Sum(const std::string& name = "") {
  return AllreduceOptions().name(name).op(ReduceOp::Sum);
}

TEST(AllreduceTest, SumsEveryTypeOverTheRanks) {
  RunTorchRanks(3, [](int rank) {
    for (const auto type : kNumberTypes) {
      const auto mine = torch::tensor({1, 2, 3}).to(type) * (rank + 1);
      const auto sum = allreduce(mine, Sum("t"));
      EXPECT_EQ(sum.scalar_type(), type);
      EXPECT_TRUE(torch::equal(sum, torch::tensor({6, 12, 18}).to(type))) << sum;
      EXPECT_TRUE(torch::equal(mine, torch::tensor({1, 2, 3}).to(type) * (rank + 1)));
    }
  });
}

TEST(AllreduceTest, AveragesUnlessToldOtherwise) {
  RunTorchRanks(4, [](int rank) {
    const auto average = allreduce(torch::full({2, 3}, rank, torch::kDouble));
    EXPECT_TRUE(torch::equal(average, torch::full({2, 3}, 1.5, torch::kDouble)));
  });
}

TEST(AllreduceTest, AppliesFactorsBeforeAndAfter) {
  RunTorchRanks(2, [](int rank) {
    const auto options = Sum().prescale(0.5).postscale(10);
    const auto result = allreduce(torch::tensor({2.0, 4.0}) * (rank + 1), options);
    EXPECT_TRUE(torch::equal(result, torch::tensor({30.0, 60.0}))) << result;
  });
}

// Each time in float64, truncated toward zero; an average's sum is scaled before it is divided.
TEST(AllreduceTest, TruncatesIntegersBehindEachFactor) {
  for (const int ranks : {1, 2, 3}) {
    RunTorchRanks(ranks, [ranks](int) {
      for (const auto type :
           {torch::kUInt8, torch::kInt8, torch::kShort, torch::kInt, torch::kLong}) {
        const auto mine = torch::tensor({3, 5, 20}).to(type);
        const auto options = Sum().prescale(0.5).postscale(0.75);
        const auto halves = torch::tensor({1, 2, 10});  // times 0.5
        const auto expected = (halves * ranks * 3).div(4, "floor").to(type);
        EXPECT_TRUE(torch::equal(allreduce(mine, options), expected)) << type;
        EXPECT_TRUE(torch::equal(grouped_allreduce({mine, mine}, options)[1], expected));
        EXPECT_TRUE(torch::equal(mine, torch::tensor({3, 5, 20}).to(type)));
        const auto average = allreduce(mine, AllreduceOptions().postscale(0.5));
        EXPECT_TRUE(torch::equal(average, halves.to(type))) << average;
        const auto rows =
            reducescatter(mine.repeat({ranks, 1}),
                          ReducescatterOptions().op(ReduceOp::Sum).prescale(0.5).postscale(0.75));
        EXPECT_TRUE(torch::equal(rows, expected.unsqueeze(0))) << rows;
      }
    });
  }
}

TEST(AllreduceTest, LargeTensorsAreReducedWhole) {
  RunTorchRanks(2, [](int rank) {
    const auto mine = torch::arange(3000000, torch::kFloat) * (rank == 0 ? 1 : 2);
    const auto sum = allreduce(mine, Sum());
    EXPECT_TRUE(torch::equal(sum, torch::arange(3000000, torch::kFloat) * 3));
  });
}

TEST(AllreduceTest, TakesViewsEmptyAndScalarTensors) {
  RunTorchRanks(2, [](int) {
    const auto matrix = torch::arange(12, torch::kFloat).reshape({3, 4});
    EXPECT_TRUE(torch::equal(allreduce(matrix.t(), Sum()), matrix.t() * 2));
    EXPECT_TRUE(torch::equal(allreduce(matrix[1], Sum()), matrix[1] * 2));
    EXPECT_TRUE(
        torch::equal(allreduce(matrix.slice(1, 1, 4, 2), Sum()), matrix.slice(1, 1, 4, 2) * 2));
    EXPECT_TRUE(
        torch::equal(allreduce(torch::ones({1}).expand({5}), Sum()), torch::full({5}, 2.0f)));
    EXPECT_EQ(allreduce(torch::empty({0, 3}), Sum()).sizes(), (std::vector<std::int64_t>{0, 3}));
    const auto scalar = allreduce(torch::tensor(2.5), Sum());
    EXPECT_EQ(scalar.dim(), 0);
    EXPECT_EQ(scalar.item<float>(), 5.0f);
  });
}

TEST(AllreduceTest, InPlaceWritesTheTensorItself) {
  RunTorchRanks(2, [](int rank) {
    auto tensor = torch::full({3}, rank + 1.0);
    const auto result = allreduce_(tensor, Sum());
    EXPECT_TRUE(result.is_same(tensor));
    EXPECT_TRUE(torch::equal(tensor, torch::full({3}, 3.0)));
  });
}

TEST(AllreduceTest, InPlaceOnAViewWritesOnlyTheView) {
  RunTorchRanks(2, [](int) {
    auto matrix = torch::ones({4, 4});
    allreduce_(matrix.slice(1, 0, 2), Sum());
    EXPECT_EQ(matrix.sum().item<float>(), 8 + 16);
    EXPECT_EQ(matrix.slice(1, 0, 2).sum().item<float>(), 16);
  });
}

TEST(AllreduceTest, InPlaceOnALeafThatRequiresGradKeepsItALeaf) {
  RunTorchRanks(2, [](int) {
    auto leaf = torch::ones({3}, torch::requires_grad());
    allreduce_(leaf, Sum());
    EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
    EXPECT_TRUE(torch::equal(leaf.detach(), torch::full({3}, 2.0f)));
    EXPECT_FALSE(synchronize(allreduce_async(leaf, Sum())).requires_grad());
  });
}

TEST(AllreduceTest, AutogradSeesThatASavedTensorWasOverwritten) {
  RunTorchRanks(2, [](int) {
    auto leaf = torch::ones({3}, torch::requires_grad());
    auto doubled = leaf * 2;
    const auto loss = (doubled * doubled).sum();
    allreduce_(doubled.detach(), Sum());
    EXPECT_THROW(loss.backward(), c10::Error);
  });
}

TEST(AllreduceTest, TheAverageOfNarrowIntegersDoesNotWrap) {
  RunTorchRanks(2, [](int) {
    const auto average = allreduce(torch::full({3}, 200, torch::kUInt8));
    EXPECT_TRUE(torch::equal(average, torch::full({3}, 200, torch::kUInt8))) << average;
    const auto large = allreduce(torch::full({2}, 2000000000, torch::kInt));
    EXPECT_TRUE(torch::equal(large, torch::full({2}, 2000000000, torch::kInt))) << large;
  });
}

TEST(AllreduceTest, IntegerAverageTruncates) {
  RunTorchRanks(2, [](int rank) {
    const auto average = allreduce(torch::tensor({rank == 0 ? 1 : 2, -3}));
    EXPECT_TRUE(torch::equal(average, torch::tensor({1, -3}))) << average;
  });
}

TEST(AllgatherTest, JoinsDifferentFirstDimensions) {
  RunTorchRanks(3, [](int rank) {
    // No row of rank 0, one of rank 1, two of rank 2.
    const auto rows = torch::full({rank, 2}, rank, torch::kInt);
    const auto all = allgather(rows, AllgatherOptions().name("rows"));
    EXPECT_TRUE(torch::equal(all, torch::tensor({{1, 1}, {2, 2}, {2, 2}}, torch::kInt))) << all;
  });
}

TEST(AllgatherTest, MovesEveryTypeAndViews) {
  RunTorchRanks(2, [](int rank) {
    auto types = kNumberTypes;
    types.push_back(torch::kBool);
    for (const auto type : types) {
      const auto all = allgather(torch::tensor({rank, 1}).to(type));
      EXPECT_TRUE(torch::equal(all, torch::tensor({0, 1, 1, 1}).to(type))) << all;
    }
    const auto matrix = torch::arange(6).reshape({2, 3}) + 6 * rank;
    const auto all = allgather(matrix.t());
    EXPECT_TRUE(torch::equal(all.slice(0, 3 * rank, 3 * rank + 3), matrix.t()));
  });
}

TEST(AllgatherTest, NothingFromAnyRankIsNothing) {
  RunTorchRanks(2, [](int) {
    EXPECT_EQ(allgather(torch::empty({0, 4})).sizes(), (std::vector<std::int64_t>{0, 4}));
    EXPECT_EQ(allgather(torch::empty({2, 0})).sizes(), (std::vector<std::int64_t>{4, 0}));
  });
}

TEST(AllgatherTest, RefusesScalarsOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    const auto tensor = rank == 0 ? torch::tensor(1.0) : torch::ones({2});
    const auto text = ErrorOf(ErrorCode::InvalidArgument,
                              [&] { allgather(tensor, AllgatherOptions().name("s")); });
    EXPECT_THAT(text,
                AllOf(HasSubstr("\"s\""), HasSubstr("has none: reshape it"), HasSubstr("rank 0")));
  });
}

TEST(BroadcastTest, GivesTheTensorOfTheRoot) {
  RunTorchRanks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      const auto mine = torch::full({2, 2}, rank, torch::kInt);
      const auto got = broadcast(mine, root);
      EXPECT_TRUE(torch::equal(got, torch::full({2, 2}, root, torch::kInt)));
      EXPECT_FALSE(got.is_alias_of(mine));
      EXPECT_TRUE(torch::equal(mine, torch::full({2, 2}, rank, torch::kInt)));
      auto flag = torch::full({1}, rank == root, torch::kBool);
      EXPECT_TRUE(broadcast_(flag, root).is_same(flag));
      EXPECT_TRUE(flag.item<bool>());
    }
  });
}

TEST(BroadcastTest, RefusesARootThatIsNoRank) {
  RunTorchRanks(2, [](int) {
    const auto text = ErrorOf(ErrorCode::InvalidArgument, [&] {
      broadcast(torch::ones({1}), 2, BroadcastOptions().name("b"));
    });
    EXPECT_THAT(text, HasSubstr("root rank 2 is not among the ranks 0-1"));
  });
}

// Every rank learns what each group of ranks asked for, and the name works again at once.
void ExpectMismatch(const std::function<void(int rank)>& call,
                    const std::vector<std::string>& words, ErrorCode code = ErrorCode::Mismatch) {
  RunTorchRanks(3, [&](int rank) {
    const auto text = ErrorOf(code, [&] { call(rank); });
    EXPECT_THAT(text, HasSubstr("\"w\""));
    for (const std::string& word : words) EXPECT_THAT(text, HasSubstr(word));
    const auto sum = allreduce(torch::ones({2}), Sum("w"));
    EXPECT_TRUE(torch::equal(sum, torch::full({2}, 3.0f)));
  });
}

TEST(MismatchTest, Shapes) {
  ExpectMismatch(
      [](int rank) {
        allreduce(torch::ones({2, rank == 1 ? 4 : 3}), Sum("w"));
      },
      {"[2, 3]", "[2, 4]", "ranks 0, 2", "rank 1"});
}

TEST(MismatchTest, Types) {
  ExpectMismatch(
      [](int rank) {
        allreduce(torch::ones({2}, rank == 2 ? torch::kDouble : torch::kFloat), Sum("w"));
      },
      {"float32", "float64", "ranks 0-1", "rank 2"});
}

TEST(MismatchTest, ReduceOps) {
  ExpectMismatch(
      [](int rank) {
        const auto op = rank == 0 ? ReduceOp::Average : ReduceOp::Sum;
        allreduce(torch::ones({2}), AllreduceOptions().name("w").op(op));
      },
      {"sum", "average", "rank 0", "ranks 1-2"});
}

TEST(MismatchTest, KindsOfOperation) {
  ExpectMismatch(
      [](int rank) {
        if (rank == 1) {
          allgather(torch::ones({2}), AllgatherOptions().name("w"));
        } else {
          allreduce(torch::ones({2}), Sum("w"));
        }
      },
      {"all-gather", "all-reduce", "ranks 0, 2", "rank 1"});
}

TEST(MismatchTest, Roots) {
  ExpectMismatch(
      [](int rank) {
        broadcast(torch::ones({2}), rank == 1 ? 2 : 0, BroadcastOptions().name("w"));
      },
      {"root 0", "root 2", "ranks 0, 2", "rank 1"});
}

TEST(MismatchTest, Factors) {
  ExpectMismatch(
      [](int rank) { allreduce(torch::ones({2}), Sum("w").prescale(rank == 0 ? 0.5 : 0.25)); },
      {"prescale 0.5", "prescale 0.25", "rank 0", "ranks 1-2"});
}

// Not the peers' fault, but they must not wait for it.
TEST(MismatchTest, AnArgumentThatOneRankGotWrong) {
  const std::vector<std::pair<torch::Tensor, std::string>> wrong = {
      {torch::Tensor(), "undefined"},
      {torch::empty({2}, torch::kComplexHalf), "ComplexHalf"},
      {torch::ones({2}, torch::kBool), "bool"},
      {torch::ones({2, 2}).to_sparse_csr(), "dense"},
      {torch::empty({2}, torch::TensorOptions().device(torch::kMeta)), "on meta; only the CPU"},
      {torch::empty(std::vector<std::int64_t>(65, 1)), "65 dimensions; at most 64"},
      {torch::ones({1}).expand({std::int64_t{1} << 50}), "out of memory: "},
  };
  for (const auto& [tensor, word] : wrong) {
    ExpectMismatch(
        [&, bad = tensor](int rank) { allreduce(rank == 1 ? bad : torch::ones({2}), Sum("w")); },
        {word, "rank 1"}, ErrorCode::InvalidArgument);
  }
}

TEST(MismatchTest, FactorOfAComplexNumber) {
  ExpectMismatch(
      [](int) { allreduce(torch::ones({2}, torch::kComplexFloat), Sum("w").postscale(2)); },
      {"postscale", "floating point", "complex64"}, ErrorCode::InvalidArgument);
}

TEST(MismatchTest, FactorsThatAreNoNumber) {
  for (const double factor : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    ExpectMismatch(
        [factor](int rank) {
          allreduce(torch::ones({2}), Sum("w").prescale(rank == 2 ? factor : 1));
        },
        {"prescale must be a finite number", "rank 2"}, ErrorCode::InvalidArgument);
  }
}

TEST(MismatchTest, ATimeoutThatOneRankHasNegative) {
  ExpectMismatch(
      [](int rank) {
        const auto options = Sum("w").timeout(std::chrono::milliseconds(rank == 1 ? -5 : 0));
        allreduce(torch::ones({2}), options);
      },
      {"timeout is negative: -5 ms", "rank 1"}, ErrorCode::InvalidArgument);
}

TEST(AllgatherTest, TooManyDimensionsAreRefusedOnEveryRank) {
  RunTorchRanks(2, [](int rank) {
    const auto tensor = torch::empty(std::vector<std::int64_t>(rank == 0 ? 66 : 2, 1));
    const auto text = ErrorOf(ErrorCode::InvalidArgument,
                              [&] { allgather(tensor, AllgatherOptions().name("s")); });
    EXPECT_THAT(text, AllOf(HasSubstr("66 dimensions"), HasSubstr("rank 0")));
  });
}

TEST(AllreduceTest, SixtyFourDimensionsAreFine) {
  RunTorchRanks(2, [](int) {
    auto tensor = torch::empty(std::vector<std::int64_t>(64, 1));
    *tensor.data_ptr<float>() = 3;
    allreduce_(tensor, Sum());
    EXPECT_EQ(*tensor.data_ptr<float>(), 6);
  });
}

TEST(AllreduceTest, ANameIsAtMost4096BytesLong) {
  RunTorchRanks(2, [](int) {
    const auto text = ErrorOf(ErrorCode::InvalidArgument,
                              [&] { allreduce(torch::ones({1}), Sum(std::string(4097, 'n'))); });
    EXPECT_THAT(text, AllOf(HasSubstr("4097"), HasSubstr("at most 4096")));
    const auto sum = allreduce(torch::ones({1}), Sum(std::string(4096, 'n')));
    EXPECT_TRUE(torch::equal(sum, torch::full({1}, 2.0f)));
  });
}

TEST(MismatchTest, InPlaceOnExpandedMemory) {
  ExpectMismatch([](int) { allreduce_(torch::ones({1}).expand({2}), Sum("w")); }, {"share memory"},
                 ErrorCode::InvalidArgument);
}

TEST(MismatchTest, AListInPlaceWhoseTensorsOverlap) {
  ExpectMismatch(
      [](int rank) {
        const at::Tensor all = torch::ones({10});
        const std::int64_t second = rank == 0 ? 4 : 5;  // of rank 1 they only touch
        grouped_allreduce_({torch::ones({3}), all.narrow(0, second, 5), all.narrow(0, 0, 5)},
                           Sum("w"));
      },
      {"tensors 1 and 2 of the list share memory"}, ErrorCode::InvalidArgument);
}

TEST(AllreduceTest, InPlaceOnALazyCopyWritesThatCopyOnly) {
  RunTorchRanks(2, [](int rank) {
    const at::Tensor original = torch::full({1000}, rank + 1.0);
    const at::Tensor copy = at::_lazy_clone(original);
    const Handle handle = allreduce_async_(copy, Sum("w"));
    original.zero_();
    EXPECT_TRUE(torch::equal(synchronize(handle), torch::full({1000}, 3.0)));
    EXPECT_TRUE(torch::equal(original, torch::zeros({1000})));
  });
}

TEST(HandleTest, SynchronizeGivesTheResultEveryTime) {
  RunTorchRanks(2, [](int rank) {
    const Handle handle = allreduce_async(torch::full({2}, rank + 1.0), Sum("a"));
    const Handle copy = handle;
    EXPECT_TRUE(torch::equal(synchronize(handle), torch::full({2}, 3.0)));
    EXPECT_TRUE(synchronize(copy).is_same(synchronize(handle)));
    EXPECT_TRUE(poll(copy));
  });
}

TEST(HandleTest, ManyMayBeInFlightInAnyOrder) {
  RunTorchRanks(2, [](int rank) {
    std::vector<Handle> handles(20);
    for (int i = 0; i < 20; ++i) {
      const int which = rank == 0 ? i : 19 - i;
      handles[static_cast<std::size_t>(which)] =
          allreduce_async(torch::full({5}, which), Sum("t" + std::to_string(which)));
    }
    for (int i = 0; i < 20; ++i) {
      const auto sum = synchronize(handles[static_cast<std::size_t>(i)]);
      EXPECT_EQ(sum[0].item<std::int64_t>(), 2 * i);
    }
  });
}

TEST(HandleTest, PollTurnsTrueWhenTheOthersHaveCome) {
  RunTorchRanks(2, [](int rank) {
    if (rank == 1) {
      // Only after rank 0 has polled in vain does it ask for this.
      allreduce(torch::ones({1}), Sum("go"));
      synchronize(allreduce_async(torch::ones({3}), Sum("late")));
      return;
    }
    auto tensor = torch::ones({2, 3}).t();  // not flat: poll writes it back
    const Handle handle = allreduce_async_(tensor.select(1, 0), Sum("late"));
    EXPECT_FALSE(poll(handle));
    allreduce(torch::ones({1}), Sum("go"));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!poll(handle)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
    EXPECT_EQ(tensor.sum().item<float>(), 3 * 2 + 3);
  });
}

TEST(HandleTest, AnEmptyHandleIsRefused) {
  EXPECT_THAT(ErrorOf(ErrorCode::InvalidArgument, [] { synchronize(Handle()); }),
              HasSubstr("empty"));
  ErrorOf(ErrorCode::InvalidArgument, [] { poll(Handle()); });
}

TEST(HandleTest, ANameInFlightIsRefusedUntilItsHandleIsUsed) {
  RunTorchRanks(2, [](int) {
    const Handle first = allreduce_async(torch::ones({1}), Sum("x"));
    for (int i = 0; i < 2; ++i) {
      const auto text =
          ErrorOf(ErrorCode::DuplicateName, [&] { allreduce_async(torch::ones({1}), Sum("x")); });
      EXPECT_THAT(text, HasSubstr("\"x\""));
    }
    EXPECT_EQ(synchronize(first).item<float>(), 2);
    EXPECT_EQ(allreduce(torch::full({1}, 2.0f), Sum("x")).item<float>(), 4);
  });
}

TEST(HandleTest, ADroppedHandleGivesTheNameFree) {
  RunTorchRanks(2, [](int) {
    auto tensor = torch::ones({1});
    allreduce_async_(tensor, Sum("x"));
    allreduce(torch::ones({1}), Sum("behind it"));
    EXPECT_EQ(allreduce(torch::ones({1}), Sum("x")).item<float>(), 2);
  });
}

TEST(UnnamedTest, AreMatchedByCallOrder) {
  RunTorchRanks(2, [](int rank) {
    const Handle a = allreduce_async(torch::full({1}, 1.0 + rank), Sum());
    const Handle b = allreduce_async(torch::full({2}, 10.0 + rank), Sum());
    const Handle c = allgather_async(torch::full({1}, rank));
    EXPECT_EQ(synchronize(c).numel(), 2);
    EXPECT_EQ(synchronize(b)[0].item<double>(), 21);
    EXPECT_EQ(synchronize(a).item<double>(), 3);
  });
}

TEST(SessionTest, KnowsItsPlace) {
  RunTorchRanks(3, [](int r) {
    EXPECT_EQ(rank(), r);
    EXPECT_EQ(size(), 3);
    EXPECT_EQ(local_size(), 3);
    EXPECT_EQ(local_rank(), r);
    EXPECT_EQ(cross_size(), 1);
    EXPECT_EQ(cross_rank(), 0);
    EXPECT_TRUE(is_homogeneous());
  });
}

TEST(SessionTest, HandlesOfAnEndedSessionAreRefused) {
  std::vector<Handle> handles(2);
  std::vector<std::shared_ptr<detail::SessionState>> sessions(2);
  RunTorchRanks(2, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    handles[index] = allreduce_async(torch::ones({1}), Sum("h"));
    synchronize(handles[index]);
    sessions[index] = detail::CurrentSession();
  });
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [&] { synchronize(handles[0]); }),
              HasSubstr("\"h\""));
  ErrorOf(ErrorCode::NotInitialized, [&] { poll(handles[1]); });
  const detail::SessionScope ended(sessions[0]);
  ErrorOf(ErrorCode::NotInitialized, [] { allreduce(torch::ones({1})); });
  ErrorOf(ErrorCode::NotInitialized, [] { rank(); });
}

TEST(SessionTest, WithoutInitEveryCallSaysSo) {
  EXPECT_FALSE(is_initialized());
  EXPECT_THAT(ErrorOf(ErrorCode::NotInitialized, [] { allreduce(torch::ones({1})); }),
              HasSubstr("init()"));
  ErrorOf(ErrorCode::NotInitialized, [] { rank(); });
  ErrorOf(ErrorCode::NotInitialized, [] { abort("why"); });
  shutdown();  // nothing to do
}

TEST(FailureTest, ACallPastItsTimeoutFailsTheGroupAndNamesTheTensor) {
  RunTorchRanks(2, [](int rank) {
    const auto text = ErrorOf(ErrorCode::TimedOut, [&] {
      if (rank == 0) {
        allreduce(torch::ones({1}), Sum("slow").timeout(std::chrono::milliseconds(50)));
      } else {
        allreduce(torch::ones({1}), Sum("other"));
      }
    });
    EXPECT_THAT(text, HasSubstr("slow"));
    ErrorOf(ErrorCode::TimedOut, [&] { allreduce(torch::ones({1})); });
  });
}

TEST(FailureTest, TheLongestTimeoutIsNone) {
  RunTorchRanks(2, [](int) {
    using std::chrono::milliseconds;
    for (const milliseconds timeout : {milliseconds::max(), milliseconds(87601LL * 3600 * 1000)}) {
      const auto sum = allreduce(torch::ones({1}), Sum("w").timeout(timeout));
      EXPECT_TRUE(torch::equal(sum, torch::full({1}, 2.0f)));
    }
  });
}

TEST(FailureTest, AnErrorSaysWhereItBegan) {
  RunTorchRanks(3, [](int rank) {
    const auto origin_of = [&](const torch::Tensor& tensor, const std::string& name,
                               ErrorCode code) {
      try {
        allreduce(tensor, Sum(name));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error.origin();
      }
      ADD_FAILURE() << "nothing was thrown";
      return ErrorOrigin();
    };
    const ErrorOrigin invalid = origin_of(rank == 1 ? torch::Tensor() : torch::ones({2}), "late",
                                          ErrorCode::InvalidArgument);
    EXPECT_EQ(invalid.tensor, "late");
    EXPECT_EQ(invalid.rank, 1);
    const ErrorOrigin mismatch =
        origin_of(torch::ones({rank == 1 ? 3 : 2}), "la\n\"te", ErrorCode::Mismatch);
    EXPECT_EQ(mismatch.tensor, "la\n\"te");
    EXPECT_EQ(mismatch.rank, -1);  // who is right?
    EXPECT_EQ(
        origin_of(torch::ones({2}), std::string(5000, 'a'), ErrorCode::InvalidArgument).tensor,
        std::string(5000, 'a'));
  });
}

TEST(FailureTest, ANameIsWrittenSoThatItCanBeRead) {
  RunTorchRanks(2, [](int rank) {
    const auto text_of = [&](const std::string& name) {
      return ErrorOf(ErrorCode::Mismatch, [&] { allreduce(torch::ones({rank + 1}), Sum(name)); });
    };
    EXPECT_THAT(text_of("a\nb\x07\xff"), HasSubstr("all-reduce \"a\\nb\\x07\\xff\": shape [1]"));
    const std::string text = text_of(std::string(4000, 'a'));
    EXPECT_THAT(text, HasSubstr("aaa...aaa"));
    EXPECT_THAT(text, HasSubstr("\" (4000 bytes): shape [1]"));
    EXPECT_LT(text.size(), 300u);
    EXPECT_THAT(
        ErrorOf(ErrorCode::InvalidArgument,
                [&] { allreduce(torch::ones({1}), Sum(std::string(5000, 'a'))); }),
        AllOf(HasSubstr("aaa...aaa"), HasSubstr("(5000 bytes)"), HasSubstr("at most 4096")));
  });
}

TEST(FailureTest, AbortEndsTheOthersWithItsReason) {
  RunTorchRanks(3, [](int rank) {
    if (rank == 1) abort("the data ran out");
    try {
      allreduce(torch::ones({1}), Sum("x"));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Aborted);
      EXPECT_EQ(error.origin().rank, 1);
      EXPECT_THAT(error.what(), HasSubstr("the data ran out"));
    }
  });
}

TEST(WorldOfOneTest, EveryOperationGivesItsInput) {
  RunTorchRanks(1, [](int) {
    const auto tensor = torch::arange(6, torch::kDouble).reshape({2, 3});
    EXPECT_TRUE(torch::equal(allreduce(tensor), tensor));
    EXPECT_TRUE(torch::equal(allreduce(tensor, Sum().prescale(2).postscale(3)), tensor * 6));
    EXPECT_TRUE(torch::equal(allgather(tensor), tensor));
    EXPECT_TRUE(torch::equal(broadcast(tensor, 0), tensor));
    EXPECT_THROW(broadcast(tensor, 1), Error);
    EXPECT_THROW(allreduce(torch::empty({2}, torch::kComplexHalf)), Error);
  });
}

}  // namespace
}  // namespace sirtaki::tests
