// TCP as a port: each transfer goes over the stream to its rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/base/stop_sign.h"
#include "ops/inproc/inproc_port.h"
#include "ops/wire/port.h"
#include "tcp/stream.h"

namespace sirtaki::tcp {

class Port final : public ops::wire::Port {
 public:
  // `urgent`, `bulk`: connections by rank, which do not block; this rank has none. `hosts`: their
  // names, for texts. `patience`: with those whose hosts are silent.
  Port(int rank, std::vector<Line> urgent, std::vector<Line> bulk,
       const std::vector<std::string>& hosts, Patience patience);

  std::string_view name() const override { return "tcp"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t tags() const override { return std::int64_t{1} << 30; }

  std::unique_ptr<ops::Completion> Post(ops::wire::Envelope envelope,
                                        std::span<const ops::wire::Receive> receives,
                                        std::span<const ops::wire::Send> sends) override;

  bool lets_go() const override { return true; }
  void Abort(const core::Status& why) override {
    stop_.Raise(why);
    self_->Abort(why);
  }

  // Moves whatever there is to move.
  void ProgressAll() const;

 private:
  Stream* StreamTo(const ops::wire::Envelope& envelope, int rank) const {
    const auto& streams = envelope.urgent ? urgent_ : bulk_;
    return streams[static_cast<std::size_t>(rank)].get();
  }

  const int rank_;
  const int size_;
  std::vector<std::unique_ptr<Stream>> urgent_;
  std::vector<std::unique_ptr<Stream>> bulk_;
  const std::unique_ptr<ops::wire::Port> self_;  // of a world of this rank alone
  ops::StopSign stop_;
};

}  // namespace sirtaki::tcp
