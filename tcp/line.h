// A line is a connection's descriptor that forked children do not have: else a child that outlives
// its parent would keep the connection open, and nobody would notice that the parent has ended.
#pragma once

#include <utility>

#include "core/base/descriptor.h"

namespace sirtaki::tcp {

class Line {
 public:
  Line() = default;
  explicit Line(core::Descriptor fd);
  Line(Line&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Line& operator=(Line&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;
  ~Line() { Close(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Close();

 private:
  int fd_ = -1;
};

// The connections of this rank to one other.
struct Lines {
  Line control;  // the engines' messages
  Line urgent;   // collectives of the small lane
  Line bulk;     // everything else
};

}  // namespace sirtaki::tcp
