#include "ops/between_hosts/hierarchical_run.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>

#include "ops/base/bytes.h"
#include "ops/base/keep_forever.h"
#include "ops/base/kernels.h"
#include "ops/groups/reduction_terms.h"

namespace sirtaki::ops {
namespace {

using core::DType;
using core::ReduceOp;
using core::Status;

// Waiting keeps its core for so long, then gives it away, then sleeps.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kYield = std::chrono::microseconds(200);
// Nothing rings for what crosses, or for the end of a peer. What crosses goes on without this rank,
// and yielding would take the core from what brings it.
constexpr auto kNapWhileCrossing = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::milliseconds(50);

fusion::FusedVector Fuse(std::span<const Segment> segments, const SegmentReduction& how,
                         std::int64_t chunk_bytes) {
  const DType moved = fusion::AccumulationType(how.dtype, how.op);
  return {how.dtype,
          moved,
          {segments.begin(), segments.end()},
          {.chunk_bytes = chunk_bytes},
          IdentityOf(how.op, moved)};
}

}  // namespace

HierarchicalRun::HierarchicalRun(bool spin, std::shared_ptr<HostStage> stage, int slices,
                                 std::span<const Segment> segments, const SegmentReduction& how,
                                 Crossing crossing, std::function<Status()> check)
    : spin_(spin),
      stage_(std::move(stage)),
      slices_(slices),
      vector_(Fuse(segments, how, stage_->chunk_bytes())),
      op_(Combining(how.op)),
      before_(how.before),
      after_(how.after),
      crossing_(std::move(crossing)),
      check_(std::move(check)),
      begin_(stage_->chunks()),
      end_(begin_ + static_cast<std::uint32_t>(vector_.windows().size())),
      loaded_(begin_),
      reduced_(begin_),
      sent_(begin_),
      crossed_(begin_),
      taken_(begin_) {
  stage_->EndOperation(end_ - begin_);
  RunThrough();
}

HierarchicalRun::~HierarchicalRun() {
  // After an error too the medium may still be at it.
  const bool lost = std::any_of(under_way_.begin(), under_way_.end(), [](const auto& slice) {
    return slice != nullptr && (!slice->Poll() || !slice->status().ok());
  });
  if (lost) KeepForever(stage_->memory());
}

void HierarchicalRun::RunThrough() {
  while (!finished_) {
    const std::uint32_t rung = mine().bell.Load();
    if (!Advance() && !finished_) Wait(rung);
  }
}

// Wait sleeps until a peer has come further, or for a while.
void HierarchicalRun::Wait(std::uint32_t rung) {
  if (Status stop = check_(); !stop.ok()) return Finish(std::move(stop));
  const bool crosses = !under_way_.empty();
  const core::Duration spin = spin_ ? kSpin : core::Duration();
  const core::Duration awake = crosses ? spin : kYield;
  const core::TimePoint start = core::Clock::now();
  for (core::TimePoint now = start; now - start < awake; now = core::Clock::now()) {
    if (mine().bell.Load() != rung) return;
    if (crosses && PollCrossings()) return;
    if (now - start >= spin) std::this_thread::yield();
  }
  mine().bell.Sleep(rung, core::Clock::now() + (crosses ? kNapWhileCrossing : kNap));
}

bool HierarchicalRun::Advance() {
  bool moved = EndCrossings();
  if (finished_) return moved;
  moved |= StartCrossing();
  moved |= Load();
  moved |= Reduce();
  moved |= Take();
  if (taken_ == end_ && !finished_) Finish(Status::Ok());
  return moved;
}

bool HierarchicalRun::Load() {
  if (loaded_ == end_) return false;
  // Everybody has taken what was in this chunk's place.
  if (!AllReached(&HostStageCounters::taken, stage_->size(), loaded_ + 1 - HostStage::kSlots)) {
    return false;
  }
  const bool alone = stage_->size() == 1;  // then it is reduced already
  vector_.LoadInto(WindowOf(loaded_),
                   alone ? stage_->Reduced(0, loaded_) : stage_->Loaded(stage_->self(), loaded_),
                   before_);
  stage_->Publish(mine().loaded, ++loaded_);
  return true;
}

bool HierarchicalRun::Reduce() {
  if (reduced_ == loaded_ ||
      !AllReached(&HostStageCounters::loaded, stage_->size(), reduced_ + 1)) {
    return false;
  }
  const DType dtype = vector_.moved();
  const std::int64_t size = BytesOf(dtype);
  const Part part = PartOf(reduced_, stage_->self(), stage_->size());
  for (int carrier = 0; carrier < slices_ && stage_->size() > 1; ++carrier) {
    const Part slice = PartOf(reduced_, carrier, slices_);
    const std::int64_t from = std::max(part.begin, slice.begin);
    const std::int64_t count = std::min(part.begin + part.count, slice.begin + slice.count) - from;
    if (count <= 0) continue;
    std::byte* const to = stage_->Reduced(carrier, reduced_) + (from - slice.begin) * size;
    Copy(to, stage_->Loaded(0, reduced_) + from * size, count * size);
    for (int member = 1; member < stage_->size(); ++member) {
      ReduceInto(op_, dtype, to, stage_->Loaded(member, reduced_) + from * size, count);
    }
  }
  stage_->Publish(mine().reduced, ++reduced_);
  return true;
}

bool HierarchicalRun::StartCrossing() {
  if (!carries() || sent_ == end_) return false;
  if (!AllReached(&HostStageCounters::reduced, stage_->size(), sent_ + 1)) return false;
  const Part slice = PartOf(sent_, stage_->self(), slices_);
  // All carriers of an empty slice know that it is.
  under_way_.push_back(slice.count == 0 ? nullptr
                                        : crossing_(stage_->Reduced(stage_->self(), sent_),
                                                    slice.count, vector_.moved(), op_));
  ++sent_;
  EndCrossings();
  return true;
}

// All of them, since each may have several steps. Whether the oldest is over.
bool HierarchicalRun::PollCrossings() {
  for (const auto& slice : under_way_) {
    if (slice != nullptr) slice->Poll();
  }
  return under_way_.front() == nullptr || under_way_.front()->Poll();
}

bool HierarchicalRun::EndCrossings() {
  const std::uint32_t before = crossed_;
  if (!under_way_.empty()) PollCrossings();
  while (!finished_ && !under_way_.empty()) {
    Completion* const slice = under_way_.front().get();
    if (slice != nullptr && !slice->Poll()) break;
    if (slice != nullptr && !slice->status().ok()) {
      Finish(slice->status());
      return true;
    }
    under_way_.pop_front();
    stage_->Publish(mine().crossed, ++crossed_);
  }
  return crossed_ != before;
}

bool HierarchicalRun::Take() {
  if (taken_ == loaded_ || !AllReached(&HostStageCounters::crossed, slices_, taken_ + 1)) {
    return false;
  }
  const fusion::Window& window = WindowOf(taken_);
  for (int carrier = 0; carrier < slices_; ++carrier) {
    const Part slice = PartOf(taken_, carrier, slices_);
    if (slice.count == 0) continue;
    vector_.StoreFrom({.begin = window.begin + slice.begin, .count = slice.count},
                      stage_->Reduced(carrier, taken_), after_);
  }
  stage_->Publish(mine().taken, ++taken_);
  return true;
}

void HierarchicalRun::Finish(Status status) {
  status_ = std::move(status);
  finished_ = true;
}

const fusion::Window& HierarchicalRun::WindowOf(std::uint32_t chunk) const {
  return vector_.windows()[chunk - begin_];
}

Part HierarchicalRun::PartOf(std::uint32_t chunk, int i, int parts) const {
  return ops::PartOf(WindowOf(chunk).count, BytesOf(vector_.moved()), i, parts);
}

bool HierarchicalRun::AllReached(shm::SharedCounter HostStageCounters::*counter, int members,
                                 std::uint32_t value) const {
  for (int member = 0; member < members; ++member) {
    if (!shm::Reached((stage_->counters(member).*counter).Load(), value)) return false;
  }
  return true;
}

}  // namespace sirtaki::ops
