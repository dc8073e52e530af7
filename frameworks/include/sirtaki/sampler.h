// Which samples of the data set each rank takes.
#pragma once

#include <torch/arg.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "sirtaki/export.h"
#include "sirtaki/session.h"

namespace sirtaki {

// What to do if the number of samples is no multiple of the number of ranks.
enum class Uneven : unsigned char {
  Pad,   // ranks get ceil(samples / ranks) each: the first samples of the order come again
  Drop,  // ranks get floor(samples / ranks) each: the last samples of the order are left out
  Keep,  // every sample once: shares differ by one. For evaluation; training needs as many steps
         // on every rank
};

struct DistributedSamplerOptions {
  // In another order in every epoch; false: in the data set's order.
  TORCH_ARG(bool, shuffle) = true;
  // Of the order. The same on all ranks, or they would take each other's samples.
  TORCH_ARG(std::uint64_t, seed) = 0;
  TORCH_ARG(Uneven, uneven) = Uneven::Pad;
  // Whose share it is; both or none are given. Default: those of the session. For a process set
  // that reads the data among its ranks: rank(set.rank()).ranks(set.size()).
  TORCH_ARG(std::optional<int>, rank);
  TORCH_ARG(std::optional<int>, ranks);
};

// Gives this rank every ranks-th sample of a common order, beginning with the rank-th:
//
//   sirtaki::DistributedSampler sampler(*data.size(), DistributedSamplerOptions().seed(7));
//   auto loader = torch::data::make_data_loader(data, sampler, batch_size);
//   for (auto& batch : *loader) …   // each such loop is the next epoch
//
// The order depends on the seed, the epoch and the number of samples, on nothing else: it is the
// same on every rank and machine, and in every run.
//
// A data loader takes a copy of its own. Its loops begin with reset(), which goes on to the next
// epoch if the one before was begun; a program that makes a loader for every epoch calls
// set_epoch() on the sampler that it keeps. It is the kept one that goes into a checkpoint.
//
// To go on in the middle of an epoch, say how much of it is done, then make the loader:
//
//   sampler.set_position(steps_done * batch_size);
//
// position() counts what next() has given. A loader with worker threads asks for batches ahead, so
// there that is more than what was trained on; the sampler that the program keeps does not move
// with its loader's, and set_position() tells it before it is saved.
//
// Not collective, and not thread-safe; loaders call it from the thread that runs their loop.
class SIRTAKI_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // `samples`: how many the data set has, at least 0. Throws invalid_argument for a rank that is
  // not in 0 <= rank < ranks.
  explicit DistributedSampler(std::size_t samples, const DistributedSamplerOptions& options = {},
                              const Session& session = {});

  // Begins this epoch; if it is the present one, nothing changes.
  void set_epoch(std::size_t epoch);
  std::size_t epoch() const { return epoch_; }

  // How many of size() are done. Survives the next reset(). At most size(), or invalid_argument.
  void set_position(std::size_t position);
  std::size_t position() const { return position_; }

  // Samples of this rank in this epoch.
  std::size_t size() const;

  // Back to the beginning: of the next epoch if next() was called in this one, else of this one,
  // where set_position() or load() have put it. `samples`: a new size of the data set; if it is
  // another, the epoch begins at its first sample.
  void reset(std::optional<std::size_t> samples = std::nullopt) override;

  // The next up to `batch_size` (at least 1) indices, nothing if there are none left.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  // Seed, epoch and position, the same for every rank: that of one may be loaded by all. Data set,
  // `shuffle` and `uneven` must be as they were, else load() throws invalid_argument and changes
  // nothing. The number of ranks may be another: then what is left of the epoch is shared out among
  // the new ranks, position() is 0 and size() what is left for this one; later epochs are whole.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void BeginEpoch(std::size_t epoch);
  std::size_t IndexAt(std::size_t place);

  bool shuffle_;
  std::uint64_t seed_;
  Uneven uneven_;
  std::size_t rank_ = 0;
  std::size_t ranks_ = 1;
  std::size_t samples_;
  std::size_t epoch_ = 0;
  std::size_t done_before_ = 0;  // samples of this epoch that a job of other ranks has done
  std::size_t position_ = 0;
  bool begun_ = false;              // next() was called since the position was set
  std::vector<std::size_t> order_;  // of the shuffled epoch; made when it is first needed
};

}  // namespace sirtaki
