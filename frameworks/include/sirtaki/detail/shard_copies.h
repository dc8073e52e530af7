// ShardCopies let a rank of another host keep a second time what one rank alone has of a training's
// state. An elastic::State uses them, in C++ and Python; programs do not.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "sirtaki/export.h"

namespace sirtaki::detail {

// Returns the rank that keeps a copy of this rank's shards: one of another host if there are several,
// taken by turns, each host for itself. A rank without others is its own partner. Pure.
// `host_of_rank`: numbers of hosts. `leaving`: ranks that are to leave, and are nobody's partners.
SIRTAKI_API int PartnerOf(int rank, const std::vector<int>& host_of_rank,
                          const std::vector<int>& leaving = {});

// Returns the number of each rank's shards where each host has all of them: its place among the ranks of its
// host. Empty where hosts have different numbers of ranks, or there is one alone. Pure.
SIRTAKI_API std::vector<int> NumbersByHost(const std::vector<int>& host_of_rank);

// ShardCopies keep the shards of this rank, and those of ranks whose partner it is, of the last two
// boundaries of a training at most. A boundary is a place in the training where all ranks kept their
// shards: it serves when somebody is left that has each of them.
//
// Belongs to an elastic::State, and is used by the thread that trains.
class SIRTAKI_API ShardCopies {
 public:
  // The shards of one rank: the bytes of each sharded optimizer. Without bytes: that one's state is
  // whole, and each rank has it. The first byte says who else has them.
  using Shards = std::vector<std::string>;
  static constexpr char kOfJob = '1';       // this rank alone
  static constexpr char kAgain = '2';       // they were received, and another rank gives the same
  static constexpr char kOfEachHost = '3';  // a rank of each other host, as by ShardOver::Host

  // A boundary as the ranks have agreed on it.
  struct Boundary {
    std::int64_t place = 0;
    int root = 0;    // the lowest rank that has all else of the state as it was there
    int shards = 0;  // how many ranks kept shards there; 0: the state is whole
  };

  // Keeps this rank's shards of a boundary, and gives them to the partner if `to_partner`. Collective.
  // What throws has kept nothing.
  void Keep(std::int64_t place, Shards mine, bool to_partner);
  // Does so before ranks leave or come: gives the shards to a partner that stays. Collective.
  void KeepForChange(std::int64_t place, Shards mine);
  // All ranks are known to have kept the last boundary: lets the one before go.
  void Confirm();
  // Returns what this rank has kept last in this generation, where its shards are the same; empty:
  // nothing.
  Shards Mine() const;

  // The ranks of a new generation agree on the last boundary of which each shard is there. `place`:
  // where this rank has all else of the state. All ranks throw InvalidArgument if there is none.
  // Collective.
  Boundary Agree(std::int64_t place);
  // Returns the shards that this rank had at the boundary that was agreed on. Collective.
  Shards Receive(int shard) const;

  std::int64_t bytes() const;  // of all that is kept

 private:
  // `partner`: this rank is none. `is_change`: ranks of all hosts may leave.
  void KeepWith(int partner, std::int64_t place, Shards mine, bool is_change);
  struct Version {
    std::int64_t place = 0;
    std::int64_t generation = 0;  // in which it was kept
    int shards = 0;
    int mine = 0;  // the number of this rank's
    std::map<int, at::Tensor>
        held;  // by number; a rank that has come has none of those that it got
  };

  std::vector<Version> versions_;  // the newest comes last
  std::map<int, int> holders_;     // of the shards that were agreed on
};

}  // namespace sirtaki::detail
