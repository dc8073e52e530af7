// The bytes that reductions and conversions read and write in a second, each beside a memcpy that
// moves as many, taken in turn with it; and what a call costs that has little to do.
//
//   kernels [--rounds N]
#include "ops/base/kernels.h"

#include <time.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "benchmarks/support/measure.h"
#include "core/base/types.h"
#include "fusion/convert.h"

namespace sirtaki::benchmarks {
namespace {

using core::DType;
using core::ReduceOp;

constexpr std::size_t kSizes[] = {std::size_t{64} << 10, std::size_t{32} << 20};

std::string SizeName(std::size_t bytes) {
  return bytes < (1 << 20) ? std::to_string(bytes >> 10) + " KiB"
                           : std::to_string(bytes >> 20) + " MiB";
}

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::string Name(DType dtype) { return std::string(core::DTypeName(dtype)); }

// Aligned as LibTorch aligns its tensors.
class Memory {
 public:
  explicit Memory(std::size_t bytes)
      : bytes_((bytes + kAlignment - 1) / kAlignment * kAlignment),
        data_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes_)), std::free) {
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 1, bytes_);
  }
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return bytes_; }

 private:
  static constexpr std::size_t kAlignment = 64;

  std::size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> data_;
};

// Elements that are 1, of any type: nothing overflows or becomes subnormal on the way.
Memory Ones(DType dtype, std::size_t bytes) {
  Memory memory(bytes);
  const auto count = static_cast<std::int64_t>(bytes / core::SizeOf(dtype));
  ops::FillIdentity(ReduceOp::kProduct, dtype, memory.data(), count);
  return memory;
}

// The mean of as many calls as make about 4 MB of traffic, in this thread's own time: others may
// want the processor too.
double Timed(std::size_t moved, const std::function<void()>& work) {
  const std::size_t calls = (std::size_t{4} << 20) / moved + 1;
  const double start = ThreadSeconds();
  for (std::size_t i = 0; i < calls; ++i) work();
  return (ThreadSeconds() - start) / static_cast<double>(calls);
}

// `moved`: the bytes that `work` reads and writes.
Row Rate(const std::string& name, std::size_t moved, int rounds,
         const std::function<void()>& work) {
  const Memory from(moved / 2);
  const Memory to(moved / 2);
  const Pair pair = Interleave(
      rounds, [&] { return Timed(moved, work); },
      [&] { return Timed(moved, [&] { std::memcpy(to.data(), from.data(), moved / 2); }); });
  const auto bytes = static_cast<double>(moved);
  return {.work = name,
          .ranks = 1,
          .value = bytes / pair.ours * 1e-9,
          .unit = "GB/s",
          .reference = "memcpy of as many bytes",
          .reference_value = bytes / pair.reference * 1e-9};
}

void AddReductions(int rounds, std::vector<Row>* rows) {
  for (const std::size_t size : kSizes) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax,
                              ReduceOp::kBitAnd, ReduceOp::kBitXor}) {
      for (const DType dtype : {DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64,
                                DType::kF32, DType::kF64, DType::kBool}) {
        if (!ops::HasReduction(op, dtype)) continue;
        const Memory to = Ones(dtype, size);
        const Memory from = Ones(dtype, size);
        const auto count = static_cast<std::int64_t>(size / core::SizeOf(dtype));
        rows->push_back(Rate(
            std::string(core::ReduceOpName(op)) + " of " + Name(dtype) + ", " + SizeName(size),
            3 * size, rounds, [&] { ops::ReduceInto(op, dtype, to.data(), from.data(), count); }));
      }
    }
  }
}

void AddParts(int rounds, std::vector<Row>* rows) {
  for (const std::size_t size : kSizes) {
    for (const std::int64_t members : {2, 4}) {
      for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64, DType::kI8,
                                DType::kI32, DType::kI64}) {
        const std::size_t bytes = size * static_cast<std::size_t>(members);
        const Memory parts = Ones(dtype, bytes);
        const auto count = static_cast<std::int64_t>(size / core::SizeOf(dtype));
        rows->push_back(Rate("average of " + std::to_string(members) + " parts of " + Name(dtype) +
                                 ", " + SizeName(size),
                             bytes + size, rounds, [&] {
                               ops::ReduceParts(ReduceOp::kAverage, dtype, parts.data(), members,
                                                count, {}, {.divisor = members});
                             }));
      }
    }
  }
}

void AddConversions(int rounds, std::vector<Row>* rows) {
  constexpr DType kFloating[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  for (const std::size_t size : kSizes) {
    for (const DType from : kFloating) {
      for (const DType to : kFloating) {
        const bool scaled = from == to;  // alone it would be a memcpy
        if (core::IsHalf(from) && core::IsHalf(to)) continue;
        const Memory in = Ones(from, size);
        const std::size_t count = size / core::SizeOf(from);
        const Memory out = Ones(to, count * core::SizeOf(to));
        rows->push_back(Rate(
            Name(from) + " to " + Name(to) + (scaled ? ", times 0.3" : "") + ", " + SizeName(size),
            size + out.size(), rounds, [&] {
              fusion::Convert(from, in.data(), to, out.data(), static_cast<std::int64_t>(count),
                              {.factor = scaled ? 0.3 : 1.0});
            }));
      }
    }
    for (const DType half : {DType::kF16, DType::kBF16}) {
      const Memory values = Ones(DType::kF32, size);
      rows->push_back(
          Rate("float32 through " + Name(half) + ", " + SizeName(size), 2 * size, rounds, [&] {
            fusion::RoundThrough(half, reinterpret_cast<float*>(values.data()),
                                 static_cast<std::int64_t>(size / sizeof(float)));
          }));
    }
  }
}

// A reduction inside MPI calls the kernel with what it has at hand.
void AddCalls(int rounds, std::vector<Row>* rows) {
  constexpr int kCalls = 20000;
  for (const std::int64_t count : {1, 7, 64}) {
    std::vector<float> to(64, 1.0f);
    const std::vector<float> from(64, 1.0f);
    const auto timed = [&](const auto& work) {
      const double start = ThreadSeconds();
      for (int i = 0; i < kCalls; ++i) work();
      return (ThreadSeconds() - start) / kCalls;
    };
    void (*volatile loop)(float*, const float*, std::int64_t) =
        [](float* accumulator, const float* addend, std::int64_t n) {
          for (std::int64_t i = 0; i < n; ++i) accumulator[i] += addend[i];
        };
    const Pair pair = Interleave(
        rounds,
        [&] {
          return timed(
              [&] { ops::ReduceInto(ReduceOp::kSum, DType::kF32, to.data(), from.data(), count); });
        },
        [&] { return timed([&] { loop(to.data(), from.data(), count); }); });
    rows->push_back({"a call: sum of " + std::to_string(count) + " float32", 1, pair.ours * 1e9,
                     "ns", "a function with a loop", pair.reference * 1e9});
  }
}

int Main(int argc, char** argv) {
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "11"));
  std::vector<Row> rows;
  AddReductions(rounds, &rows);
  AddParts(rounds, &rows);
  AddConversions(rounds, &rows);
  AddCalls(rounds, &rows);
  for (const Row& row : rows) Emit(row);
  return 0;
}

}  // namespace
}  // namespace sirtaki::benchmarks

int main(int argc, char** argv) {
  using namespace sirtaki::benchmarks;
  return Guarded("kernels", [&] { return Main(argc, argv); });
}
