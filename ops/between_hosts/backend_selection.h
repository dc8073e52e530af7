// Chooses for each channel the backend that does it best: shared memory for process sets of one
// host, by hosts for large all-reduces of sets that span several, the medium's own for the rest and
// for messages. Decided by what all members agree on.
#pragma once

#include <map>
#include <memory>

#include "core/base/rank_ranges.h"
#include "core/base/thread_annotations.h"
#include "ops/base/backend.h"
#include "ops/between_hosts/hierarchy.h"
#include "ops/shm/backend.h"

namespace sirtaki::ops {

class BackendSelection final : public Backends {
 public:
  // `flat`: takes every set. `local`: null if this host's ranks share no memory. `hierarchy`: null
  // if nothing goes that way; it knows the world already. All must outlive this and all operations.
  BackendSelection(Backend& flat, shm::Backend* local, const core::RankRanges& world,
                   Hierarchy* hierarchy = nullptr);

  core::Status AddSet(core::SetNumber set, const core::RankRanges& members) override
      SIRTAKI_EXCLUDES(mutex_);
  core::Status RemoveSet(core::SetNumber set) override SIRTAKI_EXCLUDES(mutex_);
  Route Select(Channel channel) override SIRTAKI_EXCLUDES(mutex_);
  core::MemorySource& memory() override {
    return local_ != nullptr ? local_->memory() : flat_.memory();
  }
  std::unique_ptr<Completion> SendMessage(int to, int tag, const void* memory,
                                          std::int64_t bytes) override {
    return flat_.SendMessage(to, tag, memory, bytes);
  }
  std::unique_ptr<Completion> ReceiveMessage(int from, int tag, void* memory,
                                             std::int64_t bytes) override {
    return flat_.ReceiveMessage(from, tag, memory, bytes);
  }
  LetGo WhenMessagesLetGo() const override { return flat_.WhenMessagesLetGo(); }
  void Abort(const core::Status& why) override;

 private:
  Backend& flat_;
  shm::Backend* const local_;
  Hierarchy* const hierarchy_;
  core::Mutex mutex_;
  std::map<core::SetNumber, Backend*> of_set_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::ops
