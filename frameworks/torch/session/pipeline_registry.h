// The pipelines that are there in a session: which tags their messages have, and which ranks train
// the model that a parameter belongs to.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/base/thread_annotations.h"
#include "sirtaki/process_set.h"

namespace sirtaki::detail {

// Thread-safe. Keeps nothing alive.
class PipelineRegistry {
 public:
  struct Tags {
    int first = 0;
    int end = 0;  // behind the last one
  };

  // The tags of all pipelines of this rank.
  std::vector<Tags> TagsInUse() const {
    core::MutexLock lock(mutex_);
    std::vector<Tags> tags;
    for (const auto& [pipeline, entry] : pipelines_) tags.push_back(entry.tags);
    return tags;
  }
  void Take(const void* pipeline, Tags tags) {
    core::MutexLock lock(mutex_);
    pipelines_[pipeline].tags = tags;
  }
  // `parameters`: the addresses of the TensorImpls that this rank has of it.
  void SetParameters(const void* pipeline, const ProcessSet& row,
                     std::set<const void*> parameters) {
    core::MutexLock lock(mutex_);
    Entry& entry = pipelines_[pipeline];
    entry.row = row;
    entry.parameters = std::move(parameters);
  }
  void Remove(const void* pipeline) {
    core::MutexLock lock(mutex_);
    pipelines_.erase(pipeline);
  }

  // The rows of the pipelines that have some of these parameters, each once, in one order on all
  // ranks; without any, those of the pipelines of which this rank has none.
  std::vector<ProcessSet> RowsOf(const std::vector<const void*>& parameters) const {
    core::MutexLock lock(mutex_);
    std::map<std::uint32_t, ProcessSet> rows;
    for (const auto& [pipeline, entry] : pipelines_) {
      if (!entry.row) continue;
      bool has = parameters.empty() && entry.parameters.empty();
      for (const void* parameter : parameters) has = has || entry.parameters.contains(parameter);
      if (has) rows.emplace(entry.row->id(), *entry.row);
    }
    std::vector<ProcessSet> found;
    for (const auto& [id, row] : rows) found.push_back(row);
    return found;
  }

 private:
  struct Entry {
    Tags tags;
    std::optional<ProcessSet> row;  // none: the pipeline is this rank's alone
    std::set<const void*> parameters;
  };

  mutable core::Mutex mutex_;
  std::map<const void*, Entry> pipelines_ SIRTAKI_GUARDED_BY(mutex_);
};

}  // namespace sirtaki::detail
