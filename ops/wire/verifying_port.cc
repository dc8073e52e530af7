#include "ops/wire/verifying_port.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "ops/base/keep_forever.h"

namespace sirtaki::ops::wire {

using core::Status;

namespace {

constexpr std::int64_t kBlock = VerifyingPort::kBlockBytes;

std::int64_t BlocksOf(std::int64_t bytes) { return (bytes + kBlock - 1) / kBlock; }

std::uint64_t DigestOfBlock(const void* memory, std::int64_t bytes, std::int64_t block) {
  return core::Digest(static_cast<const std::byte*>(memory) + block * kBlock,
                      static_cast<std::size_t>(std::min(kBlock, bytes - block * kBlock)));
}

using Digests = std::vector<std::uint64_t>;

std::int64_t LengthOf(const Digests& digests) {
  return static_cast<std::int64_t>(digests.size() * sizeof(std::uint64_t));
}

// What has bytes.
struct Posted {
  std::vector<Receive> receives;
  std::vector<Digests> of_receives;
  std::vector<Digests> of_sends;
};

class Verification final : public Completion {
 public:
  Verification(std::unique_ptr<Completion> transfers, const Port& port, Envelope envelope,
               std::shared_ptr<Posted> posted)
      : port_(port),
        envelope_(envelope),
        posted_(std::move(posted)),
        transfers_(std::move(transfers)) {}
  // Unfinished or failed: the medium may still use the digests.
  ~Verification() override {
    const bool lost = !finished_ || !transfers_->status().ok();
    if (lost && !port_.lets_go()) KeepForever(posted_);
  }
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;

  bool Poll() override {
    if (finished_) return true;
    if (!transfers_->Poll()) return false;
    status_ = transfers_->status();
    for (std::size_t i = 0; i < posted_->receives.size() && status_.ok(); ++i) status_ = Judge(i);
    return finished_ = true;
  }
  Status status() const override { return status_; }

 private:
  Status Judge(std::size_t i) const {
    const Receive& receive = posted_->receives[i];
    const Digests& sent = posted_->of_receives[i];
    for (std::int64_t block = 0; block < static_cast<std::int64_t>(sent.size()); ++block) {
      const std::uint64_t arrived = DigestOfBlock(receive.memory, receive.bytes, block);
      if (arrived == sent[static_cast<std::size_t>(block)]) continue;
      const std::int64_t first = block * kBlock;
      return {core::StatusCode::kBackend,
              "verify_transfers: bytes " + std::to_string(first) + "-" +
                  std::to_string(std::min(first + kBlock, receive.bytes) - 1) + " of " +
                  std::to_string(receive.bytes) + " that rank " + std::to_string(receive.rank) +
                  " sent to rank " + std::to_string(port_.rank()) + " (tag " +
                  std::to_string(envelope_.tag) + ") arrived changed"};
    }
    return Status::Ok();
  }

  const Port& port_;
  const Envelope envelope_;
  const std::shared_ptr<Posted> posted_;
  const std::unique_ptr<Completion> transfers_;  // goes before what it uses
  bool finished_ = false;
  Status status_;
};

}  // namespace

std::unique_ptr<Completion> VerifyingPort::Post(Envelope envelope,
                                                std::span<const Receive> receives,
                                                std::span<const Send> sends) {
  auto posted = std::make_shared<Posted>();
  std::vector<Receive> all_receives;
  std::vector<Send> all_sends;
  posted->of_receives.reserve(receives.size());
  posted->of_sends.reserve(sends.size());
  for (const Receive& receive : receives) {
    all_receives.push_back(receive);
    if (receive.bytes == 0) continue;
    posted->receives.push_back(receive);
    Digests& digests =
        posted->of_receives.emplace_back(static_cast<std::size_t>(BlocksOf(receive.bytes)));
    all_receives.push_back({receive.rank, digests.data(), LengthOf(digests)});
  }
  for (const Send& send : sends) {
    all_sends.push_back(send);
    if (send.bytes == 0) continue;
    Digests& digests = posted->of_sends.emplace_back();
    for (std::int64_t block = 0; block < BlocksOf(send.bytes); ++block) {
      digests.push_back(DigestOfBlock(send.memory, send.bytes, block));
    }
    all_sends.push_back({send.rank, digests.data(), LengthOf(digests)});
  }
  std::unique_ptr<Completion> transfers = port_.Post(envelope, all_receives, all_sends);
  return std::make_unique<Verification>(std::move(transfers), port_, envelope, std::move(posted));
}

}  // namespace sirtaki::ops::wire
