// What arrives changed is noticed, with the ranks and the bytes; what arrives as it was is not.
#include "ops/wire/verifying_port.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ops/inproc/inproc_port.h"
#include "ops/wire/wire_backend.h"
#include "tests/support/rank_threads.h"

namespace sirtaki::ops::wire {
namespace {

using core::Status;
using core::StatusCode;
using tests::RankThreads;

// Sends byte `at` of what is that long with one bit changed.
class DamagingPort final : public Port {
 public:
  DamagingPort(std::unique_ptr<Port> port, std::int64_t at) : port_(std::move(port)), at_(at) {}

  std::string_view name() const override { return port_->name(); }
  int rank() const override { return port_->rank(); }
  int size() const override { return port_->size(); }
  std::int64_t tags() const override { return port_->tags(); }
  void Abort(const Status& why) override { port_->Abort(why); }

  std::unique_ptr<Completion> Post(Envelope envelope, std::span<const Receive> receives,
                                   std::span<const Send> sends) override {
    std::vector<Send> damaged(sends.begin(), sends.end());
    for (Send& send : damaged) {
      if (send.bytes <= at_) continue;
      std::vector<std::byte>& copy = copies_.emplace_back(static_cast<std::size_t>(send.bytes));
      std::memcpy(copy.data(), send.memory, copy.size());
      copy[static_cast<std::size_t>(at_)] ^= std::byte{0x10};
      send.memory = copy.data();
    }
    return port_->Post(envelope, receives, damaged);
  }

 private:
  const std::unique_ptr<Port> port_;
  const std::int64_t at_;
  std::vector<std::vector<std::byte>> copies_;
};

// Rank 1 sends `bytes` to rank 0, `at` of which is changed on the way: what rank 0 says of it.
Status SendDamaged(std::int64_t bytes, std::int64_t at) {
  InprocPorts ports(2);
  Status seen;
  RankThreads::Run(2, [&](int rank) {
    std::unique_ptr<Port> port = ports.Connect(rank);
    if (rank == 1) port = std::make_unique<DamagingPort>(std::move(port), at);
    VerifyingPort verifying(*port);
    WireBackend backend(verifying, {.host_of_rank = {0, 1}});
    std::vector<std::byte> values(static_cast<std::size_t>(bytes));
    const auto operation =
        backend.Broadcast({core::kWorldSet, fusion::Lane::kLarge}, values.data(), bytes, 1);
    ASSERT_TRUE(operation->Poll());
    if (rank == 0) {
      seen = operation->status();
    } else {
      EXPECT_TRUE(operation->status().ok()) << operation->status().ToString();
    }
  });
  return seen;
}

TEST(VerifyingPortTest, ChangedBytesAreNamed) {
  const Status last = SendDamaged(70'000, 69'999);
  EXPECT_EQ(last.code(), StatusCode::kBackend);
  EXPECT_EQ(last.message().substr(0, last.message().find(" (tag")),
            "verify_transfers: bytes 65536-69999 of 70000 that rank 1 sent to rank 0");
  EXPECT_TRUE(last.message().ends_with("arrived changed"));
  const Status first = SendDamaged(70'000, 0);
  EXPECT_NE(first.message().find("bytes 0-65535 of 70000 "), std::string::npos) << first.message();
}

TEST(VerifyingPortTest, WhatIsAsItWasSentIsNoError) {
  for (const std::int64_t bytes : {0, 1, 65'536, 65'537, 1'000'000}) {
    EXPECT_TRUE(SendDamaged(bytes, std::int64_t{1} << 40).ok()) << bytes;
  }
}

}  // namespace
}  // namespace sirtaki::ops::wire
