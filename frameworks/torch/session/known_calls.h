// A session remembers its named calls: most are made again as they were.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/protocol/request.h"

namespace sirtaki::detail {

// Calls that were right on this rank, each as its name was used last. Whoever makes one again takes
// its key and its signature instead of making, checking and comparing new ones. Thread-safe.
class KnownCalls {
 public:
  struct Known {
    core::Key key;
    core::SignaturePtr signature;  // null: the name is not known
  };

  Known Find(const std::string& name) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? Known() : found->second;
  }

  void Note(const std::string& name, Known known) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // Programs that never use a name again fill the table with nothing that is needed.
    if (by_name_.size() >= kMost) by_name_.clear();
    by_name_.insert_or_assign(name, std::move(known));
  }

 private:
  static constexpr std::size_t kMost = 16384;

  mutable std::mutex mutex_;
  std::unordered_map<std::string, Known> by_name_;
};

}  // namespace sirtaki::detail
