#include "tests/support/run_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <type_traits>

#include "ops/cuda/device_work.h"
#include "tests/support/half_reference.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::OpKind;
using core::ReduceOp;

constexpr std::byte kUntouched{0xCD};

std::size_t BytesOf(DType dtype, std::int64_t count) {
  return static_cast<std::size_t>(count) * core::SizeOf(dtype);
}

// Calls function(T{}, read, write) with the type in which reductions of `dtype` are computed.
template <typename Function>
void WithNumbers(DType dtype, Function function) {
  const auto plain = [&](auto zero) {
    using T = decltype(zero);
    function(
        zero,
        [](const Memory& memory, std::int64_t i) {
          T value;
          std::memcpy(&value, memory.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
          return value;
        },
        [](Memory& memory, std::int64_t i, T value) {
          std::memcpy(memory.data() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
        });
  };
  const auto half = [&](const tests::SmallFloat& format) {
    function(
        float{},
        [&format](const Memory& memory, std::int64_t i) {
          std::uint16_t bits;
          std::memcpy(&bits, memory.data() + static_cast<std::size_t>(i) * 2, 2);
          return static_cast<float>(format.Decode(bits));
        },
        [&format](Memory& memory, std::int64_t i, float value) {
          const std::uint16_t bits = format.Encode(static_cast<double>(value));
          std::memcpy(memory.data() + static_cast<std::size_t>(i) * 2, &bits, 2);
        });
  };
  switch (dtype) {
    case DType::kI8:
      return plain(std::int8_t{});
    case DType::kI16:
      return plain(std::int16_t{});
    case DType::kI32:
      return plain(std::int32_t{});
    case DType::kI64:
      return plain(std::int64_t{});
    case DType::kF16:
      return half(tests::kFloat16);
    case DType::kBF16:
      return half(tests::kBFloat16);
    case DType::kF32:
      return plain(float{});
    case DType::kF64:
      return plain(double{});
    default:
      return plain(std::uint8_t{});  // bytes: uint8, bool, float8
  }
}

template <typename T>
T Combined(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMin) return std::min(a, b);
  if (op == ReduceOp::kMax) return std::max(a, b);
  if constexpr (std::is_floating_point_v<T>) {
    return op == ReduceOp::kProduct ? a * b : a + b;
  } else {
    // The low bits of a sum and a product do not depend on the high ones.
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    switch (op) {
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
}

// Toward zero; beyond the type's range the end that is nearer.
template <typename T>
T Truncated(double value) {
  if (value >= std::ldexp(1.0, std::numeric_limits<T>::digits)) {
    return std::numeric_limits<T>::max();
  }
  const auto least = static_cast<double>(std::numeric_limits<T>::min());
  return value <= least ? std::numeric_limits<T>::min() : static_cast<T>(std::trunc(value));
}

// The sum of all who give something, in the order of the ranks.
Memory Reduced(const RunCase& c, int size) {
  const core::Signature& s = c.signature;
  std::vector<Memory> given;
  for (int r = 0; r < size; ++r) {
    if (r != c.absent && !c.Joined(r)) given.push_back(InputOf(c, r));
  }
  Memory result(given.front().size());
  const DType dtype = core::PartType(s.dtype);
  const auto count = static_cast<std::int64_t>(result.size() / core::SizeOf(dtype));
  const bool average = s.reduction == ReduceOp::kAverage;
  WithNumbers(dtype, [&](auto zero, auto read, auto write) {
    using T = decltype(zero);
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_floating_point_v<T>) {
        const auto scaled = [&](const Memory& memory) {
          return read(memory, i) * static_cast<T>(s.prescale);
        };
        T value = scaled(given.front());
        for (std::size_t g = 1; g < given.size(); ++g) {
          value = Combined(s.reduction, value, scaled(given[g]));
        }
        const auto divisor = static_cast<T>(average ? size : 1);
        if (s.postscale != 1.0) {
          value *= static_cast<T>(s.postscale / (average ? size : 1));
        } else {
          value /= divisor;
        }
        write(result, i, value);
      } else {
        const auto scaled = [&](const Memory& memory) {
          return s.prescale == 1.0
                     ? std::int64_t{read(memory, i)}
                     : Truncated<T>(static_cast<double>(read(memory, i)) * s.prescale);
        };
        auto value = static_cast<T>(scaled(given.front()));
        auto wide = static_cast<std::uint64_t>(scaled(given.front()));
        for (std::size_t g = 1; g < given.size(); ++g) {
          value = Combined(s.reduction, value, static_cast<T>(scaled(given[g])));
          wide += static_cast<std::uint64_t>(scaled(given[g]));
        }
        const auto sum = average ? static_cast<std::int64_t>(wide) : std::int64_t{value};
        const int divisor = average ? size : 1;
        if (s.postscale != 1.0) {
          value = Truncated<T>(static_cast<double>(sum) * s.postscale / divisor);
        } else {
          value = static_cast<T>(sum / divisor);
        }
        write(result, i, value);
      }
    }
  });
  return result;
}

Memory Slice(const Memory& memory, std::int64_t rows, std::int64_t first, std::int64_t count) {
  const std::size_t row = rows == 0 ? 0 : memory.size() / static_cast<std::size_t>(rows);
  const auto begin = memory.begin() + static_cast<std::ptrdiff_t>(row) * first;
  return {begin, begin + static_cast<std::ptrdiff_t>(row) * count};
}

// What `from` gives to `to`, of kinds that have rows.
Memory Given(const RunCase& c, int from, int to, int size) {
  std::int64_t first = 0;
  for (int r = 0; r < to; ++r) first += c.RowsFromTo(from, r, size);
  if (c.signature.kind == OpKind::kAllGather || c.signature.kind == OpKind::kGather) first = 0;
  const std::int64_t rows = c.rows[static_cast<std::size_t>(from)];
  return Slice(InputOf(c, from), rows, first, c.RowsFromTo(from, to, size));
}

void Append(Memory& to, const Memory& more) { to.insert(to.end(), more.begin(), more.end()); }

// Rows by rank: none anywhere, equal, growing, one rank alone.
std::vector<std::vector<std::int64_t>> RowChoices(int size) {
  std::vector<std::vector<std::int64_t>> choices(4);
  for (int r = 0; r < size; ++r) {
    choices[0].push_back(0);
    choices[1].push_back(3 * size);
    choices[2].push_back(size * (1 + 20 * r));
    choices[3].push_back(r == size / 2 ? 4 * size : 0);
  }
  return choices;
}

bool IsTheRoots(const RunCase& c) {
  return c.signature.kind == OpKind::kReduce || c.signature.kind == OpKind::kGather;
}

}  // namespace

std::int64_t RunCase::RowsFromTo(int from, int to, int size) const {
  if (Joined(from)) return 0;
  const std::int64_t own = rows[static_cast<std::size_t>(from)];
  switch (signature.kind) {
    case OpKind::kAllGather:
      return own;
    case OpKind::kGather:
      return to == signature.root ? own : 0;
    case OpKind::kScatter:
      if (from != signature.root) return 0;
      break;
    default:
      break;
  }
  const auto& given =
      splits.empty() ? std::vector<std::int64_t>{} : splits[static_cast<std::size_t>(from)];
  return given.empty() ? core::RowsOf(own, size, to) : given[static_cast<std::size_t>(to)];
}

std::int64_t RunCase::InputCount(int rank) const {
  const std::int64_t count = signature.ElementCount();
  if (signature.kind == OpKind::kBarrier) return 0;
  if (!core::FirstDimensionVaries(signature.kind)) return count;
  if (signature.kind == OpKind::kScatter && rank != signature.root) return 0;
  return count * rows[static_cast<std::size_t>(rank)];
}

std::int64_t RunCase::OutputCount(int rank, int size) const {
  const std::int64_t count = InputCount(rank);
  if (signature.kind == OpKind::kAllGatherInto) return count * size;
  if (signature.kind == OpKind::kReduceScatter) {
    const std::int64_t all = signature.shape.front();
    return all == 0 ? 0 : count / all * core::RowsOf(all, size, rank);
  }
  return count;
}

std::string RunCase::ToString() const {
  std::string text = signature.ToString() + (in_place ? " in place" : "");
  if (!joined.empty()) text += ", joined: " + joined.ToString();
  if (absent >= 0) text += ", absent: " + std::to_string(absent);
  for (const std::int64_t r : rows) text += " " + std::to_string(r);
  return text;
}

Memory InputOf(const RunCase& c, int rank) {
  const DType dtype = core::PartType(c.signature.dtype);
  const std::size_t bytes = BytesOf(c.signature.dtype, c.InputCount(rank));
  Memory memory(bytes);
  std::mt19937_64 random(c.seed * 1000003 + static_cast<std::uint64_t>(rank));
  if (dtype == DType::kBool) {
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random() % 2);
    return memory;
  }
  const bool product = c.signature.reduction == ReduceOp::kProduct;
  WithNumbers(dtype, [&](auto zero, auto, auto write) {
    using T = decltype(zero);
    const auto count = static_cast<std::int64_t>(bytes / core::SizeOf(dtype));
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_integral_v<T>) {
        write(memory, i, static_cast<T>(random()));
      } else if (product) {
        // Products of powers of two are exact in any type.
        write(memory, i,
              static_cast<T>(random() % 2 == 0 ? -1 : 1) *
                  static_cast<T>(std::uint64_t{1} << random() % 3) / 2);
      } else {
        // Never 0, whose sign would tell a part that is missing from one that is an identity.
        write(memory, i, static_cast<T>(static_cast<double>(random() % 200) * 2 - 199) / 16);
      }
    }
  });
  return memory;
}

std::optional<Memory> ExpectedOf(const RunCase& c, int rank, int size) {
  const core::Signature& s = c.signature;
  if (IsTheRoots(c) && rank != s.root) return std::nullopt;
  Memory all;
  switch (s.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      return Reduced(c, size);
    case OpKind::kReduceScatter: {
      const std::int64_t rows = s.shape.front();
      return Slice(Reduced(c, size), rows, core::FirstRowOf(rows, size, rank),
                   core::RowsOf(rows, size, rank));
    }
    case OpKind::kBroadcast:
      return InputOf(c, s.root);
    case OpKind::kAllGatherInto:
      for (int r = 0; r < size; ++r) {
        const Memory input = InputOf(c, r);
        Append(all, c.Joined(r) ? Memory(input.size()) : input);
      }
      return all;
    case OpKind::kBarrier:
      return std::nullopt;
    default:
      for (int r = 0; r < size; ++r) {
        if (!c.Joined(r) && c.RowsFromTo(r, rank, size) > 0) Append(all, Given(c, r, rank, size));
      }
      return all;
  }
}

std::vector<std::int64_t> ExpectedRows(const RunCase& c, int rank, int size) {
  if (!core::FirstDimensionVaries(c.signature.kind)) return {};
  if (c.signature.kind == OpKind::kScatter) {
    std::vector<std::int64_t> rows(static_cast<std::size_t>(size), 0);
    rows[static_cast<std::size_t>(c.signature.root)] = c.RowsFromTo(c.signature.root, rank, size);
    return rows;
  }
  if (IsTheRoots(c) && rank != c.signature.root) return {};
  std::vector<std::int64_t> rows;
  for (int r = 0; r < size; ++r) rows.push_back(c.RowsFromTo(r, rank, size));
  return rows;
}

core::RunItem RunSide::MakeItem(const RunCase& c, const std::string& name, int rank, int size) {
  core::RunItem item;
  item.key = core::Key::Named(core::kWorldSet, name);
  item.signature = std::make_shared<const core::Signature>(c.signature);
  item.silent = c.joined;
  if (c.Joined(rank)) return item;

  handle_ = std::make_shared<core::HandleState>();
  memory_ = std::make_shared<Tensors>();
  Tensors* const memory = memory_.get();
  memory->input = InputOf(c, rank);
  in_place_ = c.in_place;
  const bool on_device = c.signature.device == core::DeviceKind::kCuda;
  const core::WorkPtr work =
      on_device ? std::make_shared<cuda::DeviceWork>() : std::make_shared<core::Work>();
  work->handle = handle_;
  work->keep_alive = memory_;
  // Nothing may be read of an absent gradient.
  const bool absent = c.absent == rank;
  if (absent) work->request.absent = {true};
  work->input = absent && !in_place_ ? nullptr : memory->input.data();
  if (core::FirstDimensionVaries(c.signature.kind)) {
    if (!c.rows.empty()) work->rows = c.rows[static_cast<std::size_t>(rank)];
    if (!c.splits.empty()) work->splits = c.splits[static_cast<std::size_t>(rank)];
    work->allocate_output = [memory, dtype = c.signature.dtype, count = c.signature.ElementCount()](
                                const std::vector<std::int64_t>& rows) -> void* {
      EXPECT_FALSE(memory->allocated) << "the output was allocated twice";
      memory->allocated = true;
      memory->seen_rows = rows;
      std::int64_t total = 0;
      for (const std::int64_t r : rows) total += r;
      const std::size_t bytes = BytesOf(dtype, total * count);
      memory->output.assign(bytes + kGuard, kUntouched);
      return bytes == 0 ? nullptr : memory->output.data();
    };
    in_place_ = false;
  } else {
    memory->output.assign(
        in_place_ ? 0 : BytesOf(c.signature.dtype, c.OutputCount(rank, size)) + kGuard, kUntouched);
    work->output = in_place_ ? memory->input.data() : memory->output.data();
  }
  if (c.in_parts) {
    work->kept.emplace();
    work->kept->cuts = c.Cuts(size);
    const std::int64_t* const cut = work->kept->cuts->data() + rank;
    work->kept->begin = BytesOf(c.signature.dtype, cut[0]);
    work->kept->bytes = BytesOf(c.signature.dtype, cut[1] - cut[0]);
    memory->part.assign(work->kept->bytes + kGuard, kUntouched);
    work->kept->memory = c.part_in_whole ? static_cast<std::byte*>(work->output) + work->kept->begin
                                         : memory->part.data();
  }
  if (c.in_parts) work_ = work;  // a lane is to keep the others as long as it has to, and no longer
  item.work = work;
  return item;
}

namespace {

// Whether a share of an average is rounded before it is added, which GPUs do.
bool RoundsShares(const RunCase& c, int size) {
  const core::Signature& s = c.signature;
  return s.device == core::DeviceKind::kCuda && s.reduction == ReduceOp::kAverage &&
         core::IsFloating(core::PartType(s.dtype)) && (size & (size - 1)) != 0;
}

// Every byte, or as many roundings as there are numbers added.
void ExpectSame(const RunCase& c, int size, const Memory& found, const Memory& expected) {
  if (!core::Reduces(c.signature.kind) || !RoundsShares(c, size)) {
    EXPECT_TRUE(found == expected);
    return;
  }
  const DType dtype = core::PartType(c.signature.dtype);
  double greatest = 0;
  for (int r = 0; r < size; ++r) {
    for (const double given : AsDoubles(dtype, InputOf(c, r))) {
      greatest = std::max(greatest, std::fabs(given));
    }
  }
  greatest *= std::fabs(c.signature.prescale * c.signature.postscale);
  const DType moved = c.signature.wire.value_or(dtype);
  const int bits = moved == DType::kBF16  ? 8
                   : moved == DType::kF16 ? 11
                   : moved == DType::kF32 ? 24
                                          : 53;
  const double allowed = (size + 3) * std::ldexp(greatest, -bits);
  const std::vector<double> a = AsDoubles(dtype, found);
  const std::vector<double> b = AsDoubles(dtype, expected);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], allowed) << i;
}

}  // namespace

void RunSide::Check(const RunCase& c, int rank, int size) const {
  if (c.Joined(rank)) return;
  SCOPED_TRACE(c.ToString());
  ASSERT_TRUE(handle_->done());
  ASSERT_TRUE(handle_->status().ok()) << handle_->status().ToString();
  EXPECT_EQ(memory_->seen_rows, ExpectedRows(c, rank, size));
  const std::optional<Memory> expected = ExpectedOf(c, rank, size);
  if (has_part()) {
    const auto begin = expected->begin() + work_->kept->begin;
    ExpectSame(c, size, part(), Memory(begin, begin + work_->kept->bytes));
    // The guards, and all of the memory for a part that lies elsewhere.
    const std::size_t used = c.part_in_whole ? 0 : static_cast<std::size_t>(work_->kept->bytes);
    const Memory behind(memory_->part.begin() + static_cast<std::ptrdiff_t>(used),
                        memory_->part.end());
    EXPECT_EQ(behind, Memory(behind.size(), kUntouched));
    if (!in_place_) {
      EXPECT_EQ(Memory(memory_->output.end() - kGuard, memory_->output.end()),
                Memory(kGuard, kUntouched));
    }
    return;
  }
  if (!in_place_ || !expected) {
    EXPECT_TRUE(memory_->input == InputOf(c, rank)) << "the input was written to";
  }
  if (in_place_) {
    if (expected) {
      ExpectSame(c, size, memory_->input, *expected);
    }
    return;
  }
  Memory whole = expected.value_or(Memory());
  // The guard; all of the memory where nothing was to be written.
  whole.resize(memory_->output.size(), kUntouched);
  ExpectSame(c, size, memory_->output, whole);
}

Memory RunSide::part() const {
  const auto* const begin = static_cast<const std::byte*>(work_->kept->memory);
  return {begin, begin + work_->kept->bytes};
}

core::PartCuts RunCase::Cuts(int size) const {
  std::vector<std::int64_t> cuts = {0};
  for (const std::int64_t part : parts) cuts.push_back(cuts.back() + part);
  if (!parts.empty()) return std::make_shared<const std::vector<std::int64_t>>(std::move(cuts));
  cuts.clear();
  for (std::int64_t rank = 0; rank < size; ++rank) {
    cuts.push_back(signature.ElementCount() * rank * rank / (size * size));
  }
  cuts.push_back(signature.ElementCount());
  return std::make_shared<const std::vector<std::int64_t>>(std::move(cuts));
}

std::vector<std::int64_t> UnequalSplits(std::int64_t rows, int rank, int size) {
  std::vector<std::int64_t> splits(static_cast<std::size_t>(size), 0);
  for (std::int64_t i = 0; i < rows; ++i) {
    ++splits[static_cast<std::size_t>((rank + i * i) % size)];
  }
  return splits;
}

Cases CasesWithRows(OpKind kind, DType dtype, int root, int size) {
  Cases cases;
  for (const auto& rows : RowChoices(size)) {
    RunCase c{.signature = {.kind = kind, .dtype = dtype, .root = root, .shape = {5}},
              .seed = 11 + cases.size(),
              .rows = rows};
    cases.push_back(c);
    if (kind == OpKind::kScatter || kind == OpKind::kAllToAll) {
      for (int r = 0; r < size; ++r) {
        c.splits.push_back(UnequalSplits(rows[static_cast<std::size_t>(r)], r, size));
      }
      cases.push_back(c);
    }
  }
  cases.push_back(cases[2]);
  cases.back().signature.shape = {3, 0};  // rows of nothing
  return cases;
}

Cases ReducingCases(ReduceOp op, DType dtype, int size) {
  Cases cases;
  for (const std::int64_t count : {0, 1, 7, 33, 700}) {
    for (const bool in_place : {false, true}) {
      const int root = static_cast<int>(count) % size;
      const std::uint64_t seed = 100 + cases.size();
      cases.push_back({.signature = {.reduction = op, .dtype = dtype, .shape = {count}},
                       .in_place = in_place,
                       .seed = seed});
      cases.push_back({.signature = {.kind = OpKind::kReduce,
                                     .reduction = op,
                                     .dtype = dtype,
                                     .root = root,
                                     .shape = {count}},
                       .in_place = in_place,
                       .seed = seed});
    }
    cases.push_back({.signature = {.kind = OpKind::kReduceScatter,
                                   .reduction = op,
                                   .dtype = dtype,
                                   .shape = {count, 3}},
                     .seed = 300 + cases.size()});
  }
  return cases;
}

core::RunBatch SmallBatch(int size, std::uint64_t number) {
  return {.number = number,
          .members = std::make_shared<const core::RankRanges>(core::RankRanges::Span(0, size - 1)),
          .limits = {.fusion_bytes = 4096, .small_bytes = 512, .chunk_bytes = 256},
          .items = {}};
}

void RunToIdle(HostLanes& lanes) {
  while (!lanes.Idle()) {
    if (!lanes.Step()) std::this_thread::yield();
  }
}

std::vector<double> AsDoubles(core::DType dtype, const Memory& memory) {
  std::vector<double> numbers;
  WithNumbers(dtype, [&](auto, auto read, auto) {
    const auto count = static_cast<std::int64_t>(memory.size() / core::SizeOf(dtype));
    for (std::int64_t i = 0; i < count; ++i) {
      numbers.push_back(static_cast<double>(read(memory, i)));
    }
  });
  return numbers;
}

}  // namespace sirtaki::ops
