// What programs share that run on several ranks: timing over all of them, and tensors in memory of
// each kind.
#pragma once

#include <ATen/Functions.h>
#include <mpi.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/support/measure.h"
#include "frameworks/torch/session/session_state.h"

namespace sirtaki::benchmarks {

// MPI for the references, also where the library runs without it. After init(), which else starts it.
class MpiOfReferences {
 public:
  MpiOfReferences() {
    int started = 0;
    MPI_Initialized(&started);
    int provided = 0;
    if (started == 0) MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
    is_ours_ = started == 0;
  }
  // After shutdown(), if nothing has failed.
  void End() const {
    if (is_ours_) MPI_Finalize();
  }

 private:
  bool is_ours_ = false;
};

// The slowest rank's, so that all ranks see one number.
inline double Slowest(double seconds) {
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

// Seconds that the slowest rank needs for `body`, all beginning together.
inline double Timed(const std::function<void()>& body) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto start = Clock::now();
  body();
  return Slowest(Seconds(Clock::now() - start));
}

inline std::string SizeName(std::int64_t bytes) {
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; ++unit) bytes /= 1024;
  constexpr const char* kUnits[] = {" B", " KiB", " MiB", " GiB"};
  return std::to_string(bytes) + kUnits[unit];
}

// Zeros in memory that the ranks of this host share, as gradient arenas are.
inline at::Tensor SharedZeros(std::int64_t elements) {
  std::shared_ptr<void> memory = detail::CurrentSession()->session().AllocateShared(
      elements * static_cast<std::int64_t>(sizeof(float)));
  void* data = memory.get();
  return at::from_blob(
             data, {elements}, [memory = std::move(memory)](void*) {}, at::kFloat)
      .zero_();
}

// Zeros in memory of malloc, whatever allocator LibTorch has: nobody else sees it.
inline at::Tensor PrivateZeros(std::int64_t elements) {
  const auto memory = std::make_shared<std::vector<float>>(static_cast<std::size_t>(elements));
  return at::from_blob(
      memory->data(), {elements}, [memory](void*) {}, at::kFloat);
}

// The reference: a vector of malloc's, reduced in place by MPI.
class RawVector {
 public:
  explicit RawVector(std::int64_t elements) : values_(static_cast<std::size_t>(elements)) {}
  void AllReduce() { AllReduce(0, static_cast<std::int64_t>(values_.size())); }
  void AllReduce(std::int64_t from, std::int64_t elements) {
    MPI_Allreduce(MPI_IN_PLACE, values_.data() + from, static_cast<int>(elements), MPI_FLOAT,
                  MPI_SUM, MPI_COMM_WORLD);
  }

 private:
  std::vector<float> values_;
};

// Measures the variants in turn and writes their medians, `scale` times as much, from rank 0.
// Fewer rounds where all of them would take longer than about `most_seconds`; but at least 3.
inline void Measure(const std::string& work, int rounds, const std::string& unit, double scale,
                    const std::vector<Variant>& variants, double most_seconds = 10) {
  const std::vector<double> medians = Interleave(rounds, variants, most_seconds);
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != 0) return;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    Emit(Sample{work, size, variants[i].name, medians[i] * scale, unit});
  }
}

}  // namespace sirtaki::benchmarks
