// Which ranks share a host, and the numbers that follow from it. Pure.
#pragma once

#include <string>
#include <vector>

namespace sirtaki::core {

// "Host" means: ranks that run on one kernel and call their host by the same name.
struct Topology {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this host, by their slots; of equal ones, by rank
  int local_size = 1;
  int cross_rank = 0;  // among the hosts that have a rank with this local rank
  int cross_size = 1;
  bool homogeneous = true;        // every host has as many ranks
  std::string host;               // this one's name
  std::vector<int> host_of_rank;  // number of each rank's host, in order of their lowest ranks
  std::vector<std::string> host_names;  // by that number
};

// What each rank says of itself.
struct Place {
  std::string host;
  int lowest_sharing = 0;  // the lowest world rank that it can share memory with
  int slot = 0;            // of its host, in an elastic job; else 0
};

// Preconditions: 0 <= rank < places.size().
Topology BuildTopology(int rank, const std::vector<Place>& places);

}  // namespace sirtaki::core
