#include "fusion/bucket_assembly.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

namespace sirtaki::fusion {

BucketAssembly::BucketAssembly(core::Key key, core::SignaturePtr signature)
    : key_(std::move(key)),
      signature_(std::move(signature)),
      parts_(std::max<std::size_t>(signature_->parts.size(), 1)),
      missing_(parts_.size()) {}

BucketAssembly::~BucketAssembly() {
  if (submitted_) whole_->handle->Observe();
}

BucketAssembly::Arrival BucketAssembly::Put(std::size_t part, core::WorkPtr work) {
  // The count is made less by a part of this round alone, and one is not counted yet: ours.
  if (missing_.load(std::memory_order_acquire) == 0) return Arrival::kInFlight;
  parts_[part] = std::move(work);
  // The last sees what the others wrote before they were counted.
  return missing_.fetch_sub(1, std::memory_order_acq_rel) == 1 ? Arrival::kLast : Arrival::kEarly;
}

core::WorkPtr BucketAssembly::Assemble(std::uint32_t round) const {
  const bool refuses = std::any_of(parts_.begin(), parts_.end(), [](const core::WorkPtr& part) {
    return std::holds_alternative<core::Refusal>(part->request.asked);
  });
  const core::WorkPtr whole = of_one() ? parts_.front() : std::make_shared<core::Work>();
  whole->request.key = key_;
  if (refuses) {
    whole->request.asked = core::Refusal{};
  } else if (round == signature_->round) {
    whole->request.asked = signature_;
  } else {
    auto signature = std::make_shared<core::Signature>(*signature_);
    signature->round = round;
    whole->request.asked = std::move(signature);
  }
  if (of_one()) return whole;
  whole->parts = parts_;
  bool some_absent = false;
  std::vector<bool> absent;
  for (const core::WorkPtr& part : parts_) {
    const core::Request& request = part->request;
    absent.push_back(!request.absent.empty() && request.absent.front());
    some_absent |= absent.back();
    if (whole->request.invalid.empty()) whole->request.invalid = request.invalid;
  }
  if (some_absent) whole->request.absent = std::move(absent);
  return whole;
}

void BucketAssembly::NoteSubmitted(core::WorkPtr whole) {
  whole_ = std::move(whole);
  submitted_.store(true, std::memory_order_release);
}

core::HandlePtr BucketAssembly::handle() const {
  return submitted_.load(std::memory_order_acquire) ? whole_->handle : nullptr;
}

bool BucketAssembly::AbsentEverywhere(std::size_t part) const {
  return whole_->handle->PartIsAbsent(part);
}

void BucketAssembly::Release(std::size_t part) {
  if (!submitted_) {
    parts_[part].reset();
    missing_.fetch_add(1, std::memory_order_acq_rel);
  } else if (++released_ == parts_.size()) {
    EndRound();
  }
}

void BucketAssembly::EndRound() {
  whole_->handle->Observe();
  whole_.reset();
  for (core::WorkPtr& part : parts_) part.reset();
  released_ = 0;
  submitted_.store(false, std::memory_order_relaxed);
  missing_.store(parts_.size(), std::memory_order_release);
}

}  // namespace sirtaki::fusion
