// Where the gradients of a bucket become one request. The hooks of several autograd threads hand
// them in at once; the one that comes last submits the whole. A gradient that goes by itself is a
// bucket of one, and its request that of the gradient. Knows nothing of LibTorch, so that the thread
// sanitizer sees all of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/engine/work.h"
#include "core/protocol/request.h"

namespace sirtaki::fusion {

// Used in rounds: every part is put, the whole is submitted, every part is released. Put never
// blocks and is called by any thread; the rest by the one that uses the optimizer, when the putters
// of the round have returned, but Assemble and NoteSubmitted.
class BucketAssembly {
 public:
  // `signature`: of the whole, with a part for each gradient; without parts it is that of the one
  // gradient there is.
  BucketAssembly(core::Key key, core::SignaturePtr signature);
  ~BucketAssembly();
  BucketAssembly(const BucketAssembly&) = delete;
  BucketAssembly& operator=(const BucketAssembly&) = delete;

  bool of_one() const { return signature_->parts.empty(); }

  enum class Arrival {
    kEarly,     // others are missing
    kLast,      // the caller, nobody else, submits what Assemble gives
    kInFlight,  // the round is not over: nothing was taken
  };
  // Hands in a part: its memory, and whether its request is absent, invalid or a refusal, which then
  // is one of the whole; key and signature are not looked at, and set where it is the whole. Once in
  // a round, for each part.
  Arrival Put(std::size_t part, core::WorkPtr work);

  // Gives the parts that were put, to whoever was told kLast.
  const std::vector<core::WorkPtr>& parts() const { return parts_; }
  // The work of the whole: absent bits of all parts, and the first invalid one's text. By who was
  // told kLast. `round`: which average of its step it is, for the signature; 0: nobody tells.
  core::WorkPtr Assemble(std::uint32_t round = 0) const;
  // NoteSubmitted is called by the same, when the session has accepted it.
  void NoteSubmitted(core::WorkPtr whole);

  // The handle is the whole's, in this round; null before NoteSubmitted.
  core::HandlePtr handle() const;
  // Precondition: the handle is done, and ok.
  bool AbsentEverywhere(std::size_t part) const;

  // This part is done with, whatever has become of it. Precondition: it was put in this round. With
  // the last one the round is over; one that was not submitted may be put again.
  void Release(std::size_t part);

 private:
  void EndRound();

  const core::Key key_;
  const core::SignaturePtr signature_;
  std::vector<core::WorkPtr> parts_;
  std::atomic<std::size_t> missing_;
  std::atomic<bool> submitted_{false};
  core::WorkPtr whole_;       // once submitted
  std::size_t released_ = 0;  // of a whole that was submitted
};

}  // namespace sirtaki::fusion
