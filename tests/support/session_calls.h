// The options of a test's Session, and collectives of float32 through one; for tests and programs
// without LibTorch.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/work.h"
#include "session/session.h"

namespace sirtaki::tests {

// What a test's session starts with: nothing of the environment, and time for all ranks to come.
inline session::StartOptions SessionOptions(
    const std::function<void(core::Config&)>& change = nullptr) {
  session::StartOptions options;
  options.environment = {};
  options.config.start_timeout = std::chrono::seconds(20);
  if (change) change(options.config);
  return options;
}

// A vector under a collective.
class Vector {
 public:
  // An empty name makes an unnamed call. All-reduce and broadcast work in place.
  Vector(core::OpKind kind, const std::string& name, std::vector<float> values, int root = -1,
         core::SetNumber set = core::kWorldSet)
      : memory_(std::make_shared<Memory>()), work_(std::make_shared<core::Work>()) {
    memory_->values = std::move(values);
    auto signature = std::make_shared<core::Signature>();
    signature->kind = kind;
    signature->root = root;
    if (kind == core::OpKind::kAllGather) {
      work_->rows = static_cast<std::int64_t>(memory_->values.size());
      work_->allocate_output = [memory = memory_.get()](const std::vector<std::int64_t>& rows) {
        const auto count = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
        memory->gathered.resize(static_cast<std::size_t>(count));
        return static_cast<void*>(memory->gathered.data());
      };
    } else {
      signature->shape = {static_cast<std::int64_t>(memory_->values.size())};
      work_->output = memory_->values.data();
    }
    work_->input = memory_->values.data();
    work_->request.key = name.empty() ? core::Key::Unnamed(set, 0) : core::Key::Named(set, name);
    work_->request.asked = std::move(signature);
    work_->keep_alive = memory_;  // a lane that is stuck after a fault still refers to it
  }

  const std::vector<float>& values() const { return memory_->values; }
  const std::vector<float>& gathered() const { return memory_->gathered; }
  core::Work& work() { return *work_; }

  core::Status Submit(session::Session& session, bool will_wait = false) {
    return session.Submit(work_, will_wait);
  }

  // Waits as a user's synchronize does.
  core::Status Synchronize(session::Session& session) {
    core::Status status = session.Wait(*work_->handle);
    work_->handle->Observe();
    return status;
  }

  core::Status Run(session::Session& session) {
    core::Status refused = Submit(session, /*will_wait=*/true);
    return refused.ok() ? Synchronize(session) : refused;
  }

 private:
  struct Memory {
    std::vector<float> values;
    std::vector<float> gathered;
  };

  std::shared_ptr<Memory> memory_;
  core::WorkPtr work_;
};

}  // namespace sirtaki::tests
