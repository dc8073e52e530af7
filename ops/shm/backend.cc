#include "ops/shm/backend.h"

#include "ops/finished.h"

namespace sirtaki::ops::shm {

namespace {

std::unique_ptr<Completion> Refused() {
  return Finished::With({core::StatusCode::kUnsupported, "not over shared memory"});
}

}  // namespace

Backend::Backend(LocalGroup& group, const BackendOptions& options)
    : group_(group), options_(options) {
  static_cast<void>(options_);
}
Backend::~Backend() = default;
bool Backend::Covers(const core::RankRanges& /*members*/) const { return false; }
core::Status Backend::AddSet(core::SetNumber, const core::RankRanges&) { return {}; }
core::Status Backend::RemoveSet(core::SetNumber) { return {}; }
std::unique_ptr<Completion> Backend::AllReduce(Channel, void*, std::int64_t, core::DType,
                                               core::ReduceOp) {
  return Refused();
}
std::unique_ptr<Completion> Backend::Reduce(Channel, void*, std::int64_t, core::DType,
                                            core::ReduceOp, int) {
  return Refused();
}
std::unique_ptr<Completion> Backend::Broadcast(Channel, void*, std::int64_t, int) {
  return Refused();
}
std::unique_ptr<Completion> Backend::AllGather(Channel, const void*, void*, std::int64_t) {
  return Refused();
}
std::unique_ptr<Completion> Backend::AllGatherV(Channel, const void*, void*,
                                                std::span<const std::int64_t>) {
  return Refused();
}
std::unique_ptr<Completion> Backend::AllToAll(Channel, const void*, void*, std::int64_t) {
  return Refused();
}
std::unique_ptr<Completion> Backend::Exchange(Channel, std::span<const OutgoingSlice>,
                                              std::span<const IncomingSlice>) {
  return Refused();
}
bool Backend::ReducesSegments(Channel, const SegmentReduction&) const { return false; }
std::unique_ptr<Completion> Backend::AllReduceSegments(Channel, std::span<const Segment>,
                                                       const SegmentReduction&) {
  return Refused();
}
bool Backend::Rings(Channel) const { return false; }
std::unique_ptr<Completion> Backend::SendMessage(int, int, const void*, std::int64_t) {
  return Refused();
}
std::unique_ptr<Completion> Backend::ReceiveMessage(int, int, void*, std::int64_t) {
  return Refused();
}
void Backend::Abort(const core::Status&) {}

}  // namespace sirtaki::ops::shm
