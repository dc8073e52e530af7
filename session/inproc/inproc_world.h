// N sessions in one process: threads act as ranks. For tests, and for programs that want several
// ranks without a launcher.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/protocol/inproc_hub.h"
#include "session/base/medium.h"

namespace sirtaki::session {

// Thread-safe. Shared by its sessions. The n-th session of each rank meets the n-th of the others.
class InprocWorld : public std::enable_shared_from_this<InprocWorld> {
 public:
  // `host_of_rank`: which ranks pretend to share a host; empty: all do.
  explicit InprocWorld(int size, std::vector<int> host_of_rank = {});
  ~InprocWorld();

  int size() const { return hub_.size(); }
  core::InprocHub& hub() { return hub_; }  // to isolate and break ranks

  // How the ranks of a host work together from their next sessions on.
  enum class Sharing : std::uint8_t {
    kNone,    // as those of different hosts do
    kDirect,  // as processes that share memory, all of it: tensors are reduced where they lie
    kStaged,  // as processes that share their session memory only
    kPooled,  // as processes that share their session memory and their pools
  };
  void Share(Sharing sharing);

  // The medium of the rank's next session.
  std::unique_ptr<Medium> Join(int rank);

 private:
  class InprocMedium;
  struct Meetings;

  core::InprocHub hub_;
  const std::vector<int> host_of_rank_;
  const std::unique_ptr<Meetings> meetings_;
};

}  // namespace sirtaki::session
