// Ranks of a host that share memory, as threads of one process.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/base/backend.h"
#include "ops/between_hosts/backend_selection.h"
#include "ops/shm/backend.h"
#include "ops/shm/local_group.h"
#include "ops/shm/pool.h"

namespace sirtaki::tests {

// Which memory of a rank the others see.
enum class Seen : std::uint8_t {
  kAll,      // as threads do
  kNothing,  // as processes without a pool
  kPools,    // as processes with one
};
std::string_view SeenName(Seen seen);

// The backends of one rank, as a session puts them together.
struct ShmRank {
  ShmRank(ops::shm::LocalGroup& group, ops::Backend& flat, const ops::shm::BackendOptions& options,
          const core::RankRanges& world)
      : local(group, options), backend(flat, &local, world) {}

  ops::shm::Backend local;
  ops::BackendSelection backend;
};

class ShmRanks {
 public:
  explicit ShmRanks(int size, Seen seen = Seen::kAll);

  int size() const { return static_cast<int>(groups_.size()); }
  ops::shm::LocalGroup& group(int rank) { return *groups_[static_cast<std::size_t>(rank)]; }
  // One a rank. `flat`: for messages.
  std::unique_ptr<ShmRank> Connect(int rank, ops::Backend& flat,
                                   const ops::shm::BackendOptions& options);

 private:
  std::vector<std::unique_ptr<ops::shm::LocalGroup>> groups_;
};

}  // namespace sirtaki::tests
