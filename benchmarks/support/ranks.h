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

// The reference between hosts: what an all-reduce has to send over each host's network, and nothing
// else. The first rank of every host streams to that of the next host.
class RawStream {
 public:
  // Collective. `bytes`: of the vector.
  explicit RawStream(std::int64_t bytes) {
    MPI_Comm here = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &here);
    int local_rank = 0;
    MPI_Comm_rank(here, &local_rank);
    MPI_Comm_free(&here);
    MPI_Comm_split(MPI_COMM_WORLD, local_rank == 0 ? 0 : MPI_UNDEFINED, 0, &across_);
    if (across_ == MPI_COMM_NULL) return;
    MPI_Comm_size(across_, &hosts_);
    MPI_Comm_rank(across_, &host_);
    given_.resize(static_cast<std::size_t>(bytes * 2 * (hosts_ - 1) / hosts_));
    taken_.resize(given_.size());
  }
  ~RawStream() {
    if (across_ != MPI_COMM_NULL) MPI_Comm_free(&across_);
  }
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;

  // Whether there are several hosts. The same on all ranks.
  bool crosses() const {
    int hosts = hosts_;
    MPI_Allreduce(MPI_IN_PLACE, &hosts, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return hosts > 1;
  }
  void Stream() {
    if (across_ == MPI_COMM_NULL) return;
    const int bytes = static_cast<int>(given_.size());
    MPI_Sendrecv(given_.data(), bytes, MPI_BYTE, (host_ + 1) % hosts_, 0, taken_.data(), bytes,
                 MPI_BYTE, (host_ + hosts_ - 1) % hosts_, 0, across_, MPI_STATUS_IGNORE);
  }

 private:
  MPI_Comm across_ = MPI_COMM_NULL;  // the first ranks of the hosts; null: this one is none
  int hosts_ = 0;
  int host_ = 0;
  std::vector<char> given_;
  std::vector<char> taken_;
};

// Measures the variants in turn and writes their medians, `scale` times as much, from rank 0.
inline void Measure(const std::string& work, int rounds, const std::string& unit, double scale,
                    const std::vector<Variant>& variants) {
  const std::vector<double> medians = Interleave(rounds, variants);
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
