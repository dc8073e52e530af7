#include "ops/inproc/inproc_port.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sirtaki::ops {
namespace {

using wire::Envelope;

// Finished when all are, or the first has failed.
class Together final : public Completion {
 public:
  explicit Together(std::vector<std::unique_ptr<Completion>> parts) : parts_(std::move(parts)) {}

  bool Poll() override {
    for (; next_ < parts_.size() && status_.ok(); ++next_) {
      if (!parts_[next_]->Poll()) return false;
      status_ = parts_[next_]->status();
    }
    return true;
  }
  core::Status status() const override { return status_; }

 private:
  std::vector<std::unique_ptr<Completion>> parts_;
  std::size_t next_ = 0;  // all before have finished
  core::Status status_;
};

class InprocPort final : public wire::Port {
 public:
  InprocPort(int rank, int size, const InprocPortOptions& options,
             std::shared_ptr<Mailboxes> mailboxes)
      : rank_(rank), size_(size), options_(options), mailboxes_(std::move(mailboxes)) {}

  std::string_view name() const override { return "in-process"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t tags() const override { return options_.tags; }

  std::unique_ptr<Completion> Post(Envelope envelope, std::span<const wire::Receive> receives,
                                   std::span<const wire::Send> sends) override {
    const int tag = envelope.space == Envelope::Space::kMessages
                        ? envelope.tag
                        : Backend::kMaxTag + 1 + envelope.tag;
    std::vector<std::unique_ptr<Completion>> parts;
    parts.reserve(receives.size() + sends.size());
    for (const wire::Receive& receive : receives) {
      parts.push_back(
          Mailboxes::Receive(mailboxes_, receive.rank, rank_, tag, receive.memory, receive.bytes));
    }
    for (const wire::Send& send : sends) {
      parts.push_back(Mailboxes::Send(mailboxes_, rank_, send.rank, tag, send.memory, send.bytes));
    }
    return std::make_unique<Together>(std::move(parts));
  }

  void Abort(const core::Status& why) override { mailboxes_->Abort(why); }

 private:
  const int rank_;
  const int size_;
  const InprocPortOptions options_;
  const std::shared_ptr<Mailboxes> mailboxes_;
};

}  // namespace

std::unique_ptr<wire::Port> InprocPorts::Connect(int rank) const {
  return std::make_unique<InprocPort>(rank, size_, options_, mailboxes_);
}

}  // namespace sirtaki::ops
