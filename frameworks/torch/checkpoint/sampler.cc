#include "sirtaki/sampler.h"

#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/text.h"
#include "frameworks/torch/session/session_state.h"
#include "frameworks/torch/tensors/seed_mix.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

[[noreturn]] void Refuse(const std::string& text) {
  detail::ThrowInvalid("DistributedSampler: " + text);
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

struct DistributedSampler::State {
  void BeginEpoch(std::size_t begun_epoch) {
    epoch = begun_epoch;
    done_before = 0;
    position = 0;
    begun = false;
    order.clear();
  }
  std::size_t IndexAt(std::size_t place) {
    if (!shuffle) return place;
    if (order.empty()) order = ShuffledOrder(samples, seed, epoch);
    return order[place];
  }
  std::size_t Size() const {
    const std::size_t left = samples - done_before;
    switch (uneven) {
      case Uneven::Drop:
        return left / ranks;
      case Uneven::Keep:
        return left / ranks + (rank < left % ranks ? 1 : 0);
      case Uneven::Pad:
        break;
    }
    return left / ranks + (left % ranks == 0 ? 0 : 1);
  }

  // Position and done_before are those of a job of `before` ranks. What is left of the epoch is shared
  // out among the ranks that there are now.
  void ShareOut(std::size_t before) {
    begun = false;
    if (before != ranks) {
      done_before = std::min<std::size_t>(samples, done_before + position * before);
      position = 0;
    }
    // The position may be of a rank whose share is larger by one.
    position = std::min(position, Size());
  }

  bool shuffle = true;
  std::uint64_t seed = 0;
  Uneven uneven = Uneven::Pad;
  std::size_t rank = 0;
  std::size_t ranks = 1;
  bool of_job = false;  // rank and ranks are
  std::size_t samples = 0;
  std::size_t epoch = 0;
  std::size_t done_before = 0;  // samples of this epoch that a job of other ranks has done
  std::size_t position = 0;
  bool begun = false;              // next() was called since the position was set
  std::vector<std::size_t> order;  // of the shuffled epoch; made when it is first needed
};

DistributedSampler::DistributedSampler(std::size_t samples,
                                       const DistributedSamplerOptions& options)
    : state_(std::make_unique<State>()) {
  state_->shuffle = options.shuffle();
  state_->seed = options.seed();
  state_->uneven = options.uneven();
  state_->samples = samples;
  if (options.rank().has_value() != options.ranks().has_value()) {
    Refuse("give both rank and ranks, or neither");
  }
  int rank = options.rank().value_or(0);
  int ranks = options.ranks().value_or(1);
  state_->of_job = !options.rank().has_value();
  if (state_->of_job) {
    const auto state = detail::CurrentSession();
    rank = state->topology().rank;
    ranks = state->topology().size;
  }
  if (rank < 0 || rank >= ranks) {
    Refuse("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
           " ranks: they count from 0");
  }
  state_->rank = static_cast<std::size_t>(rank);
  state_->ranks = static_cast<std::size_t>(ranks);
}

DistributedSampler::DistributedSampler(const DistributedSampler& other)
    : state_(std::make_unique<State>(*other.state_)) {}
DistributedSampler::DistributedSampler(DistributedSampler&&) noexcept = default;
DistributedSampler& DistributedSampler::operator=(const DistributedSampler& other) {
  state_ = std::make_unique<State>(*other.state_);
  return *this;
}
DistributedSampler& DistributedSampler::operator=(DistributedSampler&&) noexcept = default;
DistributedSampler::~DistributedSampler() = default;

void DistributedSampler::set_epoch(std::size_t epoch) {
  if (epoch != state_->epoch) state_->BeginEpoch(epoch);
}

void DistributedSampler::set_position(std::size_t position) {
  if (position > size()) {
    Refuse("position is " + std::to_string(position) + "; this rank has " + std::to_string(size()) +
           " samples");
  }
  state_->position = position;
  state_->begun = false;
}

void DistributedSampler::take_ranks_of_job() {
  if (!state_->of_job) return;
  const auto session = detail::AliveSession();
  const std::size_t before = state_->ranks;
  state_->rank = static_cast<std::size_t>(session->topology().rank);
  state_->ranks = static_cast<std::size_t>(session->topology().size);
  state_->ShareOut(before);
}

std::size_t DistributedSampler::size() const { return state_->Size(); }
std::size_t DistributedSampler::epoch() const { return state_->epoch; }
std::size_t DistributedSampler::position() const { return state_->position; }

void DistributedSampler::reset(std::optional<std::size_t> samples) {
  if (state_->begun) state_->BeginEpoch(state_->epoch + 1);
  if (samples.has_value() && *samples != state_->samples) {
    state_->samples = *samples;
    state_->BeginEpoch(state_->epoch);
  }
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch_size) {
  if (batch_size == 0) Refuse("batch_size is 0; it has to be at least 1");
  state_->begun = true;
  const std::size_t count = std::min(batch_size, size() - state_->position);
  if (count == 0) return std::nullopt;
  std::vector<std::size_t> indices(count);
  for (std::size_t& index : indices) {
    // Padding goes around to the beginning, more than once if there are more ranks than samples.
    index =
        state_->IndexAt((state_->done_before + state_->rank + state_->ranks * state_->position++) %
                        state_->samples);
  }
  return indices;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  Write(archive, kSamples, state_->samples);
  Write(archive, kShuffle, state_->shuffle ? 1 : 0);
  Write(archive, kUneven, static_cast<std::uint64_t>(state_->uneven));
  Write(archive, kSeed, state_->seed);
  Write(archive, kEpoch, state_->epoch);
  Write(archive, kRanks, state_->ranks);
  Write(archive, kDoneBefore, state_->done_before);
  Write(archive, kPosition, state_->position);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const std::uint64_t samples = Read(archive, kSamples);
  if (samples != state_->samples) {
    Refuse("the saved sampler has " + std::to_string(samples) + " samples, this one has " +
           std::to_string(state_->samples));
  }
  const bool shuffle = Read(archive, kShuffle) != 0;
  if (shuffle != state_->shuffle) {
    Refuse(std::string("the saved sampler ") + (shuffle ? "shuffles" : "does not shuffle") +
           ", this one " + (state_->shuffle ? "does" : "does not"));
  }
  const auto uneven = static_cast<Uneven>(Read(archive, kUneven));
  if (uneven != state_->uneven) {
    Refuse(std::string("the saved sampler has uneven = ") + NameOf(uneven) + ", this one " +
           NameOf(state_->uneven));
  }
  const std::uint64_t seed = Read(archive, kSeed);
  const std::uint64_t epoch = Read(archive, kEpoch);
  const std::uint64_t ranks = Read(archive, kRanks);
  const std::uint64_t done_before = Read(archive, kDoneBefore);
  const std::uint64_t position = Read(archive, kPosition);
  if (ranks == 0 || done_before > state_->samples || position > state_->samples) {
    Refuse("the saved state is damaged");
  }
  state_->seed = seed;
  state_->BeginEpoch(epoch);
  state_->done_before = done_before;
  state_->position = position;
  state_->ShareOut(ranks);
}

}  // namespace sirtaki
