// The collectives as sequences of posted sends and receives, of one member each.
//
//   doubling   small all-reduces: log2(n) exchanges of everything, each with a member twice as far
//   ring       large all-reduces and all-gathers: every member has a part that goes round
//   chain      large broadcasts and reductions to a root: from each member to the next
//   tree       small broadcasts: log2(n) steps
//   bruck      small all-gathers: log2(n) steps of growing blocks
//
// Rings and chains go by hosts, so each host's network carries everything once each way. Members of
// a run post in the same order to each other, so one envelope serves it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/status.h"
#include "core/base/types.h"
#include "ops/base/backend.h"
#include "ops/base/bytes.h"
#include "ops/wire/port.h"

namespace sirtaki::ops::wire {

// A process set as one of its members sees it. Never changed once made.
struct Party {
  std::vector<int> ranks;  // of the world, by member
  int self = 0;            // this one among the members
  std::vector<int> order;  // the members by host, this set's hosts by their first member
  int position = 0;        // of this one in `order`
  std::vector<int> hosts;  // by member

  int size() const { return static_cast<int>(ranks.size()); }
};
using PartyPtr = std::shared_ptr<const Party>;
// `host_of_rank`: empty: all are on one host.
Party MakeParty(std::vector<int> ranks, int rank, const std::vector<int>& host_of_rank);

// Where this member takes part in a run.
struct Seat {
  Port& port;
  PartyPtr party;
  Envelope envelope;
};

// What can be waited for with an eye on whether it gets on.
class Operation : public Completion {
 public:
  virtual std::uint64_t exchanges() const = 0;  // that have finished
};

// One exchange after the other.
class Run : public Operation {
 public:
  // After a fault: what the medium may still write to stays for the life of the process.
  ~Run() override;

  bool Poll() final;
  core::Status status() const final { return status_; }
  std::uint64_t exchanges() const final { return exchanges_; }

 protected:
  explicit Run(const Seat& seat) : seat_(seat) {}

  // The last exchange has finished (or there was none): takes what came and posts the next. False
  // if none is left.
  virtual bool Next() = 0;

  void Exchange(std::span<const Receive> receives, std::span<const Send> sends) {
    posted_ = seat_.port.Post(seat_.envelope, receives, sends);
  }
  // Members are given by index. A negative member: there is nothing in that direction.
  void Exchange(int from, void* taken, std::int64_t taken_bytes, int to, const void* given,
                std::int64_t given_bytes);
  // Memory for what comes, uninitialised, for as long as the run lives.
  std::byte* Scratch(std::int64_t bytes);

  int size() const { return party().size(); }
  int self() const { return party().self; }
  const Party& party() const { return *seat_.party; }
  // The place by hosts that lies that far behind this member, around the ring, and the member
  // there.
  int PlaceAt(int offset) const { return ((party().position + offset) % size() + size()) % size(); }
  int MemberAt(int offset) const {
    return party().order[static_cast<std::size_t>(PlaceAt(offset))];
  }

 private:
  const Seat seat_;
  std::unique_ptr<Completion> posted_;
  std::shared_ptr<std::byte[]> scratch_;
  std::uint64_t exchanges_ = 0;
  core::Status status_;
  bool over_ = false;
};

struct Reduction {
  void* memory = nullptr;
  std::int64_t count = 0;
  core::DType dtype = core::DType::kF32;
  core::ReduceOp op = core::ReduceOp::kSum;
  fusion::Scale after;  // scales the result of an all-reduce
};

// What a member gives to an all-gather. In `output` the members' parts follow each other.
struct Gathering {
  std::byte* output = nullptr;  // its own part is there already
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> bytes;
};

std::unique_ptr<Run> MakeDoubling(const Seat& seat, const Reduction& what);
std::unique_ptr<Run> MakeRing(const Seat& seat, const Reduction& what);
// Every member's part of the memory ends up reduced there, and nowhere else.
std::unique_ptr<Run> MakeRing(const Seat& seat, const Reduction& what, std::vector<Part> parts);
std::unique_ptr<Run> MakeRing(const Seat& seat, Gathering what);
std::unique_ptr<Run> MakeChain(const Seat& seat, void* memory, std::int64_t bytes, int root);
std::unique_ptr<Run> MakeChain(const Seat& seat, const Reduction& what, int root);
std::unique_ptr<Run> MakeTree(const Seat& seat, void* memory, std::int64_t bytes, int root);
std::unique_ptr<Run> MakeBruck(const Seat& seat, const void* input, std::byte* output,
                               std::int64_t bytes);
// All at once, by member.
std::unique_ptr<Run> MakeExchange(const Seat& seat, std::vector<Receive> receives,
                                  std::vector<Send> sends);

}  // namespace sirtaki::ops::wire
