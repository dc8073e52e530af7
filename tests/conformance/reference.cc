#include "tests/conformance/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

namespace sirtaki::tests::conformance {
namespace {

using core::DType;
using core::ReduceOp;
using Sizes = std::vector<std::int64_t>;

// The remainder goes to the first ones.
Sizes DealOut(std::int64_t rows, std::int64_t members) {
  Sizes parts(static_cast<std::size_t>(members), rows / members);
  for (std::int64_t i = 0; i < rows % members; ++i) ++parts[static_cast<std::size_t>(i)];
  return parts;
}

std::int64_t Sum(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

std::int64_t LargeElements(const Problem& problem) {
  const auto whole = std::int64_t{1 << 20} / static_cast<std::int64_t>(core::SizeOf(problem.dtype));
  return problem.shape == ShapeClass::kBelowMiB ? whole - 1 : whole + 1;
}

// What is behind the first dimension; a group's tensors differ in it.
Sizes RowShape(const Problem& problem, int part) {
  switch (problem.shape) {
    case ShapeClass::kOne:
    case ShapeClass::kBelowMiB:
    case ShapeClass::kAboveMiB:
      return {};
    case ShapeClass::kTransposed:
      return {5 + part};
    case ShapeClass::kStrided:
    case ShapeClass::kExpanded:
      return {4 + part};
    default:
      return {3 + part};
  }
}

// Rows where they are the same on all members.
std::int64_t EqualRows(const Problem& problem) {
  if (IsLarge(problem.shape)) return LargeElements(problem);
  switch (problem.shape) {
    case ShapeClass::kEmpty:
      return 0;
    case ShapeClass::kOne:
      return 1;
    case ShapeClass::kOdd:
      return 37;
    default:
      return 6;
  }
}

// Rows that differ: of "one" a single row on the first member alone, of "odd" fewer for each next.
std::int64_t VaryingRows(const Problem& problem, std::size_t member) {
  const auto index = static_cast<std::int64_t>(member);
  if (problem.shape == ShapeClass::kOne) return member == 0 ? 1 : 0;
  if (problem.shape == ShapeClass::kOdd) return std::max<std::int64_t>(37 - 12 * index, 1);
  return problem.shape == ShapeClass::kEmpty ? 0 : EqualRows(problem) + index;
}

// The rows that `from` has for each member, where the caller gives them; some have none.
Sizes GivenSplits(const Problem& problem, std::size_t members, std::size_t from) {
  Sizes splits(members, 0);
  if (problem.shape == ShapeClass::kEmpty) return splits;
  if (problem.shape == ShapeClass::kOne) {
    splits[(from + 1) % members] = 1;
    return splits;
  }
  if (IsLarge(problem.shape)) {
    // Nearly all to one of them.
    splits[(from + 1) % members] = LargeElements(problem) - 3;
    splits[from] += 3;
    return splits;
  }
  for (std::size_t to = 0; to < members; ++to) {
    splits[to] = static_cast<std::int64_t>((from + 2 * to + 1) % 4);
  }
  return splits;
}

Sizes ShapeOf(const Problem& problem, int part, std::size_t members, std::size_t member,
              const Sizes& splits) {
  Sizes shape = RowShape(problem, part);
  std::int64_t rows = EqualRows(problem);
  switch (problem.collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      rows = VaryingRows(problem, member);
      break;
    case Collective::kAllToAll:
      rows = IsLarge(problem.shape) ? rows / static_cast<std::int64_t>(members)
                                    : std::min<std::int64_t>(rows, 3);
      rows *= static_cast<std::int64_t>(members);
      break;
    case Collective::kAllToAllSplits:
    case Collective::kScatterSplits:
      rows = Sum(splits);
      break;
    default:
      break;
  }
  shape.insert(shape.begin(), rows);
  return shape;
}

void RepeatFirstRow(Array* array) {
  const std::size_t row = array->RowBytes();
  for (std::size_t at = row; at < array->bytes.size(); at += row) {
    std::memcpy(array->bytes.data() + at, array->bytes.data(), row);
  }
}

// ---- reductions ----

std::uint64_t CombineIntegers(ReduceOp op, std::int64_t a, std::int64_t b) {
  const auto x = static_cast<std::uint64_t>(a);
  const auto y = static_cast<std::uint64_t>(b);
  switch (op) {
    case ReduceOp::kMin:
      return static_cast<std::uint64_t>(std::min(a, b));
    case ReduceOp::kMax:
      return static_cast<std::uint64_t>(std::max(a, b));
    case ReduceOp::kProduct:
      return x * y;
    case ReduceOp::kBitAnd:
      return x & y;
    case ReduceOp::kBitOr:
      return x | y;
    case ReduceOp::kBitXor:
      return x ^ y;
    default:
      return x + y;
  }
}

// NaN wins; -0 is less than +0.
double Extreme(bool least, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  if (a == b) return std::signbit(a) == least ? a : b;
  return (a < b) == least ? a : b;
}

double CombineFloats(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return Extreme(op == ReduceOp::kMin, a, b);
  return op == ReduceOp::kProduct ? a * b : a + b;
}

double Divided(DType part, double sum, std::size_t members) {
  if (part == DType::kF64) return sum / static_cast<double>(members);
  return static_cast<float>(sum) / static_cast<float>(members);
}

void ReduceFloats(const Problem& problem, const std::vector<Array>& inputs, Array* result) {
  const std::int64_t count = result->Elements() * (core::IsComplex(result->dtype) ? 2 : 1);
  const double before = problem.scaled ? kPrescale : 1.0;
  const double after = problem.scaled ? kPostscale : 1.0;
  for (std::int64_t i = 0; i < count; ++i) {
    double value = LoadFloat(inputs[0], i) * before;
    for (std::size_t m = 1; m < inputs.size(); ++m) {
      value = CombineFloats(problem.op, value, LoadFloat(inputs[m], i) * before);
    }
    if (problem.op == ReduceOp::kAverage) {
      value = Divided(core::PartType(result->dtype), value, inputs.size());
    }
    StoreFloat(result, i, value * after);
  }
}

// In double, truncated toward zero; what is beyond the type's range becomes the end that is nearer.
std::int64_t Scaled(DType dtype, std::int64_t value, double factor) {
  const int bits = static_cast<int>(core::SizeOf(dtype)) * 8;
  const double beyond = std::ldexp(1.0, dtype == DType::kU8 ? bits : bits - 1);
  const double least = dtype == DType::kU8 ? 0 : -beyond;
  const double product = static_cast<double>(value) * factor;
  if (product >= beyond) {
    return static_cast<std::int64_t>(~std::uint64_t{0} >> ((dtype == DType::kU8 ? 64 : 65) - bits));
  }
  return static_cast<std::int64_t>(std::max(product, least));
}

void ReduceIntegers(const Problem& problem, const std::vector<Array>& inputs, Array* result) {
  const std::int64_t count = result->Elements();
  const auto operand = [&](std::size_t member, std::int64_t i) {
    const std::int64_t value = LoadInteger(inputs[member], i);
    return problem.scaled ? Scaled(problem.dtype, value, kPrescale) : value;
  };
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t value = operand(0, i);
    for (std::size_t m = 1; m < inputs.size(); ++m) {
      value = static_cast<std::int64_t>(CombineIntegers(problem.op, value, operand(m, i)));
    }
    if (problem.scaled) {
      StoreInteger(result, i, static_cast<std::uint64_t>(value));  // wraps
      value = Scaled(problem.dtype, LoadInteger(*result, i), kPostscale);
    }
    // C++ divides with truncation toward zero.
    if (problem.op == ReduceOp::kAverage) value /= static_cast<std::int64_t>(inputs.size());
    StoreInteger(result, i, static_cast<std::uint64_t>(value));
  }
}

// ---- Adasum, in double ----

using Vector = std::vector<double>;

double Dot(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

// Takes from each vector half of what it has in common with the other: adds what is orthogonal,
// averages what is parallel.
Vector AdasumOfTwo(const Vector& a, const Vector& b) {
  const double common = Dot(a, b);
  const double aa = Dot(a, a);
  const double bb = Dot(b, b);
  const double of_a = aa == 0 ? 1.0 : 1.0 - common / (2 * aa);
  const double of_b = bb == 0 ? 1.0 : 1.0 - common / (2 * bb);
  Vector sum(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}

// Those beyond the greatest power of two are first added to as many at the front; then neighbours
// are added, then pairs of neighbours, and so on.
Vector Adasum(std::vector<Vector> vectors) {
  const std::size_t power = std::bit_floor(vectors.size());
  for (std::size_t i = power; i < vectors.size(); ++i) {
    vectors[i - power] = AdasumOfTwo(vectors[i - power], vectors[i]);
  }
  for (std::size_t distance = 1; distance < power; distance *= 2) {
    for (std::size_t i = 0; i < power; i += 2 * distance) {
      vectors[i] = AdasumOfTwo(vectors[i], vectors[i + distance]);
    }
  }
  return vectors[0];
}

void ReduceByAdasum(const std::vector<Array>& inputs, Array* result) {
  const std::int64_t count = result->Elements();
  std::vector<Vector> vectors;
  for (const Array& input : inputs) {
    vectors.emplace_back();
    for (std::int64_t i = 0; i < count; ++i) vectors.back().push_back(LoadFloat(input, i));
  }
  const Vector sum = Adasum(std::move(vectors));
  for (std::int64_t i = 0; i < count; ++i) {
    StoreFloat(result, i, sum[static_cast<std::size_t>(i)]);
  }
}

// A few roundings of the type: factors and sums are kept in at least float32.
double AdasumTolerance(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-9;
    case DType::kBF16:
      return 0x1p-6;
    case DType::kF32:
      return 0x1p-18;
    default:
      return 0x1p-44;
  }
}

Array Reduce(const Problem& problem, const std::vector<Array>& inputs) {
  Array result = MakeArray(problem.dtype, inputs[0].shape);
  if (problem.op == ReduceOp::kAdasum) {
    ReduceByAdasum(inputs, &result);
  } else if (core::IsFloating(core::PartType(problem.dtype))) {
    ReduceFloats(problem, inputs, &result);
  } else {
    ReduceIntegers(problem, inputs, &result);
  }
  return result;
}

// ---- movements ----

Sizes RowsOf(const std::vector<Array>& arrays) {
  Sizes rows;
  for (const Array& array : arrays) rows.push_back(array.shape[0]);
  return rows;
}

// `rows` rows of `from`, starting at `first`, behind what `to` has.
void AppendRows(const Array& from, std::int64_t first, std::int64_t rows, Array* to) {
  const auto row = static_cast<std::ptrdiff_t>(from.RowBytes());
  to->bytes.insert(to->bytes.end(), from.bytes.begin() + first * row,
                   from.bytes.begin() + (first + rows) * row);
  to->shape[0] += rows;
}

// Member `me`'s share of an array that is dealt out by `splits`.
void AppendShare(const Array& from, const Sizes& splits, std::size_t me, Array* to) {
  const auto mine = splits.begin() + static_cast<std::ptrdiff_t>(me);
  AppendRows(from, std::accumulate(splits.begin(), mine, std::int64_t{0}), *mine, to);
}

void Move(const Problem& problem, std::size_t me, std::size_t root, Exercise* exercise) {
  const std::size_t members = exercise->inputs.size();
  const Array& roots = exercise->inputs[root];
  Array& result = exercise->result;
  result = MakeArray(problem.dtype, exercise->inputs[0].shape);
  result.bytes.clear();
  result.shape[0] = 0;
  switch (problem.collective) {
    case Collective::kBroadcast:
      return AppendRows(roots, 0, roots.shape[0], &result);
    case Collective::kScatter:
    case Collective::kScatterSplits:
      AppendShare(roots,
                  exercise->splits[root].empty()
                      ? DealOut(roots.shape[0], static_cast<std::int64_t>(members))
                      : exercise->splits[root],
                  me, &result);
      exercise->received_splits.resize(members, 0);
      exercise->received_splits[root] = result.shape[0];
      return;
    case Collective::kGather:
      if (me != root) return;
      break;
    case Collective::kAllToAll:
    case Collective::kAllToAllSplits:
      for (std::size_t from = 0; from < members; ++from) {
        const Array& input = exercise->inputs[from];
        const Sizes splits = exercise->splits[from].empty()
                                 ? DealOut(input.shape[0], static_cast<std::int64_t>(members))
                                 : exercise->splits[from];
        AppendShare(input, splits, me, &result);
        exercise->received_splits.push_back(splits[me]);
      }
      return;
    default:
      break;
  }
  for (const Array& input : exercise->inputs) AppendRows(input, 0, input.shape[0], &result);
  if (problem.collective != Collective::kAllGatherInto) {
    exercise->received_splits = RowsOf(exercise->inputs);
  }
}

}  // namespace

std::uint64_t SeedOf(const Problem& problem) {
  std::uint64_t seed = 0;
  for (std::uint64_t part :
       {static_cast<std::uint64_t>(problem.collective), static_cast<std::uint64_t>(problem.op),
        static_cast<std::uint64_t>(problem.scaled), static_cast<std::uint64_t>(problem.dtype),
        static_cast<std::uint64_t>(problem.shape), static_cast<std::uint64_t>(problem.set)}) {
    seed = seed * 32 + part;
  }
  return seed;
}

std::size_t RootOf(const Problem& problem, std::size_t members) {
  return Bits({SeedOf(problem), 0, 0}, -1) % members;
}

Exercise MakeExercise(const Problem& problem, int part, const std::vector<int>& members,
                      std::size_t me) {
  Exercise exercise;
  exercise.splits.resize(members.size());
  const bool splits = problem.collective == Collective::kAllToAllSplits ||
                      problem.collective == Collective::kScatterSplits;
  // One large tensor a group is enough; but splits hold for all of its tensors.
  Problem sized = problem;
  if (part > 0 && IsLarge(problem.shape) && !splits) sized.shape = ShapeClass::kOdd;
  for (std::size_t m = 0; m < members.size(); ++m) {
    if (splits) exercise.splits[m] = GivenSplits(problem, members.size(), m);
    Array input =
        MakeArray(problem.dtype, ShapeOf(sized, part, members.size(), m, exercise.splits[m]));
    const Source source{SeedOf(problem), part, members[m]};
    if (Reduces(problem.collective)) {
      FillOperands(problem.op, source, &input);
    } else {
      FillWithBits(source, &input);
    }
    if (problem.shape == ShapeClass::kExpanded) RepeatFirstRow(&input);
    exercise.inputs.push_back(std::move(input));
  }
  if (problem.refused) return exercise;
  const std::size_t root = RootOf(problem, members.size());
  if (!Reduces(problem.collective)) {
    Move(problem, me, root, &exercise);
    return exercise;
  }
  if (problem.op == ReduceOp::kAdasum) exercise.tolerance = AdasumTolerance(problem.dtype);
  Array whole = Reduce(problem, exercise.inputs);
  if (problem.collective == Collective::kReduceScatter) {
    const Sizes rows = DealOut(whole.shape[0], static_cast<std::int64_t>(members.size()));
    exercise.result = MakeArray(problem.dtype, whole.shape);
    exercise.result.bytes.clear();
    exercise.result.shape[0] = 0;
    AppendShare(whole, rows, me, &exercise.result);
    return exercise;
  }
  // A reduce leaves the others what they have.
  const bool gets = problem.collective != Collective::kReduce || me == root;
  exercise.result = gets ? std::move(whole) : exercise.inputs[me];
  return exercise;
}

}  // namespace sirtaki::tests::conformance
