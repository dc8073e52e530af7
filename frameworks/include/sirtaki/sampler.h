// DistributedSampler chooses the samples of the data set that each rank takes.
#pragma once

#include <torch/arg.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki {

// Uneven says what to do if the number of samples is not a multiple of the number of ranks.
enum class Uneven : unsigned char {
  Pad,   // ranks get ceil(samples / ranks) each: the first samples of the order come again
  Drop,  // ranks get floor(samples / ranks) each: the last samples of the order are left out
  Keep,  // every sample comes once: shares differ by one. For evaluation; training needs as many
         // steps on every rank
};

struct DistributedSamplerOptions {
  // True: another order in every epoch; false: the data set's order.
  TORCH_ARG(bool, shuffle) = true;
  // The seed of the order. It must be the same on all ranks, or they would take each other's
  // samples.
  TORCH_ARG(std::uint64_t, seed) = 0;
  TORCH_ARG(Uneven, uneven) = Uneven::Pad;
  // The share is that of `rank` among `ranks`; both or none are given. Default: those of the
  // job. For a process set that reads the data among its ranks:
  // rank(set.rank()).ranks(set.size()).
  TORCH_ARG(std::optional<int>, rank);
  TORCH_ARG(std::optional<int>, ranks);
};

// A DistributedSampler gives this rank every ranks-th sample of a common order, beginning with the
// rank-th:
//
//   sirtaki::DistributedSampler sampler(*data.size(), DistributedSamplerOptions().seed(7));
//   auto loader = torch::data::make_data_loader(data, sampler, batch_size);
//   for (auto& batch : *loader) …   // each such loop is the next epoch
//
// The order depends on the seed, the epoch and the number of samples, on nothing else: it is the
// same on every rank and machine, and in every run.
//
// A data loader takes a copy of its own. Its loops begin with reset(), which goes on to the next
// epoch if the current one was begun; a program that makes a loader for every epoch calls
// set_epoch() on the sampler that it keeps. The kept sampler goes into a checkpoint.
//
// To go on in the middle of an epoch, say how much of it is done, then make the loader:
//
//   sampler.set_position(samples_done);  // not steps * batch_size: the last batch may be smaller
//
// position() counts what next() has given. A loader with worker threads asks for batches ahead, so
// its sampler's position is more than what was trained on. The sampler that the program keeps does
// not move with its loader's: call set_position() on it before it is saved.
//
// Not collective, and not thread-safe; loaders call it from the thread that runs their loop.
class SIRTAKI_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // `samples` is the number of samples of the data set, at least 0. Throws InvalidArgument for a
  // rank that is not in 0 <= rank < ranks.
  explicit DistributedSampler(std::size_t samples, const DistributedSamplerOptions& options = {});
  // A copy goes its own way from there.
  DistributedSampler(const DistributedSampler&);
  DistributedSampler(DistributedSampler&&) noexcept;
  DistributedSampler& operator=(const DistributedSampler&);
  DistributedSampler& operator=(DistributedSampler&&) noexcept;
  ~DistributedSampler() override;

  // Begins the epoch; if it is the current one, nothing changes.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const;

  // The position is the number of this rank's samples that are done. It survives the next reset().
  // Throws InvalidArgument if it is above size().
  void set_position(std::size_t position);
  std::size_t position() const;

  // After another init() the job may have other ranks. Takes this process's rank among those that there
  // are now, unless the options have given rank and ranks. What is left of the epoch is shared out
  // among them, as load() does. An elastic::State calls it.
  void take_ranks_of_job();

  // Returns the number of samples of this rank in this epoch.
  std::size_t size() const;

  // Goes back to the beginning of the next epoch if next() was called in this one, else to where
  // set_position() or load() have put this one. `samples` is a new size of the data set; if it is
  // another, the epoch begins at its first sample.
  void reset(std::optional<std::size_t> samples = std::nullopt) override;

  // Returns the next up to `batch_size` (at least 1) indices, or nothing if there are none left.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  // The archive holds seed, epoch and position, which are the same for every rank: all ranks may
  // load that of one. Data set, `shuffle` and `uneven` must be as they were, else load() throws
  // InvalidArgument and changes nothing. The number of ranks may be another: then what is left of
  // the epoch is shared out among the new ranks, position() is 0 and size() is what is left for
  // this rank; later epochs are whole.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sirtaki
