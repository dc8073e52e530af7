#include "core/base/topology.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace sirtaki::core {

Topology BuildTopology(int rank, const std::vector<Place>& places) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(places.size());

  std::map<std::pair<int, std::string>, int> number_of_host;
  std::vector<int> ranks_on_host;
  for (const Place& place : places) {
    const auto [entry, is_new] = number_of_host.try_emplace(
        {place.lowest_sharing, place.host}, static_cast<int>(topology.host_names.size()));
    if (is_new) {
      topology.host_names.push_back(place.host);
      ranks_on_host.push_back(0);
    }
    const int host = entry->second;
    topology.host_of_rank.push_back(host);
    ++ranks_on_host[static_cast<std::size_t>(host)];
  }

  const int host = topology.host_of_rank[static_cast<std::size_t>(rank)];
  topology.host = topology.host_names[static_cast<std::size_t>(host)];
  const auto slot_of = [&](int of) { return places[static_cast<std::size_t>(of)].slot; };
  for (int other = 0; other < topology.size; ++other) {
    const bool is_here = topology.host_of_rank[static_cast<std::size_t>(other)] == host;
    const bool is_before = std::pair(slot_of(other), other) < std::pair(slot_of(rank), rank);
    if (is_here && is_before) ++topology.local_rank;
  }
  topology.local_size = ranks_on_host[static_cast<std::size_t>(host)];
  topology.homogeneous = std::all_of(ranks_on_host.begin(), ranks_on_host.end(),
                                     [&](int count) { return count == ranks_on_host.front(); });
  topology.cross_size = 0;
  for (std::size_t other = 0; other < ranks_on_host.size(); ++other) {
    if (ranks_on_host[other] <= topology.local_rank) continue;
    if (static_cast<int>(other) < host) ++topology.cross_rank;
    ++topology.cross_size;
  }
  return topology;
}

}  // namespace sirtaki::core
