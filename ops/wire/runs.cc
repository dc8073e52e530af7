#include "ops/wire/runs.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "ops/base/bytes.h"
#include "ops/base/keep_forever.h"
#include "ops/base/kernels.h"

namespace sirtaki::ops::wire {
namespace {

using core::Status;

void ScaleInPlace(const Reduction& what, void* memory, std::int64_t count) {
  if (!what.after.identity()) {
    fusion::Convert(what.dtype, memory, what.dtype, memory, count, what.after);
  }
}

// The members in the order of a chain from the root: its host first, then the others, each host's
// together.
std::vector<int> ChainFrom(const Party& party, int root) {
  std::vector<int> chain{root};
  chain.reserve(party.ranks.size());
  const int host = party.hosts[static_cast<std::size_t>(root)];
  for (const bool of_root : {true, false}) {
    for (const int member : party.order) {
      if (member == root) continue;
      if ((party.hosts[static_cast<std::size_t>(member)] == host) == of_root) {
        chain.push_back(member);
      }
    }
  }
  return chain;
}

// All-reduce of everything at once. Where the number of members is no power of two, the last ones
// give theirs to the first ones, and get the result from them.
class Doubling final : public Run {
 public:
  Doubling(const Seat& seat, const Reduction& what)
      : Run(seat),
        what_(what),
        bytes_(what.count * BytesOf(what.dtype)),
        core_(static_cast<int>(std::bit_floor(static_cast<unsigned>(size())))),
        extra_(size() - core_),
        scratch_(Scratch(bytes_)) {}

 private:
  bool Next() override {
    if (self() >= core_) return NextOfExtra();
    if (came_from_ >= 0) Combine();
    if (!folded_) {
      folded_ = true;
      if (self() < extra_) {
        came_from_ = self() + core_;
        Exchange(came_from_, scratch_, bytes_, -1, nullptr, 0);
        return true;
      }
    }
    if (distance_ < core_) {
      came_from_ = self() ^ distance_;
      distance_ *= 2;
      Exchange(came_from_, scratch_, bytes_, came_from_, what_.memory, bytes_);
      return true;
    }
    if (gave_) return false;
    gave_ = true;
    ScaleInPlace(what_, what_.memory, what_.count);
    if (self() >= extra_) return false;
    Exchange(-1, nullptr, 0, self() + core_, what_.memory, bytes_);
    return true;
  }

  bool NextOfExtra() {
    const int partner = self() - core_;
    if (!folded_) {
      folded_ = true;
      Exchange(-1, nullptr, 0, partner, what_.memory, bytes_);
      return true;
    }
    if (gave_) return false;
    gave_ = true;
    Exchange(partner, what_.memory, bytes_, -1, nullptr, 0);
    return true;
  }

  // Both sides combine in the order of the members: the bits of a NaN may depend on it.
  void Combine() {
    if (std::exchange(came_from_, -1) > self()) {
      ReduceInto(what_.op, what_.dtype, what_.memory, scratch_, what_.count);
      return;
    }
    ReduceInto(what_.op, what_.dtype, scratch_, what_.memory, what_.count);
    Copy(what_.memory, scratch_, bytes_);
  }

  const Reduction what_;
  const std::int64_t bytes_;
  const int core_;   // the greatest power of two that is not above the number of members
  const int extra_;  // members beyond
  std::byte* const scratch_;
  int distance_ = 1;
  int came_from_ = -1;
  bool folded_ = false;
  bool gave_ = false;
};

// A part for each position. Each goes round once to be reduced, and ends at its position; then once
// more to be known to all. At first the member at position p gives part p - 1 and takes part p - 2.
class ReducingRing final : public Run {
 public:
  // `gathers`: all parts are to be known to all.
  ReducingRing(const Seat& seat, const Reduction& what, std::vector<Part> parts, bool gathers)
      : Run(seat),
        what_(what),
        element_bytes_(BytesOf(what.dtype)),
        parts_(std::move(parts)),
        steps_(gathers ? 2 * (size() - 1) : size() - 1) {
    std::int64_t most = 0;
    for (const Part& part : parts_) most = std::max(most, part.count);
    scratch_ = Scratch(most * element_bytes_);
  }

 private:
  bool Next() override {
    const bool reduces = step_ < size() - 1;
    if (step_ > 0 && step_ < size()) {
      const Part& part = PartAt(-step_ - 1);
      ReduceInto(what_.op, what_.dtype, At(part), scratch_, part.count);
      // It is this member's now, and still in its cache.
      if (step_ == size() - 1) ScaleInPlace(what_, At(part), part.count);
    }
    if (step_ == steps_) return false;
    const Part& given = PartAt(-step_ - 1);
    const Part& taken = PartAt(-step_ - 2);
    ++step_;
    Exchange(MemberAt(-1), reduces ? scratch_ : At(taken), taken.count * element_bytes_,
             MemberAt(1), At(given), given.count * element_bytes_);
    return true;
  }

  const Part& PartAt(int offset) const { return parts_[static_cast<std::size_t>(PlaceAt(offset))]; }
  std::byte* At(const Part& part) const {
    return static_cast<std::byte*>(what_.memory) + part.begin * element_bytes_;
  }

  const Reduction what_;
  const std::int64_t element_bytes_;
  const std::vector<Part> parts_;  // by position
  const int steps_;
  std::byte* scratch_ = nullptr;
  int step_ = 0;
};

class GatheringRing final : public Run {
 public:
  GatheringRing(const Seat& seat, Gathering what) : Run(seat), what_(std::move(what)) {}

 private:
  bool Next() override {
    if (step_ == size() - 1) return false;
    const auto given = static_cast<std::size_t>(MemberAt(-step_));
    const auto taken = static_cast<std::size_t>(MemberAt(-step_ - 1));
    ++step_;
    Exchange(MemberAt(-1), what_.output + what_.offsets[taken], what_.bytes[taken], MemberAt(1),
             what_.output + what_.offsets[given], what_.bytes[given]);
    return true;
  }

  const Gathering what_;
  int step_ = 0;
};

// Each member of the chain takes it from the one before and gives it to the next. A reduction adds up
// on its way, so that the last one has the result.
class Chain final : public Run {
 public:
  Chain(const Seat& seat, const Reduction& what, std::vector<int> chain, bool reduces)
      : Run(seat),
        what_(what),
        bytes_(what.count * BytesOf(what.dtype)),
        chain_(std::move(chain)),
        place_(std::find(chain_.begin(), chain_.end(), self()) - chain_.begin()),
        scratch_(reduces && place_ > 0 ? Scratch(bytes_) : nullptr) {}

 private:
  bool Next() override {
    const int step = step_++;
    if (step == 0) {
      if (place_ > 0) {
        void* const taken = scratch_ != nullptr ? scratch_ : what_.memory;
        Exchange(chain_[static_cast<std::size_t>(place_ - 1)], taken, bytes_, -1, nullptr, 0);
      }
      return true;
    }
    if (step == 1 && scratch_ != nullptr) {
      ReduceInto(what_.op, what_.dtype, what_.memory, scratch_, what_.count);
    }
    if (step == 2 || place_ + 1 == size()) return false;
    Exchange(-1, nullptr, 0, chain_[static_cast<std::size_t>(place_ + 1)], what_.memory, bytes_);
    return true;
  }

  const Reduction what_;
  const std::int64_t bytes_;
  const std::vector<int> chain_;
  const std::ptrdiff_t place_;
  std::byte* const scratch_;
  int step_ = 0;
};

// Members count from the root: one whose lowest bit is b gets it from the one without that bit, and
// gives it to those with one lower bit more.
class Tree final : public Run {
 public:
  Tree(const Seat& seat, void* memory, std::int64_t bytes, int root)
      : Run(seat), memory_(memory), bytes_(bytes), root_(root) {}

 private:
  bool Next() override {
    const int n = size();
    const int place = (self() - root_ + n) % n;
    const int lowest =
        place == 0 ? static_cast<int>(std::bit_ceil(static_cast<unsigned>(n))) : (place & -place);
    const int step = step_++;
    if (step == 0) {
      if (place > 0) Exchange(MemberFromRoot(place - lowest), memory_, bytes_, -1, nullptr, 0);
      return true;
    }
    if (step == 2) return false;
    std::vector<Send> sends;
    for (int bit = lowest / 2; bit > 0; bit /= 2) {
      if (place + bit < n) sends.push_back({RankAt(place + bit), memory_, bytes_});
    }
    if (sends.empty()) return false;
    Run::Exchange({}, sends);
    return true;
  }

  int MemberFromRoot(int place) const { return (place + root_) % size(); }
  int RankAt(int place) const {
    return party().ranks[static_cast<std::size_t>(MemberFromRoot(place))];
  }

  void* const memory_;
  const std::int64_t bytes_;
  const int root_;
  int step_ = 0;
};

// Blocks count from this member's own. With `have` of them it gives as many to the member that far
// below and takes as many from the one that far above.
class Bruck final : public Run {
 public:
  Bruck(const Seat& seat, const void* input, std::byte* output, std::int64_t bytes)
      : Run(seat), output_(output), bytes_(bytes), blocks_(Scratch(size() * bytes)) {
    Copy(blocks_, input, bytes_);
  }

 private:
  bool Next() override {
    const int n = size();
    have_ += more_;
    if (have_ == n) {
      const std::int64_t first = self() * bytes_;
      const std::int64_t tail = n * bytes_ - first;
      Copy(output_ + first, blocks_, tail);
      Copy(output_, blocks_ + tail, first);
      return false;
    }
    more_ = std::min(have_, n - have_);
    Exchange((self() + have_) % n, blocks_ + have_ * bytes_, more_ * bytes_,
             (self() - have_ + n) % n, blocks_, more_ * bytes_);
    return true;
  }

  std::byte* const output_;
  const std::int64_t bytes_;
  std::byte* const blocks_;
  int have_ = 1;
  int more_ = 0;
};

class AllAtOnce final : public Run {
 public:
  AllAtOnce(const Seat& seat, std::vector<Receive> receives, std::vector<Send> sends)
      : Run(seat), receives_(std::move(receives)), sends_(std::move(sends)) {}

 private:
  bool Next() override {
    if (begun_ || (receives_.empty() && sends_.empty())) return false;
    begun_ = true;
    Run::Exchange(receives_, sends_);
    return true;
  }

  const std::vector<Receive> receives_;
  const std::vector<Send> sends_;
  bool begun_ = false;
};

}  // namespace

Party MakeParty(std::vector<int> ranks, int rank, const std::vector<int>& host_of_rank) {
  Party party;
  party.ranks = std::move(ranks);
  std::map<int, std::vector<int>> by_host;
  std::vector<int> hosts_in_order;
  for (int member = 0; member < party.size(); ++member) {
    const int world_rank = party.ranks[static_cast<std::size_t>(member)];
    if (world_rank == rank) party.self = member;
    const int host = host_of_rank.empty() ? 0 : host_of_rank[static_cast<std::size_t>(world_rank)];
    party.hosts.push_back(host);
    if (by_host.count(host) == 0) hosts_in_order.push_back(host);
    by_host[host].push_back(member);
  }
  for (const int host : hosts_in_order) {
    for (const int member : by_host[host]) {
      if (member == party.self) party.position = static_cast<int>(party.order.size());
      party.order.push_back(member);
    }
  }
  return party;
}

Run::~Run() {
  const bool lost = posted_ != nullptr && (!posted_->Poll() || !posted_->status().ok());
  posted_.reset();
  if (lost && scratch_ != nullptr && !seat_.port.lets_go()) KeepForever(std::move(scratch_));
}

bool Run::Poll() {
  while (!over_) {
    if (posted_ != nullptr) {
      if (!posted_->Poll()) return false;
      status_ = posted_->status();
      if (!status_.ok()) {
        over_ = true;
        break;
      }
      posted_.reset();
      ++exchanges_;
    }
    over_ = !Next();
  }
  return true;
}

void Run::Exchange(int from, void* taken, std::int64_t taken_bytes, int to, const void* given,
                   std::int64_t given_bytes) {
  const auto rank_of = [this](int member) {
    return party().ranks[static_cast<std::size_t>(member)];
  };
  Receive receive;
  Send send;
  std::span<const Receive> receives;
  std::span<const Send> sends;
  if (from >= 0 && taken_bytes > 0) {
    receive = {rank_of(from), taken, taken_bytes};
    receives = {&receive, 1};
  }
  if (to >= 0 && given_bytes > 0) {
    send = {rank_of(to), given, given_bytes};
    sends = {&send, 1};
  }
  if (!receives.empty() || !sends.empty()) Exchange(receives, sends);
}

std::byte* Run::Scratch(std::int64_t bytes) {
  scratch_ = std::shared_ptr<std::byte[]>(new std::byte[static_cast<std::size_t>(bytes)]);
  return scratch_.get();
}

std::unique_ptr<Run> MakeDoubling(const Seat& seat, const Reduction& what) {
  return std::make_unique<Doubling>(seat, what);
}

std::unique_ptr<Run> MakeRing(const Seat& seat, const Reduction& what) {
  std::vector<Part> parts;
  for (int i = 0; i < seat.party->size(); ++i) {
    parts.push_back(PartOf(what.count, BytesOf(what.dtype), i, seat.party->size()));
  }
  return std::make_unique<ReducingRing>(seat, what, std::move(parts),
                                        /*gathers=*/true);
}

std::unique_ptr<Run> MakeRing(const Seat& seat, const Reduction& what, std::vector<Part> parts) {
  std::vector<Part> by_position;
  for (const int member : seat.party->order) {
    by_position.push_back(parts[static_cast<std::size_t>(member)]);
  }
  return std::make_unique<ReducingRing>(seat, what, std::move(by_position), /*gathers=*/false);
}

std::unique_ptr<Run> MakeRing(const Seat& seat, Gathering what) {
  return std::make_unique<GatheringRing>(seat, std::move(what));
}

std::unique_ptr<Run> MakeChain(const Seat& seat, void* memory, std::int64_t bytes, int root) {
  std::vector<int> chain = ChainFrom(*seat.party, root);
  return std::make_unique<Chain>(seat, Reduction{memory, bytes, core::DType::kU8}, std::move(chain),
                                 /*reduces=*/false);
}

std::unique_ptr<Run> MakeChain(const Seat& seat, const Reduction& what, int root) {
  std::vector<int> chain = ChainFrom(*seat.party, root);
  std::reverse(chain.begin(), chain.end());
  return std::make_unique<Chain>(seat, what, std::move(chain), /*reduces=*/true);
}

std::unique_ptr<Run> MakeTree(const Seat& seat, void* memory, std::int64_t bytes, int root) {
  return std::make_unique<Tree>(seat, memory, bytes, root);
}

std::unique_ptr<Run> MakeBruck(const Seat& seat, const void* input, std::byte* output,
                               std::int64_t bytes) {
  return std::make_unique<Bruck>(seat, input, output, bytes);
}

std::unique_ptr<Run> MakeExchange(const Seat& seat, std::vector<Receive> receives,
                                  std::vector<Send> sends) {
  return std::make_unique<AllAtOnce>(seat, std::move(receives), std::move(sends));
}

}  // namespace sirtaki::ops::wire
