// A port that sends the digests of what it sends behind it, and compares them with what arrives.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "ops/wire/port.h"

namespace sirtaki::ops::wire {

// All ranks have one, or none has. What arrives changed fails its Completion: kBackend, naming the
// ranks and the bytes, to kBlockBytes.
class VerifyingPort final : public Port {
 public:
  static constexpr std::int64_t kBlockBytes = std::int64_t{64} << 10;  // have a digest each

  // `port` must outlive it.
  explicit VerifyingPort(Port& port) : port_(port) {}

  std::string_view name() const override { return port_.name(); }
  int rank() const override { return port_.rank(); }
  int size() const override { return port_.size(); }
  std::int64_t tags() const override { return port_.tags(); }
  std::unique_ptr<Completion> Post(Envelope envelope, std::span<const Receive> receives,
                                   std::span<const Send> sends) override;
  bool lets_go() const override { return port_.lets_go(); }
  void Abort(const core::Status& why) override { port_.Abort(why); }

 private:
  Port& port_;
};

}  // namespace sirtaki::ops::wire
