#include "sirtaki/detail/shard_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>

#include "frameworks/torch/session/session_set.h"
#include "frameworks/torch/tensors/throw.h"
#include "session/elastic/elastic_worker.h"
#include "sirtaki/detail/elastic_calls.h"
#include "sirtaki/movement.h"
#include "sirtaki/objects.h"
#include "sirtaki/session.h"

namespace sirtaki::detail {
namespace {

constexpr std::int64_t kNeverKept = -1;  // the generation of a state that nobody has kept shards of
constexpr std::int64_t kAllElse = -1;    // stands for the number of a shard
constexpr char kNoRest[] = "nobody is left that has the rest of the state";

// The shards of a rank as one tensor: how many there are, the size of each, their bytes. Each goes when
// it is copied.
at::Tensor Pack(ShardCopies::Shards shards) {
  std::vector<std::uint64_t> sizes = {shards.size()};
  for (const std::string& one : shards) sizes.push_back(one.size());
  std::size_t bytes = sizes.size() * sizeof(sizes[0]);
  for (const std::string& one : shards) bytes += one.size();
  at::Tensor packed = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  std::memcpy(to, sizes.data(), sizes.size() * sizeof(sizes[0]));
  to += sizes.size() * sizeof(sizes[0]);
  for (std::string& one : shards) {
    to = std::copy(one.begin(), one.end(), to);
    std::string().swap(one);
  }
  return packed;
}

ShardCopies::Shards Unpack(const char* from) {
  const auto size_at = [from](std::size_t place) {
    std::uint64_t size = 0;
    std::memcpy(&size, from + place * sizeof(size), sizeof(size));
    return static_cast<std::size_t>(size);
  };
  const std::size_t count = size_at(0);
  const char* bytes = from + (count + 1) * sizeof(std::uint64_t);
  ShardCopies::Shards shards;
  for (std::size_t i = 0; i < count; ++i) {
    shards.emplace_back(bytes, size_at(i + 1));
    bytes += shards.back().size();
  }
  return shards;
}

const char* BytesOf(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

std::size_t Place(int rank) { return static_cast<std::size_t>(rank); }

const std::vector<int>& HostOfRank() { return CurrentSession()->topology().host_of_rank; }

// Holders are the lowest ranks that have each part of a boundary.
struct Holders {
  std::map<int, int> of_shards;
  std::optional<int> of_all_else;
};

bool AreOnEachHost(const ShardCopies::Shards& shards) {
  return std::all_of(shards.begin(), shards.end(), [](const std::string& one) {
    return one.empty() || one.front() == ShardCopies::kOfEachHost;
  });
}

// Returns what of a boundary nobody is left that has; empty: all is there.
std::string WhatLacks(const Holders& holders, int shards) {
  std::string lacks;
  for (int shard = 0; shard < shards; ++shard) {
    if (holders.of_shards.count(shard) > 0) continue;
    lacks +=
        (lacks.empty() ? "nobody is left that has those of rank " : ", ") + std::to_string(shard);
  }
  if (!lacks.empty()) return lacks + " of " + std::to_string(shards);
  return holders.of_all_else ? "" : kNoRest;
}

[[noreturn]] void ThrowLost(const std::string& what) {
  ThrowInvalid(
      "an optimizer of the state is sharded, and a rank that is lost takes its shards of the state "
      "with it: " +
      what +
      ". Go on from the last checkpoint; partners keep copies of all shards at each commit() "
      "of an elastic job unless copy_shards says otherwise, so that only the loss of both ends "
      "the training");
}

}  // namespace

int PartnerOf(int rank, const std::vector<int>& host_of_rank, const std::vector<int>& leaving) {
  const auto ranks = static_cast<int>(host_of_rank.size());
  const auto host = [&](int of) { return host_of_rank[static_cast<std::size_t>(of)]; };
  // Those that stay: of other hosts, and of this one.
  std::vector<int> others;
  std::vector<int> mates;
  int before = 0;  // ranks of this host
  for (int step = 1; step < ranks; ++step) {
    const int other = (rank + step) % ranks;
    if (other < rank && host(other) == host(rank)) ++before;
    if (std::find(leaving.begin(), leaving.end(), other) != leaving.end()) continue;
    (host(other) == host(rank) ? mates : others).push_back(other);
  }
  if (others.empty()) return mates.empty() ? rank : mates.front();
  // Beginning behind this host, so that hosts that follow each other have partners that do.
  std::sort(others.begin(), others.end(), [&](int a, int b) {
    return std::tuple(host(a) < host(rank), host(a), a) <
           std::tuple(host(b) < host(rank), host(b), b);
  });
  return others[static_cast<std::size_t>(before) % others.size()];
}

std::vector<int> NumbersByHost(const std::vector<int>& host_of_rank) {
  std::map<int, int> ranks_of_host;
  std::vector<int> numbers;
  for (const int host : host_of_rank) numbers.push_back(ranks_of_host[host]++);
  const bool are_alike =
      std::all_of(ranks_of_host.begin(), ranks_of_host.end(),
                  [&](const auto& one) { return one.second == ranks_of_host.begin()->second; });
  return are_alike && ranks_of_host.size() > 1 ? numbers : std::vector<int>();
}

void ShardCopies::Keep(std::int64_t place, Shards mine, bool to_partner) {
  KeepWith(to_partner ? PartnerOf(rank(), HostOfRank()) : rank(), place, std::move(mine),
           /*is_change=*/false);
}

// A rank may have heard of the change, and of who leaves, before others.
void ShardCopies::KeepForChange(std::int64_t place, Shards mine) {
  const std::vector<int> known = session::ElasticWorker::OfProcess().LeavingRanks();
  const std::string bytes(reinterpret_cast<const char*>(known.data()), known.size() * sizeof(int));
  const std::string told = broadcast_object(bytes, 0, "sirtaki/elastic ranks that leave");
  std::vector<int> leaving(told.size() / sizeof(int));
  std::memcpy(leaving.data(), told.data(), told.size());
  KeepWith(PartnerOf(rank(), HostOfRank(), leaving), place, std::move(mine), /*is_change=*/true);
}

void ShardCopies::KeepWith(int partner, std::int64_t place, Shards mine, bool is_change) {
  Version version;
  version.place = place;
  version.generation = ElasticGeneration();
  const bool is_whole =
      std::all_of(mine.begin(), mine.end(), [](const std::string& one) { return one.empty(); });
  std::vector<int> numbers;  // of the ranks' shards
  if (AreOnEachHost(mine)) numbers = NumbersByHost(HostOfRank());
  if (!numbers.empty() && !is_change) partner = rank();
  const bool is_first = !numbers.empty() || HostOfRank()[Place(rank())] == HostOfRank()[0];
  for (std::string& one : mine) {
    if (!one.empty() && one.front() == kOfEachHost) one.front() = is_first ? kOfJob : kAgain;
  }
  if (numbers.empty()) {
    for (int of = 0; of < size(); ++of) numbers.push_back(of);
  }
  version.mine = numbers[Place(rank())];
  if (!is_whole) {
    version.shards = 1 + *std::max_element(numbers.begin(), numbers.end());
    version.held[version.mine] = Pack(std::move(mine));
  }
  // It is made with nothing to send as well: a rank that returns from it knows that all others have
  // kept the boundary before.
  AlltoallOptions options;
  std::vector<std::int64_t> splits(static_cast<std::size_t>(size()));
  at::Tensor sent = at::empty({0}, at::kByte);
  if (!is_whole && partner != rank()) {
    sent = version.held[version.mine];
    splits[Place(partner)] = sent.numel();
  }
  const AlltoallResult received =
      alltoall(sent, options.splits(std::move(splits)).name("sirtaki/elastic copies of shards"));
  std::int64_t at = 0;
  for (std::size_t from = 0; from < received.received_splits.size(); ++from) {
    const std::int64_t bytes = received.received_splits[from];
    if (bytes > 0) version.held[numbers[from]] = received.tensor.narrow(0, at, bytes);
    at += bytes;
  }
  Confirm();
  versions_.push_back(std::move(version));
}

void ShardCopies::Confirm() {
  if (versions_.size() > 1) versions_.erase(versions_.begin(), versions_.end() - 1);
}

ShardCopies::Shards ShardCopies::Mine() const {
  if (versions_.empty() || versions_.back().generation != ElasticGeneration()) return {};
  const auto found = versions_.back().held.find(versions_.back().mine);
  return found == versions_.back().held.end() ? Shards() : Unpack(BytesOf(found->second));
}

std::int64_t ShardCopies::bytes() const {
  std::int64_t bytes = 0;
  for (const Version& version : versions_) {
    for (const auto& [_, copy] : version.held) bytes += copy.numel();
  }
  return bytes;
}

ShardCopies::Boundary ShardCopies::Agree(std::int64_t place) {
  // Each row: place, generation, number of shards, which of them, who has it.
  constexpr std::int64_t kColumns = 5;
  std::vector<std::int64_t> rows;
  const auto add = [&](const Version& version, std::int64_t what) {
    rows.insert(rows.end(), {version.place, version.generation, version.shards, what, rank()});
  };
  Version never;
  never.place = place;
  never.generation = kNeverKept;
  if (versions_.empty()) add(never, kAllElse);
  for (const Version& version : versions_) {
    // A generation begins with the boundary of the one before: all else is the same in both.
    if (version.place == place) add(version, kAllElse);
    for (const auto& [shard, _] : version.held) add(version, shard);
  }
  const auto count = static_cast<std::int64_t>(rows.size()) / kColumns;  // it may have nothing
  const at::Tensor all = allgather(at::tensor(rows, at::kLong).view({count, kColumns}),
                                   AllgatherOptions().name("sirtaki/elastic boundaries of shards"));
  // A boundary of a later generation is newer than one of an earlier generation at the same place.
  using Key = std::tuple<std::int64_t, std::int64_t, int>;
  std::map<Key, Holders> boundaries;
  bool was_kept = false;
  const auto* row = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < all.size(0); ++i, row += kColumns) {
    Holders& holders = boundaries[{row[0], row[1], static_cast<int>(row[2])}];
    const auto of = static_cast<int>(row[4]);
    if (row[3] == kAllElse) {
      holders.of_all_else = std::min(of, holders.of_all_else.value_or(of));
    } else {
      holders.of_shards.emplace(static_cast<int>(row[3]), of);  // rows come by rank
    }
    was_kept = was_kept || row[1] != kNeverKept;
  }
  std::string lacks;
  for (auto found = boundaries.rbegin(); found != boundaries.rend(); ++found) {
    const auto& [at, generation, shards] = found->first;
    const Holders& holders = found->second;
    // Nobody has trained what a rank that has come has.
    if (was_kept && generation == kNeverKept) continue;
    std::string lacking = WhatLacks(holders, shards);
    if (lacking.empty()) {
      holders_ = holders.of_shards;
      const Key key = found->first;
      std::erase_if(versions_, [&key](const Version& one) {
        return key != Key(one.place, one.generation, one.shards);
      });
      if (versions_.empty() &&
          shards > 0) {  // this rank has come: it trains from here, or not at all
        Version received;
        received.place = at;
        received.generation = generation;
        received.shards = shards;
        versions_.push_back(std::move(received));
      }
      return {at, *holders.of_all_else, shards};
    }
    if (lacks.empty()) lacks = std::move(lacking);
  }
  ThrowLost(lacks.empty() ? kNoRest : lacks);
}

ShardCopies::Shards ShardCopies::Receive(int shard) const {
  const int holder = holders_.at(shard);
  std::string bytes;
  if (rank() == holder) {
    const at::Tensor& held = versions_.back().held.at(shard);
    bytes.assign(BytesOf(held), held.nbytes());
  }
  return Unpack(broadcast_object(bytes, holder, "sirtaki/elastic shards").data());
}

}  // namespace sirtaki::detail
