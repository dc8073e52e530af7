// MPI as a port: each transfer is an MPI_Isend or MPI_Irecv, or several of them where it is too long
// for MPI's counts.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "mpi/communicators.h"
#include "ops/base/stop_sign.h"
#include "ops/wire/port.h"

namespace sirtaki::mpi {

struct PortOptions {
  // Longer transfers are cut into calls of at most this many bytes, on both sides alike: MPI counts
  // with int, and some implementations compute byte offsets with it, too.
  std::int64_t max_call_bytes = std::int64_t{256} << 20;
};

class Port final : public ops::wire::Port {
 public:
  // The communicators must outlive the port and all that it posts.
  Port(const Communicators& communicators, PortOptions options)
      : communicators_(communicators), options_(options) {}

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return communicators_.rank(); }
  int size() const override { return communicators_.size(); }
  std::int64_t tags() const override { return communicators_.tags(); }

  // A message that is received and destroyed before any of it has come is no fault; anything else
  // that is destroyed unfinished is, since MPI may use its memory for as long as the process lives.
  std::unique_ptr<ops::Completion> Post(ops::wire::Envelope envelope,
                                        std::span<const ops::wire::Receive> receives,
                                        std::span<const ops::wire::Send> sends) override;

  void Abort(const core::Status& why) override { stop_.Raise(why); }

 private:
  const Communicators& communicators_;
  const PortOptions options_;
  ops::StopSign stop_;
};

}  // namespace sirtaki::mpi
