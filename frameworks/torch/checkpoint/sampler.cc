#include "sirtaki/sampler.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "core/base/text.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/seed_mix.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

[[noreturn]] void Refuse(const std::string& text) {
  detail::ThrowStatus(
      core::Status(core::StatusCode::kInvalidArgument, "DistributedSampler: " + text));
}

// Evenly from 0 … bound - 1. std::uniform_int_distribution would draw other numbers with another
// standard library, and the ranks need not share one.
std::size_t DrawBelow(std::size_t bound, std::mt19937_64& random) {
  constexpr auto kMax = std::numeric_limits<std::uint64_t>::max();
  // The greatest draws, which would favour the small remainders, are thrown away.
  const std::uint64_t last_good = kMax - (kMax % bound + 1) % bound;
  for (;;) {
    const std::uint64_t drawn = random();
    if (drawn <= last_good) return static_cast<std::size_t>(drawn % bound);
  }
}

std::vector<std::size_t> ShuffledOrder(std::size_t samples, std::uint64_t seed, std::size_t epoch) {
  std::vector<std::size_t> order(samples);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 random(detail::SplitMix64(detail::SplitMix64(seed) + epoch));
  // Fisher-Yates, written out because std::shuffle does not say how it draws.
  for (std::size_t left = samples; left > 1; --left) {
    std::swap(order[left - 1], order[DrawBelow(left, random)]);
  }
  return order;
}

std::string NameOf(Uneven uneven) {
  static constexpr std::string_view kNames[] = {"Pad", "Drop", "Keep"};
  return std::string(core::NameIn(kNames, uneven));
}

// What save() writes. All of it fits into int64, but for the seed, whose bits are kept.
constexpr char kSamples[] = "samples";
constexpr char kShuffle[] = "shuffle";
constexpr char kUneven[] = "uneven";
constexpr char kSeed[] = "seed";
constexpr char kEpoch[] = "epoch";
constexpr char kRanks[] = "ranks";
constexpr char kDoneBefore[] = "done_before";
constexpr char kPosition[] = "position";

void Write(torch::serialize::OutputArchive& archive, const char* key, std::uint64_t value) {
  archive.write(key, c10::IValue(static_cast<std::int64_t>(value)));
}

std::uint64_t Read(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt()) {
    Refuse(std::string("the saved state has no whole number \"") + key + "\"");
  }
  return static_cast<std::uint64_t>(value.toInt());
}

}  // namespace

DistributedSampler::DistributedSampler(std::size_t samples,
                                       const DistributedSamplerOptions& options,
                                       const Session& session)
    : shuffle_(options.shuffle()),
      seed_(options.seed()),
      uneven_(options.uneven()),
      samples_(samples) {
  if (options.rank().has_value() != options.ranks().has_value()) {
    Refuse("give both rank and ranks, or neither");
  }
  int rank = options.rank().value_or(0);
  int ranks = options.ranks().value_or(1);
  if (!options.rank().has_value()) {
    const auto state = detail::StateOf(session);
    rank = state->topology().rank;
    ranks = state->topology().size;
  }
  if (rank < 0 || rank >= ranks) {
    Refuse("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
           " ranks: they count from 0");
  }
  rank_ = static_cast<std::size_t>(rank);
  ranks_ = static_cast<std::size_t>(ranks);
}

void DistributedSampler::BeginEpoch(std::size_t epoch) {
  epoch_ = epoch;
  done_before_ = 0;
  position_ = 0;
  begun_ = false;
  order_.clear();
}

void DistributedSampler::set_epoch(std::size_t epoch) {
  if (epoch != epoch_) BeginEpoch(epoch);
}

void DistributedSampler::set_position(std::size_t position) {
  if (position > size()) {
    Refuse("position is " + std::to_string(position) + "; this rank has " + std::to_string(size()) +
           " samples");
  }
  position_ = position;
  begun_ = false;
}

std::size_t DistributedSampler::size() const {
  const std::size_t left = samples_ - done_before_;
  switch (uneven_) {
    case Uneven::Drop:
      return left / ranks_;
    case Uneven::Keep:
      return left / ranks_ + (rank_ < left % ranks_ ? 1 : 0);
    case Uneven::Pad:
      break;
  }
  return left / ranks_ + (left % ranks_ == 0 ? 0 : 1);
}

void DistributedSampler::reset(std::optional<std::size_t> samples) {
  if (begun_) BeginEpoch(epoch_ + 1);
  if (samples.has_value() && *samples != samples_) {
    samples_ = *samples;
    BeginEpoch(epoch_);
  }
}

std::size_t DistributedSampler::IndexAt(std::size_t place) {
  if (!shuffle_) return place;
  if (order_.empty()) order_ = ShuffledOrder(samples_, seed_, epoch_);
  return order_[place];
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  if (batch_size == 0) Refuse("batch_size is 0; it has to be at least 1");
  begun_ = true;
  const std::size_t count = std::min(batch_size, size() - position_);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> indices(count);
  for (std::size_t& index : indices) {
    // Padding goes around to the beginning, more than once if there are more ranks than samples.
    index = IndexAt((done_before_ + rank_ + ranks_ * position_++) % samples_);
  }
  return indices;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  Write(archive, kSamples, samples_);
  Write(archive, kShuffle, shuffle_ ? 1 : 0);
  Write(archive, kUneven, static_cast<std::uint64_t>(uneven_));
  Write(archive, kSeed, seed_);
  Write(archive, kEpoch, epoch_);
  Write(archive, kRanks, ranks_);
  Write(archive, kDoneBefore, done_before_);
  Write(archive, kPosition, position_);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const std::uint64_t samples = Read(archive, kSamples);
  if (samples != samples_) {
    Refuse("the saved sampler has " + std::to_string(samples) + " samples, this one has " +
           std::to_string(samples_));
  }
  const bool shuffle = Read(archive, kShuffle) != 0;
  if (shuffle != shuffle_) {
    Refuse(std::string("the saved sampler ") + (shuffle ? "shuffles" : "does not shuffle") +
           ", this one " + (shuffle_ ? "does" : "does not"));
  }
  const auto uneven = static_cast<Uneven>(Read(archive, kUneven));
  if (uneven != uneven_) {
    Refuse(std::string("the saved sampler has uneven = ") + NameOf(uneven) + ", this one " +
           NameOf(uneven_));
  }
  const std::uint64_t seed = Read(archive, kSeed);
  const std::uint64_t epoch = Read(archive, kEpoch);
  const std::uint64_t ranks = Read(archive, kRanks);
  const std::uint64_t done_before = Read(archive, kDoneBefore);
  const std::uint64_t position = Read(archive, kPosition);
  if (ranks == 0 || done_before > samples_ || position > samples_) {
    Refuse("the saved state is damaged");
  }
  seed_ = seed;
  BeginEpoch(epoch);
  if (ranks == ranks_) {
    done_before_ = done_before;
    // The saved one may be of a rank whose share is larger by one.
    position_ = std::min<std::size_t>(position, size());
  } else {
    done_before_ = std::min<std::size_t>(samples_, done_before + position * ranks);
  }
}

}  // namespace sirtaki
