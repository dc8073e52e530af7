#include "ops/host/host_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/inproc/inproc_backend.h"
#include "tests/support/half_reference.h"
#include "tests/support/rank_threads.h"
#include "tests/support/run_cases.h"
#include "tests/support/test_scale.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;
using core::RunBatch;
using core::RunItem;
using core::Signature;
using core::Status;
using core::StatusCode;
using tests::RankThreads;

// A tensor of one rank in plain bytes, read and written as doubles.
struct Tensor {
  Tensor(DType tensor_dtype, std::int64_t count)
      : dtype(tensor_dtype), bytes(static_cast<std::size_t>(count) * core::SizeOf(tensor_dtype)) {}

  std::int64_t size() const {
    return static_cast<std::int64_t>(bytes.size() / core::SizeOf(dtype));
  }

  template <typename T>
  T At(std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void Put(std::int64_t i, T value) {
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
  }

  DType dtype;
  std::vector<std::byte> bytes;
};

// Calls `function` with a value of the type in which sums of `dtype` are kept.
template <typename Function>
void WithArithmetic(DType dtype, Function function) {
  switch (dtype) {
    case DType::kU8:
      return function(std::uint8_t{});
    case DType::kI8:
      return function(std::int8_t{});
    case DType::kI16:
      return function(std::int16_t{});
    case DType::kI32:
      return function(std::int32_t{});
    case DType::kI64:
      return function(std::int64_t{});
    case DType::kF16:
    case DType::kBF16:
    case DType::kF32:
      return function(float{});
    case DType::kF64:
      return function(double{});
    default:
      FAIL() << "no arithmetic";
  }
}

template <typename T>
T Load(const Tensor& tensor, std::int64_t i) {
  if (tensor.dtype == DType::kF16) {
    return static_cast<T>(tests::kFloat16.Decode(tensor.At<std::uint16_t>(i)));
  }
  if (tensor.dtype == DType::kBF16) {
    return static_cast<T>(tests::kBFloat16.Decode(tensor.At<std::uint16_t>(i)));
  }
  return tensor.At<T>(i);
}

template <typename T>
void Store(Tensor& tensor, std::int64_t i, T value) {
  if (tensor.dtype == DType::kF16) {
    tensor.Put(i, tests::kFloat16.Encode(static_cast<double>(value)));
  } else if (tensor.dtype == DType::kBF16) {
    tensor.Put(i, tests::kBFloat16.Encode(static_cast<double>(value)));
  } else {
    tensor.Put(i, value);
  }
}

// What each rank has before: every rank can make every rank's.
Tensor InputOf(DType dtype, std::int64_t count, std::uint64_t seed, int rank) {
  Tensor tensor(dtype, count);
  std::mt19937_64 random(seed * 1000003 + static_cast<std::uint64_t>(rank));
  if (dtype == DType::kBool) {
    for (std::byte& byte : tensor.bytes) byte = static_cast<std::byte>(random() % 2);
    return tensor;
  }
  WithArithmetic(dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_integral_v<T>) {
        Store(tensor, i, static_cast<T>(random()));
      } else {
        Store(tensor, i, static_cast<T>(static_cast<double>(random() % 4001) - 2000) / 16);
      }
    }
  });
  return tensor;
}

// What a value is after it has travelled as this type.
float Travelled(DType wire, double value) {
  const tests::SmallFloat& format = wire == DType::kF16 ? tests::kFloat16 : tests::kBFloat16;
  return static_cast<float>(format.Decode(format.Encode(static_cast<float>(value))));
}

// The compressed all-reduce as the documentation says it: T is the tensors' type.
template <typename T>
Tensor ReducedCompressed(const Signature& signature, const std::vector<Tensor>& inputs) {
  Tensor result(signature.dtype, inputs.front().size());
  for (std::int64_t i = 0; i < result.size(); ++i) {
    float sum = 0;
    for (std::size_t r = 0; r < inputs.size(); ++r) {
      const T value = inputs[r].At<T>(i) * static_cast<T>(signature.prescale);
      sum = r == 0 ? Travelled(*signature.wire, static_cast<double>(value))
                   : sum + Travelled(*signature.wire, static_cast<double>(value));
    }
    if (signature.reduction == ReduceOp::kAverage) sum /= static_cast<float>(inputs.size());
    const auto back = static_cast<T>(Travelled(*signature.wire, static_cast<double>(sum)));
    result.Put(i, static_cast<T>(back * static_cast<T>(signature.postscale)));
  }
  return result;
}

// The all-reduce as the documentation says it, element by element, in the order of the ranks.
Tensor Reduced(const Signature& signature, const std::vector<Tensor>& inputs, int divisor) {
  Tensor result(signature.dtype, inputs.front().size());
  WithArithmetic(signature.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < result.size(); ++i) {
      T sum{};
      std::uint64_t wide_sum = 0;  // of integers, which an average sums without wrapping
      for (std::size_t r = 0; r < inputs.size(); ++r) {
        T value = Load<T>(inputs[r], i);
        if constexpr (std::is_floating_point_v<T>) {
          value = value * static_cast<T>(signature.prescale);
          sum = r == 0 ? value : sum + value;
        } else {
          sum = static_cast<T>(static_cast<std::make_unsigned_t<T>>(sum) +
                               static_cast<std::make_unsigned_t<T>>(value));
          wide_sum += static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
        }
      }
      const bool average = signature.reduction == ReduceOp::kAverage;
      if constexpr (std::is_floating_point_v<T>) {
        if (signature.postscale != 1.0) {
          sum = sum * static_cast<T>(signature.postscale / (average ? divisor : 1));
        } else if (average) {
          sum = sum / static_cast<T>(divisor);
        }
      } else if (average) {
        sum = static_cast<T>(static_cast<std::int64_t>(wide_sum) / divisor);
      }
      Store(result, i, sum);
    }
  });
  return result;
}

// One collective of a test, as all ranks see it.
struct Case {
  Signature signature;
  bool in_place = false;
  std::uint64_t seed = 0;
  std::vector<std::int64_t> rows;  // all-gather: by rank
  int absent = -1;                 // the rank that has no gradient
};

// One rank's side of it.
struct Side {
  Tensor input{DType::kU8, 0};
  Tensor output{DType::kU8, 0};
  core::HandlePtr handle;
  std::vector<std::int64_t> seen_rows;
  const std::byte* result() const { return in_place ? input.bytes.data() : output.bytes.data(); }
  bool in_place = false;
};

core::HandlePtr NewCaseHandle() { return std::make_shared<core::HandleState>(); }

std::int64_t InputCount(const Case& c, int rank) {
  const std::int64_t count = c.signature.ElementCount();
  const bool gather = c.signature.kind == OpKind::kAllGather;
  return gather ? count * c.rows[static_cast<std::size_t>(rank)] : count;
}

RunItem MakeItem(const Case& c, const std::string& name, int rank, Side& side) {
  side.in_place = c.in_place;
  side.input = InputOf(c.signature.dtype, InputCount(c, rank), c.seed, rank);
  side.output = Tensor(c.signature.dtype, c.in_place ? 0 : c.signature.ElementCount());
  side.handle = NewCaseHandle();
  auto work = std::make_shared<core::Work>();
  work->request.absent.assign(c.absent == rank ? 1 : 0, true);
  work->input = side.input.bytes.data();
  work->output = c.in_place ? side.input.bytes.data() : side.output.bytes.data();
  work->handle = side.handle;
  if (c.signature.kind == OpKind::kAllGather) {
    work->rows = c.rows[static_cast<std::size_t>(rank)];
    work->allocate_output = [&side, &c](const std::vector<std::int64_t>& rows) -> void* {
      side.seen_rows = rows;
      std::int64_t total = 0;
      for (const std::int64_t r : rows) total += r;
      side.output = Tensor(c.signature.dtype, total * c.signature.ElementCount());
      side.in_place = false;
      return side.output.bytes.empty() ? nullptr : side.output.bytes.data();
    };
  }
  RunItem item;
  item.key = core::Key::Named(core::kWorldSet, name);
  item.signature = std::make_shared<const Signature>(c.signature);
  item.work = std::move(work);
  return item;
}

std::vector<std::byte> Expected(const Case& c, int size) {
  std::vector<Tensor> inputs;
  for (int r = 0; r < size; ++r) {
    Tensor input = InputOf(c.signature.dtype, InputCount(c, r), c.seed, r);
    if (c.absent == r) std::fill(input.bytes.begin(), input.bytes.end(), std::byte{0});
    inputs.push_back(std::move(input));
  }
  switch (c.signature.kind) {
    case OpKind::kAllReduce:
      // Nothing travels where there is one rank.
      if (c.signature.wire && size > 1) {
        return c.signature.dtype == DType::kF32
                   ? ReducedCompressed<float>(c.signature, inputs).bytes
                   : ReducedCompressed<double>(c.signature, inputs).bytes;
      }
      return Reduced(c.signature, inputs, size).bytes;
    case OpKind::kBroadcast:
      return inputs[static_cast<std::size_t>(c.signature.root)].bytes;
    default:
      break;
  }
  std::vector<std::byte> all;
  for (const Tensor& input : inputs) all.insert(all.end(), input.bytes.begin(), input.bytes.end());
  return all;
}

// Drives lanes as the engine does, until everything is done.
void RunCaseToIdle(HostLanes& lanes) {
  while (!lanes.Idle()) {
    if (!lanes.Step()) std::this_thread::yield();
  }
  EXPECT_FALSE(lanes.NeedsStepping());
  EXPECT_TRUE(lanes.Running().empty());
}

HostLanesOptions StrictLimits(int rank) {
  HostLanesOptions options{.rank = rank};
  options.on_failure = [rank](const Status& why, const std::string& key) {
    ADD_FAILURE() << "rank " << rank << ": " << key << ": " << why.ToString();
  };
  return options;
}

std::string NameOf(const ::testing::TestParamInfo<int>& size) {
  return std::to_string(size.param) + "Ranks";
}

class HostLanesTest : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }

  // Each inner vector is a batch. All ranks run all batches, started at once, and compare every
  // byte.
  void RunCases(const std::vector<std::vector<Case>>& batches) {
    InprocWorld world(size());
    RankThreads::Run(size(), [&](int rank) {
      const std::unique_ptr<Backend> backend = world.Connect(rank);
      HostLanes lanes(StrictLimits(rank), *backend);
      std::vector<std::vector<Side>> sides;
      sides.reserve(batches.size());
      for (const auto& cases : batches) sides.emplace_back(cases.size());
      for (std::size_t b = 0; b < batches.size(); ++b) {
        RunBatch batch = SmallBatch(size(), b);
        for (std::size_t i = 0; i < batches[b].size(); ++i) {
          batch.items.push_back(
              MakeItem(batches[b][i], "t" + std::to_string(i), rank, sides[b][i]));
        }
        lanes.Start(std::move(batch), core::Clock::now());
      }
      RunCaseToIdle(lanes);
      for (std::size_t b = 0; b < batches.size(); ++b) {
        for (std::size_t i = 0; i < batches[b].size(); ++i) Check(batches[b][i], sides[b][i], rank);
      }
    });
  }

 private:
  void Check(const Case& c, const Side& side, int rank) const {
    SCOPED_TRACE(c.signature.ToString() + (c.in_place ? " in place" : ""));
    ASSERT_TRUE(side.handle->done());
    EXPECT_TRUE(side.handle->status().ok()) << side.handle->status().ToString();
    const std::vector<std::byte> expected = Expected(c, size());
    const auto& result = side.in_place ? side.input.bytes : side.output.bytes;
    ASSERT_EQ(result.size(), expected.size());
    EXPECT_TRUE(result == expected);
    if (!side.in_place) {
      EXPECT_TRUE(side.input.bytes ==
                  InputOf(c.signature.dtype, InputCount(c, rank), c.seed, rank).bytes)
          << "the input was written to";
    }
    if (c.signature.kind == OpKind::kAllGather) {
      EXPECT_EQ(side.seen_rows, c.rows);
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, HostLanesTest, ::testing::Values(1, 2, 3, 4), NameOf);

TEST_P(HostLanesTest, ReducesEveryTypeAndSize) {
  std::vector<std::vector<Case>> batches;
  std::uint64_t seed = 1;
  for (int d = 0; d < core::kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (!core::IsInteger(dtype) && !core::IsFloating(dtype)) continue;
    for (const ReduceOp reduction : {ReduceOp::kSum, ReduceOp::kAverage}) {
      std::vector<Case> batch;
      for (const std::int64_t count : {0, 1, 3, 64, 127, 1000, 2500}) {
        for (const bool in_place : {false, true}) {
          batch.push_back({.signature = {.reduction = reduction, .dtype = dtype, .shape = {count}},
                           .in_place = in_place,
                           .seed = ++seed,
                           .rows = {}});
        }
      }
      batches.push_back(batch);
    }
  }
  RunCases(batches);
}

TEST_P(HostLanesTest, ScalesOnTheWay) {
  std::vector<Case> batch;
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    // A backend adds up more than two values in an order of its own, except those of half types: so
    // the sums of the others must be exact.
    const bool any_order = size() > 2 && !core::IsHalf(dtype);
    for (const std::int64_t count : {3, 900}) {
      batch.push_back({.signature = {.reduction = ReduceOp::kAverage,
                                     .dtype = dtype,
                                     .shape = {count},
                                     .prescale = any_order ? 0.25 : 0.3,
                                     .postscale = 1.7},
                       .in_place = count == 900,
                       .seed = 5,
                       .rows = {}});
    }
  }
  RunCases({batch});
}

TEST_P(HostLanesTest, CompressesOnTheWay) {
  std::vector<std::vector<Case>> batches;
  std::uint64_t seed = 77;
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const DType wire : {DType::kF16, DType::kBF16}) {
      for (const ReduceOp reduction : {ReduceOp::kSum, ReduceOp::kAverage}) {
        for (const double factor : {1.0, 0.3}) {
          std::vector<Case> batch;
          for (const std::int64_t count : {0, 1, 3, 64, 127, 1000, 2501}) {
            batch.push_back({.signature = {.reduction = reduction,
                                           .dtype = dtype,
                                           .wire = wire,
                                           .shape = {count},
                                           .prescale = factor,
                                           .postscale = factor == 1.0 ? 1.0 : 1.7},
                             .in_place = count % 2 == 1,
                             .seed = ++seed,
                             .rows = {}});
          }
          batches.push_back(batch);
        }
      }
    }
  }
  RunCases(batches);
}

TEST_P(HostLanesTest, BroadcastsFromEveryRoot) {
  std::vector<Case> batch;
  for (int root = 0; root < size(); ++root) {
    for (const std::int64_t count : {0, 1, 5, 100, 3000}) {
      for (const bool in_place : {false, true}) {
        for (const DType dtype : {DType::kBool, DType::kBF16, DType::kI64}) {
          batch.push_back({.signature = {.kind = OpKind::kBroadcast,
                                         .dtype = dtype,
                                         .root = root,
                                         .shape = {count}},
                           .in_place = in_place,
                           .seed = static_cast<std::uint64_t>(count),
                           .rows = {}});
        }
      }
    }
  }
  RunCases({batch});
}

TEST_P(HostLanesTest, GathersDifferentRows) {
  std::vector<Case> batch;
  for (int shape = 0; shape < 5; ++shape) {
    Case c{.signature = {.kind = OpKind::kAllGather, .dtype = DType::kF32, .shape = {7}},
           .seed = static_cast<std::uint64_t>(shape),
           .rows = {}};
    if (shape == 4) c.signature.shape = {3, 0};  // rows of nothing
    for (int r = 0; r < size(); ++r) {
      c.rows.push_back(shape == 0 ? 0 : shape == 1 ? 4 : shape == 2 ? 50 * r : (r == 0 ? 9 : 0));
    }
    batch.push_back(c);
  }
  RunCases({batch, batch});
}

TEST_P(HostLanesTest, ARankWithoutAGradientGivesZeros) {
  std::vector<Case> batch;
  for (const std::int64_t count : {5, 2000}) {
    for (const bool in_place : {false, true}) {
      for (const std::optional<DType> wire :
           {std::optional<DType>(), std::optional(DType::kBF16)}) {
        batch.push_back(
            {.signature = {.reduction = ReduceOp::kAverage, .wire = wire, .shape = {count}},
             .in_place = in_place,
             .seed = 3,
             .rows = {},
             .absent = size() - 1});
      }
    }
  }
  RunCases({batch});
}

TEST_P(HostLanesTest, RunsRandomBatches) {
  constexpr OpKind kKinds[] = {OpKind::kAllReduce, OpKind::kBroadcast, OpKind::kAllGather};
  std::mt19937_64 random(tests::TestSeed());
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int rounds = tests::ScaledCount(6, 300);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    std::vector<std::vector<Case>> batches(static_cast<std::size_t>(1 + below(5)));
    for (auto& batch : batches) {
      batch.resize(static_cast<std::size_t>(below(12)));
      for (Case& c : batch) {
        c.seed = random();
        c.in_place = below(2) == 0;
        Signature& s = c.signature;
        s.kind = kKinds[below(3)];
        s.dtype = static_cast<DType>(below(static_cast<int>(DType::kF64) + 1));
        s.shape = {below(3) == 0 ? below(3) : below(900)};
        if (s.kind == OpKind::kAllReduce) s.reduction = static_cast<ReduceOp>(below(2));
        const bool wide = s.dtype == DType::kF32 || s.dtype == DType::kF64;
        if (s.kind == OpKind::kAllReduce && wide && below(2) == 0) {
          s.wire = below(2) == 0 ? DType::kF16 : DType::kBF16;
        }
        if (s.kind == OpKind::kBroadcast) s.root = below(size());
        if (s.kind == OpKind::kAllGather) {
          s.shape = {below(20)};
          for (int r = 0; r < size(); ++r) c.rows.push_back(below(30));
        }
      }
    }
    RunCases(batches);
  }
}

TEST_P(HostLanesTest, ManySmallBatchesAreInFlightAtOnce) {
  std::vector<std::vector<Case>> batches;
  for (std::uint64_t i = 0; i < 60; ++i) {
    batches.push_back(
        {{.signature = {.shape = {static_cast<std::int64_t>(i % 7)}}, .seed = i, .rows = {}}});
  }
  RunCases(batches);
}

TEST_P(HostLanesTest, WhatNobodyHasCompletesAtOnce) {
  InprocWorld world(size());
  RankThreads::Run(size(), [&](int rank) {
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    HostLanes lanes(StrictLimits(rank), *backend);
    Case c{.signature = {.shape = {10}}, .rows = {}};
    Side side;
    RunBatch batch = SmallBatch(size());
    batch.items.push_back(MakeItem(c, "w", rank, side));
    batch.items[0].absent = {true};
    lanes.Start(std::move(batch), core::Clock::now());
    EXPECT_TRUE(side.handle->done());
    EXPECT_TRUE(side.handle->status().ok());
    EXPECT_TRUE(lanes.Idle());
  });
}

class HostLanesJoinTest : public HostLanesTest {};

INSTANTIATE_TEST_SUITE_P(Modes, HostLanesJoinTest, ::testing::Values(2, 3, 4), NameOf);

TEST_P(HostLanesJoinTest, ARankThatHasJoinedTakesPartWithoutTensors) {
  const int joined = size() - 1;
  InprocWorld world(size());
  RankThreads::Run(size(), [&](int rank) {
    const std::unique_ptr<Backend> backend = world.Connect(rank);
    HostLanes lanes(StrictLimits(rank), *backend);
    std::vector<Case> cases;
    for (const std::int64_t count : {4, 1200}) {
      for (const std::optional<DType> wire : {std::optional<DType>(), std::optional(DType::kF16)}) {
        cases.push_back(
            {.signature = {.reduction = ReduceOp::kAverage, .wire = wire, .shape = {count}},
             .rows = {},
             .absent = joined});
      }
      cases.push_back(
          {.signature = {.kind = OpKind::kBroadcast, .root = 0, .shape = {count}}, .rows = {}});
    }
    std::vector<Side> sides(cases.size());
    RunBatch batch = SmallBatch(size());
    for (std::size_t i = 0; i < cases.size(); ++i) {
      batch.items.push_back(MakeItem(cases[i], std::to_string(i), rank, sides[i]));
      batch.items.back().silent = core::RankRanges{joined};
      if (rank == joined) batch.items.back().work = nullptr;
    }
    lanes.Start(std::move(batch), core::Clock::now());
    RunCaseToIdle(lanes);
    for (std::size_t i = 0; i < cases.size() && rank != joined; ++i) {
      EXPECT_TRUE(sides[i].output.bytes == Expected(cases[i], size()));
    }
  });
}

}  // namespace
}  // namespace sirtaki::ops
