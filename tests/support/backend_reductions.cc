// The checks of BackendConformance that reduce.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "ops/base/kernels.h"
#include "tests/support/backend_conformance.h"

namespace sirtaki::tests {
namespace {

using core::DType;
using core::ReduceOp;

template <typename Function>
void ForEachReduction(Function function) {
  for (int op = 0; op < core::kReduceOpCount; ++op) {
    for (int dtype = 0; dtype < core::kDTypeCount; ++dtype) {
      if (ops::HasReduction(static_cast<ReduceOp>(op), static_cast<DType>(dtype))) {
        function(static_cast<ReduceOp>(op), static_cast<DType>(dtype));
      }
    }
  }
}

// Rank `from`'s element: small whole numbers of both signs, exact in every floating sum and
// product; every integer's loop wraps as the backend does.
template <typename T>
T Value(DType dtype, int from, std::int64_t i) {
  if (dtype == DType::kBool) return static_cast<T>((from + i) % 3 == 0);
  const auto value = static_cast<int>((from + 1) * 5 + i * 7) % 11 - 4;
  return static_cast<T>(value);
}

template <typename T>
T CombineIntegers(ReduceOp op, T a, T b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  switch (op) {
    case ReduceOp::kMin:
      return b < a ? b : a;
    case ReduceOp::kMax:
      return b > a ? b : a;
    case ReduceOp::kProduct:
      return static_cast<T>(x * y);
    case ReduceOp::kBitAnd:
      return static_cast<T>(x & y);
    case ReduceOp::kBitOr:
      return static_cast<T>(x | y);
    case ReduceOp::kBitXor:
      return static_cast<T>(x ^ y);
    default:
      return static_cast<T>(x + y);
  }
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kMin) return std::min(a, b);
    if (op == ReduceOp::kMax) return std::max(a, b);
    return op == ReduceOp::kProduct ? a * b : a + b;
  } else {
    return CombineIntegers(op, a, b);
  }
}

}  // namespace

template <typename T>
void BackendConformance::Reduce(fusion::Lane lane, DType dtype, ReduceOp op, std::int64_t count,
                                int root) {
  std::vector<T> data(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    data[static_cast<std::size_t>(i)] = Value<T>(dtype, rank_, i);
  }
  Finish(root < 0
             ? RootlessOf(World(lane)).AllReduce(World(lane), data.data(), count, dtype, op, {})
             : On(World(lane)).Reduce(World(lane), data.data(), count, dtype, op, root),
         lane);
  if (root >= 0 && root != rank_) return;
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    T expected = Value<T>(dtype, 0, i);
    for (int r = 1; r < size_; ++r) expected = Combine<T>(op, expected, Value<T>(dtype, r, i));
    if (data[static_cast<std::size_t>(i)] != expected) ++wrong;
  }
  EXPECT_EQ(wrong, 0) << "of " << count << ": " << core::ReduceOpName(op) << " of "
                      << core::DTypeName(dtype) << ", root " << root;
}

void BackendConformance::ReduceAny(fusion::Lane lane, DType dtype, ReduceOp op, std::int64_t count,
                                   int root) {
  switch (dtype) {
    case DType::kU8:
    case DType::kBool:
      return Reduce<std::uint8_t>(lane, dtype, op, count, root);
    case DType::kI8:
      return Reduce<std::int8_t>(lane, dtype, op, count, root);
    case DType::kI16:
      return Reduce<std::int16_t>(lane, dtype, op, count, root);
    case DType::kI32:
      return Reduce<std::int32_t>(lane, dtype, op, count, root);
    case DType::kI64:
      return Reduce<std::int64_t>(lane, dtype, op, count, root);
    case DType::kF32:
      return Reduce<float>(lane, dtype, op, count, root);
    case DType::kF64:
      return Reduce<double>(lane, dtype, op, count, root);
    default:
      ADD_FAILURE() << "no check for " << core::DTypeName(dtype);
  }
}

void BackendConformance::ReducesEveryTypeAndSize() {
  for (const fusion::Lane lane : kLanes) {
    for (const std::int64_t count : {0, 1, 7, 1025, 4099}) {
      ForEachReduction(
          [&](ReduceOp op, DType dtype) { ReduceAny(lane, dtype, op, count, /*root=*/-1); });
    }
  }
}

void BackendConformance::ReducesToEveryRoot() {
  for (int root = 0; root < size_; ++root) {
    ForEachReduction([&](ReduceOp op, DType dtype) {
      ReduceAny(fusion::Lane::kSmall, dtype, op, 3, root);
      for (const std::int64_t count : {0, 1, 4099}) {
        ReduceAny(fusion::Lane::kLarge, dtype, op, count, root);
      }
    });
  }
}

void BackendConformance::ReducesLargeVectors() {
  ReduceAny(fusion::Lane::kLarge, DType::kF32, ReduceOp::kSum, (1 << 20) + 3, -1);
  ReduceAny(fusion::Lane::kLarge, DType::kU8, ReduceOp::kSum, (3 << 20) + 1, -1);
  ReduceAny(fusion::Lane::kLarge, DType::kF64, ReduceOp::kSum, (1 << 19) + 1, size_ - 1);
}

template <typename T>
void BackendConformance::Wrap(fusion::Lane lane, DType dtype) {
  const auto top = static_cast<T>(std::uint64_t{1} << (8 * sizeof(T) - 1));
  std::vector<T> data(37, top);
  Finish(
      RootlessOf(World(lane)).AllReduce(World(lane), data.data(), 37, dtype, ReduceOp::kSum, {}));
  EXPECT_TRUE(data == std::vector<T>(37, size_ % 2 == 0 ? T{0} : top)) << core::DTypeName(dtype);
  if (!ops::HasReduction(ReduceOp::kProduct, dtype)) return;
  const auto factor = static_cast<T>((std::uint64_t{1} << (8 * sizeof(T) - 2)) + 3);
  auto expected = std::uint64_t{1};
  for (int r = 0; r < size_; ++r) expected *= static_cast<std::uint64_t>(factor);
  data.assign(37, factor);
  Finish(RootlessOf(World(lane))
             .AllReduce(World(lane), data.data(), 37, dtype, ReduceOp::kProduct, {}));
  EXPECT_TRUE(data == std::vector<T>(37, static_cast<T>(expected))) << core::DTypeName(dtype);
}

void BackendConformance::IntegersWrap() {
  for (const fusion::Lane lane : kLanes) {
    Wrap<std::uint8_t>(lane, DType::kU8);
    Wrap<std::int8_t>(lane, DType::kI8);
    Wrap<std::int16_t>(lane, DType::kI16);
    Wrap<std::int32_t>(lane, DType::kI32);
    Wrap<std::int64_t>(lane, DType::kI64);
  }
}

// One element for each rank that alone has a NaN, the other zero, or the smallest or greatest
// value.
template <typename T>
void BackendConformance::OrderZerosAndNan(fusion::Lane lane, DType dtype) {
  const auto ranks = static_cast<std::size_t>(size_);
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    if (!ops::HasReduction(op, dtype)) continue;
    const T special = op == ReduceOp::kMin ? -T{0} : T{0};
    const T usual = -special;
    std::vector<T> data(2 * ranks, usual);
    data[static_cast<std::size_t>(rank_)] = std::numeric_limits<T>::quiet_NaN();
    data[ranks + static_cast<std::size_t>(rank_)] = special;
    Finish(RootlessOf(World(lane))
               .AllReduce(World(lane), data.data(), static_cast<std::int64_t>(data.size()), dtype,
                          op, {}));
    for (std::size_t i = 0; i < ranks; ++i) {
      EXPECT_TRUE(std::isnan(data[i])) << core::ReduceOpName(op) << " with a NaN of rank " << i;
      EXPECT_EQ(std::signbit(data[ranks + i]), op == ReduceOp::kMin)
          << core::ReduceOpName(op) << " of zeros, rank " << i;
    }
  }
}

void BackendConformance::NanWinsAndZerosAreOrdered() {
  for (const fusion::Lane lane : kLanes) {
    OrderZerosAndNan<float>(lane, DType::kF32);
    OrderZerosAndNan<double>(lane, DType::kF64);
  }
}

void BackendConformance::AllRanksGetTheSameBits() {
  std::vector<float> values(1001);
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 1.0f / static_cast<float>(i + 1 + static_cast<std::size_t>(rank_) * 17);
  }
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax}) {
    if (!ops::HasReduction(op, DType::kF32)) continue;
    for (const fusion::Lane lane : kLanes) {
      std::vector<float> reduced = values;
      if (op != ReduceOp::kSum) {  // NaNs of different ranks may differ before, not after
        for (const std::size_t i : {std::size_t{3}, static_cast<std::size_t>(5 + rank_)}) {
          reduced[i] = std::nanf(rank_ % 2 == 0 ? "1" : "2");
        }
      }
      const auto bytes = static_cast<std::int64_t>(reduced.size() * sizeof(float));
      Finish(RootlessOf(World(lane))
                 .AllReduce(World(lane), reduced.data(), static_cast<std::int64_t>(reduced.size()),
                            DType::kF32, op, {}));
      std::vector<float> all(reduced.size() * static_cast<std::size_t>(size_));
      Finish(On(World(lane)).AllGather(World(lane), reduced.data(), all.data(), bytes));
      for (int r = 0; r < size_; ++r) {
        const float* other = all.data() + static_cast<std::size_t>(r) * reduced.size();
        EXPECT_EQ(std::memcmp(other, reduced.data(), static_cast<std::size_t>(bytes)), 0)
            << core::ReduceOpName(op) << ", ranks " << r << " and " << rank_;
      }
    }
  }
}

template <typename T>
void BackendConformance::Scale(fusion::Lane lane, DType dtype, std::int64_t count,
                               fusion::Scale after) {
  std::vector<T> expected(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = static_cast<T>(1000.0 / static_cast<double>(i % 777 + 3) + rank_);
  }
  std::vector<T> scaled = expected;
  Finish(RootlessOf(World(lane))
             .AllReduce(World(lane), expected.data(), count, dtype, ReduceOp::kSum, {}));
  fusion::Convert(dtype, expected.data(), dtype, expected.data(), count, after);
  Finish(
      On(World(lane)).AllReduce(World(lane), scaled.data(), count, dtype, ReduceOp::kSum, after));
  const auto first = std::mismatch(expected.begin(), expected.end(), scaled.begin()).first;
  EXPECT_EQ(first - expected.begin(), count) << "of " << core::DTypeName(dtype);
}

void BackendConformance::ScalesWhatItReduces() {
  for (const fusion::Lane lane : kLanes) {
    const ops::Route route = backend_.Select(World(lane));
    // Another all-reducer has an order of adding of its own.
    if (route.rootless != route.backend || !route.backend->ScalesReduced(World(lane))) continue;
    for (const std::int64_t count : {0, 1, 5, 4099, 300007}) {
      for (const fusion::Scale after : {fusion::Scale{.divisor = 3}, fusion::Scale{.factor = 0.3},
                                        fusion::Scale{.factor = 0.7, .divisor = size_}}) {
        Scale<float>(lane, DType::kF32, count, after);
        Scale<double>(lane, DType::kF64, count, after);
        Scale<std::int32_t>(lane, DType::kI32, count, after);
      }
    }
  }
}

void BackendConformance::ReducesEveryPart() {
  const ops::Channel channel = World(fusion::Lane::kLarge);
  ops::Rootless& backend = RootlessOf(channel);
  if (!backend.ReducesParts(channel)) return;
  // Unequal ones; nothing but the last; nothing; short equal ones.
  for (const int shape : {0, 1, 2, 3}) {
    constexpr std::int64_t kUnequal[] = {70'000, 0, 3, 129, 9'001};
    std::vector<std::int64_t> counts;
    for (int r = 0; r < size_; ++r) {
      counts.push_back(shape == 0   ? kUnequal[r % 5]
                       : shape == 1 ? (r == size_ - 1 ? 777 : 0)
                       : shape == 2 ? 0
                                    : 5);
    }
    std::vector<double> values;  // whole numbers, so that no order of adding rounds
    std::size_t begin = 0;
    for (int m = 0; m < size_; ++m) {
      if (m == rank_) begin = values.size();
      for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(m)]; ++i) {
        values.push_back(static_cast<double>(i * (rank_ + 1) + m));
      }
    }
    Finish(backend.ReduceScatter(channel, values.data(), counts, DType::kF64, ReduceOp::kSum),
           channel.lane);
    const std::int64_t of_ranks = static_cast<std::int64_t>(size_) * (size_ + 1) / 2;
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(rank_)]; ++i) {
      ASSERT_EQ(values[begin + static_cast<std::size_t>(i)],
                static_cast<double>(i * of_ranks + static_cast<std::int64_t>(size_) * rank_))
          << "shape " << shape << ", element " << i;
    }
  }
}

}  // namespace sirtaki::tests
