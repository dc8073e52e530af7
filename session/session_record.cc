// A session tells of its rank: the flight record, and the table at its end.
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/machine/fork_guard.h"
#include "core/trace/summary.h"
#include "session/session.h"
#include "session/session_impl.h"
#include "session/session_observability.h"
#include "session/version_text.h"

namespace sirtaki::session {

using core::Status;
using core::trace::Metrics;
using core::trace::PipelineTimes;

namespace {

// What a rank has for the table: its metrics, and behind them, as bytes, its pipelines.
struct Table {
  Metrics metrics;
  std::vector<PipelineTimes> pipelines;
};

std::vector<std::byte> BytesOf(const core::trace::Observer& observer) {
  const Metrics metrics = observer.metrics.Read();
  const std::vector<PipelineTimes> pipelines = observer.pipelines.Read();
  std::vector<std::byte> bytes(sizeof metrics + pipelines.size() * sizeof(PipelineTimes));
  std::memcpy(bytes.data(), &metrics, sizeof metrics);
  if (!pipelines.empty()) {
    std::memcpy(bytes.data() + sizeof metrics, pipelines.data(), bytes.size() - sizeof metrics);
  }
  return bytes;
}

Table TableIn(std::span<const std::byte> bytes) {
  Table table;
  std::memcpy(&table.metrics, bytes.data(), sizeof table.metrics);
  bytes = bytes.subspan(sizeof table.metrics);
  table.pipelines.resize(bytes.size() / sizeof(PipelineTimes));
  if (!bytes.empty()) std::memcpy(table.pipelines.data(), bytes.data(), bytes.size());
  return table;
}

void Print(const std::vector<Table>& tables) {
  std::vector<Metrics> ranks;
  std::vector<std::vector<PipelineTimes>> pipelines;
  for (const Table& table : tables) {
    ranks.push_back(table.metrics);
    pipelines.push_back(table.pipelines);
  }
  std::fputs(
      ("sirtaki: what the ranks have done\n" + core::trace::SummaryText(ranks, pipelines)).c_str(),
      stderr);
}

}  // namespace

core::trace::FlightRecord Session::Describe(std::string why, core::Duration patience) const {
  core::trace::FlightRecord record;
  if (core::ForkGeneration() == fork_generation_) {
    const Call call(*this);
    if (const core::Engine* const engine = call.engine()) record = engine->Describe(patience);
    for (auto& pending : record.pending) pending.key = observation_->KeyText(pending.key);
    if (topology_.size == 1) {
      observation_->observer()->recorder.Read(0, /*to_the_end=*/true, &record.events, &record.lost);
      record.doing = observation_->observer()->doing.Text(core::Clock::now());
    }
  }
  record.rank = topology_.rank;
  record.size = topology_.size;
  record.host = topology_.host;
  record.pid = getpid();
  record.version = VersionText();
  record.session = observation_->session();
  record.why = std::move(why);
  record.fault = fault();
  record.now = core::Clock::now();
  record.offset = observation_->offset();
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  record.unix_us = std::chrono::duration_cast<std::chrono::microseconds>(since).count();
  return record;
}

std::function<void()> Session::BeginSummary() {
  if (!fault().ok()) return nullptr;
  struct Gathered {  // which a thread that is left behind may go on to use
    std::vector<std::byte> own;
    std::vector<std::byte> told;
    std::vector<std::int64_t> rows;
  };
  auto gathered = std::make_shared<Gathered>();
  gathered->own = BytesOf(*observation_->observer());
  if (topology_.size == 1) return [gathered] { Print({TableIn(gathered->own)}); };
  auto signature = std::make_shared<core::Signature>();
  signature->kind = core::OpKind::kAllGather;
  signature->dtype = core::DType::kU8;
  auto work = std::make_shared<core::Work>();
  work->request.key = core::Key::Named(core::kWorldSet, "#the table at the end");
  work->request.asked = std::move(signature);
  work->rows = static_cast<std::int64_t>(gathered->own.size());
  work->input = gathered->own.data();
  work->allocate_output = [gathered](const std::vector<std::int64_t>& rows) -> void* {
    gathered->rows = rows;
    gathered->told.resize(static_cast<std::size_t>(std::accumulate(rows.begin(), rows.end(), 0)));
    return gathered->told.data();
  };
  work->keep_alive = gathered;
  // A rank that leaves early, without a table, must not be waited for: its leaving fails this.
  if (!Submit(work, /*will_wait=*/true).ok()) return nullptr;
  return [this, gathered, handle = work->handle] {
    const bool came = handle->done() && handle->status().ok();
    handle->Observe();
    if (!came || topology_.rank != 0) return;
    std::vector<Table> all(static_cast<std::size_t>(topology_.size));
    std::span<const std::byte> rest(gathered->told);
    for (std::size_t rank = 0; rank < gathered->rows.size(); ++rank) {
      const auto size = static_cast<std::size_t>(gathered->rows[rank]);
      if (size > 0) all[rank] = TableIn(rest.first(size));  // not that of one which has joined
      rest = rest.subspan(size);
    }
    Print(all);
  };
}

}  // namespace sirtaki::session
