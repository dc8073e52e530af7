// A Completion that was finished when it was made: what a blocking call returns.
#pragma once

#include <memory>
#include <utility>

#include "ops/base/backend.h"

namespace sirtaki::ops {

class Finished : public Completion {
 public:
  explicit Finished(core::Status status) : status_(std::move(status)) {}
  bool Poll() override { return true; }
  core::Status status() const override { return status_; }

  static std::unique_ptr<Completion> With(core::Status status) {
    return std::make_unique<Finished>(std::move(status));
  }

 private:
  core::Status status_;
};

}  // namespace sirtaki::ops
