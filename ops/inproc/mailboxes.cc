#include "ops/inproc/mailboxes.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

namespace sirtaki::ops {

class Mailboxes::Pending : public Completion {
 public:
  Pending(std::shared_ptr<Mailboxes> mailboxes, SidePtr side)
      : mailboxes_(std::move(mailboxes)), side_(std::move(side)) {}

  // The memory is not read or written after this.
  ~Pending() override { mailboxes_->Withdraw(side_); }

  bool Poll() override {
    core::MutexLock lock(mailboxes_->mutex_);
    return side_->done;
  }

  core::Status status() const override {
    core::MutexLock lock(mailboxes_->mutex_);
    return side_->status;
  }

 private:
  const std::shared_ptr<Mailboxes> mailboxes_;
  const SidePtr side_;
};

std::unique_ptr<Completion> Mailboxes::Send(const std::shared_ptr<Mailboxes>& mailboxes, int from,
                                            int to, int tag, const void* memory,
                                            std::int64_t bytes) {
  auto side = std::make_shared<Side>();
  side->address = {from, to, tag};
  side->given = memory;
  side->bytes = bytes;
  return Post(mailboxes, std::move(side), /*sends=*/true);
}

std::unique_ptr<Completion> Mailboxes::Receive(const std::shared_ptr<Mailboxes>& mailboxes,
                                               int from, int to, int tag, void* memory,
                                               std::int64_t bytes) {
  auto side = std::make_shared<Side>();
  side->address = {from, to, tag};
  side->taken = memory;
  side->bytes = bytes;
  return Post(mailboxes, std::move(side), /*sends=*/false);
}

std::unique_ptr<Completion> Mailboxes::Post(const std::shared_ptr<Mailboxes>& mailboxes,
                                            SidePtr side, bool sends) {
  mailboxes->Match(side, sends);
  return std::make_unique<Pending>(mailboxes, std::move(side));
}

void Mailboxes::Match(const SidePtr& side, bool sends) {
  core::MutexLock lock(mutex_);
  if (!aborted_.ok()) return side->Finish(aborted_);
  Box& box = boxes_[side->address];
  if (box.waiting.empty() || box.sends == sends) {
    box.sends = sends;
    box.waiting.push_back(side);
    return;
  }
  const SidePtr other = std::move(box.waiting.front());
  box.waiting.pop_front();
  if (box.waiting.empty()) boxes_.erase(side->address);
  const Side& send = sends ? *side : *other;
  Side& receive = sends ? *other : *side;
  if (send.bytes != receive.bytes) {
    const auto [from, to, tag] = side->address;
    receive.Finish({core::StatusCode::kBackend,
                    "rank " + std::to_string(from) + " sent " + std::to_string(send.bytes) +
                        " bytes with tag " + std::to_string(tag) + " where rank " +
                        std::to_string(to) + " takes " + std::to_string(receive.bytes)});
  } else if (send.bytes > 0) {
    std::memcpy(receive.taken, send.given, static_cast<std::size_t>(send.bytes));
  }
  for (Side* both : {side.get(), other.get()}) {
    if (!both->done) both->Finish(core::Status::Ok());
  }
}

void Mailboxes::Withdraw(const SidePtr& side) {
  core::MutexLock lock(mutex_);
  if (side->done) return;
  const auto box = boxes_.find(side->address);
  auto& waiting = box->second.waiting;
  waiting.erase(std::find(waiting.begin(), waiting.end(), side));
  if (waiting.empty()) boxes_.erase(box);
}

void Mailboxes::Abort(const core::Status& why) {
  core::MutexLock lock(mutex_);
  if (!aborted_.ok()) return;
  aborted_ = why;
  for (auto& [address, box] : boxes_) {
    for (const SidePtr& side : box.waiting) side->Finish(why);
  }
  boxes_.clear();
}

}  // namespace sirtaki::ops
