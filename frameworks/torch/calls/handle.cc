#include "sirtaki/handle.h"

#include "frameworks/torch/calls/pending.h"
#include "frameworks/torch/tensors/throw.h"

namespace sirtaki {
namespace {

template <class AnyHandle>
detail::Pending& PendingOf(const AnyHandle& handle) {
  if (!handle.valid()) {
    detail::ThrowStatus(core::Status(core::StatusCode::kInvalidArgument,
                                     "the handle is empty: no operation returned it"));
  }
  return *handle.pending();
}

}  // namespace

bool poll(const Handle& handle) { return PendingOf(handle).Poll(); }
bool poll(const GroupedHandle& handle) { return PendingOf(handle).Poll(); }

at::Tensor synchronize(const Handle& handle) { return PendingOf(handle).Results().front(); }
std::vector<at::Tensor> synchronize(const GroupedHandle& handle) {
  return PendingOf(handle).Results();
}

std::vector<std::int64_t> received_splits(const Handle& handle) {
  return PendingOf(handle).ReceivedRows().front();
}
std::vector<std::vector<std::int64_t>> received_splits(const GroupedHandle& handle) {
  return PendingOf(handle).ReceivedRows();
}

}  // namespace sirtaki
