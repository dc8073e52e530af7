#include "ops/inproc/inproc_backend.h"

#include <utility>

#include "core/base/check.h"

namespace sirtaki::ops {
namespace {

struct OwnPort {
  const std::unique_ptr<wire::Port> port;
};

class InprocBackend final : private OwnPort, public wire::WireBackend {
 public:
  InprocBackend(std::unique_ptr<wire::Port> own, const wire::WireOptions& options)
      : OwnPort{std::move(own)}, WireBackend(*port, options) {}
};

}  // namespace

InprocWorld::InprocWorld(int size, wire::WireOptions options)
    : ports_(size), options_(std::move(options)) {
  SIRTAKI_CHECK(size >= 1, "a world has members");
}

std::unique_ptr<Backend> InprocWorld::Connect(int rank) const {
  SIRTAKI_CHECK(rank >= 0 && rank < size(), "a rank of this world");
  return std::make_unique<InprocBackend>(ports_.Connect(rank), options_);
}

}  // namespace sirtaki::ops
