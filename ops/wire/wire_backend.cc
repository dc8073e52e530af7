#include "ops/wire/wire_backend.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "core/threads/cooling_sleep.h"
#include "ops/base/bytes.h"
#include "ops/base/finished.h"
#include "ops/base/keep_forever.h"
#include "ops/base/kernels.h"
#include "ops/base/set_numbers.h"

namespace sirtaki::ops::wire {
namespace {

using core::DType;
using core::ReduceOp;
using core::SetNumber;
using core::Status;
using core::StatusCode;

// Chunks of one operation that are under way at once.
constexpr std::size_t kDepth = 8;

// What is worth a message of its own.
constexpr std::int64_t kMessageBytes = std::int64_t{64} << 10;

constexpr auto kLongestSleep = std::chrono::milliseconds(1);

std::byte* At(void* base, std::int64_t offset) { return static_cast<std::byte*>(base) + offset; }

std::string NameOf(Channel channel) {
  return "process set " + std::to_string(channel.set) +
         (channel.lane == fusion::Lane::kSmall ? ", small lane" : ", large lane");
}

std::unique_ptr<Completion> NoReduction(DType dtype, ReduceOp op) {
  return Finished::With({StatusCode::kUnsupported, std::string(core::DTypeName(dtype)) +
                                                       " has no reduction by " +
                                                       std::string(core::ReduceOpName(op))});
}

std::unique_ptr<Completion> NoSet(Channel channel) {
  return Finished::With({StatusCode::kBackend, "this rank has no " + NameOf(channel)});
}

// The runs of one operation, several at once, started in their order.
class Pipeline final : public Operation {
 public:
  using Start = std::function<std::unique_ptr<Run>(std::int64_t i)>;
  Pipeline(std::int64_t runs, std::size_t depth, Start start)
      : runs_(runs), depth_(depth), start_(std::move(start)) {}

  bool Poll() override {
    while (!over_) {
      while (next_ < runs_ && under_way_.size() < depth_) under_way_.push_back(start_(next_++));
      std::size_t done = 0;  // of the oldest
      for (const std::unique_ptr<Run>& run : under_way_) {
        const bool is_over = run->Poll();
        if (is_over && !run->status().ok()) {
          status_ = run->status();
          return over_ = true;
        }
        if (is_over && run == under_way_[done]) ++done;
      }
      if (done == 0) break;
      for (; done > 0; --done) {
        finished_ += under_way_.front()->exchanges();
        under_way_.pop_front();
      }
      over_ = under_way_.empty() && next_ == runs_;
    }
    return over_;
  }
  Status status() const override { return status_; }
  std::uint64_t exchanges() const override {
    std::uint64_t all = finished_;
    for (const std::unique_ptr<Run>& run : under_way_) all += run->exchanges();
    return all;
  }

 private:
  const std::int64_t runs_;
  const std::size_t depth_;
  const Start start_;
  std::int64_t next_ = 0;
  std::deque<std::unique_ptr<Run>> under_way_;
  std::uint64_t finished_ = 0;  // exchanges of runs that are gone
  bool over_ = false;
  Status status_;
};

}  // namespace

WireBackend::WireBackend(Port& port, WireOptions options)
    : port_(port), options_(std::move(options)) {
  const core::RankRanges world = core::RankRanges::Span(0, port_.size() - 1);
  core::MutexLock lock(mutex_);
  sets_[core::kWorldSet].party = std::make_shared<const Party>(
      MakeParty(world.ToVector(), port_.rank(), options_.host_of_rank));
}

std::int64_t WireBackend::BlockOf(SetNumber set) const {
  return DenseSetNumber(set) % std::max<std::int64_t>(1, port_.tags() / kTagsOfSet);
}

Status WireBackend::AddSet(SetNumber set, const core::RankRanges& members) {
  if (!members.Contains(port_.rank())) return Status::Ok();
  auto party = std::make_shared<const Party>(
      MakeParty(members.ToVector(), port_.rank(), options_.host_of_rank));
  const std::int64_t block = BlockOf(set);
  core::MutexLock lock(mutex_);
  if (stop_.raised()) return stop_.why();
  for (const auto& [other, there] : sets_) {
    if (BlockOf(other) != block) continue;
    return {StatusCode::kUnsupported,
            "too many process sets: " + std::string(port_.name()) + " has " +
                std::to_string(port_.tags()) + " tags, and those of process set " +
                std::to_string(set) + " are still in use by process set " + std::to_string(other)};
  }
  sets_[set] = {std::move(party), static_cast<int>(block * kTagsOfSet), {}};
  return Status::Ok();
}

Status WireBackend::RemoveSet(SetNumber set) {
  if (set == core::kWorldSet) {
    return {StatusCode::kInvalidArgument, "the world cannot be removed"};
  }
  core::MutexLock lock(mutex_);
  if (stop_.raised()) return stop_.why();
  sets_.erase(set);
  return Status::Ok();
}

PartyPtr WireBackend::PartyOf(Channel channel) const {
  core::MutexLock lock(mutex_);
  const auto found = sets_.find(channel.set);
  return found == sets_.end() ? nullptr : found->second.party;
}

// A lane that is polled may have many operations under way, which other members advance in another
// order: each has one tag for all of its runs, one after the other. The large lane has one operation,
// whose runs are begun in the same order by all.
std::unique_ptr<Completion> WireBackend::Start(Channel channel, std::int64_t runs,
                                               const MakeRun& make) {
  const bool pipelined = channel.lane == fusion::Lane::kLarge;
  PartyPtr party;
  int first_tag = pipelined ? kTagsOfLane : 0;
  std::uint32_t first_run = 0;
  {
    core::MutexLock lock(mutex_);
    const auto found = sets_.find(channel.set);
    if (found == sets_.end()) return NoSet(channel);
    Set& set = found->second;
    party = set.party;
    first_tag += set.first_tag;
    std::uint32_t& next = set.next[static_cast<std::size_t>(channel.lane)];
    first_run = std::exchange(next, next + (pipelined ? static_cast<std::uint32_t>(runs) : 1));
  }
  if (runs == 0) return Finished::With(Status::Ok());
  const auto start = [=, this](std::int64_t i) {
    const std::uint32_t number = first_run + (pipelined ? static_cast<std::uint32_t>(i) : 0);
    return make(i,
                {port_,
                 party,
                 {Envelope::Space::kCollectives, first_tag + static_cast<int>(number % kTagsOfLane),
                  /*urgent=*/!pipelined}});
  };
  if (runs == 1) return Through(channel, start(0));
  return Through(channel, std::make_unique<Pipeline>(runs, pipelined ? kDepth : 1, start));
}

std::unique_ptr<Completion> WireBackend::Through(Channel channel,
                                                 std::unique_ptr<Operation> operation) {
  if (channel.lane == fusion::Lane::kSmall) {
    operation->Poll();
    return operation;
  }
  core::CoolingSleep sleep(kLongestSleep);
  std::uint64_t seen = 0;
  while (!operation->Poll()) {
    if (Status stopped = stop_.why(); !stopped.ok()) return Finished::With(std::move(stopped));
    if (operation->exchanges() != std::exchange(seen, operation->exchanges())) {
      sleep.Restart();
    } else {
      sleep.Pause();
    }
  }
  return operation;
}

// Every member's part of it is worth a message.
std::int64_t WireBackend::ChunkBytes(Channel channel, const Party& party) const {
  if (channel.lane == fusion::Lane::kSmall) return std::numeric_limits<std::int64_t>::max();
  return std::clamp(party.size() * kMessageBytes, options_.chunk_bytes, 8 * options_.chunk_bytes);
}

std::unique_ptr<Completion> WireBackend::InChunks(
    Channel channel, const Reduction& whole,
    const std::function<std::unique_ptr<Run>(const Reduction&, const Seat&)>& make) {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  const std::int64_t size = BytesOf(whole.dtype);
  const std::int64_t step = std::max<std::int64_t>(1, ChunkBytes(channel, *party) / size);
  const std::int64_t runs =
      whole.count == 0 || party->size() == 1 ? 0 : (whole.count - 1) / step + 1;
  return Start(channel, runs, [=](std::int64_t i, const Seat& seat) {
    Reduction chunk = whole;
    chunk.memory = At(whole.memory, i * step * size);
    chunk.count = std::min(step, whole.count - i * step);
    return make(chunk, seat);
  });
}

std::unique_ptr<Completion> WireBackend::AllReduce(Channel channel, void* buffer,
                                                   std::int64_t count, DType dtype, ReduceOp op,
                                                   fusion::Scale after) {
  if (!HasReduction(op, dtype)) return NoReduction(dtype, op);
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  // Two hosts exchange everything in one step and as many bytes as a ring of two, whose arithmetic
  // is half: that counts where nothing crosses a network.
  const bool doubles = count * BytesOf(dtype) <= options_.few_steps_bytes ||
                       (party->size() == 2 && party->hosts[0] != party->hosts[1]);
  return InChunks(channel, {buffer, count, dtype, op, after},
                  [doubles](const Reduction& chunk, const Seat& seat) {
                    return doubles ? MakeDoubling(seat, chunk) : MakeRing(seat, chunk);
                  });
}

std::unique_ptr<Completion> WireBackend::Reduce(Channel channel, void* buffer, std::int64_t count,
                                                DType dtype, ReduceOp op, int root) {
  if (!HasReduction(op, dtype)) return NoReduction(dtype, op);
  const bool few = count * BytesOf(dtype) <= options_.few_steps_bytes;
  return InChunks(channel, {buffer, count, dtype, op},
                  [few, root](const Reduction& chunk, const Seat& seat) {
                    return few ? MakeDoubling(seat, chunk) : MakeChain(seat, chunk, root);
                  });
}

// Within a host a window holds as much as may be under way at once. Over a network, which carries
// more than one chunk at a time anyway, a larger window only queues.
std::int64_t WireBackend::WindowBytes(Channel channel, std::int64_t chunk_bytes) const {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return chunk_bytes;
  const bool one_host = std::all_of(party->hosts.begin(), party->hosts.end(),
                                    [&](int host) { return host == party->hosts.front(); });
  return one_host ? std::max(chunk_bytes,
                             static_cast<std::int64_t>(kDepth) * ChunkBytes(channel, *party))
                  : chunk_bytes;
}

std::unique_ptr<Completion> WireBackend::Broadcast(Channel channel, void* buffer,
                                                   std::int64_t bytes, int root) {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  const bool few = bytes <= options_.few_steps_bytes;
  const std::int64_t step = few ? bytes : ChunkBytes(channel, *party);
  const std::int64_t runs = bytes == 0 || party->size() == 1 ? 0 : (bytes - 1) / step + 1;
  return Start(channel, runs, [=](std::int64_t i, const Seat& seat) {
    std::byte* const memory = At(buffer, i * step);
    const std::int64_t part = std::min(step, bytes - i * step);
    return few ? MakeTree(seat, memory, part, root) : MakeChain(seat, memory, part, root);
  });
}

std::unique_ptr<Completion> WireBackend::AllGather(Channel channel, const void* input, void* output,
                                                   std::int64_t bytes) {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  if (bytes * party->size() > options_.few_steps_bytes || party->size() == 1) {
    return AllGatherV(channel, input, output,
                      std::vector<std::int64_t>(party->ranks.size(), bytes));
  }
  return Start(channel, bytes == 0 ? 0 : 1, [=](std::int64_t, const Seat& seat) {
    return MakeBruck(seat, input, static_cast<std::byte*>(output), bytes);
  });
}

std::unique_ptr<Completion> WireBackend::AllGatherV(Channel channel, const void* input,
                                                    void* output,
                                                    std::span<const std::int64_t> bytes) {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  std::vector<std::int64_t> offsets(bytes.size());
  std::exclusive_scan(bytes.begin(), bytes.end(), offsets.begin(), std::int64_t{0});
  const auto self = static_cast<std::size_t>(party->self);
  Copy(At(output, offsets[self]), input, bytes[self]);
  const std::int64_t most = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  const std::int64_t step =
      std::max(kMessageBytes, ChunkBytes(channel, *party) / std::max(1, party->size()));
  const std::int64_t runs = most == 0 || party->size() == 1 ? 0 : (most - 1) / step + 1;
  return Start(
      channel, runs,
      [=, bytes = std::vector(bytes.begin(), bytes.end())](std::int64_t i, const Seat& seat) {
        Gathering chunk{static_cast<std::byte*>(output), offsets, bytes};
        for (std::size_t m = 0; m < bytes.size(); ++m) {
          const std::int64_t begin = std::min(i * step, bytes[m]);
          chunk.offsets[m] += begin;
          chunk.bytes[m] = std::min(step, bytes[m] - begin);
        }
        return MakeRing(seat, std::move(chunk));
      });
}

std::unique_ptr<Completion> WireBackend::ReduceScatter(Channel channel, void* buffer,
                                                       std::span<const std::int64_t> counts,
                                                       DType dtype, ReduceOp op) {
  if (!HasReduction(op, dtype)) return NoReduction(dtype, op);
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  const std::int64_t size = BytesOf(dtype);
  const std::int64_t most = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  const std::int64_t step =
      std::max(kMessageBytes, ChunkBytes(channel, *party) / party->size()) / size;
  const std::int64_t runs = most == 0 || party->size() == 1 ? 0 : (most - 1) / step + 1;
  std::vector<std::int64_t> begins(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), std::int64_t{0});
  return Start(
      channel, runs,
      [=, counts = std::vector(counts.begin(), counts.end())](std::int64_t i, const Seat& seat) {
        std::vector<Part> parts(counts.size());
        for (std::size_t m = 0; m < counts.size(); ++m) {
          const std::int64_t first = std::min(i * step, counts[m]);
          parts[m] = {begins[m] + first, std::min(step, counts[m] - first)};
        }
        return MakeRing(seat, {buffer, 0, dtype, op}, std::move(parts));
      });
}

std::unique_ptr<Completion> WireBackend::Exchange(Channel channel,
                                                  std::span<const OutgoingSlice> outgoing,
                                                  std::span<const IncomingSlice> incoming) {
  const PartyPtr party = PartyOf(channel);
  if (party == nullptr) return NoSet(channel);
  const auto rank_of = [&](int member) { return party->ranks[static_cast<std::size_t>(member)]; };
  std::vector<Receive> receives;
  std::vector<Send> sends;
  for (const IncomingSlice& slice : incoming) {
    if (slice.bytes > 0) receives.push_back({rank_of(slice.member), slice.memory, slice.bytes});
  }
  for (const OutgoingSlice& slice : outgoing) {
    if (slice.bytes > 0) sends.push_back({rank_of(slice.member), slice.memory, slice.bytes});
  }
  return Start(channel, 1, [&](std::int64_t, const Seat& seat) {
    return MakeExchange(seat, std::move(receives), std::move(sends));
  });
}

std::unique_ptr<Completion> WireBackend::SendMessage(int to, int tag, const void* memory,
                                                     std::int64_t bytes) {
  const Send send{to, memory, bytes};
  return port_.Post({Envelope::Space::kMessages, tag}, {}, {&send, 1});
}

std::unique_ptr<Completion> WireBackend::ReceiveMessage(int from, int tag, void* memory,
                                                        std::int64_t bytes) {
  const Receive receive{from, memory, bytes};
  return port_.Post({Envelope::Space::kMessages, tag}, {&receive, 1}, {});
}

Status WireBackend::Meet(SetNumber set, const core::RankRanges& members, char mine,
                         const std::function<Status()>& patience, std::string* all) {
  if (set >= kMaxSetWithSlices) {
    return {StatusCode::kUnsupported, "process set " + std::to_string(set) + " is beyond the " +
                                          std::to_string(kMaxSetWithSlices) + " that may meet"};
  }
  const SetNumber meeting = SetBeside(SetKind::kMeeting, set, 0);
  if (Status added = AddSet(meeting, members); !added.ok()) return added;
  const auto said = std::make_shared<std::string>(static_cast<std::size_t>(members.Count()), '\0');
  const auto operation = AllGather({meeting, fusion::Lane::kSmall}, &mine, said->data(), 1);
  core::CoolingSleep sleep(kLongestSleep);
  Status status;
  while (status.ok() && !operation->Poll()) {
    status = stop_.why();
    if (status.ok()) status = patience();
    sleep.Pause();
  }
  if (status.ok()) status = operation->status();
  if (!status.ok()) {
    if (!port_.lets_go()) KeepForever(said);  // the medium may still write there
    return status;
  }
  *all = *said;
  return RemoveSet(meeting);
}

void WireBackend::Abort(const Status& why) {
  stop_.Raise(why);
  port_.Abort(stop_.why());
}

}  // namespace sirtaki::ops::wire
